"""The command's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.peers.__main__ import cli, numbers, split
from qmq.errors import InvalidOption


def test_lists_of_names_and_numbers() -> None:
    assert split(" kafka, redis,,") == ["kafka", "redis"]
    assert split("") == []
    assert numbers("100,1024") == (100, 1_024)


@pytest.mark.parametrize("text", ["", "many", "1,x", "0", "-5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="is not a list of numbers; give some as in 1000,10000"):
        numbers(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "kafak"], "there is no peer 'kafak'; there are qmq, kafka"),
        (["--work", "snd"], "there is no work 'snd'; there are move"),
        (["--sizes", "1k"], "'1k' is not a list of numbers"),
    ],
)
def test_a_wrong_argument_stops_before_anything_is_installed(tmp_path: Path, arguments: list[str], words: str) -> None:
    home = tmp_path / "home"
    done = CliRunner().invoke(cli, ["run", *arguments, "--home", str(home), "--out", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert words in str(done.exception)
    assert not home.exists()


def test_rounds_must_be_some() -> None:
    done = CliRunner().invoke(cli, ["run", "--rounds", "0"])
    assert done.exit_code == 2
    assert "--rounds" in done.output

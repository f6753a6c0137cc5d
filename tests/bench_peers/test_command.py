"""The command's arguments."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.peers.__main__ import cli, numbers, split
from bench.peers.processes import descendants
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


def test_a_run_that_is_told_to_end_leaves_no_broker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.peers", "run", "--peers", "qmq", "--work", "churn", "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 60
        started: set[int] = set()
        while not any(_is_broker(pid) for pid in started):
            assert time.monotonic() < deadline, "no broker was started"
            started = descendants({run.pid})
        for _ in range(6):
            run.terminate()
            run.terminate()  # as `timeout` does
            with suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=10)
                break
    assert run.returncode == 128 + signal.SIGTERM
    while any(_is_broker(pid) for pid in started):
        assert time.monotonic() < deadline + 60, "the broker runs on"
    assert not list(tmp_path.glob("bench-peers-*"))


def _is_broker(pid: int) -> bool:
    try:
        return b"data_dir=" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_rounds_must_be_some() -> None:
    done = CliRunner().invoke(cli, ["run", "--rounds", "0"])
    assert done.exit_code == 2
    assert "--rounds" in done.output

"""`qmq bench`: options, the table, the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qmq.bench import suite
from qmq.bench.context import Bench, Measurement
from qmq.bench.values import Value
from qmq.cli.main import cli


def fake(bench: Bench) -> Iterator[Value]:
    """Measures nothing."""
    assert bench.directory.is_dir()
    yield Value("100 B append", 9e6, "msg/s")
    yield Value("1 KiB append, relative to a plain loop", 0.25, "")
    yield Value("[x]", 1.0, "ms")


@pytest.fixture(autouse=True)
def only_a_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MEASUREMENTS", {"ingest": Measurement(fake), "restart": Measurement(fake, True)})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


def test_the_table_shows_medians_and_goals() -> None:
    done = run("--rounds", "2", "--only", "ingest", "--goals")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert any("ingest" in line and "9 M" in line and "≥ 8 M" in line and " reached" in line for line in lines)
    assert any("relative to a plain loop" in line and "0.25" in line and "not reached" in line for line in lines)
    assert "round 2 of 2: ingest" in done.stderr


def test_everything_is_saved(tmp_path: Path) -> None:
    done = run("--rounds", "2", "--json", str(tmp_path / "found.json"), "--set", "partitions=2")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["settings"] == {"partitions": "2"}
    assert found["rounds"] == 2
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date"])
    assert {"python", "qmq", "numpy"} <= set(found["versions"])
    assert {"processor", "cores", "kernel", "filesystem", "load_average"} <= set(found["machine"])
    first = found["results"][0]
    assert (first["measurement"], first["median"], first["rounds"], first["reached"]) == (
        "ingest",
        9e6,
        [9e6] * 2,
        True,
    )


def test_scratch_goes_where_it_is_told_and_away(tmp_path: Path) -> None:
    assert run("--rounds", "1", "--dir", str(tmp_path / "new")).exit_code == 0
    assert list((tmp_path / "new").iterdir()) == []


def test_the_list() -> None:
    done = run("--list")
    assert done.output.splitlines() == ["ingest            Measures nothing.", "restart           Measures nothing."]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "nothing"], "there is no measurement 'nothing'"),
        (["--only", "restart", "--server", "qmq://127.0.0.1:1"], "leave --server out"),
        (["--set", "partitions=2", "--server", "qmq://127.0.0.1:1"], "leave it or --server out"),
        (["--set", "partitions"], "is not key=value"),
        (["--json", "/nowhere/at/all.json"], "the directory of /nowhere/at/all.json does not exist"),
        (["--rounds", "0"], "0 is not in the range"),
        (["--size", "huge"], "'huge' is not one of"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert reason in done.stderr


def test_an_empty_list_of_measurements_is_not_all() -> None:
    for only in ("", ","):
        done = run("--only", only)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "--only names no measurement" in done.stderr

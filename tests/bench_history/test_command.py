"""The command, from messages to the document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.history import __main__ as command
from bench.history import table


def test_measures_and_tells(tmp_path: Path) -> None:
    given = ["run", "--messages", "20000", "--quick", "--only", "directory", "--dir", str(tmp_path), "--out"]
    done = CliRunner().invoke(command.cli, [*given, str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    whats = [(number["measurement"], number["what"]) for number in found["numbers"]]
    assert ("archive to a directory", "of the copy, synced") in whats
    assert (found["amount"]["messages"], found["rounds"]) == (20_000, 1)
    text = (tmp_path / "out" / "found.md").read_text()
    assert text in done.output
    assert "| archive to a directory | time |" in text
    assert not list(tmp_path.glob("bench-history-*"))


def test_the_document_gets_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = {"value": 5, "at_most": True}
    number = {"median": 4.0, "least": 3.5, "most": 6.0, "rounds": [4.0, 3.5, 6.0], "goal": goal, "reached": True}
    missed = {**number, "what": "messages", "unit": "msg/s", "goal": {"value": 5, "at_most": False}, "reached": False}
    found = {
        "date": "2026-01-02T03:04:05+00:00", "command": "python -m bench.history run", "rounds": 3, "datanodes": 1,
        "machine": {
            "processor": "P", "cores": 2, "memory_bytes": 8 << 30, "filesystem": "ext4", "kernel": "6",
            "load_average": 0.5,
        },
        "versions": {"pyspark": "4"}, "bytes": 2_300_000_000,
        "amount": {"messages": 10, "body_bytes": 200, "subjects": 5, "segment_bytes": 256 << 20},
        "numbers": [
            {**number, "measurement": "count", "what": "time", "unit": "s"}, {**missed, "measurement": "count"},
            {**number, "measurement": "other", "what": "ratio", "unit": "", "goal": None, "rounds": [4.0]},
        ],
    }  # fmt: skip
    (tmp_path / "found.json").write_text(json.dumps(found))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "BENCHMARKS.md").write_text("# Beside other brokers\n\nfigures\n")
    monkeypatch.setattr(command, "_ROOT", tmp_path)
    done = CliRunner().invoke(command.cli, ["show", str(tmp_path / "found.json")], catch_exceptions=False)
    text = (tmp_path / "docs" / "BENCHMARKS.md").read_text()
    assert done.exit_code == 0
    assert text.startswith(f"# Beside other brokers\n\nfigures\n\n{table.HEADING}\n")
    assert "| count | time | 4 s | 3.5 to 6 | ≤ 5 | reached |" in text
    assert "|  | messages | 4 msg/s | 3.5 to 6 | ≥ 5 | missed |" in text
    assert "| other | ratio | 4 |  |  |  |" in text

"""The processes of the bench: their output, their failures, and their end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qmq.bench.processes import BrokerProcess, Child, broker_in
from qmq.bench.values import BenchFailed


def child(tmp_path: Path, code: str) -> Child:
    return Child("a child", ["-c", code], tmp_path / "errors")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_lines_go_both_ways(tmp_path: Path) -> None:
    with child(tmp_path, "print('one\\ntwo', flush=True); print(input() + '!', flush=True)") as process:
        assert [process.read_line(), process.read_line()] == ["one", "two"]
        process.write_line("go")
        assert process.read_line() == "go!"
    assert is_gone(process.pid)


def test_a_child_that_ends_early_leaves_its_last_words(tmp_path: Path) -> None:
    with (
        child(tmp_path, "raise SystemExit('no room on the disk')") as process,
        pytest.raises(BenchFailed, match="a child ended with 1; its last words: no room on the disk"),
    ):
        process.read_line()


def test_a_child_that_hangs_is_told_of_and_ended(tmp_path: Path) -> None:
    with (
        child(tmp_path, "input()") as process,
        pytest.raises(BenchFailed, match="a child said nothing for 0 s; it printed no error"),
    ):
        process.read_line(timeout_s=0.01)
    assert is_gone(process.pid)


def test_a_broker_serves_is_looked_into_and_leaves_nothing(tmp_path: Path) -> None:
    with broker_in(tmp_path, {"partitions": 2}) as broker:
        assert broker.url.startswith("qmq://127.0.0.1:")
        assert (broker.directory / "log-1").is_dir()
        assert 0 < broker.ready_after_s < 60
        assert broker.anonymous_bytes() > 1 << 20
        assert broker.cpu_s() > 0
        assert broker.open_files() > 3
    assert is_gone(broker.pid)
    assert not broker.directory.exists()


def test_a_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"'partitoins' .* is not a setting"):
        BrokerProcess(tmp_path / "data", {"partitoins": 2})

"""qmq/cli/common/progress.py: a count and a rate on a terminal, and nothing elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from qmq.cli.common.progress import Counting, reading_bar


def test_the_line_has_count_and_rate() -> None:
    counting = Counting("sent", shown=False, clock=lambda: 100.0)
    assert counting.line(12_345, 102.0) == "12,345 sent, 6,172/s"
    assert counting.line(5, 100.0) == "5 sent, 50/s"


def test_nothing_is_written_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Counting("sent") as counting:
        counting.show(5)
    assert capsys.readouterr() == ("", "")


def test_it_writes_to_stderr_and_not_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 1.01, 1.02, 2.0])
    with Counting("sent", shown=True, clock=lambda: next(times)) as counting:
        for count in (111, 222, 333, 444):
            counting.show(count)
    out, err = capsys.readouterr()
    assert out == ""
    assert [count for count in (111, 222, 333, 444) if f"{count} sent" in err] == [111, 444]


def test_a_bar_has_bytes_rate_and_time_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with reading_bar(console) as progress:
        assert progress is not None
        for done in (1_000_000, 3_000_000):
            progress(done, 4_000_000)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3.0/4.0 MB" in shown
    assert "/s" in shown
    assert ":" in shown


def test_no_bar_where_nobody_looks() -> None:
    console = Console(file=io.StringIO())
    with reading_bar(console) as progress:
        assert progress is None
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]

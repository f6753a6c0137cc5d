"""Calls that are given up after a time."""

from __future__ import annotations

import gc
import threading

import pytest

from qmq.archive.hdfs_read import BoundedCalls, NoAnswer


def _refuse() -> None:
    raise ValueError("no")


def _time_out() -> None:
    raise TimeoutError("its own")


def test_gives_what_the_function_gives() -> None:
    calls = BoundedCalls(60)
    assert calls(lambda: threading.current_thread() is threading.main_thread()) is False
    assert [calls(lambda number=number: number) for number in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no"):
        calls(_refuse)
    with pytest.raises(TimeoutError, match="its own"):
        calls(_time_out)
    assert calls(lambda: 7) == 7


def test_gives_up_what_does_not_end() -> None:
    calls, end = BoundedCalls(0.01), threading.Event()
    with pytest.raises(NoAnswer):
        calls(end.wait)
    end.set()
    with pytest.raises(NoAnswer):
        calls(lambda: 7)


def test_its_thread_ends_with_it() -> None:
    calls = BoundedCalls(60)
    thread = calls(threading.current_thread)
    del calls
    gc.collect()
    thread.join()
    assert not thread.is_alive()

"""Acks from other threads come to the loop together, and none is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from qmq.net.client.consumer.acks import ThreadDispositions
from qmq.net.client.consumer.in_flight import InFlightWindow


class Noting:
    """Stands in for a window in flight: records the acks."""

    def __init__(self, thread_dispositions: ThreadDispositions) -> None:
        self.acked: list[tuple[int, int]] = []
        self.thread_base = 0
        self.thread_dispositions = thread_dispositions
        thread_dispositions.add(cast(InFlightWindow, self))

    def ack_from_thread(self, sequence: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """As ``SyncMessage.ack``."""
        self.thread_dispositions.waiting.append(self.thread_base + sequence)
        if not self.thread_dispositions.is_due:
            self.thread_dispositions.want_take(call_soon)

    def ack(self, start: int, end: int) -> None:
        self.acked.append((start, end))


def test_one_after_another_they_are_acknowledged_in_one_go() -> None:
    thread_dispositions, calls = ThreadDispositions(), list[Callable[[], None]]()
    first, second = Noting(thread_dispositions), Noting(thread_dispositions)
    for noting, sequence in ((first, 5), (first, 6), (first, 7), (first, 9), (second, 10), (second, 11), (first, 10)):
        noting.ack_from_thread(sequence, calls.append)
    assert len(calls) == 1
    calls.pop()()
    assert first.acked == [(5, 8), (9, 10), (10, 11)]
    assert second.acked == [(10, 12)]
    for sequence in range(2):
        first.ack_from_thread(sequence, calls.append)
    thread_dispositions.call(lambda: first.acked.append((-1, -1)), calls.append)
    first.ack_from_thread(2, calls.append)
    assert len(calls) == 1
    calls.pop()()
    assert first.acked[3:] == [(0, 2), (-1, -1), (2, 3)]


def test_an_ack_of_a_window_that_nobody_has_changes_nothing() -> None:
    thread_dispositions, calls = ThreadDispositions(), list[Callable[[], None]]()
    first, gone = Noting(thread_dispositions), Noting(thread_dispositions)
    for noting in (first, gone, first):
        noting.ack_from_thread(len(thread_dispositions.waiting), calls.append)
    del gone, noting
    calls.pop()()
    assert first.acked == [(0, 1), (2, 3)]


def test_each_ack_to_a_closed_loop_raises() -> None:
    def closed(call: Any) -> None:
        raise RuntimeError("Event loop is closed")

    noting = Noting(ThreadDispositions())
    for sequence in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            noting.ack_from_thread(sequence, closed)


async def test_none_is_left_behind_whatever_threads_do() -> None:
    loop, noting, each = asyncio.get_running_loop(), Noting(ThreadDispositions()), 5_000

    def work(first: int) -> None:
        for sequence in range(first, first + each):
            noting.ack_from_thread(sequence, loop.call_soon_threadsafe)

    threads = [threading.Thread(target=work, args=(number * each,)) for number in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    await asyncio.sleep(0)  # run the last scheduled call
    acked = sorted(noting.acked)
    assert [sequence for start, end in acked for sequence in range(start, end)] == list(range(3 * each))

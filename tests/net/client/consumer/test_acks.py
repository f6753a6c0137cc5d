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

    def __init__(self) -> None:
        self.acked: list[tuple[int, int]] = []

    def ack(self, start: int, end: int) -> None:
        self.acked.append((start, end))


def in_flight(noting: Noting) -> InFlightWindow:
    return cast(InFlightWindow, noting)


def test_one_after_another_they_are_acknowledged_in_one_go() -> None:
    thread_dispositions, calls = ThreadDispositions(), list[Callable[[], None]]()
    first, second = Noting(), Noting()
    for noting, sequence in ((first, 5), (first, 6), (first, 7), (first, 9), (second, 10), (second, 11), (first, 10)):
        thread_dispositions.ack(in_flight(noting), sequence, calls.append)
    assert len(calls) == 1
    calls.pop()()
    assert first.acked == [(5, 8), (9, 10), (10, 11)]
    assert second.acked == [(10, 12)]
    thread_dispositions.ack(in_flight(first), 0, calls.append)
    assert len(calls) == 1


def test_each_ack_to_a_closed_loop_raises() -> None:
    def closed(call: Any) -> None:
        raise RuntimeError("Event loop is closed")

    thread_dispositions = ThreadDispositions()
    for sequence in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            thread_dispositions.ack(in_flight(Noting()), sequence, closed)


async def test_none_is_left_behind_whatever_threads_do() -> None:
    loop, noting, thread_dispositions, each = asyncio.get_running_loop(), Noting(), ThreadDispositions(), 5_000

    def work(first: int) -> None:
        for sequence in range(first, first + each):
            thread_dispositions.ack(in_flight(noting), sequence, loop.call_soon_threadsafe)

    threads = [threading.Thread(target=work, args=(number * each,)) for number in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    await asyncio.sleep(0)  # run the last scheduled call
    acked = sorted(noting.acked)
    assert [sequence for start, end in acked for sequence in range(start, end)] == list(range(3 * each))

"""What a consumer of a group holds, as its client knows it: without I/O."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import Fenced, InvalidOption, ProtocolError
from qmq.format.pieces import read_answer
from qmq.format.run import Run
from qmq.intervals import Intervals
from qmq.net.client.consumer.in_flight import Back, Holding, Place, check_delay
from tests.net.scripted import stored_batch

PLACE = Place(1, 1, 10, 10, 1, 1_700_000_000_000_000)


class Desk:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.loop = None
        self.refused = 0
        self.has_left = False
        self.sends = 0
        self.let_go: list[tuple[int, int]] = []

    def want_send(self) -> None:
        self.sends += 1

    async def hand_back(self, holding: Holding, back: Back) -> None:
        raise AssertionError

    def release(self, holding: Holding, start: int, end: int) -> None:
        raise AssertionError

    async def failed(self, holding: Holding, sequence: int, error: Exception) -> None:
        raise AssertionError

    def dropped(self, holding: Holding, stretches: list[tuple[int, int]]) -> None:
        self.let_go += stretches

    def late(self, call: str, shown: object) -> None:
        raise AssertionError


class Worker:
    """A task that counts how often it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def made() -> tuple[Holding, Desk]:
    desk = Desk()
    return Holding(desk, PLACE), desk


def runs(*sizes: int) -> list[Run]:
    answer = b"".join(stored_batch({"a": [b"x"] * size}, position=5_000 * at) for at, size in enumerate(sizes, 1))
    return read_answer(memoryview(answer))[0]


def numbers(found: list[Run]) -> list[tuple[int, int, int]]:
    return [(run.pull_sequence, run.count, run.attempt) for run in found]


def test_messages_are_numbered_across_runs_and_gaps() -> None:
    holding, _ = made()
    assert numbers(holding.number(runs(3, 4), [10, 5, 1, 20, 2, 3])) == [(10, 3, 1), (13, 2, 1), (20, 2, 3)]
    assert holding.expected == 22
    assert holding.open() == [(10, 15), (20, 22)]
    holding.ack(12, 21)
    assert holding.open() == [(10, 12), (21, 22)]
    (run,) = holding.number(runs(2), [30, 2, 1])
    assert (run.pull_sequence, holding.open()) == (30, [(10, 12), (21, 22), (30, 32)])
    holding.fence(Fenced("silent"))
    assert holding.open() == []


@pytest.mark.parametrize("ranges", [[10, 2, 1], [10, 4, 1], [10, 3], [10, 1, 1, 10, 2, 1], [9, 3, 1], []])
def test_numbers_that_do_not_fit_are_refused(ranges: list[int]) -> None:
    holding, _ = made()
    with pytest.raises(ProtocolError):
        holding.number(runs(3), ranges)


@given(st.lists(st.tuples(st.sampled_from("avstcr"), st.integers(10, 60), st.integers(1, 9)), max_size=60))
def test_every_acknowledgement_is_sent_until_it_is_confirmed(steps: list[tuple[str, int, int]]) -> None:
    """Acknowledged in any order and more than once, with lost connections: against plain sets."""
    holding, _ = made()
    acked, back, confirmed = set[int](), set[int](), set[int]()
    flights: list[list[int]] = []
    for what, start, count in steps:
        span = set(range(start, start + count))
        match what:
            case "a":
                holding.ack(start, start + count)
                acked |= span - back
            case "v":  # one by one, by the short way that messages take
                for number in sorted(span):
                    if holding.tail == number:
                        holding.tail = number + 1
                    else:
                        holding.ack(number, number + 1)
                acked |= span - back
            case "t" if not span & (acked | back):
                holding.take_back(start, start + count)
                back |= span
            case "s":
                flights.append(holding.take_acks())
            case "c" if flights:
                flight = flights.pop(0)
                holding.confirm(flight, 0)
                confirmed |= expanded(flight)
            case "r":
                flights.clear()
                holding.rejoined(PLACE)
        assert holding.unconfirmed == len(acked - confirmed)
        assert all(holding.is_open(number) == (number not in acked | back) for number in range(10, 70))
    assert expanded(holding.acknowledged(1_000)) == acked - confirmed
    while flight := holding.take_acks():
        flights.append(flight)
    for flight in flights:
        holding.confirm(flight, 0)
    assert holding.unconfirmed == 0


def expanded(flat: list[int]) -> set[int]:
    return {number for low, high in zip(flat[::2], flat[1::2], strict=True) for number in range(low, high)}


def test_what_has_a_verdict_takes_no_other() -> None:
    holding, _ = made()
    holding.ack(10, 12)
    with pytest.raises(Fenced, match="before"):
        holding.take_back(11, 12)
    holding.take_back(12, 13)
    with pytest.raises(Fenced, match="before"):
        holding.take_back(12, 13)
    holding.ack(12, 14)
    assert holding.take_acks() == [10, 12, 13, 14], "what was handed back is not acknowledged"


def test_after_a_fence_nothing_is_held_and_all_is_refused() -> None:
    holding, desk = made()
    holding.ack(10, 12)
    holding.take_acks()
    holding.ack(15, 16)
    assert list(holding.fence(Fenced("silent"))) == [(10, 12), (15, 16)]
    holding.ack(10, 13)
    holding.ack(12, 14)
    assert desk.refused == 2, "12 and 13, which had no verdict"
    assert (holding.take_acks(), holding.unconfirmed) == ([], 0)
    with pytest.raises(Fenced, match="silent"):
        holding.take_back(20, 21)


def test_who_is_at_work_is_stopped_once_and_who_begins_late_at_once() -> None:
    holding, _ = made()
    one, two, late = Worker(), Worker(), Worker()
    holding.begin(one)
    holding.begin(two)
    holding.begin(two)  # on two messages
    assert not holding.end(two)
    holding.fence(Fenced("silent"))
    holding.begin(late)
    assert [worker.cancelled for worker in (one, two, late)] == [1, 1, 1]
    assert [holding.end(worker) for worker in (one, two, late)] == [True, True, True]
    assert not holding.end(one)


def test_who_is_through_is_not_stopped() -> None:
    holding, _ = made()
    worker = Worker()
    holding.begin(worker)
    assert not holding.end(worker)
    holding.fence(Fenced("silent"))
    assert worker.cancelled == 0


def test_messages_that_are_let_go_without_a_verdict_are_counted() -> None:
    holding, desk = made()
    found: Any = holding.number(runs(4, 2), [10, 6, 1])
    holding.ack(10, 11)
    part = found[0].slice(2, 3)
    del found
    gc.collect()
    assert desk.let_go == [], "a part of it is there"
    del part
    gc.collect()
    assert desk.let_go == [(10, 16)]
    assert holding.count_open(desk.let_go) == 5
    holding.fence(Fenced("silent"))
    assert holding.count_open(desk.let_go) == 0


def test_of_messages_that_all_have_a_verdict_nothing_is_said() -> None:
    holding, desk = made()
    first: Any = holding.number(runs(4), [10, 4, 1])
    second: Any = holding.number(runs(4), [14, 4, 1])
    third: Any = holding.number(runs(2), [18, 2, 1])
    holding.ack(10, 14)
    holding.ack(14, 15)
    assert holding.tail == 15
    holding.tail = 18  # as Message.ack counts on
    del first, second
    gc.collect()
    assert desk.let_go == []
    del third
    gc.collect()
    assert desk.let_go == [(18, 20)]


def test_places_of_other_incarnations_generations_and_times_are_others() -> None:
    assert PLACE.is_that_of(PLACE._replace(frontier=50, next_sequence=70))
    for field in ("consumer", "incarnation", "generation", "since_us"):
        assert not PLACE.is_that_of(PLACE._replace(**{field: 99}))


@pytest.mark.parametrize("delay", [-1, "1", True, float("nan"), 3 * 366 * 86_400])
def test_bad_delays_are_refused(delay: Any) -> None:
    with pytest.raises(InvalidOption, match="delay"):
        check_delay(delay)


def test_delays_are_microseconds() -> None:
    assert (check_delay(None), check_delay(0), check_delay(1.5)) == (None, 0, 1_500_000)


def test_many_stretches_go_in_several_frames() -> None:
    holding, _ = made()
    for number in range(10, 10_010, 2):
        holding.ack(number, number + 1)
    sent = Intervals()
    frames = 0
    while flat := holding.take_acks():
        frames += 1
        for low, high in zip(flat[::2], flat[1::2], strict=True):
            sent.add(low, high)
    assert (frames, sent.size) == (3, 5_000)

"""The window of messages in flight, as the client knows it. No I/O."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import Fenced, InvalidOption, ProtocolError
from qmq.format.layout import LANE_ORDERED
from qmq.format.pieces import read_answer
from qmq.format.run import Run
from qmq.intervals import Intervals
from qmq.net.client.consumer.in_flight import MOST_REMEMBERED, DispositionOwner, InFlightWindow, check_delay
from qmq.net.protocol.types import ConsumerState
from tests.net.scripted import stored_batch

PLACE = ConsumerState(1, 1, 10, 10, 1, 1_700_000_000_000_000)


class Desk:
    """Records the calls of a window."""

    def __init__(self) -> None:
        self.loop = None
        self.refused = 0
        self.has_left = False
        self.sends = 0
        self.dropped_ranges: list[tuple[int, int]] = []

    def want_send(self) -> None:
        self.sends += 1

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        self.dropped_ranges += sequence_ranges

    def late(self, call: str, shown: object) -> None:
        raise AssertionError


class Worker:
    """A task that counts how often it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def made() -> tuple[InFlightWindow, Desk]:
    desk = Desk()
    return InFlightWindow(cast(DispositionOwner, desk), PLACE), desk


def runs(*sizes: int) -> list[Run]:
    answer = b"".join(stored_batch({"a": [b"x"] * size}, position=5_000 * at) for at, size in enumerate(sizes, 1))
    return read_answer(memoryview(answer))[0]


def test_a_message_that_stays_open_keeps_no_slots_of_others_in_memory() -> None:
    in_flight, desk = made()
    used = list[int]()
    tracemalloc.start()
    for number in range(8_000):
        (run,) = runs(1)
        run.lane = LANE_ORDERED | number % 7
        in_flight.number([run], [10 + number, 1, 1])
        del run
        if number:
            in_flight.ack(10 + number, 11 + number)
        if number in (3_999, 7_999):
            desk.dropped_ranges.clear()
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert used[1] - used[0] < 30_000, "18 bytes a message would be 72,000"
    (run,) = runs(1)
    run.lane = LANE_ORDERED
    in_flight.number([run], [8_010, 1, 1])
    assert in_flight.behind(10, 11) == [(8_010, 8_011)], "what is open is known"


def numbers(found: list[Run]) -> list[tuple[int, int, int]]:
    return [(run.delivery_sequence, run.count, run.attempt) for run in found]


def test_messages_are_numbered_across_runs_and_gaps() -> None:
    in_flight, _ = made()
    assert numbers(in_flight.number(runs(3, 4), [10, 5, 1, 20, 2, 3])) == [(10, 3, 1), (13, 2, 1), (20, 2, 3)]
    assert in_flight.expected == 22
    assert in_flight.open() == [(10, 15), (20, 22)]
    in_flight.ack(12, 21)
    assert in_flight.open() == [(10, 12), (21, 22)]
    (run,) = in_flight.number(runs(2), [30, 2, 1])
    assert (run.delivery_sequence, in_flight.open()) == (30, [(10, 12), (21, 22), (30, 32)])
    in_flight.fence(Fenced("silent"))
    assert in_flight.open() == []


@pytest.mark.parametrize("ranges", [[10, 2, 1], [10, 4, 1], [10, 3], [10, 1, 1, 10, 2, 1], [9, 3, 1], []])
def test_ranges_that_do_not_fit_are_refused(ranges: list[int]) -> None:
    in_flight, _ = made()
    with pytest.raises(ProtocolError):
        in_flight.number(runs(3), ranges)


@given(st.lists(st.tuples(st.sampled_from("avstcr"), st.integers(10, 60), st.integers(1, 9)), max_size=60))
def test_every_acknowledgement_is_sent_until_it_is_confirmed(steps: list[tuple[str, int, int]]) -> None:
    """Acks in any order and more than once, with lost connections: compared with plain sets."""
    in_flight, _ = made()
    acked, back, confirmed = set[int](), set[int](), set[int]()
    flights: list[list[int]] = []
    for what, start, count in steps:
        span = set(range(start, start + count))
        match what:
            case "a":
                in_flight.ack(start, start + count)
                acked |= span - back
            case "v":  # one by one, as Message.ack does
                for number in sorted(span):
                    if in_flight.tail == number:
                        in_flight.tail = number + 1
                    else:
                        in_flight.ack(number, number + 1)
                acked |= span - back
            case "t" if not span & (acked | back):
                in_flight.begin_disposition(start, start + count)
                back |= span
            case "s":
                flights.append(in_flight.take_acks())
            case "c" if flights:
                flight = flights.pop(0)
                in_flight.confirm(flight, 0)
                confirmed |= expanded(flight)
            case "r":
                flights.clear()
                in_flight.rejoined(PLACE)
        assert in_flight.unconfirmed == len(acked - confirmed)
        assert all(in_flight.is_open(number) == (number not in acked | back) for number in range(10, 70))
    assert expanded(in_flight.acknowledged(1_000)) == acked - confirmed
    while flight := in_flight.take_acks():
        flights.append(flight)
    for flight in flights:
        in_flight.confirm(flight, 0)
    assert in_flight.unconfirmed == 0


def expanded(flat: list[int]) -> set[int]:
    return {number for low, high in zip(flat[::2], flat[1::2], strict=True) for number in range(low, high)}


def test_a_message_takes_one_disposition_only() -> None:
    in_flight, _ = made()
    in_flight.ack(10, 12)
    with pytest.raises(Fenced, match="already"):
        in_flight.begin_disposition(11, 12)
    in_flight.begin_disposition(12, 13)
    with pytest.raises(Fenced, match="already"):
        in_flight.begin_disposition(12, 13)
    in_flight.ack(12, 14)
    assert in_flight.take_acks() == [10, 12, 13, 14], "what was handed back is not acknowledged"


def test_after_a_fence_no_message_is_in_flight_and_all_acks_are_refused() -> None:
    in_flight, desk = made()
    in_flight.ack(10, 12)
    in_flight.take_acks()
    in_flight.ack(15, 16)
    assert list(in_flight.fence(Fenced("silent"))) == [(10, 12), (15, 16)]
    in_flight.ack(10, 13)
    in_flight.ack(12, 14)
    assert desk.refused == 2, "12 and 13, which had no disposition"
    assert (in_flight.take_acks(), in_flight.unconfirmed) == ([], 0)
    with pytest.raises(Fenced, match="silent"):
        in_flight.begin_disposition(20, 21)


def test_tasks_at_work_are_cancelled_once_and_late_ones_at_once() -> None:
    in_flight, _ = made()
    one, two, late = Worker(), Worker(), Worker()
    in_flight.begin(one)
    in_flight.begin(two)
    in_flight.begin(two)  # on two messages
    assert not in_flight.end(two)
    in_flight.fence(Fenced("silent"))
    in_flight.begin(late)
    assert [worker.cancelled for worker in (one, two, late)] == [1, 1, 1]
    assert [in_flight.end(worker) for worker in (one, two, late)] == [True, True, True]
    assert not in_flight.end(one)


def test_a_finished_task_is_not_cancelled() -> None:
    in_flight, _ = made()
    worker = Worker()
    in_flight.begin(worker)
    assert not in_flight.end(worker)
    in_flight.fence(Fenced("silent"))
    assert worker.cancelled == 0


def test_messages_dropped_without_a_disposition_are_counted() -> None:
    in_flight, desk = made()
    found: Any = in_flight.number(runs(4, 2), [10, 6, 1])
    in_flight.ack(10, 11)
    part = found[0].slice(2, 3)
    del found
    gc.collect()
    assert desk.dropped_ranges == [], "a part of it is there"
    del part
    gc.collect()
    assert desk.dropped_ranges == [(10, 16)]
    assert in_flight.count_open(desk.dropped_ranges) == 5
    in_flight.fence(Fenced("silent"))
    assert in_flight.count_open(desk.dropped_ranges) == 0


def test_no_warning_when_all_messages_have_a_disposition() -> None:
    in_flight, desk = made()
    first: Any = in_flight.number(runs(4), [10, 4, 1])
    second: Any = in_flight.number(runs(4), [14, 4, 1])
    third: Any = in_flight.number(runs(2), [18, 2, 1])
    in_flight.ack(10, 14)
    in_flight.ack(14, 15)
    assert in_flight.tail == 15
    in_flight.tail = 18  # as Message.ack increments it
    del first, second
    gc.collect()
    assert desk.dropped_ranges == []
    del third
    gc.collect()
    assert desk.dropped_ranges == [(18, 20)]


def test_states_of_other_epochs_generations_and_times_differ() -> None:
    assert PLACE.is_that_of(PLACE._replace(ack_floor=50, next_sequence=70))
    for field in ("consumer", "epoch", "generation", "since_us"):
        assert not PLACE.is_that_of(PLACE._replace(**{field: 99}))


@pytest.mark.parametrize("delay", [-1, "1x", True, float("nan"), 3 * 366 * 86_400])
def test_bad_delays_are_refused(delay: Any) -> None:
    with pytest.raises(InvalidOption, match="delay"):
        check_delay(delay)


def test_delays_are_microseconds() -> None:
    assert (check_delay(None), check_delay(0), check_delay(1.5)) == (None, 0, 1_500_000)


def test_many_ranges_go_in_several_frames() -> None:
    in_flight, _ = made()
    for number in range(10, 10_010, 2):
        in_flight.ack(number, number + 1)
    sent = Intervals()
    frames = 0
    while flat := in_flight.take_acks():
        frames += 1
        for low, high in zip(flat[::2], flat[1::2], strict=True):
            sent.add(low, high)
    assert (frames, sent.size) == (3, 5_000)


def test_of_very_many_ranges_that_were_taken_back_the_latest_are_known() -> None:
    in_flight, _ = made()
    (run,) = runs(30_000)
    in_flight.number([run], [10, 30_000, 1])
    for number in range(10, 30_010, 2):
        in_flight.take_back(number, number + 1)
    assert MOST_REMEMBERED // 2 <= len(in_flight.taken_back) <= MOST_REMEMBERED
    assert 30_008 in in_flight.taken_back
    assert not in_flight.is_open(30_008)
    assert in_flight.is_open(30_009)


def test_what_the_broker_gave_up_while_the_consumer_was_away_counts_as_refused() -> None:
    """Its ack deadline passed, say. The program has it in hand, and its ack must not pass for one that counts."""
    in_flight, desk = made()
    in_flight.number(runs(5), [10, 5, 1])
    in_flight.ack(10, 11)
    in_flight.begin_disposition(12, 13)
    assert in_flight.take_acks() == [10, 11]
    in_flight.rejoined(PLACE._replace(ack_floor=14))
    assert [in_flight.is_open(number) for number in range(10, 15)] == [False] * 4 + [True]
    assert [in_flight.is_given_up(number, number + 1) for number in range(10, 15)] == [False, True, False, True, False]
    in_flight.ack(13, 15)
    assert desk.refused == 1
    in_flight.ack(11, 12, each=False)  # by the client itself, as it has none of the group's tags
    assert desk.refused == 1
    assert in_flight.take_acks() == [10, 11, 14, 15]

"""How many messages a loop takes at a time: simulated, with time as an argument."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import pytest

from qmq.net.client.consumer.feed import MAX_PREFETCH, PREFETCH_SECONDS, Prefetch

TASKS = 10_000
CONSUMERS = 10
SLOWER = 100


class Outcome(NamedTuple):
    took: float
    #: The most messages that the first consumer had taken and not started.
    waiting: int


def work_off(seconds: list[float], tasks: int, round_trip: float) -> Outcome:
    """Simulate consumers, each with its seconds per task, that take from one queue, handle, and take again."""
    rules = [Prefetch(is_solo=False) for _ in seconds]
    turns = [(0.0, number) for number in range(len(seconds))]
    ended, waiting = 0.0, 0
    while turns and tasks:
        now, number = heapq.heappop(turns)
        count = min(rules[number].wanted(now), tasks)
        tasks -= count
        rules[number].record(count, now + round_trip)
        if number == 0:
            waiting = max(waiting, count - 1)
        now += round_trip + count * seconds[number]
        ended = max(ended, now)
        heapq.heappush(turns, (now, number))
    return Outcome(ended, waiting)


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.1])
def test_a_consumer_a_hundred_times_slower_delays_no_other(seconds: float) -> None:
    each = [SLOWER * seconds] + [seconds] * (CONSUMERS - 1)
    ideal = TASKS / sum(1 / one for one in each)
    outcome = work_off(each, TASKS, 0.0005)
    assert outcome.took <= 1.1 * ideal
    assert outcome.waiting <= 2


def test_fast_ones_take_many_and_what_they_take_is_a_tenth_of_a_second_of_work() -> None:
    rule, now, most = Prefetch(is_solo=False), 0.0, 0
    for _ in range(20):
        count = rule.wanted(now)
        rule.record(count, now)
        now += count * 0.0001
        most = max(most, count)
    assert PREFETCH_SECONDS / 2 <= most * 0.0001 <= 1.05 * PREFETCH_SECONDS


def test_a_consumer_that_slows_down_takes_few_at_once() -> None:
    rule, now = Prefetch(is_solo=False), 0.0
    while rule.wanted(now) < 1_000:
        rule.record(rule.wanted(now), now)
        now += 0.0001
    rule.record(1_000, now)
    assert rule.wanted(now + 1_000) == 1


def test_one_at_a_time_is_no_reason_to_take_more() -> None:
    """The rate of messages that arrive one by one does not show how many a loop could handle."""
    rule = Prefetch(is_solo=True)
    for now in range(100):
        rule.record(1, now)
        assert rule.wanted(now + 0.000_1) == 16


def test_no_more_than_the_most_are_taken() -> None:
    rule = Prefetch(is_solo=False)
    for _ in range(100):
        rule.record(rule.wanted(1.0), 1.0)
    assert rule.wanted(1.0) == MAX_PREFETCH

"""Waiting pulls: lookup, deadlines, and no trace of answered ones."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.delivery.wakeups import WaitingPulls
from qmq.broker.groups.group import Subscription, Waiting
from qmq.broker.ports.commands import Disconnected, Pull
from tests.broker.harness import Driven


def subscribed(driven: Driven) -> Subscription:
    number = driven.subscribe("a.", group="g")
    return driven.broker._delivery.subscriptions.get(1, number)


def waiting(subscription: Subscription, request: int, deadline_us: int) -> Waiting:
    pull = Pull(1, request, subscription.number, 1, 1, 1, deadline_us // 1_000)
    return Waiting(pull, subscription, deadline_us)


def test_they_are_found_until_they_are_answered(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = subscribed(driven)
    waiting_pulls = WaitingPulls()
    ones = [waiting(subscription, request, 1_000 * request) for request in (3, 1, 2)]
    for one in ones:
        waiting_pulls.add(one)
    assert (waiting_pulls.count, waiting_pulls.count_of(1), waiting_pulls.count_of(2)) == (3, 3, 0)
    assert 1 in waiting_pulls
    assert waiting_pulls.get(1, 2) is ones[2]
    assert waiting_pulls.all() == waiting_pulls.of_subscription(subscription) == ones
    assert list(subscription.filters[0].waiting.values()) == ones
    waiting_pulls.remove(ones[2])
    waiting_pulls.remove(ones[2])
    assert (waiting_pulls.count, waiting_pulls.get(1, 2), ones[2].done) == (2, None, True)
    for one in ones[:2]:
        waiting_pulls.remove(one)
    assert (1 in waiting_pulls, waiting_pulls.all(), len(subscription.filters[0].waiting)) == (False, [], 0)


def test_time_is_up_in_order_and_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = subscribed(driven)
    waiting_pulls = WaitingPulls()
    ones = [waiting(subscription, request, 1_000 * request) for request in range(1, 301)]
    for one in reversed(ones):
        waiting_pulls.add(one)
    waiting_pulls.remove(ones[1])
    assert waiting_pulls.next_deadline_us() == 1_000
    assert list(waiting_pulls.due(3_000)) == [ones[0], ones[2]]
    assert list(waiting_pulls.due(3_000)) == []
    assert waiting_pulls.count == 299, "who is due stays until he is answered"
    for one in ones[:290]:
        waiting_pulls.remove(one)
    assert len(waiting_pulls._deadlines) <= 64, "what was answered leaves nothing behind"
    assert list(waiting_pulls.due(1_000_000)) == ones[290:]
    assert waiting_pulls.next_deadline_us() is None
    now = waiting(subscription, 999, 0)
    waiting_pulls.add(now)
    assert waiting_pulls.overdue == [now], "it does not wait, but for a read"


def test_a_connection_that_ends_leaves_none(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = subscribed(driven)
    command = driven.pull_command(subscription.number)._replace(timeout_ms=1_000)
    assert driven.do(command) == []
    assert driven.broker.waiting_pulls() == 1
    driven.do(Disconnected(1))
    assert driven.broker.waiting_pulls() == 0
    assert driven.advance(2_000) == []

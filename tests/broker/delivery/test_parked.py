"""Pulls that wait: who is found, whose time is up, and that what was answered leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.delivery.parked import Parked
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
    parked = Parked()
    ones = [waiting(subscription, request, 1_000 * request) for request in (3, 1, 2)]
    for one in ones:
        parked.add(one)
    assert (parked.count, parked.count_of(1), parked.count_of(2)) == (3, 3, 0)
    assert 1 in parked
    assert parked.get(1, 2) is ones[2]
    assert parked.all() == parked.of_subscription(subscription) == ones
    assert list(subscription.followings[0].waiting.values()) == ones
    parked.remove(ones[2])
    parked.remove(ones[2])
    assert (parked.count, parked.get(1, 2), ones[2].done) == (2, None, True)
    for one in ones[:2]:
        parked.remove(one)
    assert (1 in parked, parked.all(), len(subscription.followings[0].waiting)) == (False, [], 0)


def test_time_is_up_in_order_and_once(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = subscribed(driven)
    parked = Parked()
    ones = [waiting(subscription, request, 1_000 * request) for request in range(1, 301)]
    for one in reversed(ones):
        parked.add(one)
    parked.remove(ones[1])
    assert parked.next_deadline_us() == 1_000
    assert list(parked.due(3_000)) == [ones[0], ones[2]]
    assert list(parked.due(3_000)) == []
    assert parked.count == 299, "who is due stays until he is answered"
    for one in ones[:290]:
        parked.remove(one)
    assert len(parked._deadlines) <= 64, "what was answered leaves nothing behind"
    assert list(parked.due(1_000_000)) == ones[290:]
    assert parked.next_deadline_us() is None
    now = waiting(subscription, 999, 0)
    parked.add(now)
    assert parked.overdue == [now], "it does not wait, but for a read"


def test_a_connection_that_ends_leaves_none(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = subscribed(driven)
    command = driven.pull_command(subscription.number)._replace(timeout_ms=1_000)
    assert driven.do(command) == []
    assert driven.broker.parked_pulls() == 1
    driven.do(Disconnected(1))
    assert driven.broker.parked_pulls() == 0
    assert driven.advance(2_000) == []

"""Snapshots: groups of several brokers as one, and rates from two answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.console.snapshot import REASONS, Away, make_snapshot
from qmq.net.client.admin.statistics import GroupTotals
from tests.console.made_up import at, broker_stats, group_stats, received


def test_a_rate_is_the_difference_of_two_counts_by_the_brokers_time() -> None:
    first = make_snapshot(1, at(0), [received(broker_stats(0, group_stats("billing", acked=10)), 100)], {}, None)
    group = group_stats("billing", acked=30, delivered=40, redelivered=4, nacked=4, session_expired=2)
    second = make_snapshot(2, at(99), [received(broker_stats(4, group), 180)], {}, first)
    assert (first.received_rate, first.acked_rate, first.groups["billing"].acked_rate) == (0, 0, 0)
    assert (second.received_rate, second.delivered_rate, second.acked_rate, second.failed_rate) == (20, 11, 5, 1)
    assert second.groups["billing"].acked_rate == 5
    assert second.subjects[0].received_rate == 20


def test_after_a_restart_all_that_was_counted_is_new() -> None:
    first = make_snapshot(1, at(10), [received(broker_stats(10, group_stats("billing", acked=1000)), 5000)], {}, None)
    restarted = received(broker_stats(20, group_stats("billing", acked=1200), started_at=at(15)), 50)
    second = make_snapshot(2, at(20), [restarted], {}, first)
    assert second.received_rate == 10
    assert second.acked_rate == 240


def test_a_group_that_was_deleted_and_came_again_counts_from_0_and_totals_go_on() -> None:
    first = make_snapshot(1, at(0), [broker_stats(0, group_stats("billing", acked=100))], {}, None)
    ended = GroupTotals(0, 0, 110, 0, 0, 0, 0, 0, 0)
    second = make_snapshot(2, at(1), [broker_stats(1, group_stats("billing", acked=3), ended=ended)], {}, first)
    assert second.groups["billing"].acked_rate == 3
    assert second.acked_rate == 13


def test_rates_are_0_when_the_clock_stands_or_the_broker_was_away() -> None:
    first = make_snapshot(1, at(0), [received(broker_stats(5), 1)], {}, None)
    assert make_snapshot(2, at(1), [received(broker_stats(5), 9)], {}, first).received_rate == 0
    assert make_snapshot(2, at(1), [received(broker_stats(4), 9)], {}, first).received_rate == 0
    away = make_snapshot(2, at(1), [], {"127.0.0.1:20881": Away(at(1), "gone")}, first)
    assert away.groups == {}
    assert make_snapshot(3, at(2), [received(broker_stats(7), 9)], {}, away).received_rate == 0


def test_a_group_at_two_brokers_is_one() -> None:
    one = group_stats(
        "billing", ready=3, consumers=1, oldest_unacked=at(5), follows=["shop.", "a."], in_flight=1, acked=1
    )
    other = group_stats(
        "billing", ready=4, consumers=2, oldest_unacked=at(2), ready_exact=False, in_flight_since=at(7), acked=1
    )
    brokers = [broker_stats(9, one, broker="a:1"), broker_stats(9, other, group_stats("mail"), broker="b:1")]
    before = make_snapshot(1, at(8), [replace(stats, at=at(8), groups=[]) for stats in brokers], {}, None)
    snapshot = make_snapshot(2, at(9), brokers, {}, before)
    billing = snapshot.groups["billing"]
    assert list(snapshot.groups) == ["billing", "mail"]
    assert (billing.brokers, billing.follows) == (("a:1", "b:1"), ("a.", "shop."))
    assert (billing.ready, billing.ready_exact, billing.consumers, billing.in_flight) == (7, False, 3, 1)
    assert (billing.oldest, billing.in_flight_since, billing.acked_rate) == (at(2), at(7), 2)
    assert billing.oldest_age(at(9)) == 7
    assert billing.in_flight_age(at(1)) == 0  # the clocks of two machines
    assert (snapshot.ready, snapshot.in_flight, snapshot.oldest) == (7, 1, at(2))
    assert [group.name for group in snapshot.behind()] == ["billing"]


def test_the_group_with_the_oldest_message_is_furthest_behind() -> None:
    groups = [
        group_stats("a", oldest_unacked=at(5)),
        group_stats("b", oldest_unacked=at(1)),
        group_stats("c"),
        group_stats("d", oldest_unacked=at(1), ready=1),
    ]
    snapshot = make_snapshot(1, at(9), [broker_stats(9, *groups)], {}, None)
    assert [group.name for group in snapshot.behind()] == ["d", "b", "a"]


def test_rates_since_any_other_snapshot() -> None:
    snapshots = [make_snapshot(n, at(n), [received(broker_stats(n), n * n)], {}, None) for n in range(1, 6)]
    assert snapshots[4].since(snapshots[0]).received_rate == 6
    assert snapshots[4].since(None).received_rate == 0


#: Five minutes before the look, and five seconds.
LONG_AGO, OF_LATE = at(0), at(295)


@pytest.mark.parametrize(
    ("values", "code", "text"),
    [
        ({}, None, ""),
        ({"ready": 1}, "no_consumer", "no consumer is there"),
        ({"in_retry": 1, "returned": 1}, "no_consumer", "no consumer is there"),
        (
            {"in_flight": 1, "consumers": 1, "held_since": LONG_AGO}, "held",
            "a consumer holds messages without an ack for 5m",
        ),
        ({"ready": 9, "in_flight": 1, "consumers": 1, "held_since": LONG_AGO, "held": 200.0}, "hands_full",
         "all hands are full (handlers take 3m)"),
        ({"ready": 9, "in_flight": 1, "consumers": 1, "held_since": at(299), "held": 3.0}, "hands_full",
         "all hands are full (handlers take 3s)"),
        ({"ready": 9, "in_flight": 1, "consumers": 1, "held_since": OF_LATE}, "hands_full", "all hands are full"),
        ({"ready": 9, "in_flight": 9, "consumers": 1, "held_since": at(300), "held": 0.01}, "at_work",
         "consumers are at work"),
        ({"in_flight": 1, "consumers": 1, "held_since": at(299), "held": 3.0}, "at_work", "consumers are at work"),
        ({"ready": 1, "consumers": 1, "failed_lately": 2, "acked_lately": 1}, "attempts_fail", "most attempts fail"),
        ({"ready": 1, "consumers": 1, "failed_lately": 1, "acked_lately": 9}, "at_work", "consumers are at work"),
        (
            {"in_retry": 1, "consumers": 1, "retry_due": at(330)}, "retry_delay",
            "all wait for a retry until 00:05:30 UTC",
        ),
        (
            {"in_retry": 1, "consumers": 1, "retry_due": at(90_000)}, "retry_delay",
            "all wait for a retry until 2026-01-02 01:00:00 UTC",
        ),
        ({"in_retry": 1, "consumers": 1, "retry_due": at(299)}, "at_work", "consumers are at work"),
        ({"ready": 1, "consumers": 1, "oldest": LONG_AGO}, "nothing_taken", "consumers take nothing"),
        (
            {"ready": 1, "consumers": 1, "oldest": LONG_AGO, "last_pull": LONG_AGO}, "nothing_taken",
            "consumers take nothing",
        ),
        ({"ready": 1, "consumers": 1, "oldest": LONG_AGO, "last_pull": OF_LATE}, "at_work", "consumers are at work"),
        ({"ready": 1, "consumers": 1, "oldest": OF_LATE}, "at_work", "consumers are at work"),
        (
            {"ready": 1, "consumers": 1, "oldest": LONG_AGO, "mode": "at_most_once"}, "at_work",
            "consumers are at work",
        ),
        (
            {"in_retry": 1, "consumers": 1, "crashes": 3, "crashed_messages": 1}, "consumers_crash",
            "consumers crash (3 sessions ended with this message in flight)",
        ),
        (
            {"in_retry": 9, "crashes": 2, "crashed_messages": 9}, "consumers_crash",
            "consumers crash (2 sessions ended with these 9 messages in flight)",
        ),
        ({"in_retry": 1, "consumers": 1, "crashes": 1, "crashed_messages": 1}, "at_work", "consumers are at work"),
        (
            {"ready": 2, "consumers": 1, "blocked": 2, "blocked_slots": 2}, "order_keys",
            "all wait: their order keys are in flight",
        ),
        (
            {"ready": 2, "consumers": 1, "in_retry": 1, "blocked": 2, "blocked_slots": 2, "blocked_retrying": 2},
            "order_keys", "all wait: their order keys are in retry",
        ),
        (
            {"ready": 2, "consumers": 1, "in_retry": 1, "blocked": 2, "blocked_slots": 2, "blocked_retrying": 1},
            "order_keys", "all wait: their keys are in flight or retry",
        ),
    ],
)  # fmt: skip
def test_a_group_that_is_behind_says_why(values: dict[str, object], code: str | None, text: str) -> None:
    now = make_snapshot(1, at(300), [broker_stats(300, group_stats("g"))], {}, None).groups["g"]
    why = replace(now, **values).why(at(300))  # type: ignore[arg-type]
    assert (None if why is None else why.code, "" if why is None else why.text) == (code, text)
    assert code is None or code in REASONS

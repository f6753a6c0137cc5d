"""Ack deadlines: an overdue message is nacked and delivered again, and its late ack is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from qmq.broker.delivery import ack_deadline
from qmq.broker.ports.commands import Administer, Heartbeat, Now
from qmq.broker.ports.effects import PulledMessages
from tests.broker.delivery.test_filters import dead
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, killed, many


def beat(driven: Driven, milliseconds: int, *names: str) -> None:
    driven.advance(milliseconds)
    driven.do(*[Heartbeat(9, driven.request(), name.encode(), 0) for name in names])


def test_what_takes_too_long_comes_again_to_anyone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 4)
    one = Consumer(driven, "one", connection=1, ack_deadline_us=10_000_000, retry_delays_us=[0], max_attempts=2)
    two = Consumer(driven, "two", connection=2)
    assert one.pull(2) == many(2)
    beat(driven, 6_000, "one", "two")
    assert one.pull(2) == many(4)[2:]
    one.ack(1)
    beat(driven, 3_999, "one", "two")
    assert two.pull() == []
    beat(driven, 1, "one", "two")
    assert two.pull() == [b"0"]
    assert list(two.got.values()) == [(b"0", 2)]
    assert one.ack(0) == 1  # too late
    assert one.ack(2, 3) == 0
    beat(driven, 10_000, "one", "two")
    assert dead(driven) == [("not handled within 10 s", 0)]
    assert two.pull() == one.pull() == []
    assert driven.broker._delivery.tracker.ack_deadlines.next_deadline_us() is None
    driven.close()


@pytest.mark.parametrize(
    ("before_ms", "after_ms"), [(2_000, 8_000), (9_000, 5_000), (60_000, 5_000)], ids=["goes on", "nearly", "long over"]
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_after_a_start_the_time_goes_on_but_acknowledgements_may_come_first(
    tmp_path: Path, before_ms: int, after_ms: int, checkpointed: bool
) -> None:
    driven = filled(tmp_path, 1)
    one = Consumer(driven, "one", connection=1, ack_deadline_us=10_000_000, retry_delays_us=[0])
    assert one.pull() == many(1)
    if checkpointed:
        driven.checkpoint()
    driven.now = Now(driven.now.monotonic_us, driven.now.wall_us + before_ms * 1_000)  # another process's clock
    killed(driven)
    one.join()
    two = Consumer(driven, "two", connection=2)
    waiting = driven.pull_command(two.subscription, timeout_ms=60_000, connection=2)._replace(expected=0)
    assert driven.do(waiting) == []
    assert driven.advance(after_ms - 1) == []
    driven.advance(1)
    said = driven.do()
    assert two.take([effect for effect in said if isinstance(effect, PulledMessages)]) == many(1)
    driven.close()


def set_time(driven: Driven, most_us: int) -> None:
    fields = {"group": "g", "settings": {"ack_deadline_us": most_us}}
    driven.do(Administer(1, driven.request(), "set_group", fields))


def test_a_longest_time_that_is_set_later_counts_for_what_is_out(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    one = Consumer(driven, "one", connection=1, retry_delays_us=[0])
    two = Consumer(driven, "two", connection=2)
    assert one.pull() == many(1)
    beat(driven, 20_000, "one", "two")
    set_time(driven, 60_000_000)
    set_time(driven, 10_000_000)
    beat(driven, 9_999, "one", "two")
    assert two.pull() == []
    beat(driven, 1, "one", "two")
    assert two.pull() == many(1)
    set_time(driven, 0)
    beat(driven, 20_000, "one", "two")
    assert one.pull() == []
    driven.close()


def test_of_many_that_are_overdue_some_are_taken_back_in_each_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ack_deadline, "MOST_RANGES", 4)
    driven = filled(tmp_path, 30)
    one = Consumer(driven, "one", connection=1, ack_deadline_us=10_000_000, retry_delays_us=[0])
    assert one.pull(12) == many(12)
    assert one.pull() == many(30)[12:]
    one.ack(*range(0, 30, 2))
    driven.do(Heartbeat(9, driven.request(), b"one", 0))
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    driven.now = Now(driven.now.monotonic_us + 10_000_000, driven.now.wall_us + 10_000_000)
    waits = list[int]()
    while driven.broker.tick(driven.now) == driven.now.monotonic_us or not waits or waits[-1] < 15:
        waits.append(ledger.retries.count)
        assert len(waits) < 100
    assert waits[0] == 4
    assert all(after - before <= 4 for before, after in pairwise(waits))
    two = Consumer(driven, "two", connection=2)
    assert sorted(two.pull(), key=int) == many(30)[1::2]
    driven.close()

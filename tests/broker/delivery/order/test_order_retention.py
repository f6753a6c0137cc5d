"""Retention drops segments with messages of slots: in flight, as retries, dead, or waiting for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.retention.retention import Dropped
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, attempts_of, numbers_of, texts
from tests.broker.retention.test_retention import BY_AGE, HOUR_MS, SMALL, settle
from tests.broker.test_admin import ask, group_row

STOPS = pytest.mark.parametrize("stop", [Keys.restart, Keys.kill])
LONG_US: Final = 20 * HOUR_MS * 1_000


def roll(driven: Keys) -> None:
    """Fill the segment that is written to, with messages that no group follows."""
    for _ in range(12):
        driven.send("z.z", b"." * 900)


def drop(driven: Keys) -> list[Dropped]:
    """Let the segments get old; return those that have gone."""
    roll(driven)
    driven.advance(2 * HOUR_MS)
    roll(driven)
    return settle(driven)


@STOPS
def test_what_is_in_flight_and_in_retry_stays_in_order(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path, BY_AGE, **SMALL)
    one = driven.join("one")
    driven.put("k", "l", "k", "l", "k")
    assert texts(driven.take(one, 2)) == ["k 0", "l 0"]
    assert texts(driven.take(one)) == ["k 1", "l 1", "k 2"]
    two = driven.join("two")
    driven.back(one, 1, delay_us=LONG_US)
    assert sum(gone.carried for gone in drop(driven)) == 5
    driven.put("k", "l", "m")
    assert driven.drain(two) == ["m 0"]
    stop(driven)
    one, two = driven.rejoin(one, two)
    assert texts(driven.take(two)) == []
    again = driven.take(one, expected=0)
    assert (texts(again), attempts_of(again)) == (["k 0", "k 1", "k 2"], [1, 1, 1])
    driven.ack(one, *numbers_of(again)[:1])
    driven.back(one, numbers_of(again)[1], delay_us=0)
    assert driven.drain(two) == ["k 1", "k 2", "k 3"]
    driven.advance(20 * HOUR_MS)
    (two,) = driven.rejoin(two)
    assert driven.drain(two) == ["l 0", "l 1", "l 2"]
    driven.close()


@STOPS
def test_a_hard_limit_that_drops_what_waits_in_a_slot_leaves_the_rest_in_order(
    tmp_path: Path, stop: Callable[[Keys], None]
) -> None:
    driven = Keys(tmp_path, BY_AGE, **SMALL)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert texts(driven.take(two)) == ["l 0"]  # it has passed k 1
    drop(driven)
    driven.put("k", "k")
    stop(driven)
    one, two = driven.rejoin(one, two)
    assert texts(driven.take(two)) == []
    assert group_row(driven)["skipped"] == 1
    assert texts(driven.take(one, 1, expected=0)) == ["k 0"]
    driven.ack(one, 0)
    assert driven.drain(two) == ["k 2", "k 3"]
    driven.close()


def test_a_forgotten_slot_whose_rows_are_dropped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 4)
    driven = Keys(tmp_path, BY_AGE, **SMALL)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*["k"] * 10)
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.put("l")
    assert driven.drain(two) == ["l 0"]
    drop(driven)
    driven.put("k", "k", "l")
    assert driven.drain(two) == ["l 1"]
    driven.ack(one, 0)
    assert driven.drain(two) == ["k 10", "k 11"]
    driven.close()


def test_the_segments_of_a_slot_that_waits_are_kept_without_a_hard_limit(tmp_path: Path) -> None:
    limits = BrokerLimits(retention_ms=HOUR_MS, session_timeout_ms=10 * HOUR_MS)
    driven = Keys(tmp_path, limits, **SMALL)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert drop(driven) == []
    assert texts(driven.take(two)) == []
    driven.ack(one, 0)
    assert driven.drain(two) == ["k 1"]
    driven.advance(700_000)
    driven.rejoin(two)
    assert settle(driven)
    driven.close()


def test_a_redriven_letter_that_was_carried_forward_comes_before_what_follows_it(tmp_path: Path) -> None:
    driven = Keys(tmp_path, BY_AGE, **SMALL)
    one = driven.join("one")
    driven.put("k", "k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2"]
    driven.back(one, 0, Disposition.REJECT)
    driven.back(one, 1, delay_us=LONG_US // 4)
    drop(driven)
    drop(driven)
    ask(driven, "redrive", group="g", numbers=None)
    driven.advance(20 * HOUR_MS)
    (one,) = driven.rejoin(one)
    assert driven.drain(one) == ["k 0", "k 1", "k 2"]
    driven.close()


def test_what_is_carried_forward_twice_stays_in_order(tmp_path: Path) -> None:
    driven = Keys(tmp_path, BY_AGE._replace(session_timeout_ms=1_000 * HOUR_MS), **SMALL)
    one = driven.join("one")
    driven.put("k")
    roll(driven)
    driven.advance(HOUR_MS // 2)
    driven.put("k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.back(one, 0, delay_us=LONG_US)
    roll(driven)
    for _ in range(5):
        driven.advance(HOUR_MS // 2)
        roll(driven)
        settle(driven)
    driven.put("k")
    driven.advance(30 * HOUR_MS)
    (one,) = driven.rejoin(one)
    assert driven.drain(one) == ["k 0", "k 1", "k 2"]
    driven.close()

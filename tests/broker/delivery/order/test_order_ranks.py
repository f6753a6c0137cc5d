"""Order keys with priorities: in a key the stored order holds, and of keys whose next message is ready the higher
priority goes first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.format.layout import LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW
from tests.broker.delivery.order.slots import Keys, attempts_of, numbers_of, texts

NORMAL, HIGH, LOW = LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW
STOPS = pytest.mark.parametrize("stop", [None, Keys.restart, Keys.kill])


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("prefixes", [("a.",), ("",), ("a.b", "a.c")])
def test_the_higher_priority_goes_first_among_keys(tmp_path: Path, prefixes: tuple[str, ...], partitions: int) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one = driven.join("one", *prefixes, priority_share=0)
    driven.put("k", kind=LOW)
    driven.put("l", kind=NORMAL, subject="a.c")
    driven.put("m", kind=HIGH)
    driven.put("high", "low", "normal")
    found = driven.drain(one, most=1)
    assert sorted(found[:2]) == ["high 0", "m 0"]
    assert sorted(found[2:4]) == ["l 0", "normal 0"]
    assert sorted(found[4:]) == ["k 0", "low 0"]
    driven.close()


@STOPS
@pytest.mark.parametrize("most", [1, 100])
def test_in_a_key_the_stored_order_holds(tmp_path: Path, most: int, stop: object) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0)
    for kind in (LOW, HIGH, NORMAL, HIGH):
        driven.put("k", kind=kind)
    driven.put("l", kind=NORMAL)
    assert texts(driven.take(one, 1)) == ["l 0"], "the next one of the other key is low"
    driven.ack(one, 0)
    if callable(stop):
        stop(driven)
        (one,) = driven.rejoin(one)
    assert driven.drain(one, most=most) == ["k 0", "k 1", "k 2", "k 3"]
    driven.close()


def test_a_retry_comes_by_its_priority(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.put("k", kind=HIGH)
    driven.put("k", kind=LOW)
    driven.put("l", "m", kind=NORMAL)
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.back(one, 0, delay_us=0)
    again = driven.take(one, 1)
    assert (texts(again), attempts_of(again)) == (["k 0"], [2])
    driven.ack(one, *numbers_of(again))
    assert driven.drain(one, most=1) == ["l 0", "m 0", "k 1"]
    driven.close()


@pytest.mark.parametrize("tags", [("eu",), ()])
def test_what_is_left_out_of_a_lower_priority_holds_no_higher_one_up(tmp_path: Path, tags: tuple[str, ...]) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", tags=tags)
    driven.put("k", kind=LOW, tags=("us",), expires_us=0 if tags else 1_000)
    driven.put("k", kind=HIGH, tags=("eu",))
    driven.advance(10)
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


def test_retries_of_a_lower_priority_come_behind_what_was_held_up_by_one_that_is_left_out(tmp_path: Path) -> None:
    """The walk down the priorities finds the higher one only once it has passed what lies before that in its key."""
    driven = Keys(tmp_path)
    one = driven.join("one", tags=("eu",), priority_share=0)
    driven.put("l", kind=NORMAL, tags=("eu",))
    driven.back(one, *numbers_of(driven.take(one)), delay_us=0)
    assert texts(driven.take(one)) == ["l 0"]
    driven.back(one, 1, delay_us=0)  # now new messages come first, where they are of the same priority
    driven.put("k", kind=NORMAL, tags=("us",))
    driven.put("k", kind=HIGH, tags=("eu",))
    assert driven.drain(one) == ["k 1", "l 0"]
    driven.close()


def test_lower_ones_have_their_share(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0.5)
    driven.put(*"abcdefgh", kind=HIGH)
    driven.put(*"klmn", kind=LOW)
    found = driven.drain(one, most=1)
    assert sum(body[0] in "klmn" for body in found[:8]) == 3
    assert len(found) == 12
    driven.close()


def test_consumers_share_the_slots_of_each_priority(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", priority_share=0), driven.join("two")
    driven.put(*"abcd", kind=HIGH)
    driven.put(*"klmn", kind=LOW)
    first, second = texts(driven.take(one)), texts(driven.take(two))
    assert sorted(body[0] for body in first + second)[:4] == list("abcd")
    assert len(first) == len(second)
    rest = driven.drain(one, two)
    assert len(first + second + rest) == 8
    driven.close()


@STOPS
def test_a_group_that_had_one_priority_only_meets_another(tmp_path: Path, stop: object) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.put("k", "l")
    assert driven.drain(one) == ["k 0", "l 0"]
    driven.put("k", "m")
    driven.put("k", kind=HIGH)
    driven.put("n", kind=HIGH)
    if callable(stop):
        stop(driven)
        (one,) = driven.rejoin(one)
    assert driven.drain(one, most=1) == ["n 0", "k 1", "k 2", "m 0"]
    driven.close()

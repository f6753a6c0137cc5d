"""Seeks, deletions, and changed settings and prefixes of groups, while slots are in flight and have retries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack
from qmq.broker.ports.effects import Refused
from tests.broker.delivery.order.slots import Keys, Session, answered, numbers_of, texts
from tests.broker.test_admin import ask, group_row

STOPS = pytest.mark.parametrize("stop", [Keys.restart, Keys.kill])


def with_retries(driven: Keys) -> tuple[Session, Session, int]:
    """Two consumers, of which one has k 0 in flight and has nacked l 1; and the time before the last messages."""
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "l", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    answer = driven.take(two)
    assert texts(answer) == ["l 0", "l 1"]
    driven.ack(two, 0)
    driven.back(two, 1, delay_us=400_000)
    driven.advance(1)
    before_us = driven.now.wall_us
    driven.put("k", "l")
    return one, two, before_us


def found_after(driven: Keys, stop: Callable[[Keys], None], *sessions: Session) -> list[str]:
    stop(driven)
    one, two = driven.rejoin(*sessions)
    found = driven.drain(one, two)
    driven.alive(one, two)
    driven.advance(500)
    driven.alive(one, two)
    return found + driven.drain(one, two)


@STOPS
@pytest.mark.parametrize(
    ("to", "clears", "found"),
    [
        ("first", True, {"k": ["k 0", "k 1"], "l": ["l 0", "l 1", "l 2"]}),
        ("first", False, {"k": ["k 0", "k 1"], "l": ["l 1", "l 0", "l 1", "l 2"]}),  # a retry that is kept comes first
        ("new", True, {"k": [], "l": []}),
        ("new", False, {"k": [], "l": ["l 1"]}),
        ("time", True, {"k": ["k 1"], "l": ["l 2"]}),
        ("time", False, {"k": ["k 1"], "l": ["l 1", "l 2"]}),
    ],
)
def test_a_seek_goes_on_in_the_order_of_slots(
    tmp_path: Path, to: str, clears: bool, found: dict[str, list[str]], stop: Callable[[Keys], None]
) -> None:
    driven = Keys(tmp_path)
    one, two, before_us = with_retries(driven)
    to_time = ["time", before_us]
    ask(driven, "seek_group", group="g", to=to_time if to == "time" else to, clear_retries=clears)
    seen = found_after(driven, stop, one, two)
    assert {key: [body for body in seen if body[0] == key] for key in "kl"} == found
    driven.put("k", "l")
    assert sorted(driven.drain(*driven.rejoin(one, two))) == ["k 2", "l 3"]
    driven.close()


def test_an_ack_of_before_a_seek_frees_no_slot(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    ask(driven, "seek_group", group="g", to="first")
    two = driven.join("two")
    assert texts(driven.take(two, 1)) == ["k 0"]
    (refused,) = driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)))
    assert isinstance(refused, Refused)
    one = driven.join("one")
    assert texts(driven.take(one)) == []
    driven.close()


@STOPS
def test_a_group_that_is_deleted_and_made_again_begins_with_free_slots(
    tmp_path: Path, stop: Callable[[Keys], None]
) -> None:
    driven = Keys(tmp_path)
    with_retries(driven)
    ask(driven, "delete_group", group="g")
    stop(driven)
    one, two = driven.join("one"), driven.join("two")
    found = driven.drain(one, two)
    assert [body for body in found if body[0] == "l"] == ["l 0", "l 1", "l 2"]
    assert [body for body in found if body[0] == "k"] == ["k 0", "k 1"]
    driven.close()


def test_a_lower_bound_of_attempts_frees_the_slot_at_the_next_nack(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    ask(driven, "set_group", group="g", settings={"max_attempts": 1})
    driven.back(one, 0)
    assert group_row(driven)["dead"] == 1
    assert texts(driven.take(two)) == ["k 1"]
    driven.close()


def test_a_passed_ack_deadline_takes_back_a_slot_in_order(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", ack_deadline_us=300_000), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.put("k")
    assert driven.wait(two, max_count=1) == []
    driven.alive(one, two)
    said = driven.advance(400) + driven.do()
    assert answered(said) == {two.connection: ["k 0"]}
    driven.ack(two, 0)
    assert driven.drain(one, two) == ["k 1", "k 2"]
    driven.close()


def test_a_passed_ack_deadline_of_a_last_attempt_takes_back_what_was_pulled_later(tmp_path: Path) -> None:
    """Its client may still nack the first one, and gives the program none of what lies behind it then."""
    driven = Keys(tmp_path)
    one, two = driven.join("one", ack_deadline_us=300_000, max_attempts=1), driven.join("two")
    driven.put("k", "k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.advance(200)
    assert texts(driven.take(one, 1)) == ["k 1"]
    driven.alive(one, two)
    driven.advance(200)
    assert group_row(driven)["dead"] == 1
    assert texts(driven.take(two, 1)) == ["k 1"]
    assert texts(driven.take(one)) == []
    driven.ack(two, 0)
    assert driven.drain(one, two) == ["k 2"]
    driven.close()


@STOPS
def test_a_slot_of_a_subject_that_is_followed_no_more_is_let_go(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a."), driven.join("two", "a.")
    driven.put("k", "k", subject="a.x")
    driven.put("l", "l", subject="a.y")
    assert [texts(driven.take(one, 1)), texts(driven.take(two, 1))] == [["k 0"], ["l 0"]]
    driven.back(one, 0)
    ask(driven, "set_group", group="g", follows=["a.y"])
    stop(driven)
    one, two = driven.rejoin(one, two, prefixes=("a.y",))
    assert texts(driven.take(one)) == [], "k 0 is dead, l 1 waits for l 0"
    assert group_row(driven)["dead"] == 1
    driven.ack(two, 0)
    assert driven.drain(one, two) == ["l 1"]
    ask(driven, "set_group", group="g", follows=["a."])
    one, two = driven.rejoin(one, two)
    assert driven.drain(one, two) == ["k 1"]
    driven.close()


def test_a_wider_prefix_goes_on_with_the_slots_of_a_narrow_one(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.b")
    driven.put("k", "k", "l")
    first = driven.take(one, 1)
    assert texts(first) == ["k 0"]
    two = driven.join("two", "a.")
    driven.put("m", subject="a.c")
    assert sorted(driven.drain(two)) == ["l 0", "m 0"]
    driven.ack(one, *numbers_of(first))
    assert driven.drain(two) == ["k 1"]
    driven.close()

"""Tags and expiry in the middle of slots: a message that a group does not get holds nothing up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.delivery.order.slots import Keys, bodies_after, numbers_of, texts
from tests.broker.test_admin import ask


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_filtered_message_in_the_middle_of_those_in_flight_holds_nothing_up(tmp_path: Path, partitions: int) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one, two = driven.join("one", tags=("eu",)), driven.join("two")
    for tag in ("eu", "us", "eu", "us", "eu"):
        driven.put("k", tags=(tag,))
    assert texts(driven.take(one, 2)) == ["k 0", "k 2"]
    assert texts(driven.take(two)) == []
    driven.back(one, 0)
    assert driven.drain(two, one) == ["k 0", "k 2", "k 4"]
    driven.close()


def test_a_slot_of_other_tags_is_no_answer_while_others_have_messages(tmp_path: Path) -> None:
    """A pull takes messages of its part of the slots; where a filter leaves none of them, it looks at the others."""
    driven = Keys(tmp_path)
    driven.join("one", tags=("eu",))
    two = driven.join("two")
    driven.put("k", tags=("us",))
    driven.put("l", tags=("eu",))
    assert texts(driven.take(two)) == ["l 0"]
    driven.close()


@pytest.mark.parametrize("min_count", [1, 2, 4])
def test_a_waiting_pull_finds_enough_of_its_tags_behind_many_others(tmp_path: Path, min_count: int) -> None:
    driven = Keys(tmp_path)
    driven.join("one", tags=("eu",))
    two = driven.join("two")
    driven.put(*"klmnop", tags=("us",))
    driven.put(*"qrst", tags=("eu",))
    found = bodies_after(driven.wait(two, min_count=min_count), two)
    assert len(found) >= min_count
    assert set(found) <= {"q 0", "r 0", "s 0", "t 0"}
    driven.close()


def test_a_slot_of_expired_messages_is_no_answer_while_others_have_messages(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    driven.join("one")
    two = driven.join("two")
    driven.put("k", "k", expires_us=1_000)
    driven.put("l")
    driven.advance(10)
    assert texts(driven.take(two)) == ["l 0"]
    driven.put("k")
    assert texts(driven.take(two)) == ["k 2"]
    assert [letter["reason"] for letter in ask(driven, "dead_letters", group="g")["rows"]] == ["expired"] * 2
    driven.close()


def test_what_expires_in_the_middle_of_a_slot_is_dead_and_the_next_goes_on(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    driven.put("k", "k", expires_us=100_000)
    driven.put("k")
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    driven.alive(one, two)
    driven.advance(200)
    driven.back(one, 0)
    assert driven.drain(two, one) == ["k 0", "k 3"]
    letters = ask(driven, "dead_letters", group="g")["rows"]
    assert [(letter["sequence"], letter["reason"]) for letter in letters] == [(1, "expired"), (2, "expired")]
    driven.close()


def test_a_group_whose_messages_all_expire_goes_by_its_setting(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", expire_after_us=500_000), driven.join("two")
    driven.put("k", "k", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.alive(one, two)
    driven.advance(600)
    driven.alive(one, two)
    driven.put("k", "m")
    assert texts(driven.take(two)) == ["m 0"]
    driven.ack(one, 0)
    assert texts(driven.take(two)) == ["k 2"]
    driven.close()


def test_new_tags_of_a_group_go_for_messages_that_wait_in_a_slot(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    assert texts(driven.take(one)) == ["k 0"]
    for tag in ("us", "eu"):
        driven.put("k", tags=(tag,))
    assert texts(driven.take(two)) == []  # it has passed both
    ask(driven, "set_group", group="g", settings={"tags": ("eu",)})
    driven.ack(one, *[0])
    answer = driven.take(two)
    assert texts(answer) == ["k 2"]
    driven.ack(two, *numbers_of(answer))
    assert driven.drain(one, two) == []
    driven.close()

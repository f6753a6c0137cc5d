"""Pulls that wait for messages of slots: what wakes them, and how many slots they get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack, DispositionRange, HandBack
from qmq.broker.ports.effects import Effect, PulledMessages
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, Session, answered, bodies_after, numbers_of, texts


def acked(driven: Keys, one: Session, two: Session) -> list[Effect]:
    return driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)))


def dead(driven: Keys, one: Session, two: Session) -> list[Effect]:
    backs = (DispositionRange(0, 1, Disposition.REJECT, None, "it broke"),)
    return driven.do(HandBack(one.connection, driven.request(), one.subscription, backs))


def expired(driven: Keys, one: Session, two: Session) -> list[Effect]:
    return driven.expire(two)


def left(driven: Keys, one: Session, two: Session) -> list[Effect]:
    return driven.leave(one)


@pytest.mark.parametrize("prefix", ["a.", "a.b"])
@pytest.mark.parametrize(
    ("free", "found"),
    [
        (acked, ["k 1", "k 2"]),
        (dead, ["k 1", "k 2"]),
        (expired, ["k 0"]),  # it is handed out alone, and holds the others
        (left, ["k 0"]),  # one retry is an answer, whatever the minimum
    ],
)
def test_a_pull_that_waits_for_several_is_woken_when_their_slot_is_free(
    tmp_path: Path, prefix: str, free: Callable[[Keys, Session, Session], list[Effect]], found: list[str]
) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", prefix), driven.join("two", prefix)
    driven.put("k", "k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert driven.wait(two, min_count=2) == []
    assert bodies_after(free(driven, one, two), two) == found
    driven.close()


def test_a_pull_that_waits_for_several_gets_what_there_is_when_its_time_is_up(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert driven.wait(two, min_count=2, timeout_ms=500) == []
    driven.alive(one, two)
    assert bodies_after(driven.advance(500), two) == ["l 0"]
    driven.close()


def test_a_pull_that_lacks_messages_leaves_them_to_one_that_has_enough(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    driven.take(one)
    assert driven.wait(two, min_count=2) == []
    assert driven.wait(one, min_count=2) == []
    said = driven.do(driven.command_of("k"), driven.command_of("l"))
    assert answered(said) == {one.connection: ["k 1", "l 0"]}
    driven.close()


def test_a_pull_that_waits_for_several_gets_more_slots_than_its_part(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*"kklmno")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert bodies_after(driven.wait(two, min_count=4, max_count=4), two) == ["l 0", "m 0", "n 0", "o 0"]
    driven.put("p")
    assert texts(driven.take(one)) == ["k 1", "p 0"]
    driven.close()


def test_a_pull_without_a_minimum_leaves_slots_to_others(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*"klmnklmn")
    assert texts(driven.take(one)) == ["k 0", "l 0", "k 1", "l 1"]
    assert texts(driven.take(two)) == ["m 0", "n 0", "m 1", "n 1"]
    driven.close()


def test_slots_whose_messages_are_handled_take_no_part(tmp_path: Path) -> None:
    """After a start, rows are read again that lie behind one that waits; all else of them is handled."""
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "m", "l", "n")
    assert texts(driven.take(one, 1)) == ["k 0"]
    handled = driven.take(two, 1)
    assert texts(handled) == ["m 0"]
    driven.ack(two, *numbers_of(handled))
    driven.restart()
    one, two = driven.join("one"), driven.join("two")
    assert texts(driven.take(two)) == ["l 0", "n 0"], "its part of three slots"
    driven.close()


def test_others_are_woken_when_a_pull_buries_what_held_a_slot_up(tmp_path: Path) -> None:
    """A message that expires as a retry is dead when a pull takes it; that pull may be answered with another slot."""
    driven = Keys(tmp_path)
    one, two, three = driven.join("one"), driven.join("two"), driven.join("three")
    driven.put("m")
    assert texts(driven.take(two, 1)) == ["m 0"]
    driven.put("k", expires_us=1_100_000)
    driven.put("l")
    assert [texts(driven.take(one, 1)) for _ in range(2)] == [["k 0"], ["l 0"]]
    driven.put("k")
    driven.expire(two, three)
    assert driven.wait(two) == []
    assert answered(driven.wait(three)) == {two.connection: ["k 1"], three.connection: ["l 0"]}
    driven.close()


def test_the_longest_waiting_pull_gets_a_freed_slot(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    sessions = [driven.join(f"c{number}") for number in range(4)]
    driven.put("k", "k")
    assert texts(driven.take(sessions[0], 1)) == ["k 0"]
    for who in sessions[1:]:
        assert driven.wait(who) == []
    said = acked(driven, sessions[0], sessions[1])
    assert answered(said) == {sessions[1].connection: ["k 1"]}
    driven.close()


def test_a_slot_that_is_freed_in_a_turn_with_arrivals_goes_to_one(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two, three = driven.join("one"), driven.join("two"), driven.join("three")
    driven.put("k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert driven.wait(two) == driven.wait(three) == []
    said = driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)), driven.command_of("l"))
    found = [text for one in said if isinstance(one, PulledMessages) for text in texts(one)]
    assert sorted(found) == ["k 1", "l 0"]
    driven.close()

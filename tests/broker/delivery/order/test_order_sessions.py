"""Consumers of slots that die, are taken over, or lose an answer; and starts of the broker in each of these states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack, DispositionRange, HandBack
from qmq.broker.ports.effects import Refused
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, Session, attempts_of, numbers_of, texts
from tests.broker.find.test_resend import resend
from tests.broker.test_admin import ask, group_row

STOPS = pytest.mark.parametrize("stop", [Keys.restart, Keys.kill])


def redrive(driven: Keys) -> None:
    ids = [letter["id"] for letter in ask(driven, "dead_letters", group="g")["rows"]]
    ask(driven, "redrive", group="g", ids=ids)


# --- sessions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["a.", "a.b"])
def test_what_a_dead_consumer_had_comes_alone_and_in_order(tmp_path: Path, prefix: str) -> None:
    driven = Keys(tmp_path)
    one, two, three = (driven.join(name, prefix) for name in ("one", "two", "three"))
    driven.put("k", "k", "l", "k")
    assert [texts(driven.take(one, 2)) for _ in range(2)] == [["k 0", "k 1"], ["l 0", "k 2"]]
    driven.put("k", "m")
    driven.expire(two, three)
    first, other = driven.take(two), driven.take(three)
    assert texts(first) == ["k 0"], "alone: it may have killed its consumer"
    assert texts(other) == ["l 0"], "no other message of slot k before the first is settled"
    driven.ack(three, *numbers_of(other))
    assert texts(driven.take(three)) == ["m 0"], "the rest of the slot waits for the first"
    driven.ack(two, *numbers_of(first))
    assert driven.drain(two) == ["k 1", "k 2", "k 3"]
    driven.close()


def test_quarantined_messages_of_a_slot_come_one_by_one_to_any_consumer(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two, three = driven.join("one"), driven.join("two"), driven.join("three")
    driven.put("k", "k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2"]
    driven.put("k")
    driven.expire(two, three)
    found = list[str]()
    for who in (two, three, two, three):
        answer = driven.take(who)
        assert texts(driven.take(three if who is two else two)) == []
        found += texts(answer)
        driven.ack(who, *numbers_of(answer))
    assert found == ["k 0", "k 1", "k 2", "k 3"]
    driven.close()


def test_a_deadly_message_is_dead_at_last_and_its_slot_goes_on(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", max_session_expiries=2)
    driven.put("k", "k", "l")
    assert texts(driven.take(one, 1)) == ["k 0"]
    for number in range(2):
        driven.expire()
        who = driven.join(f"next{number}")
        assert texts(driven.take(who)) == ["k 0"]
    driven.expire()
    last = driven.join("last")
    assert driven.drain(last) == ["k 1", "l 0"]
    assert group_row(driven)["dead"] == 1
    driven.close()


def test_what_a_late_owner_says_is_refused(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.expire(two)
    first = driven.take(two)
    assert texts(first) == ["k 0"]
    backs = (DispositionRange(0, 2, Disposition.NACK, 0, "late"),)
    for command in (
        Ack(one.connection, driven.request(), one.subscription, (0, 2)),
        HandBack(one.connection, driven.request(), one.subscription, backs),
    ):
        (answer,) = driven.do(command)
        assert isinstance(answer, Refused)
    driven.ack(two, *numbers_of(first))
    assert texts(driven.take(two)) == ["k 1"]
    driven.close()


def test_of_three_the_last_is_acked_and_does_not_come_again(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2", "k 3"]
    driven.ack(one, 1, 3)
    driven.expire(two)
    assert driven.drain(two) == ["k 0", "k 2"]
    driven.close()


# --- takeovers -------------------------------------------------------------------------------------------------------


def test_a_takeover_resumes_with_the_slot_and_others_wait(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    again = driven.join("one")
    assert texts(driven.take(two)) == []
    answer = driven.take(again, expected=0)
    assert (texts(answer), attempts_of(answer)) == (["k 0", "k 1"], [1, 1])
    (refused,) = driven.do(Ack(one.connection, driven.request(), one.subscription, (0, 1)))
    assert isinstance(refused, Refused), "the epoch before is fenced"
    driven.ack(again, *numbers_of(answer))
    assert texts(driven.take(two)) == ["k 2"]
    driven.close()


def test_a_consumer_taken_over_twice_without_progress_has_its_slot_quarantined(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    for _ in range(3):
        one = driven.join("one")
    assert group_row(driven)["in_flight"] == 0
    assert texts(driven.take(two)) == ["k 0"]
    assert texts(driven.take(one)) == []
    driven.ack(two, 0)
    assert driven.drain(one, two) == ["k 1", "k 2"]
    driven.close()


# --- lost answers ----------------------------------------------------------------------------------------------------


@STOPS
def test_a_lost_answer_with_retries_is_repeated(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one)) == ["k 0", "k 1"]
    driven.back(one, 0)
    lost = driven.take(two)
    assert (texts(lost), attempts_of(lost)) == (["k 0", "k 1"], [2, 1])
    stop(driven)
    one, two = driven.rejoin(one, two)
    driven.put("k")
    assert texts(driven.take(one)) == []
    again = driven.take(two, expected=0)
    assert (texts(again), attempts_of(again)) == (["k 0", "k 1"], [2, 1])
    driven.ack(two, *numbers_of(again))
    assert texts(driven.take(one)) == ["k 2"]
    driven.close()


# --- starts of the broker --------------------------------------------------------------------------------------------


def in_flight(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    return ["k 0", "k 1", "k 2"]


def partly_acked(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 3)) == ["k 0", "k 1", "k 2"]
    driven.ack(one, 1)
    return ["k 0", "k 2"]


def nacked(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    driven.back(one, 0, delay_us=500_000)
    return ["k 0", "k 1", "k 2"]


def released(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 3)) == ["k 0", "k 1", "k 2"]
    driven.back(one, 1, Disposition.RELEASE, 500_000)
    return ["k 0", "k 1", "k 2"]


def redriven(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.back(one, 0, Disposition.REJECT)
    assert texts(driven.take(one, 1)) == ["k 1"]
    redrive(driven)
    return ["k 0", "k 1", "k 2"]


def resent(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    driven.ack(one, 0)
    resend(driven, prefix="a.", group="g", until_us=driven.now.wall_us + 1)
    return ["k 0", "k 1", "k 2"]


def quarantined(driven: Keys, one: Session, two: Session) -> list[str]:
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    driven.expire(two)
    assert texts(driven.take(two)) == ["k 0"]
    return ["k 0", "k 1", "k 2"]


@STOPS
@pytest.mark.parametrize(
    "begin", [in_flight, partly_acked, nacked, released, redriven, resent, quarantined], ids=lambda one: one.__name__
)
def test_after_a_start_a_slot_is_held_as_before(
    tmp_path: Path, begin: Callable[[Keys, Session, Session], list[str]], stop: Callable[[Keys], None]
) -> None:
    driven = Keys(tmp_path, partitions=3)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", "k")
    left = begin(driven, one, two)
    three = driven.join("three")
    driven.put("k", "m")
    assert driven.drain(three) == ["m 0"]
    stop(driven)
    one, two, three = driven.rejoin(one, two, three)
    driven.put("m")
    assert driven.drain(three) == ["m 1"]
    driven.leave(one)
    driven.leave(two)
    driven.alive(three)
    driven.advance(600)
    driven.alive(three)
    found = driven.drain(three)
    assert found == [*left, "k 3"], "each once, in stored order"
    driven.close()

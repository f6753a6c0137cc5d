"""One order key in several subjects: a message waits for the earlier ones of its key in all that its group follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Ack
from qmq.broker.ports.effects import Effect
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, Session, attempts_of, bodies_after, numbers_of, texts
from tests.broker.delivery.order.test_order_retention import drop
from tests.broker.find.test_resend import id_of, resend
from tests.broker.retention.test_retention import BY_AGE, SMALL
from tests.broker.test_admin import ask, group_row

PREFIXES = pytest.mark.parametrize("prefixes", [("a.",), ("",), ("a.b", "a.c"), ("a.b", "a."), ("a.c", "")])
PARTITIONS = pytest.mark.parametrize("partitions", [1, 3])


def acked(driven: Keys, who: Session, number: int) -> list[Effect]:
    """Ack a delivery sequence; return the effects."""
    return driven.do(Ack(who.connection, driven.request(), who.subscription, (number, number + 1)))


@PARTITIONS
@PREFIXES
def test_one_consumer_has_the_key_in_all_subjects(tmp_path: Path, prefixes: tuple[str, ...], partitions: int) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one, two = driven.join("one", *prefixes), driven.join("two", *prefixes)
    for subject in ("a.b", "a.c", "a.c", "a.b"):
        driven.put("k", subject=subject)
    driven.put("l", subject="a.c")
    assert texts(driven.take(one, 1)) == ["k 0"]
    assert driven.drain(two) == ["l 0"]
    driven.ack(one, 0)
    assert driven.drain(two) == ["k 1", "k 2", "k 3"]
    driven.close()


@PARTITIONS
def test_subjects_that_the_group_does_not_follow_hold_nothing_up(tmp_path: Path, partitions: int) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one = driven.join("one", "a.c")
    driven.put("k", subject="a.b")
    driven.put("k", subject="a.c")
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


@PARTITIONS
@PREFIXES
def test_a_failed_message_takes_back_later_ones_of_other_subjects(
    tmp_path: Path, prefixes: tuple[str, ...], partitions: int
) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one = driven.join("one", *prefixes)
    for subject in ("a.b", "a.c", "a.b", "a.c"):
        driven.put("k", subject=subject)
    driven.put("l", subject="a.c")
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2", "k 3", "l 0"]
    two = driven.join("two", *prefixes)
    driven.ack(one, 0)
    driven.back(one, 1, delay_us=100_000)
    assert driven.ack(one, 2) == 1, "it went back with the one before it"
    assert texts(driven.take(two)) == []
    driven.alive(one, two)
    driven.advance(200)
    again = driven.take(two)
    assert (texts(again), attempts_of(again)) == (["k 1", "k 2", "k 3"], [2, 1, 1])
    driven.close()


@PARTITIONS
def test_a_consumer_of_one_subject_waits_for_one_of_another(tmp_path: Path, partitions: int) -> None:
    driven = Keys(tmp_path, partitions=partitions)
    one, two = driven.join("one", "a.b"), driven.join("two", "a.c")
    driven.put("k", subject="a.b")
    driven.put("k", subject="a.c")
    driven.put("l", subject="a.c")
    assert driven.drain(two) == ["l 0"]
    assert driven.wait(two) == []
    assert texts(driven.take(one)) == ["k 0"]
    assert bodies_after(acked(driven, one, 0), two) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("tags", [(), ("eu",)])
def test_what_is_left_out_of_one_subject_wakes_a_consumer_of_another(tmp_path: Path, tags: tuple[str, ...]) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a.b", tags=tags), driven.join("two", "a.c")
    driven.put("z", subject="a.b", tags=("eu",))
    assert driven.drain(one) == ["z 0"]
    driven.put("k", subject="a.b", tags=("us",), expires_us=0 if tags else 1_000)
    driven.put("k", subject="a.c", tags=("eu",))
    driven.advance(10)
    assert driven.wait(two) == []
    said = driven.wait(one)
    assert bodies_after(said, two) == ["k 1"]
    driven.close()


def test_a_retry_of_one_subject_holds_a_consumer_of_another(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one", "a.b"), driven.join("two", "a.c")
    driven.put("k", subject="a.b")
    assert texts(driven.take(one)) == ["k 0"]
    driven.put("k", subject="a.c")
    driven.back(one, 0, delay_us=0)
    assert driven.wait(two) == []
    assert texts(driven.take(one)) == ["k 0"]
    assert bodies_after(acked(driven, one, 1), two) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("stop", [None, Keys.restart, Keys.kill])
def test_what_comes_again_comes_in_the_order_of_all_subjects(tmp_path: Path, stop: object) -> None:
    """Resent, redriven and released ones, which lie in different subjects."""
    driven = Keys(tmp_path)
    one = driven.join("one")
    sent = [driven.do(driven.command_of("k", subject))[0] for subject in ("a.c", "a.b", "a.c", "a.b", "a.c")]
    taken = driven.take(one)
    driven.ack(one, numbers_of(taken)[0], numbers_of(taken)[4])
    driven.back(one, numbers_of(taken)[1], Disposition.REJECT)
    driven.back(one, numbers_of(taken)[2], Disposition.REJECT)
    driven.ack(one, numbers_of(taken)[3])
    driven.put("k", subject="a.b")
    resend(driven, ids=[id_of(driven, sent[0]), id_of(driven, sent[3])], group="g")
    ask(driven, "redrive", group="g", numbers=None)
    if callable(stop):
        stop(driven)
        (one,) = driven.rejoin(one)
    driven.alive(one)
    assert driven.drain(one, most=1) == ["k 0", "k 1", "k 2", "k 3", "k 5"]
    driven.close()


@pytest.mark.parametrize("stop", [Keys.restart, Keys.kill])
def test_copies_keep_their_places_between_subjects(tmp_path: Path, stop: object) -> None:
    """Retention copies what is in flight and in retry: each copy stays where its original was."""
    driven = Keys(tmp_path, BY_AGE, **SMALL)
    one = driven.join("one")
    for subject in ("a.c", "a.b", "a.c", "a.b"):
        driven.put("k", subject=subject)
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2", "k 3"]
    driven.back(one, 1, delay_us=72_000_000_000)
    assert sum(gone.carried for gone in drop(driven)) == 4
    driven.put("k", subject="a.a")
    assert callable(stop)
    stop(driven)
    (one,) = driven.rejoin(one)
    again = driven.take(one, expected=0)
    assert texts(again) == ["k 0"]
    driven.ack(one, *numbers_of(again))
    driven.advance(72_000_000)
    (one,) = driven.rejoin(one)
    assert driven.drain(one, most=1) == ["k 1", "k 2", "k 3", "k 4"]
    driven.close()


def test_a_stuck_key_far_back_is_found_in_all_its_subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.broker.delivery.order.scan.MOST_PASSED", 4)
    monkeypatch.setattr("qmq.broker.delivery.order.scan.AGAIN_ROWS", 0)
    monkeypatch.setattr("qmq.broker.delivery.order.scan._SLOT_ROWS", 2)
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", subject="a.b")
    assert texts(driven.take(one)) == ["k 0"]
    expected = list[str]()
    for number in range(30):
        expected += driven.put("k", subject=("a.c", "a.b", "a.d")[number % 3 if number < 20 else 0])
        driven.put("l", subject="a.b")
    assert len(driven.drain(two)) == 30
    driven.ack(one, 0)
    assert driven.drain(two, most=7) == expected
    driven.close()


def test_many_keys_are_shared_between_consumers_of_all_subjects(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    for key in "abcdefgh":
        driven.put(key, subject="a.b")
        driven.put(key, subject="a.c")
    first, second = texts(driven.take(one)), texts(driven.take(two))
    assert {len(first), len(second)} == {8}
    assert not {body[0] for body in first} & {body[0] for body in second}
    driven.close()


def test_a_subject_that_is_followed_later_begins_at_its_start(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.b")
    driven.put("k", "k", subject="a.b")
    assert texts(driven.take(one, 1)) == ["k 0"]
    driven.put("j", "k", subject="a.c")
    two = driven.join("two", "a.b", "a.c", start="new")
    driven.put("k", subject="a.c")
    assert texts(driven.take(two)) == [], "an earlier one is in flight"
    driven.ack(one, 0)
    assert driven.drain(two) == ["k 1", "k 3"]
    driven.close()


def test_an_unfollowed_subject_lets_the_others_go_on(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.c")
    driven.join("two", "a.b")
    driven.put("k", subject="a.b")
    driven.put("k", subject="a.c")
    assert texts(driven.take(one)) == []
    ask(driven, "set_group", group="g", follows=["a.c"])
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


def test_a_list_says_what_waits_for_what_across_subjects(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one")
    driven.put("k", subject="a.b")
    driven.take(one)
    for subject in ("a.c", "a.d", "a.c"):
        driven.put("k", subject=subject)
    (slot,) = group_row(driven)["blocked"]
    assert (slot["subject"], slot["waiting"], slot["waiting_subjects"]) == ("a.b", 3, ("a.c", "a.d"))
    assert (slot["reason"], slot["consumer"], slot["message_id"] is None) == ("in_flight", "one", False)
    driven.close()


def test_what_came_before_a_message_that_fails_stays(tmp_path: Path) -> None:
    """A group that follows more gets earlier messages of the key after later ones: an ack of these stands."""
    driven = Keys(tmp_path)
    one = driven.join("one", "a.b")
    driven.put("k", subject="a.c")
    driven.put("k", subject="a.b")
    assert texts(driven.take(one)) == ["k 1"]
    one = driven.join("one", "a.b", "a.c")
    assert texts(driven.take(one, expected=1)) == ["k 0"]
    driven.back(one, 1, delay_us=10_000_000)
    assert driven.ack(one, 0) == 0
    driven.close()


def test_the_first_message_of_a_subject_holds_others_up_though_none_of_its_consumers_has_looked(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", "a.b")
    two = driven.join("two", "a.c")
    driven.put("k", subject="a.b")
    assert driven.drain(one) == ["k 0"]
    driven.leave(two)
    driven.put("k", subject="a.c")
    driven.put("k", subject="a.b")
    assert driven.drain(one) == []
    driven.close()

"""Messages in the middle of a slot that come again: resent, redriven, released. They come before all behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Administer
from qmq.net.protocol.types import Disposition
from tests.broker.delivery.order.slots import Keys, attempts_of, bodies_after, numbers_of, texts
from tests.broker.find.test_resend import id_of, resend
from tests.broker.test_admin import ask


def redrive(driven: Keys, *numbers: int) -> None:
    """Redrive the dead letters of these numbers; none: all."""
    ask(driven, "redrive", group="g", numbers=list(numbers) or None)


def test_a_message_that_is_resent_in_the_middle_holds_those_behind_it(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    sent = [driven.do(driven.command_of("k"))[0] for _ in range(3)]
    driven.ack(one, *numbers_of(driven.take(one)))
    driven.put("k")
    resend(driven, ids=[id_of(driven, sent[1])], group="g")
    driven.alive(one, two)
    first = driven.take(one, 1)
    assert (texts(first), texts(driven.take(two))) == (["k 1"], [])
    driven.ack(one, *numbers_of(first))
    assert texts(driven.take(two)) == ["k 3"]
    driven.close()


def test_resent_messages_wait_for_those_of_their_slot_in_flight(tmp_path: Path) -> None:
    """The consumer that has the slot may get them; those that it has stay with it."""
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    sent = [driven.do(driven.command_of("k"))[0] for _ in range(3)]
    assert texts(driven.take(one, 2)) == ["k 0", "k 1"]
    driven.ack(one, 0)
    resend(driven, ids=[id_of(driven, sent[0])], group="g")
    driven.alive(one, two)
    assert texts(driven.take(two)) == []
    mine = driven.take(one)
    assert texts(mine) == ["k 0"]
    assert texts(driven.take(two)) == []
    driven.leave(one)
    assert driven.drain(two) == ["k 0", "k 1", "k 2"]
    driven.close()


def test_redriven_letters_come_in_their_places(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*["k"] * 6)
    answer = driven.take(one, 5)
    for number in (0, 2, 4):
        driven.back(one, number, Disposition.REJECT)
    driven.back(one, 3, delay_us=0)
    redrive(driven, 3, 1)
    assert len(numbers_of(answer)) == 5
    assert texts(driven.take(two)) == [], "k 1 is in flight"
    driven.ack(one, 1)
    found = driven.drain(two, one)
    assert found == ["k 0", "k 3", "k 4", "k 5"]
    redrive(driven)
    assert driven.drain(one) == ["k 2"]
    driven.close()


def test_a_waiting_pull_gets_a_redriven_letter_and_not_those_behind_it(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k")
    assert texts(driven.take(one)) == ["k 0"]
    driven.back(one, 0, Disposition.REJECT)
    assert driven.wait(two, max_count=1) == []
    fields = {"group": "g", "numbers": None}
    said = driven.do(Administer(1, driven.request(), "redrive", fields), driven.command_of("k"))
    assert bodies_after(said, two) == ["k 0"]
    assert texts(driven.take(one)) == []
    driven.ack(two, 0)
    assert texts(driven.take(one)) == ["k 1"]
    driven.close()


@pytest.mark.parametrize("delay_us", [None, 0, 300_000])
def test_a_release_gives_back_what_is_behind_it_too_and_counts_no_attempt(tmp_path: Path, delay_us: int | None) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*["k"] * 4)
    assert texts(driven.take(one, 3)) == ["k 0", "k 1", "k 2"]
    driven.back(one, 1, Disposition.RELEASE, delay_us)
    assert texts(driven.take(two)) == [], "k 0 is in flight"
    driven.ack(one, 0)
    if delay_us:
        assert texts(driven.take(two)) == []
        driven.alive(one, two)
        driven.advance(400)
    first = driven.take(two)
    assert (texts(first)[0], attempts_of(first)[0]) == ("k 1", 1)
    driven.ack(two, *numbers_of(first))
    assert texts(first) + driven.drain(one, two) == ["k 1", "k 2", "k 3"]
    driven.close()


def test_the_longest_delay_of_a_slot_holds_it_not_the_shortest(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put(*["k"] * 3)
    assert texts(driven.take(one)) == ["k 0", "k 1", "k 2"]
    driven.back(one, 2, delay_us=0)
    driven.back(one, 0, delay_us=300_000)
    assert texts(driven.take(two)) == []
    driven.alive(one, two)
    driven.advance(400)
    assert driven.drain(two) == ["k 0", "k 1", "k 2"]
    driven.close()


def test_more_retries_of_a_held_slot_than_memory_has_let_others_pass(tmp_path: Path) -> None:
    """Retries that nobody may have are put back after a second, and those behind them are looked at."""
    driven = Keys(tmp_path)
    one = driven.join("one")
    driven.put(*["k"] * 300, "l")
    assert len(numbers_of(driven.take(one))) == 301
    for number in range(1, 301):
        driven.back(one, number, Disposition.REJECT)
    two = driven.join("two")
    driven.do(Administer(1, driven.request(), "redrive", {"group": "g", "numbers": None}))
    found = list[str]()
    for _ in range(40):
        driven.alive(one, two)
        driven.advance(100)
        found += texts(driven.take(two))
    assert found == ["l 0"], "k 0 is in flight"
    driven.ack(one, 0)
    for _ in range(60):
        driven.alive(one, two)
        driven.advance(100)
        found += driven.drain(two, one)
    assert found == ["l 0", *(f"k {number}" for number in range(1, 300))]
    driven.close()

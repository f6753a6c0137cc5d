"""Delayed, handed over and restored messages keep their order key and priority, and take their place in the slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qmq.broker.ports.commands import HandOver
from qmq.broker.ports.effects import HandedOver, Refused
from qmq.format.copies.for_group import private_batch
from qmq.format.copies.restored import numbered, restored_batches
from qmq.format.ids import MessageId
from qmq.format.pieces import Run
from qmq.format.private import private_subject
from qmq.net.protocol.types import Disposition
from tests.broker.delay.test_delay import cancel
from tests.broker.delivery.order.slots import Keys, Session, attempts_of, numbers_of, texts
from tests.broker.transfer.test_restore import RUN, begin, store
from tests.format.contents import CREATED_US

STOPS = pytest.mark.parametrize("stop", [Keys.restart, Keys.kill])
SECOND_US = 1_000_000


def stopped(driven: Keys, stop: Callable[[Keys], None], *sessions: Session) -> list[Session]:
    stop(driven)
    return driven.rejoin(*sessions)


def later(driven: Keys, milliseconds: int, *sessions: Session) -> None:
    """Let time pass in which these consumers live."""
    for _ in range(milliseconds // 500):
        driven.alive(*sessions)
        driven.advance(500)
        driven.alive(*sessions)
    for _ in range(5):  # what is due is read, and stored
        driven.advance(10)


def stored_elsewhere(path: Path, *keys: str) -> list[Run]:
    """Return runs as another broker has them."""
    other = Keys(path)
    other.put(*keys)
    runs = other.pull(other.subscribe("a.", group=None, start="first"))
    other.close()
    return runs


# --- delayed messages ------------------------------------------------------------------------------------------------


@STOPS
def test_a_delayed_message_takes_its_place_when_it_is_due(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path)
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k", delay_us=2 * SECOND_US)
    driven.put("k")
    assert texts(driven.take(one)) == ["k 2"], "it waits for no delayed one"
    one, two = stopped(driven, stop, one, two)
    later(driven, 2_000, one, two)
    driven.put("k")
    assert texts(driven.take(two)) == []
    driven.leave(one)
    assert driven.drain(two) == ["k 2", "k 0", "k 1", "k 3"]
    driven.close()


@STOPS
def test_a_cancelled_message_holds_nothing_up(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one")
    driven.put("k")
    sent = driven.send_delayed("k", 2 * SECOND_US)
    driven.put("k", delay_us=2 * SECOND_US)
    assert cancel(driven, str(MessageId(driven.store.store_id, sent.partition, sent.position)))
    (one,) = stopped(driven, stop, one)
    later(driven, 2_000, one)
    assert driven.drain(one) == ["k 0", "k 2"]
    driven.close()


def test_due_messages_come_by_priority(tmp_path: Path) -> None:
    driven = Keys(tmp_path)
    one = driven.join("one", priority_share=0)
    driven.put("low", "normal", "high", delay_us=2 * SECOND_US)
    driven.put("low", "normal")
    later(driven, 2_000, one)
    assert driven.drain(one, most=1) == ["high 0", "normal 1", "normal 0", "low 1", "low 0"]
    driven.close()


# --- handovers and restores ------------------------------------------------------------------------------------------


@STOPS
def test_messages_of_another_broker_come_before_all_others_of_their_slot(
    tmp_path: Path, stop: Callable[[Keys], None]
) -> None:
    driven = Keys(tmp_path / "a")
    one, two = driven.join("one"), driven.join("two")
    driven.put("k", "k")
    assert texts(driven.take(one, 1)) == ["k 0"]
    hand_over(driven, *stored_elsewhere(tmp_path / "b", "x", "k"), first=1)
    one, two = stopped(driven, stop, one, two)
    assert texts(driven.take(two)) == [], "k 0 is in flight"
    driven.leave(one)
    answer = driven.take(two)
    assert (texts(answer)[0], attempts_of(answer)[0]) == ("k 0", 2), "it was handed over after its first attempt"
    driven.ack(two, *numbers_of(answer))
    assert texts(answer) + driven.drain(two) == ["k 0", "k 0", "k 1"]
    driven.close()


def test_a_message_of_another_broker_is_in_its_slot_before_that_has_messages_here(tmp_path: Path) -> None:
    driven = Keys(tmp_path / "a")
    one, two = driven.join("one"), driven.join("two")
    driven.put("l")
    assert driven.drain(one) == ["l 0"]
    hand_over(driven, *stored_elsewhere(tmp_path / "b", "k"))
    first = driven.take(one)
    assert texts(first) == ["k 0"]
    driven.numbers["k"] = 1
    driven.put("k")
    assert texts(driven.take(two)) == [], "the slot is held by the first"
    driven.back(one, numbers_of(first)[0], delay_us=300_000)
    assert texts(driven.take(two)) == []
    later(driven, 500, one, two)
    assert driven.drain(two) == ["k 0", "k 1"]
    driven.close()


def test_handed_over_messages_keep_their_priority(tmp_path: Path) -> None:
    driven = Keys(tmp_path / "a")
    one = driven.join("one", priority_share=0)
    driven.put("normal")
    hand_over(driven, *stored_elsewhere(tmp_path / "b", "low", "high"))
    assert [body.split()[0] for body in driven.drain(one, most=1)] == ["high", "normal", "low"]
    driven.close()


@STOPS
def test_messages_restored_to_a_group_keep_slot_and_priority(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path / "a")
    one, two = driven.join("one", priority_share=0), driven.join("two")
    driven.numbers["k"] = 2
    driven.put("k", "normal")
    runs = stored_elsewhere(tmp_path / "b", "low", "k", "k", "high")
    begin(driven, group="g")
    restore(driven, runs, "g")
    one, two = stopped(driven, stop, one, two)
    first = driven.take(one, 1)
    assert texts(first) == ["high 0"]
    found = list[str]()
    while some := driven.drain(two, one, most=1):
        found += some
    assert [body for body in found if body.startswith("k")] == ["k 0", "k 1", "k 2"]
    assert found[-1] == "low 0"
    driven.close()


@STOPS
def test_messages_restored_for_all_come_behind_what_is_there(tmp_path: Path, stop: Callable[[Keys], None]) -> None:
    driven = Keys(tmp_path / "a")
    one, two = driven.join("one", priority_share=0), driven.join("two")
    driven.put("high", "x")
    runs = stored_elsewhere(tmp_path / "b", "low", "x", "x", "high")
    begin(driven)
    restore(driven, runs, None)
    one, two = stopped(driven, stop, one, two)
    found = driven.drain(one, two, most=1)
    assert found[:2] == ["high 0", "high 0"]
    assert [body for body in found if body[0] == "x"] == ["x 0", "x 0", "x 1"]
    assert found[-1] == "low 0"
    driven.close()


def hand_over(driven: Keys, *runs: Run, first: int = 0) -> None:
    """Hand messages over that a consumer of another broker nacked there."""
    for number, run in enumerate(runs[first:]):
        batch = memoryview(bytearray(private_batch(run, 0, "g", b"q" * 16, number)))
        said = driven.do(HandOver(9, driven.request(), batch, "g", 1, Disposition.NACK, 0, "broke"))
        assert not any(isinstance(one, Refused) for one in said)
        assert any(isinstance(one, HandedOver) for one in said)


def restore(driven: Keys, runs: list[Run], group: str | None) -> None:
    """Restore messages, each as a batch of its own."""
    for number, run in enumerate(runs):
        subject = run.subject if group is None else private_subject(group, run.subject)
        (batch,) = restored_batches([(subject, run)], CREATED_US, 1 << 20)
        numbered(batch.buffer, RUN, number)
        store(driven, memoryview(bytearray(batch.buffer)))

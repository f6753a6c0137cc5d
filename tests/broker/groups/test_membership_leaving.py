"""Consumers with many messages in flight that leave or expire: leaving in parts ends in the same state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.journal.record_types import LEAVING_RANGES, LeaveReason
from qmq.broker.ports.commands import Administer, Unsubscribe
from qmq.broker.ports.effects import Administered
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import Fenced
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven
from tests.broker.long_turns import SESSION_TIMEOUT_MS, expire_session, leave
from tests.broker.test_consuming import Consumer, killed

MESSAGES = 90
ACKED = range(0, MESSAGES, 3)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranges(monkeypatch, 4, 5)


def set_ranges(monkeypatch: pytest.MonkeyPatch, expired: int, left: int) -> None:
    monkeypatch.setitem(LEAVING_RANGES, LeaveReason.EXPIRED, expired)
    monkeypatch.setitem(LEAVING_RANGES, LeaveReason.LEFT, left)


def in_flight(tmp_path: Path) -> tuple[Driven, Consumer]:
    driven = Driven(tmp_path, BrokerLimits(session_timeout_ms=SESSION_TIMEOUT_MS))
    for number in range(0, MESSAGES, 2):
        driven.do(driven.send_command({"a": [b"%d" % number, b"%d" % (number + 1)]}))
    consumer = Consumer(driven, "one", "a")
    for _ in range(3):
        consumer.pull(MESSAGES // 3)
    consumer.ack(*ACKED)
    return driven, consumer


def go(driven: Driven, consumer: Consumer, why: str) -> None:
    """Let the consumer leave, and do the first part of it."""
    if why == "leaves":
        driven.do(Unsubscribe(1, driven.request(), consumer.subscription))
    else:
        driven.advance(SESSION_TIMEOUT_MS + 1)


def ledger_of(driven: Driven) -> Any:
    ledger = driven.broker.groups["g"].ledger
    assert ledger is not None
    return ledger


def listed(driven: Driven) -> list[tuple[str, bool, int]]:
    (answer,) = driven.do(Administer(9, driven.request(), "consumers", {"group": "g"}))
    assert isinstance(answer, Administered)
    return [(row["consumer"], row["online"], row["in_flight"]) for row in answer.fields["rows"]]


def finish(driven: Driven) -> int:
    """Tick until no work is left; return how often."""
    ticks = 0
    while any(member.leaving for member in ledger_of(driven).members.values()):
        driven.advance(0)
        ticks += 1
        assert ticks < 1_000
    return ticks


def again(driven: Driven) -> Counter[bytes]:
    """Return the messages that other consumers get."""
    other, got = Consumer(driven, "two", "a", connection=2), Counter[bytes]()
    while bodies := other.pull():
        got.update(bodies)
        other.ack()
    return got


LEFT = Counter(b"%d" % number for number in range(MESSAGES) if number not in ACKED)


@pytest.mark.parametrize("why", ["leaves", "falls silent"])
def test_leaving_in_parts_ends_in_the_same_state(tmp_path: Path, why: str) -> None:
    driven, consumer = in_flight(tmp_path)
    go(driven, consumer, why)
    assert finish(driven) > 2
    assert ledger_of(driven).retries.count == sum(LEFT.values())
    assert again(driven) == LEFT
    driven.close()


@pytest.mark.parametrize("stop", ["clean", "kill", "kill behind a checkpoint"])
@pytest.mark.parametrize("why", ["leaves", "falls silent"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_start_goes_on_behind_the_last_part(tmp_path: Path, why: str, stop: str, parts: int) -> None:
    driven, consumer = in_flight(tmp_path)
    driven.checkpoint()
    go(driven, consumer, why)
    for _ in range(parts - 1):
        driven.advance(0)
    if stop == "clean":
        driven.restart()
    else:
        if "behind" in stop:
            driven.checkpoint()
        driven.advance(0)
        driven.store.close(clean=False)
        driven.open()
    assert ledger_of(driven).by_name["one"].leaving
    assert finish(driven) > 0
    assert ledger_of(driven).retries.count == sum(LEFT.values())
    assert again(driven) == LEFT
    driven.close()


def test_a_silent_consumer_is_fenced_from_the_first_part_on(tmp_path: Path) -> None:
    driven, consumer = in_flight(tmp_path)
    go(driven, consumer, "falls silent")
    with pytest.raises(Fenced):
        consumer.ack(MESSAGES - 1)
    with pytest.raises(Fenced):
        consumer.pull()
    finish(driven)
    assert again(driven) == LEFT
    driven.close()


@pytest.mark.parametrize("stop", [None, Driven.restart, killed])
@pytest.mark.parametrize("nonce", [b"n", b"another"])
@pytest.mark.parametrize("why", ["leaves", "falls silent"])
def test_a_consumer_that_comes_back_begins_anew_and_the_rest_leaves_a_part_a_turn(
    tmp_path: Path, why: str, nonce: bytes, stop: Callable[[Driven], None] | None
) -> None:
    driven, consumer = in_flight(tmp_path)
    before = consumer.consumer_state
    go(driven, consumer, why)
    waits = ledger_of(driven).retries.count
    consumer.nonce = nonce
    consumer.join()
    assert ledger_of(driven).retries.count == waits, "all of it in one turn"
    assert consumer.consumer_state.epoch == before.epoch + 1
    assert consumer.consumer_state.ack_floor == consumer.consumer_state.next_sequence == MESSAGES
    assert listed(driven) == [("one", True, 0)]
    if stop is not None:
        stop(driven)
        consumer.join()
    assert finish(driven) > 1
    assert listed(driven) == [("one", True, 0)]
    assert len(ledger_of(driven).members) == 1
    consumer.got.clear()
    found = Counter[bytes]()
    while bodies := consumer.pull():
        found.update(bodies)
        consumer.ack(*consumer.got)
        consumer.got.clear()
    assert found == LEFT
    driven.close()


def test_a_consumer_has_left_before_all_its_messages_are_retries(tmp_path: Path) -> None:
    driven, consumer = in_flight(tmp_path)
    ledger_of(driven).by_name["one"].transient = True
    go(driven, consumer, "leaves")
    consumer.join()
    driven.do(Unsubscribe(1, driven.request(), consumer.subscription))
    assert "one" not in ledger_of(driven).by_name
    assert finish(driven) > 1
    assert not ledger_of(driven).members
    assert again(driven) == LEFT
    driven.store.close(clean=False)


@pytest.mark.parametrize("stop", [None, Driven.restart, killed])
def test_a_second_takeover_with_many_messages_expires_the_session_a_part_a_turn(
    tmp_path: Path, stop: Callable[[Driven], None] | None
) -> None:
    driven, consumer = in_flight(tmp_path)
    consumer.nonce = b"second"
    consumer.join()
    consumer.nonce = b"third"
    consumer.join()  # a first takeover after progress
    assert ledger_of(driven).retries.count == 0
    consumer.nonce = b"fourth"
    consumer.join()
    assert ledger_of(driven).retries.count == 0, "all of it in one turn"
    assert consumer.consumer_state.ack_floor == consumer.consumer_state.next_sequence == MESSAGES
    if stop is not None:
        stop(driven)
        consumer.join()
    assert finish(driven) > 1
    assert ledger_of(driven).retries.is_quarantined_due
    assert again(driven) == LEFT
    driven.close()


def test_a_seek_ends_leaving(tmp_path: Path) -> None:
    driven, consumer = in_flight(tmp_path)
    go(driven, consumer, "falls silent")
    group = driven.broker.groups["g"]
    assert group.ledger is not None
    driven.broker._delivery.tracker.drop(group.ledger, clear_retries=True)
    for _ in range(20):
        driven.advance(0)
    assert group.ledger.retries.count == 0
    driven.close()


@pytest.mark.parametrize("work", [expire_session, leave])
def test_no_turn_does_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    set_ranges(monkeypatch, 16, 32)
    found = work(tmp_path / "data", 10_000, 1_000)
    assert found.count >= 1_000 // 32
    assert found.messages == 9_000
    assert not verify(tmp_path / "data", Disk()).faults

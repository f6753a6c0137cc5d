"""Whose a message is that two consumers hold after a start."""

from __future__ import annotations

from pathlib import Path

import pytest
from qmq.broker.error_log.retry import Failure
from qmq.broker.startup.doubled import doubled

from qmq.broker.groups.in_flight import MessageRange
from tests.broker.test_consuming import Consumer, filled


def test_who_was_given_a_message_last_holds_it(tmp_path: Path) -> None:
    driven = filled(tmp_path, 10)
    first, second = Consumer(driven, "a"), Consumer(driven, "b", nonce=b"m", connection=2)
    first.pull(6)
    driven.advance(1)
    second.pull(1)
    first.ack(0)
    group = driven.broker.groups["g"]
    assert group.ledger is not None
    assert list(doubled(driven.store, group)) == []
    subject = driven.store.subject_number("a.x")
    assert subject is not None
    b = group.ledger.by_name["b"]
    # As if a record were lost that took messages 0, 3 and 4 from the first one, which had acknowledged 0.
    lent = [MessageRange(subject, start, 0, 0, count) for start, count in ((0, 1), (3, 2))]
    driven.advance(1)
    group.ledger.pulled(b, lent, 1, driven.now.wall_us, [])
    found = list(doubled(driven.store, group))
    assert [(member.name, sequence) for member, sequence in found] == [("a", 3), ("a", 4)]
    for member, sequence in found:
        group.ledger.ack(member, [sequence, sequence + 1])
    assert list(doubled(driven.store, group)) == []
    assert group.ledger.by_name["a"].held.unhandled() == [(1, 3), (5, 6)]


@pytest.mark.parametrize("delay_us", [0, 5_000_000])
def test_what_waits_to_be_handed_out_again_is_held_by_nobody(tmp_path: Path, delay_us: int) -> None:
    driven = filled(tmp_path, 10)
    first = Consumer(driven, "a")
    first.pull(6)
    first.ack(2)
    group = driven.broker.groups["g"]
    assert group.ledger is not None
    retries, subject = group.ledger.retries, driven.store.subject_number("a.x")
    assert subject is not None
    # As if a record were lost that took messages 2, 3 and 4 from it, and they had come back from another one.
    now_us = driven.now.wall_us
    failure = Failure("broke", 0, 0, now_us, now_us + delay_us)
    retries.add(MessageRange(subject, 2, 0, 0, 3), 2, 0, False, failure)
    if delay_us:
        retries._schedule._spill()  # to disk
    assert list(retries.all()) == [MessageRange(subject, 2, 0, 0, 3)]
    found = [(member.name, sequence) for member, sequence in doubled(driven.store, group)]
    assert found == [("a", 3), ("a", 4)]
    assert len(list(retries.all())) == 1, "it stays"

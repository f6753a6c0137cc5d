"""The consumers of a group by number and by name, and which of them is forgotten first."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.groups.member import Consumers
from qmq.broker.journal.record_types import LeaveReason
from qmq.errors import Fenced, TooManyConsumers
from tests.broker.groups.test_group_state import Driven


def test_the_consumer_longest_away_is_forgotten_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq.broker.groups.member.MAX_CONSUMERS", 3)
    driven = Driven(tmp_path)
    _, b, _ = (driven.ledger.join(name, b"1", transient=False, now_us=0) for name in "abc")
    with pytest.raises(TooManyConsumers, match="are there, the most it may have"):
        driven.ledger.join("d", b"1", transient=False, now_us=0)
    driven.ledger.leave(b, LeaveReason.LEFT, 1)
    driven.ledger.join("d", b"1", transient=False, now_us=2)
    assert list(driven.ledger.by_name) == ["a", "c", "d"]
    with pytest.raises(Fenced):
        driven.ledger.member(b.number, b.epoch)
    driven.restart()
    assert list(driven.ledger.by_name) == ["a", "c", "d"]


def test_follow_on_keeps_name_and_numbers_and_has_nothing_in_flight() -> None:
    consumers = Consumers()
    leaving = consumers.make("a", False, 7)
    leaving.epoch, leaving.closed = 4, False
    leaving.in_flight.skip_to(100)
    following = consumers.follow_on(leaving)
    assert (following.number, following.epoch, following.since_us) == (2, 4, 7)
    assert (following.in_flight.next_sequence, following.in_flight.count) == (100, 0)
    assert consumers.by_name["a"] is following
    consumers.forget(leaving)
    assert consumers.by_name == {"a": following}
    assert list(consumers.by_number) == [2]
    again = Consumers()
    again.restore(consumers.packed(), consumers.next_number)
    assert again.next_number == 3
    assert again.packed() == consumers.packed()


def test_only_the_current_epoch_may_call() -> None:
    consumers = Consumers()
    member = consumers.make("a", False, 0)
    member.epoch = 2
    with pytest.raises(Fenced, match="consumer 'a' is epoch 2 now, not 1"):
        consumers.caller(member.number, 1)
    for closed, leaving in ((True, 0), (False, 1)):
        member.closed, member.leaving = closed, leaving
        with pytest.raises(Fenced, match="consumer 'a' is gone: it left"):
            consumers.caller(member.number, 2)
    member.closed, member.leaving = False, 0
    assert consumers.caller(member.number, 2) is member
    with pytest.raises(Fenced, match="this consumer is forgotten"):
        consumers.caller(9, 1)
    assert consumers.there(9) is None

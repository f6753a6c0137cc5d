"""A record of messages carried forward, replayed by a start that may know less than the broker before it."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.error_log.error_log import Failure, RetryItem, to_record, unpacked
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import PARTITIONS
from qmq.broker.journal.record_types import InFlightRange, MessageRange, flat
from tests.broker.harness import START_US, Driven

OLD = MessageRange(PARTITIONS, 1_000, 0, 0, 3, 1_000)
NEW = MessageRange(PARTITIONS, 9_000, 0, 0, 3, 9_000)
WHY = Failure("broke", 2, 5, START_US, START_US + 1_000)


def ledger(path: Path) -> Ledger:
    driven = Driven(path)
    return Ledger(1, driven.store.groups.retries(1), driven.store.groups.dead(1), lambda record: None)


def test_a_retry_is_replaced_wherever_it_lies(tmp_path: Path) -> None:
    for place in ("scheduled", "due", "in part"):
        made = ledger(tmp_path / place.replace(" ", "-"))
        number = made.retries.add(OLD, 2, 1, False, WHY._replace(due_us=START_US if place == "due" else WHY.due_us))
        (found,) = made.retries.waiting() if place == "due" else made.retries.left_of(_scheduled(made))
        if place == "in part":
            made.retries.take([(number, InFlightRange(OLD.part(0, 1), 2, 0))])
            (found,) = made.retries.left_of(_scheduled(made))
            assert found.messages == OLD.part(1, 3)
        left = found.messages.total
        made.forward([[to_record(found), place == "scheduled", flat([NEW.part(0, left)]), []]], [], [], 5)
        assert made.retries.count == left
        made.retries.load(START_US + 1_000)
        (one,) = made.retries.waiting()
        assert one == found._replace(number=number + 1, messages=NEW.part(0, left))


def _scheduled(made: Ledger) -> RetryItem:
    return next(retry for items in made.retries.scheduled() for retry in unpacked(items))


def test_consumers_that_are_unknown_or_have_it_not_in_flight_are_skipped(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    member = made.join("c", b"n", False, START_US)
    pull = made.pulled(member, [OLD], 10, START_US, [])
    made.ack(member, [pull.first, pull.first + 1], 0)
    rows = [[9, 0, flat([NEW])], [member.number, pull.first, flat([NEW])]]
    made.forward([], [], rows, START_US)
    assert list(member.in_flight.between(0, 3)) == [InFlightRange(OLD, 1, 0)]
    made.forward([], [], [[member.number, pull.first + 1, flat([NEW.part(1, 2), NEW.part(2, 3)])]], START_US)
    assert [one.messages for one in member.in_flight.between(1, 3)] == [NEW.part(1, 2), NEW.part(2, 3)]
    assert made.ack(member, [pull.first + 1, pull.first + 3], 0) == 0
    assert not member.in_flight.pulls


def test_lost_messages_become_dead_letters(tmp_path: Path) -> None:
    made = ledger(tmp_path)
    made.retries.add(OLD, 3, 0, False, WHY)
    (found,) = made.retries.left_of(_scheduled(made))
    made.forward([[to_record(found), True, [], flat([OLD])]], [], [], START_US)
    assert (made.retries.count, len(made.dead)) == (0, 3)

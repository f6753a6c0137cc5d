"""Retries as items of a schedule, and the rest of a range without other ranges."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.error_log.error_log import (
    LOADED_ITEMS,
    PASSED_AFTER_US,
    PIECES,
    Failure,
    Retries,
    RetryItem,
    packed,
    rest_of,
    split,
    taken_of,
    unpacked,
    without,
)
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.store import Schedule
from tests.fake_disk import FakeDisk

MESSAGES = MessageRange(3, 100, 2, 5, 40, 900)


def ids_of(messages: MessageRange) -> list[int]:
    return list(range(messages.skip, messages.skip + messages.total))


def test_a_retry_is_the_same_as_an_item() -> None:
    retries = [
        RetryItem(7, 50, MESSAGES, 3, 1, True, 9, 11, 40, "broke"),
        RetryItem(8, 60, MESSAGES._replace(log=1 << 31), 1, 0, False, 0, 0, 0, ""),
    ]
    assert unpacked(packed(retries)) == retries
    assert unpacked(packed([])) == []


@pytest.mark.parametrize(("reason", "kept"), [("x" * 310, "x" * 300), ("\u00e4" * 160, "\u00e4" * 150), ("a\0b", "ab")])
def test_a_reason_is_cut_where_a_letter_ends(reason: str, kept: str) -> None:
    (found,) = unpacked(packed([RetryItem(7, 50, MESSAGES, 3, 1, True, 9, 11, 40, reason)]))
    assert found.reason == kept


@pytest.mark.parametrize("total", [1, 2, 9, 10, 11, 19, 20, 21, 1_000, 1_001])
def test_the_pieces_of_a_range_are_the_range(total: int) -> None:
    pieces = split(MESSAGES._replace(total=total))
    assert 1 <= len(pieces) <= PIECES
    assert [one for piece in pieces for one in ids_of(piece)] == list(range(5, 5 + total))
    sizes = [piece.total for piece in pieces]
    assert max(sizes) == sizes[0] <= -(-total // PIECES)


def test_without_leaves_out_taken_messages() -> None:
    chance = random.Random(5)
    for _ in range(200):
        taken = list[MessageRange]()
        for _ in range(chance.randrange(4)):
            start = chance.randrange(40)
            taken.append(MESSAGES.part(start, chance.randrange(start + 1, 41)))
        gone = {one for part in taken for one in ids_of(part)}
        left = rest_of(MESSAGES, taken)
        assert all(part.total for part in left)
        assert [one for part in left for one in ids_of(part)] == [one for one in ids_of(MESSAGES) if one not in gone]
    assert without(MESSAGES, MESSAGES._replace(first=101)) == [MESSAGES], "another range"


def test_taken_are_the_first_messages_with_their_attempt() -> None:
    retry = RetryItem(7, 50, MESSAGES, 3, 1, True, 9, 11, 40, "broke")
    assert taken_of(retry, 4) == (retry, 4, InFlightRange(MESSAGES.part(0, 4), 3, 1))


def test_retries_that_are_put_back_during_a_walk_are_seen(tmp_path: Path) -> None:
    """A walk has read the schedule, and then retries that were in memory are put back into it."""
    retries = Retries(Schedule(FakeDisk(), tmp_path, b"store1", RETRY_DTYPE, []))
    failure = Failure("broke", 1, 0, 10, 10)
    for number in range(LOADED_ITEMS + 3):
        retries.add(MESSAGES._replace(first=number), 1, 0, False, failure)
    walk = retries.look()
    read = {retry.number for items in retries.scheduled() for retry in unpacked(items)}
    before = retries.waiting()
    assert not retries.pass_over(20)
    assert retries.pass_over(20 + PASSED_AFTER_US)
    assert not {retry.number for retry in before} & {retry.number for retry in retries.waiting()}
    assert {retry.number for retry in (*retries.waiting(), *walk.added, *walk.passed)} | read == set(
        range(1, LOADED_ITEMS + 4)
    )
    assert all(retries.has(retry, walk) for retry in walk.passed)
    retries.end_look(walk)


def test_parts_of_a_retry_that_lie_apart_are_taken_though_they_are_not_loaded(tmp_path: Path) -> None:
    """Older programs have put the ends of a retry back as two items; then a start replays that the ends were taken."""
    schedule, failure = Schedule(FakeDisk(), tmp_path, b"store1", RETRY_DTYPE, []), Failure("broke", 1, 0, 10, 10)
    retries = Retries(schedule)
    number = retries.add(MESSAGES, 2, 0, False, failure)
    (retry,) = retries.waiting()
    retries.take([(number, InFlightRange(MESSAGES, 2, 0))])
    ends = [MESSAGES.part(0, 10), MESSAGES.part(20, 40)]
    schedule.push(packed([retry._replace(messages=messages) for messages in ends]))
    retries.take([(number, InFlightRange(messages, 2, 0)) for messages in ends])
    assert not retries.load(1_000)
    assert len(schedule) == 0


def test_a_retry_whose_middle_was_taken_is_put_back_as_one_item(tmp_path: Path) -> None:
    """What replaces an item of the schedule, such as copies, replaces all that has its number."""
    disk, failure = FakeDisk(), Failure("broke", 1, 0, 10, 10)
    retries = Retries(Schedule(disk, tmp_path, b"store1", RETRY_DTYPE, []))
    number = retries.add(MESSAGES, 2, 0, False, failure)
    middle = InFlightRange(MESSAGES.part(10, 20), 2, 0)
    retries.take([(number, middle)])
    for first in range(LOADED_ITEMS + 3):
        retries.add(MESSAGES._replace(first=first), 2, 0, False, failure)
    ends = [retry for retry in retries.waiting() if retry.number == number]
    assert [len(ids_of(retry.messages)) for retry in ends] == [10, 20]
    walk = retries.look()
    assert not retries.pass_over(20)
    assert retries.pass_over(20 + PASSED_AFTER_US)
    (item,) = [retry for items in retries.scheduled() for retry in unpacked(items) if retry.number == number]
    left = retries.left_of(item)
    assert [retry.messages for retry in left] == [retry.messages for retry in ends]
    assert [retries.has(retry, walk) for retry in (*walk.passed[:2], item)] == [True, True, False]
    assert retries.counted_in_files() == retries.count
    started = Retries(Schedule(disk, tmp_path, b"store1", RETRY_DTYPE, []))
    started.restore(retries.packed())
    for retry in left:
        started.replace(retry, [retry.messages._replace(first=2_000)], whole=retry == item)
    came = list[MessageRange]()
    while started.load(10_000_000_000):
        came += [retry.messages for retry in started.waiting()]
        started.take([(retry.number, InFlightRange(retry.messages, 2, 0)) for retry in started.waiting()])
    assert [messages.total for messages in came if messages.first == 2_000] == [10, 20]
    assert len(came) == LOADED_ITEMS + 3 + 2
    assert started.count == 0

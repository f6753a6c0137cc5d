"""The first segments of a message log are dropped with their messages: the rest keeps its numbers and counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qmq.errors import BadBytes
from qmq.storage.message_log.drop import subject_ranges_of
from qmq.storage.store import Store
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, checkpoint, close_cleanly, kill, open_store, verified

SMALL = {"segment_bytes": 8 << 10, "max_frame_bytes": 4 << 10}


def filled(path: Path, partitions: int = 1, count: int = 60) -> Sender:
    """Send messages of two subjects to all partitions by turns, a few KB each."""
    sender = Sender(open_store(path, FakeDisk(), partitions=partitions, **SMALL))
    for number in range(count):
        sender.send("ab"[number % 2], b"%d" % number + bytes(1_500), b"more", partition=number // 2 % partitions)
    checkpoint(sender.store)
    return sender


def drop(store: Store, partition: int = 0) -> None:
    """Return the first segment of a partition."""
    span = store.partitions[partition].removable()[0]
    assert span == store.partitions[partition].message_log.sealed[0]
    old = store.partitions[partition].old_segment(span.base)
    rows = old.rows()
    assert int(rows["stored_at_us"][-1]) == old.stored_until_us()
    for row in rows[:2]:
        assert bytes(old.read(int(row["position"]), 4)) == b"QMQb"
    store.drop_segment(partition, span.base, subject_ranges_of(rows))


def left(store: Store, name: str) -> list[int]:
    """Return all readable sequences of a subject."""
    number = store.subjects.number(name)
    assert number is not None
    found = [rows for _, rows in store.subject_rows(number, 0, 10_000)]
    return sorted(first + n for rows in found for first, *_ in rows.tolist() for n in range(2))


def check(store: Store) -> None:
    for name in "ab":
        number = store.subjects.number(name)
        assert number is not None
        first, end, there = int(store.subjects.firsts[number]), int(store.subjects.ends[number]), left(store, name)
        assert there[:1] == [first] or (not there and first == end)
        assert store.subjects.message_count(number, first, end) == len(there)
        assert end == 60
    assert store.partitions[0].consumer_log.row_at_position(0) == store.partitions[0].consumer_log.first_row
    assert (
        store.partitions[0].consumer_log.read_entry(store.partitions[0].consumer_log.first_row)[1]
        > store.partitions[0].message_log.sealed[0].base
    )


@pytest.mark.parametrize("partitions", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 4])
def test_the_log_begins_behind_a_dropped_segment(tmp_path: Path, partitions: int, times: int) -> None:
    sender = filled(tmp_path, partitions)
    for number in range(times):
        rows = sender.store.partitions[0].consumer_log.visible_row
        drop(sender.store, number % partitions)
        assert sender.store.partitions[0].consumer_log.visible_row == rows, "rows keep their numbers"
        check(sender.store)
    for _ in range(3):
        checkpoint(sender.store)
    check(sender.store)
    close_cleanly(sender.store)
    verified(tmp_path)
    store = open_store(tmp_path, FakeDisk(), partitions=partitions, **SMALL)
    check(store)
    while len(store.partitions[0].removable()) > 1:
        drop(store)
    check(store)
    for _ in range(3):
        checkpoint(store)
    close_cleanly(store)
    verified(tmp_path)


@pytest.mark.parametrize("checkpoints", range(4))
def test_a_start_after_a_kill_has_it_or_has_it_not(tmp_path: Path, checkpoints: int) -> None:
    sender = filled(tmp_path, 2)
    number = sender.store.subjects.number("a")
    assert number is not None
    drop(sender.store)
    drop(sender.store, 1)
    drop(sender.store)
    first = int(sender.store.subjects.firsts[number])
    for _ in range(checkpoints):
        checkpoint(sender.store)
    kill(sender.store)
    verified(tmp_path)
    store = open_store(tmp_path, FakeDisk(), partitions=2, **SMALL)
    assert [(part.damaged, part.holes) for part in store.recovery.partitions] == [([], [])] * 2
    assert store.recovery.notes == []
    assert int(store.subjects.firsts[number]) == (first if checkpoints else 0)
    check(store)
    close_cleanly(store)
    verified(tmp_path)


def test_no_sequence_is_given_again_even_without_any_checkpoint(tmp_path: Path) -> None:
    sender = Sender(open_store(tmp_path, FakeDisk(), **SMALL))
    store = sender.store
    for number in range(30):
        sender.send("once", b"%d" % number + bytes(900))
    while not store.partitions[0].message_log.sealed or len(store.partitions[0].message_log.sealed) < 6:
        sender.send("later", bytes(900))
    checkpoint(store)
    once = store.subjects.number("once")
    assert once is not None
    while left(store, "once"):
        drop(store)
    assert int(store.subjects.firsts[once]) == int(store.subjects.ends[once]) == 30
    for _ in range(3):
        checkpoint(store)
    close_cleanly(store)
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    sender.store = open_store(tmp_path, FakeDisk(), **SMALL)
    assert sender.send("once", b"again").runs[0][1] >= 30
    assert sender.send("later", b"again").runs[0][1] >= 30
    close_cleanly(sender.store)
    verified(tmp_path)


def test_views_of_it_stay_good_and_new_ones_are_refused(tmp_path: Path) -> None:
    sender = filled(tmp_path)
    store, sent = sender.store, sender.sent[0]
    view = store.partitions[0].message_log.view(sent.position, len(sent.data))
    drop(store)
    for _ in range(3):
        checkpoint(store)
    assert bytes(view) == sent.data
    with pytest.raises(BadBytes, match="has no"):
        store.partitions[0].message_log.view(sent.position, len(sent.data))
    kill(store)


def test_a_segment_that_is_being_dropped_is_not_offered_and_still_read(tmp_path: Path) -> None:
    sender = filled(tmp_path)
    store = sender.store
    span = store.partitions[0].removable()[0]
    had = subject_ranges_of(store.partitions[0].old_segment(span.base).rows())
    behind = store.partitions[0].leave(span.base, had)
    assert store.partitions[0].consumer_log.read_entry(behind)[1] > span.end
    assert store.partitions[0].offered_row == behind > store.partitions[0].consumer_log.first_row
    assert store.partitions[0].consumer_log.row_at_position(0) == store.partitions[0].consumer_log.first_row
    number = store.subjects.number("a")
    assert number is not None
    assert store.offered_sequence(number) == int(had.ends[0]) > 0
    assert store.offered_sequence(7) == 0
    store.stay()
    assert (store.partitions[0].offered_row, store.offered_sequence(number)) == (0, 0)
    store.partitions[0].leave(span.base, had)
    store.drop_segment(0, span.base, had)
    assert store.partitions[0].offered_row == store.partitions[0].consumer_log.first_row == behind
    kill(store)


def test_ranges_are_one_where_sequences_go_on() -> None:
    from qmq.format.layout import ENTRY_DTYPE

    rows = np.zeros(5, ENTRY_DTYPE)
    rows["subject"] = [1, 0, 1, 1, 0]
    rows["first_sequence"] = [10, 5, 12, 20, 6]
    rows["count"] = [2, 1, 3, 1, 4]
    found = subject_ranges_of(rows)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == [(0, 5, 10), (1, 10, 15), (1, 20, 21)]
    assert not len(subject_ranges_of(rows[:0]).subjects)

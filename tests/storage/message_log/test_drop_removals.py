"""Segments removed from among others: they leave the log at once and the disk after two checkpoints. The rest is read,
checked and repaired as before, also when rows have other numbers than their files say.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from qmq.errors import StorageError
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.drop import Removals
from qmq.storage.store import Store
from qmq.storage.types import Hole, SegmentSpan
from qmq.storage.verify.repair import repair
from qmq.storage.verify.verify import verify
from tests.fake_disk import FakeDisk
from tests.storage.stores import (
    NOW_US,
    Sender,
    Sent,
    checkpoint,
    close_cleanly,
    kill,
    open_store,
    segment_files,
    verified,
)

SMALL = {"segment_bytes": 8 << 10, "max_frame_bytes": 4 << 10}


def filled(path: Path, disk: Disk | None = None, count: int = 40) -> Sender:
    """Send batches of 1 KB, about seven a segment."""
    sender = Sender(open_store(path, disk if disk is not None else FakeDisk(), **SMALL))
    for number in range(count):
        sender.send("ab"[number % 2], b"%d" % number + bytes(1_000))
    return sender


def remove(sender: Sender, *places: int) -> list[Sent]:
    """Remove the segments with these indexes; return the other batches."""
    store = sender.store
    gone = [store.partitions[0].removable()[place] for place in places]
    for span in gone:
        store.partitions[0].remove_segment(span.base)
    return [sent for sent in sender.sent if not any(base <= sent.position < end for base, end in gone)]


def check(store: Store, batches: Sequence[Sent]) -> None:
    """Check that exactly these batches are found by row, position and time."""
    wanted = sorted(sent.position for sent in batches)
    assert [header.position for _, header in store.headers_since([])] == wanted
    rows = [
        store.partitions[0].consumer_log.read_entry(row)[1]
        for row in range(store.partitions[0].consumer_log.first_row, store.partitions[0].consumer_log.visible_row)
    ]
    assert rows == wanted
    for sent in batches:
        assert bytes(store.partitions[0].message_log.view(sent.position, len(sent.data))) == sent.data
        row = store.partitions[0].consumer_log.row_at_position(sent.position)
        assert store.partitions[0].consumer_log.read_entry(row)[1] == sent.position
        assert store.partitions[0].consumer_log.row_at_time(store.partitions[0].consumer_log.read_entry(row)[2]) == row
    for name in "ab":
        number = store.subjects.number(name)
        assert number is not None
        found = store.subject_rows(number, 0, 1_000)
        assert [int(entry[1]) for _, part in found for entry in part.tolist()] == sorted(
            sent.position for sent in batches if sent.runs[0][0] == name
        )


PLACES = [(0,), (2,), (1, 3), (0, 1), (1, 2), (-1,)]


@pytest.mark.parametrize("places", PLACES)
def test_the_other_segments_are_there_at_every_step(tmp_path: Path, places: tuple[int, ...]) -> None:
    sender = filled(tmp_path)
    checkpoint(sender.store)
    files = segment_files(tmp_path)
    left = remove(sender, *places)
    for taken in range(3):
        check(sender.store, left)
        assert len(segment_files(tmp_path)) == len(files) - (len(places) if taken == 2 else 0)
        assert sender.store.partitions[0].removals.are_pending == (taken < 2)
        left.append(sender.send("a", b"more" + bytes(1_000)))
        checkpoint(sender.store)
    for _ in range(8):  # a segment is sealed behind one that was removed
        left.append(sender.send("b", b"and more" + bytes(1_000)))
    checkpoint(sender.store)
    check(sender.store, left)
    close_cleanly(sender.store)
    verified(tmp_path)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("checkpoints", range(3))
@pytest.mark.parametrize("clean", [True, False])
def test_a_start_goes_on_with_the_other_segments(
    tmp_path: Path, places: tuple[int, ...], checkpoints: int, clean: bool
) -> None:
    sender = filled(tmp_path)
    checkpoint(sender.store)
    left = remove(sender, *places)
    for _ in range(checkpoints):
        checkpoint(sender.store)
    if clean:
        close_cleanly(sender.store)
    else:
        left += [sender.send("a", b"behind" + bytes(1_000)) for _ in range(9)]
        kill(sender.store)
        if not checkpoints:
            left = list(sender.sent)  # no client has its id
    verified(tmp_path)
    sender.store = store = open_store(tmp_path, FakeDisk(), **SMALL)
    assert [(part.damaged, part.holes, part.rebuilt_bytes) for part in store.recovery.partitions] == [([], [], 0)]
    assert store.recovery.notes == []
    check(store, left)
    left.append(sender.send("b", b"later" + bytes(1_000)))
    while store.partitions[0].removals.are_pending:
        checkpoint(store)
    check(store, left)
    assert len(segment_files(tmp_path)) == len(store.partitions[0].message_log.sealed) + 1
    assert len(list(tmp_path.glob("log-0/*.index"))) <= len(store.partitions[0].message_log.sealed) + 1
    close_cleanly(store)
    verified(tmp_path)


def test_a_checkpoint_that_still_names_it_finds_it(tmp_path: Path) -> None:
    sender = filled(tmp_path)
    checkpoint(sender.store)
    remove(sender, 1)
    checkpoint(sender.store)
    kill(sender.store)
    max(tmp_path.glob("checkpoint-*")).unlink()
    sender.store = open_store(tmp_path, FakeDisk(), **SMALL)
    check(sender.store, sender.sent)
    close_cleanly(sender.store)
    verified(tmp_path)


def test_files_that_cannot_be_removed_are_removed_later(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    sender = filled(tmp_path, disk)
    checkpoint(sender.store)
    files = segment_files(tmp_path)
    left = remove(sender, 1, 2)
    checkpoint(sender.store)
    disk.fail_always("unlink", errno.EIO, "log-0")
    checkpoint(sender.store)
    assert len(segment_files(tmp_path)) == len(files)
    close_cleanly(sender.store)
    report = verify(tmp_path, Disk())
    assert {str(one.what) for one in report.findings} == {"is a removed segment"}
    disk.heal()
    sender.store = open_store(tmp_path, disk, **SMALL)
    check(sender.store, left)
    for _ in range(2):
        checkpoint(sender.store)
    assert len(segment_files(tmp_path)) == len(files) - 2
    close_cleanly(sender.store)
    verified(tmp_path)


@pytest.mark.parametrize("which", ["entries", "order", "index"])
def test_derived_files_behind_a_gap_are_made_again(tmp_path: Path, which: str) -> None:
    sender = filled(tmp_path)
    checkpoint(sender.store)
    left = remove(sender, 1)
    for _ in range(2):
        checkpoint(sender.store)
    close_cleanly(sender.store)
    for path in tmp_path.rglob(f"*.{which}"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert repair(tmp_path, FakeDisk(), NOW_US).is_whole
    verified(tmp_path)
    sender.store = open_store(tmp_path, FakeDisk(), **SMALL)
    check(sender.store, left)
    kill(sender.store)


def test_only_segments_in_a_checkpoint_are_removable(tmp_path: Path) -> None:
    sender = filled(tmp_path)
    assert sender.store.partitions[0].removable() == []
    checkpoint(sender.store)
    assert sender.store.partitions[0].removable() == list(sender.store.partitions[0].message_log.sealed)
    gone = sender.store.partitions[0].removable()[2]
    remove(sender, 2)
    assert gone not in sender.store.partitions[0].removable()
    assert sender.store.partitions[0].message_log.segment_at(gone.base) is None
    with pytest.raises(StorageError, match="has no 10 bytes at position"):
        sender.store.partitions[0].message_log.view(gone.base + 64, 10)
    close_cleanly(sender.store)


def test_neighbours_become_one(tmp_path: Path) -> None:
    removals = Removals(FakeDisk(), tmp_path, tmp_path, (), [])
    for before, span in ((20, (20, 30)), (50, (60, 70)), (30, (30, 50)), (0, (0, 5))):
        removals.add(before, SegmentSpan(*span))
    assert removals.removed == (Hole(0, 5), Hole(20, 70))

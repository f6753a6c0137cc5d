"""One partition's log: batches written all or none, segments one after another, and failed syncs."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest

from qmq.errors import BadBytes, StorageFailed, StorageFull, SyncFailed
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.storage.message_log.partition_log import MAPS_KEPT, MessageLog
from qmq.storage.message_log.segment import Segment, SegmentOwner, list_bases
from qmq.storage.types import SegmentSpan
from tests.fake_disk import FakeDisk

OWNER = SegmentOwner(b"\1\2\3\4\5\6", 0)
SIZE = 1_000


def make(path: Path, disk: FakeDisk, reserve: int = 10**6) -> MessageLog:
    current = Segment.create(disk, path, OWNER, 0, 0, SIZE, 1)
    return MessageLog(
        disk, path, OWNER, segment_bytes=SIZE, sealed=[], current=current, end=SEGMENT_HEADER_SIZE, reserve=reserve
    )


def put(log: MessageLog, data: bytes) -> int:
    """Stage a batch, as the store does."""
    if not log.fits_segment(len(data)):
        log.roll(1, len(data))
    position = log.staged_end
    log.stage(data, len(data))
    return position


def test_nothing_is_there_before_it_is_written(tmp_path: Path) -> None:
    log = make(tmp_path, FakeDisk("boot-1"))
    first, second = put(log, b"a" * 100), put(log, b"b" * 50)
    assert (first, second, log.end, log.staged_end) == (64, 164, 64, 214)
    with pytest.raises(BadBytes):
        log.view(first, 1)
    log.write()
    assert log.end == 214
    assert bytes(log.view(first, 150)) == b"a" * 100 + b"b" * 50
    log.close()


def test_a_group_that_crosses_segments_is_written_in_order(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    places = [put(log, bytes([number]) * 400) for number in range(7)]
    assert list_bases(disk, tmp_path) != [0]
    before = disk.calls["pwritev"]
    log.write()
    assert disk.calls["pwritev"] == before + 4  # one a segment
    assert [bytes(log.view(place, 400)) for place in places] == [bytes([number]) * 400 for number in range(7)]
    bases = [span.base for span in log.spans()]
    assert bases == list_bases(disk, tmp_path)
    assert log.sealed == [SegmentSpan(base, after) for base, after in pairwise(bases)]
    assert [(tmp_path / f"{base:016x}.messages").stat().st_size for base in bases] == [864, 864, 864, SIZE]
    log.close()


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_batches_that_cross_segments_are_all_undone(tmp_path: Path, nth: int) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    put(log, b"before")
    log.write()
    for number in range(7):
        put(log, bytes([number]) * 400)
    disk.fail("pwritev", nth, errno.ENOSPC)
    with pytest.raises(StorageFull):
        log.write()
    assert (log.end, log.staged_end, log.staged, log.sealed) == (70, 70, [], [])
    assert list_bases(disk, tmp_path) == [0]
    assert (tmp_path / "0000000000000000.messages").read_bytes()[70:] == bytes(SIZE - 70)
    place = put(log, b"x" * 900)
    log.write()
    assert bytes(log.view(place, 900)) == b"x" * 900
    log.close()
    assert disk.still_open() == []


def test_staged_batches_can_be_forgotten(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    for number in range(5):
        put(log, bytes([number]) * 400)
    log.unstage()
    assert list_bases(disk, tmp_path) == [0]
    assert (log.end, log.staged_end, log.limit) == (64, 64, SIZE)
    assert put(log, b"x") == 64
    log.close()


def test_leftovers_of_a_failed_write_are_cleaned_before_the_next(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    disk.fail("pwritev", 1)
    disk.fail_always("ftruncate")
    put(log, b"x" * 100)
    with pytest.raises(Exception, match="cannot write"):
        log.write()
    put(log, b"y" * 100)
    with pytest.raises(StorageFull):  # it could not be cleaned, so nothing may be written over it
        log.write()
    disk.heal()
    place = put(log, b"z" * 100)
    log.write()
    assert bytes(log.view(place, 100)) == b"z" * 100
    log.close()


@pytest.mark.parametrize("operation", ["pread", ""])
def test_leftovers_that_cannot_be_removed_stop_the_partition(tmp_path: Path, operation: str) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    disk.tears = True
    disk.fail("pwritev", 1)
    disk.fail_always("ftruncate")
    if operation:  # whether anything was left cannot be told
        disk.fail_always(operation)
    put(log, b"x" * 200)
    with pytest.raises(SyncFailed, match=r"cannot write .* cannot be removed; .* has been restarted"):
        log.write()
    disk.heal()
    put(log, b"y")
    with pytest.raises(SyncFailed):
        log.write()
    assert log.staged == []
    log.close()


def test_the_limit_is_the_end_of_the_segment_or_the_reserve(tmp_path: Path) -> None:
    log = make(tmp_path, FakeDisk("boot-1"), reserve=500)
    assert log.limit == 500
    log.set_reserve(5_000)
    assert log.limit == SIZE
    put(log, b"x" * 900)
    put(log, b"x" * 900)
    assert log.limit == 964 + SIZE
    log.set_reserve(2_500)
    put(log, b"x" * 900)
    assert log.limit == 2_500
    log.close()


def test_segments_are_let_go_once_they_are_synced(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    ends = []
    for number in range(6):
        put(log, bytes([number]) * 900)
        log.write()
        ends.append(log.end)
    assert len(disk.still_open()) == 6
    log.sync()
    log.mark_synced(ends[2])
    assert log.synced == ends[2]
    log.sync()  # closes them: one that ran before might have used them
    assert len(disk.still_open()) == 3
    assert disk.calls["fdatasync"] == 6 + 3
    log.mark_synced(ends[0])
    assert log.synced == ends[2]
    log.close()
    assert disk.still_open() == []


def test_the_directory_is_synced_after_a_segment_was_made(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    log.sync()
    assert disk.calls["fsync_directory"] == 0
    for _ in range(2):
        put(log, b"x" * 900)
        log.write()
    log.sync()
    log.sync()
    assert disk.calls["fsync_directory"] == 1
    log.close()


@pytest.mark.parametrize("operation", ["fdatasync", "fsync_directory"])
def test_a_failed_sync_is_for_good(tmp_path: Path, operation: str) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    place = put(log, b"x" * 900)
    put(log, b"x" * 900)
    log.write()
    disk.fail(operation)
    with pytest.raises(SyncFailed, match=f"cannot sync {tmp_path}.*has read it again"):
        log.sync()
    for _ in range(2):
        with pytest.raises(SyncFailed):
            log.sync()
        put(log, b"y")
        with pytest.raises(SyncFailed):
            log.write()
    assert log.staged == []
    assert log.limit == 0
    assert bytes(log.view(place, 900)) == b"x" * 900
    log.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_sync_that_could_not_begin_can_be_tried_again(tmp_path: Path, code: int) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    put(log, b"x" * 900)
    put(log, b"x" * 900)
    log.write()
    disk.fail_always("fsync_directory", code)
    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"limit of open files") as caught:
            log.sync()
        assert caught.value.retryable
    disk.heal()
    synced = disk.calls["fsync_directory"]
    log.sync()
    assert disk.calls["fsync_directory"] == synced + 1
    log.close()


def test_few_segments_stay_mapped_and_views_pin_theirs(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    log = make(tmp_path, disk)
    places = [put(log, number.to_bytes(2, "little") * 450) for number in range(MAPS_KEPT + 20)]
    log.write()
    views = [log.view(place, 900) for place in places]
    mapped = disk.calls["map"]
    for number in (0, 5, 0, MAPS_KEPT, 0):
        assert bytes(log.view(places[number], 900)) == number.to_bytes(2, "little") * 450
    assert disk.calls["map"] - mapped <= 2
    assert [bytes(view[:2]) for view in views] == [number.to_bytes(2, "little") for number in range(MAPS_KEPT + 20)]
    log.close()


def test_a_removed_segment_is_not_shown_again(tmp_path: Path) -> None:
    log = make(tmp_path, FakeDisk("boot-1"))
    places = [put(log, bytes([number]) * 400) for number in range(7)]
    log.write()
    gone, next_one = places[0], places[2]
    kept = log.view(gone, 400)
    log.remove(log.sealed[0].base)
    with pytest.raises(BadBytes):
        log.view(gone, 400)
    assert bytes(kept) == bytes(400)
    assert bytes(log.view(next_one, 400)) == bytes([2]) * 400
    log.close()


def test_views_stay_within_batches_of_one_segment(tmp_path: Path) -> None:
    log = make(tmp_path, FakeDisk("boot-1"))
    for _ in range(3):
        put(log, b"x" * 900)
    log.write()
    for position, size in ((0, 1), (963, 2), (964, 10), (1_027, 5), (log.end - 1, 2), (10**9, 1)):
        with pytest.raises(BadBytes, match=f"has no {size} bytes at position {position}"):
            log.view(position, size)
    log.close()

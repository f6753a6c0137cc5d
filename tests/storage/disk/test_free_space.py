"""Space that sends leave free: measured seldom, refused in time, taken again when there is some."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from qmq.errors import StorageFailed, StorageFull
from qmq.storage.disk.free_space import PARTS, FreeSpace
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, check_stored, checkpoint, close_cleanly, open_store, verified

KIB = 1 << 10
LOG, DATA = Path("/log"), Path("/data")


def small_disk(free: int, total: int = 1 << 40) -> FakeDisk:
    """A disk with a given free space."""
    disk = FakeDisk("boot-1")
    disk.room_left, disk.total = {"": free, str(DATA): 1 << 40}, total
    return disk


def test_reserved_space_is_never_taken() -> None:
    disk = small_disk(1_000 * KIB)
    room = FreeSpace(disk, (LOG, DATA), 80 * KIB)

    def fill() -> None:
        for _ in range(1_000):
            room.take(3 * KIB)
            disk.room_left[""] -= 3 * KIB

    with pytest.raises(StorageFull, match=f"disk of {LOG} has .* keep_free_bytes keeps {80 * KIB} .*free some space"):
        fill()
    assert 80 * KIB <= disk.room_left[""] < 83 * KIB
    assert disk.calls["room"] < 2 * 920 / 9 + 4  # about every 10 KiB, on two disks
    disk.room_left[""] += 100 * KIB
    room.take(3 * KIB)


def test_each_disk_counts() -> None:
    disk = small_disk(1 << 40)
    room = FreeSpace(disk, (LOG, DATA), 64 * KIB)
    disk.room_left[str(DATA)] = 65 * KIB
    room.take(1 * KIB)
    with pytest.raises(StorageFull, match=f"the disk of {DATA} has"):
        room.take(2 * KIB)


def test_little_is_reserved_of_a_small_disk() -> None:
    disk = small_disk(free=100 * KIB, total=1_600 * KIB)
    assert disk.total // PARTS == 100 * KIB
    room = FreeSpace(disk, (LOG,), 1 << 30)
    with pytest.raises(StorageFull):
        room.take(1)
    disk.room_left[""] += 1
    room.take(1)


def test_nothing_is_measured_when_nothing_is_reserved() -> None:
    disk = small_disk(0)
    FreeSpace(disk, (LOG,), 0).take(1 << 30)
    assert disk.calls["room"] == 0


def test_a_store_is_full_until_there_is_room_for_what_it_refused(tmp_path: Path) -> None:
    disk = small_disk(1_000 * KIB)
    sender = Sender(open_store(tmp_path, disk, keep_free_bytes=80 * KIB))
    room = sender.store.partitions[0].room
    sender.send("a", b"1")
    disk.room_left[""] = 82 * KIB
    room.measure_again()
    with pytest.raises(StorageFull):
        sender.send("a", bytes(4 * KIB))
    sender.take_back()
    assert room.refused_bytes > 4 * KIB
    sender.send("a", b"2")
    assert room.full is not None, "there is still no room for what was refused"
    disk.room_left[""] = 100 * KIB
    room.measure_again()
    sender.send("a", b"3")
    assert (room.full, room.refused_bytes) == (None, 0)
    close_cleanly(sender.store)
    verified(tmp_path)


def test_a_store_is_full_that_keeps_nothing_free(tmp_path: Path) -> None:
    disk = small_disk(0)
    sender = Sender(open_store(tmp_path, disk, keep_free_bytes=0))
    room = sender.store.partitions[0].room
    disk.fail_always("pwritev", errno.ENOSPC)
    for _ in range(2):
        with pytest.raises(StorageFull):
            sender.send("a", bytes(4 * KIB))
        sender.take_back()
        assert room.full is not None
    disk.heal()
    disk.room_left[""] = 10 * KIB
    sender.send("a", b"1")
    assert (room.full, room.refused_bytes) == (None, 0)
    close_cleanly(sender.store)
    verified(tmp_path)


def test_room_that_cannot_be_measured_refuses() -> None:
    disk = small_disk(1 << 40)
    disk.fail_always("room", errno.EIO)
    room = FreeSpace(disk, (LOG,), 1)
    with pytest.raises(StorageFailed, match=f"cannot see how much is free on the disk of {LOG}: .*check the disk"):
        room.take(1)
    disk.heal()
    room.take(1)


def test_a_store_refuses_batches_and_takes_checkpoints(tmp_path: Path) -> None:
    disk = small_disk(1_000 * KIB)
    sender = Sender(open_store(tmp_path, disk, keep_free_bytes=80 * KIB))
    sender.send("a", b"1")
    disk.room_left[""] = 80 * KIB
    sender.send("a", b"2")  # at the last measurement there was enough
    checkpoint(sender.store)
    for _ in range(2):
        with pytest.raises(StorageFull):
            sender.send("a", b"3")
        sender.take_back()
        checkpoint(sender.store)
    disk.room_left[""] = 100 * KIB
    sender.send("a", b"4")
    check_stored(sender.store, sender.sent)
    close_cleanly(sender.store)
    verified(tmp_path)

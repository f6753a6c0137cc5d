"""Room that sends leave free: measured seldom, refused in time, taken again as soon as there is some."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qmq.errors import StorageFailed, StorageFull
from qmq.storage.disk.free_space import PARTS, Room
from tests.storage.faults import FaultyDisk
from tests.storage.stores import Sender, check_stored, checkpoint, close_cleanly, open_store, verified

KIB = 1 << 10
LOG, DATA = Path("/log"), Path("/data")


class SmallDisk(FaultyDisk):
    """Says that it has so much room; by path where there are several."""

    def __init__(self, free: int, total: int = 1 << 40) -> None:
        super().__init__()
        self.free = {LOG: free, DATA: 1 << 40}
        self.total = total
        self.measured = 0
        self.error = 0

    def room(self, path: Path) -> tuple[int, int]:
        self.measured += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self.free.get(path, self.free[LOG]), self.total


def test_what_is_kept_is_never_taken() -> None:
    disk = SmallDisk(1_000 * KIB)
    room = Room(disk, (LOG, DATA), 80 * KIB)

    def fill() -> None:
        for _ in range(1_000):
            room.take(3 * KIB)
            disk.free[LOG] -= 3 * KIB

    with pytest.raises(StorageFull, match=f"disk of {LOG} has .* keep_free_bytes keeps {80 * KIB} .*free some space"):
        fill()
    assert 80 * KIB <= disk.free[LOG] < 83 * KIB
    assert disk.measured < 2 * 920 / 9 + 4  # about every 10 KiB, on two disks
    disk.free[LOG] += 100 * KIB
    room.take(3 * KIB)


def test_each_disk_counts() -> None:
    disk = SmallDisk(1 << 40)
    room = Room(disk, (LOG, DATA), 64 * KIB)
    disk.free[DATA] = 65 * KIB
    room.take(1 * KIB)
    with pytest.raises(StorageFull, match=f"the disk of {DATA} has"):
        room.take(2 * KIB)


def test_of_a_small_disk_little_is_kept() -> None:
    disk = SmallDisk(free=100 * KIB, total=1_600 * KIB)
    assert disk.total // PARTS == 100 * KIB
    room = Room(disk, (LOG,), 1 << 30)
    with pytest.raises(StorageFull):
        room.take(1)
    disk.free[LOG] += 1
    room.take(1)


def test_nothing_is_measured_where_nothing_is_kept() -> None:
    disk = SmallDisk(0)
    Room(disk, (LOG,), 0).take(1 << 30)
    assert disk.measured == 0


def test_room_that_cannot_be_measured_refuses() -> None:
    disk = SmallDisk(1 << 40)
    disk.error = errno.EIO
    room = Room(disk, (LOG,), 1)
    with pytest.raises(StorageFailed, match=f"cannot see how much is free on the disk of {LOG}: .*check the disk"):
        room.take(1)
    disk.error = 0
    room.take(1)


def test_a_store_refuses_batches_and_takes_checkpoints(tmp_path: Path) -> None:
    disk = SmallDisk(1_000 * KIB)
    sender = Sender(open_store(tmp_path, disk, keep_free_bytes=80 * KIB))
    sender.send("a", b"1")
    disk.free[LOG] = 80 * KIB
    sender.send("a", b"2")  # measured the last time, there was enough
    checkpoint(sender.store)
    for _ in range(2):
        with pytest.raises(StorageFull):
            sender.send("a", b"3")
        sender.take_back()
        checkpoint(sender.store)
    disk.free[LOG] = 100 * KIB
    sender.send("a", b"4")
    check_stored(sender.store, sender.sent)
    close_cleanly(sender.store)
    verified(tmp_path)

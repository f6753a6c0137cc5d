"""The simulated disk keeps what it must and loses what it may; it lies to nobody about what can be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qmq.storage.disk.disk import Disk
from tests.fake_disk import FakeDisk
from tests.sim.disk import SimulatedDisk, SimulatedFiles

FILE = Path("/file")


def disk_with(seed: int, *parts: bytes, synced: int = 0) -> tuple[SimulatedDisk, int]:
    """A disk with a file of these parts, the first *synced* of which are on disk, as the file's name is."""
    disk = SimulatedDisk(seed)
    fd = disk.open(FILE, os.O_RDWR | os.O_CREAT)
    disk.fsync_directory(Path("/"))
    offset = 0
    for number, part in enumerate(parts):
        if number == synced:
            disk.fdatasync(fd)
        disk.pwritev(fd, [part], offset)
        offset += len(part)
    return disk, fd


def content(disk: SimulatedDisk) -> bytes:
    fd = disk.open(FILE, os.O_RDONLY)
    try:
        return disk.pread(fd, 1 << 20, 0)
    finally:
        disk.close(fd)


def test_it_stands_in_for_every_call() -> None:
    calls = {name for name in vars(Disk) if not name.startswith("_")}
    for stands_in in (FakeDisk, SimulatedFiles):
        assert calls <= vars(stands_in).keys(), "a call that is not simulated would reach the machine's own disk"


@pytest.mark.parametrize("seed", range(20))
def test_what_was_synced_stays(seed: int) -> None:
    disk, fd = disk_with(seed, b"a" * 1_000, b"b" * 1_000, synced=1)
    disk.pwritev(fd, [b"c" * 10], 500)
    disk.stop(power=True)
    found = content(disk)
    assert found[:448] == b"a" * 448
    assert found[512:1_000] == b"a" * 488
    assert found[500:510] in (b"a" * 10, b"c" * 10)
    assert set(found[1_000:]) <= {0, ord("b")}


def test_unsynced_writes_are_lost_torn_and_reordered_each_in_some_history() -> None:
    found = set()
    for seed in range(200):
        disk, fd = disk_with(seed, b"a" * 64, b"b" * 128, b"c" * 64)
        disk.ftruncate(fd, 512)
        disk.stop(power=True)
        found.add(bytes(content(disk).rstrip(b"\0")).replace(b"\0", b".").decode()[::64])
    assert {"", "a", "ab", "abb", "abbc", "...c", ".bbc", ".b", "a..c"} <= found


def test_a_name_that_is_not_synced_may_be_lost_and_a_rename_is_one() -> None:
    found = set()
    for seed in range(100):
        disk, fd = disk_with(seed, b"old", synced=1)
        disk.fsync(fd)
        new = disk.open(Path("/new"), os.O_RDWR | os.O_CREAT)
        disk.pwritev(new, [b"new"], 0)
        disk.fsync(new)
        disk.rename(Path("/new"), FILE)
        disk.stop(power=True)
        found.add((*disk.listdir(Path("/")), content(disk)))
    assert found == {("file", b"old"), ("file", "new", b"old"), ("file", b"new")}


def test_a_link_is_a_second_name_that_may_be_lost() -> None:
    found = set()
    for seed in range(100):
        disk, fd = disk_with(seed, b"old", synced=1)
        disk.fsync(fd)
        disk.link(FILE, Path("/other"))
        with pytest.raises(FileExistsError):
            disk.link(FILE, Path("/other"))
        disk.unlink(FILE)
        disk.stop(power=True)
        found.add(tuple(disk.listdir(Path("/"))))
    assert found == {("file",), ("other",), ("file", "other"), ()}


def test_pages_of_a_failed_sync_are_readable_and_gone_with_the_power() -> None:
    found = set()
    for seed in range(100):
        disk, fd = disk_with(seed, b"a" * 64, b"b" * 64, synced=1)
        disk.fail("fdatasync", code=errno.EIO)
        with pytest.raises(OSError, match="Input"):
            disk.fdatasync(fd)
        assert content(disk) == b"a" * 64 + b"b" * 64
        disk.fdatasync(fd)  # says nothing of what it did not write
        disk.stop(power=True)
        found.add(content(disk))
    assert found == {b"a" * 64 + b"b" * 64, b"a" * 64 + bytes(64)}


def test_pages_of_a_failed_sync_are_written_again_when_they_are_written_again() -> None:
    for seed in range(20):
        disk, fd = disk_with(seed, b"a" * 640)
        disk.fail("fdatasync", code=errno.EIO)
        with pytest.raises(OSError, match="Input"):
            disk.fdatasync(fd)
        disk.pwritev(fd, [b"a" * 640], 0)
        disk.fdatasync(fd)
        disk.stop(power=True)
        assert content(disk) == b"a" * 640


def test_a_map_sees_later_writes_and_stays_when_its_file_grows() -> None:
    disk, fd = disk_with(1, b"a" * 8_000)
    view = memoryview(disk.map(fd, 8_000))
    disk.pwritev(fd, [b"b" * 20_000], 4_000)
    assert bytes(view[3_999:4_001]) == b"ab"
    assert view.readonly
    with pytest.raises(ValueError, match="length"):
        disk.map(fd, 30_000)


def test_a_clone_goes_its_own_way() -> None:
    disk, fd = disk_with(1, b"a" * 100)
    other = disk.clone(2)
    other.pwritev(fd, [b"b" * 100], 0)
    assert content(disk) == b"a" * 100
    assert content(other) == b"b" * 100

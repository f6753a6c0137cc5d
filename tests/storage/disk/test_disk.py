"""The seam to the operating system: errors that say what to do, complete writes, files that are replaced whole."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from qmq.errors import StorageFailed, StorageFull
from qmq.storage.disk.disk import (
    IOV_MAX,
    WRITE_BYTES,
    Disk,
    failure,
    read_fully,
    read_whole,
    write_atomically,
    write_fully,
)
from tests.fake_disk import FakeDisk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_storage_full(code: int) -> None:
    error = failure(OSError(code, os.strerror(code)), "write", Path("log-0/x"), 77)
    assert type(error) is StorageFull
    assert error.retryable
    assert str(error) == (
        f"cannot write log-0/x at position 77: {os.strerror(code)}; free some space: sends are taken again as soon as "
        "there is room"
    )


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EACCES, "give the user that runs QMQ read and write access"),
        (errno.EROFS, "mount the file system for writing"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "check the disk"),
        (errno.ENOENT, "mounted"),
        (errno.ENOTDIR, "choose another directory"),
    ],
)
def test_other_errors_say_what_to_do(code: int, advice: str) -> None:
    error = failure(OSError(code, os.strerror(code)), "open", "d/f")
    assert type(error) is StorageFailed
    assert str(error).startswith(f"cannot open d/f: {os.strerror(code)}; ")
    assert advice in str(error)


def test_an_error_without_advice_still_says_what_happened() -> None:
    assert (
        str(failure(OSError(errno.EBADF, "Bad file descriptor"), "sync", "f")) == "cannot sync f: Bad file descriptor"
    )


@pytest.mark.parametrize("short", [None, 1, 3, 1_000])
def test_write_fully_writes_all_however_short_the_system_writes(tmp_path: Path, short: int | None) -> None:
    disk = FakeDisk("boot-1")
    disk.short = short
    fd = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    parts = [bytes([number % 256]) * (number % 5) for number in range(IOV_MAX + 50)]
    write_fully(disk, fd, parts, 10)
    assert read_fully(disk, fd, 1 << 20, 0) == bytes(10) + b"".join(parts)
    disk.close(fd)


@pytest.mark.parametrize("short", [None, 700_001])
def test_no_call_is_asked_to_write_very_much(tmp_path: Path, short: int | None) -> None:
    asked = list[int]()
    disk = FakeDisk()
    disk.short = short
    fd = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    disk.before = lambda operation: asked.append(sum(map(len, operation.arguments[1])))
    parts = [bytes([number]) * size for number, size in enumerate((5, WRITE_BYTES, 3 * WRITE_BYTES + 7, 1, 600_000))]
    write_fully(disk, fd, parts, 3)
    disk.before = None
    assert read_fully(disk, fd, 1 << 24, 0) == bytes(3) + b"".join(parts)
    assert max(asked) == WRITE_BYTES
    assert short or len(asked) == 5
    disk.close(fd)


def test_a_write_of_nothing_does_not_go_on_for_ever(tmp_path: Path) -> None:
    disk = FakeDisk()
    fd = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    disk.short = 0
    with pytest.raises(OSError, match="wrote nothing"):
        write_fully(disk, fd, [b"x"], 0)
    disk.close(fd)


def test_the_end_of_the_data_of_a_sparse_file(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    assert disk.data_end(fd) == 0
    disk.ftruncate(fd, 1 << 24)
    assert disk.data_end(fd) == 0
    disk.pwritev(fd, [b"x"], 1 << 20)
    assert (1 << 20) < disk.data_end(fd) <= (1 << 20) + (1 << 16)
    disk.close(fd)


def test_a_file_system_that_knows_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    fd = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    disk.ftruncate(fd, 5_000)

    def refuse(fd: int, offset: int, whence: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "lseek", refuse)
    assert disk.data_end(fd) == 5_000
    monkeypatch.undo()
    disk.close(fd)


def test_mkdir_where_one_is_and_where_a_file_is(tmp_path: Path) -> None:
    disk = Disk()
    disk.mkdir(tmp_path / "d")
    disk.mkdir(tmp_path / "d")
    (tmp_path / "f").write_text("x")
    with pytest.raises(NotADirectoryError):
        disk.mkdir(tmp_path / "f")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(FakeDisk("boot-1"), path, b"old")
    assert read_whole(Disk(), path) == b"old"
    for operation in ("open", "pwritev", "fsync", "rename"):
        disk = FakeDisk("boot-1")
        disk.fail(operation, 1, errno.ENOSPC)
        with pytest.raises(StorageFull, match="cannot write"):
            write_atomically(disk, path, [b"n", b"ew"])
        assert [file.name for file in tmp_path.iterdir()] == ["f"]
        assert path.read_bytes() == b"old"
    write_atomically(FakeDisk("boot-1"), path, [b"n", b"ew"])
    assert path.read_bytes() == b"new"


def test_a_replaced_file_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "d")
    write_atomically(disk, tmp_path / "d" / "f", b"content")
    disk.without_power(tmp_path / "d", tmp_path / "after")
    assert (tmp_path / "after" / "f").read_bytes() == b"content"


def test_one_process_has_the_lock_of_a_file(tmp_path: Path) -> None:
    disk = Disk()
    first = disk.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    second = disk.open(tmp_path / "f", os.O_RDWR)
    assert disk.flock(first)
    assert not disk.flock(second)
    disk.close(first)
    assert disk.flock(second)
    disk.close(second)


def test_the_boot_is_known_and_stays() -> None:
    assert Disk().boot_id() == Disk().boot_id() != ""


def test_uncached_reads_give_the_bytes_and_keep_pages_that_were_in_memory(tmp_path: Path) -> None:
    disk, path = Disk(), tmp_path / "f"
    content = os.urandom(1 << 20)
    path.write_bytes(content)
    fd = disk.open_uncached(path)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 65_536, 131_072)  # another process reads this part
        buffer, offset = memoryview(bytearray(65_536)), 0
        while read := disk.preadv_uncached(fd, buffer, offset):
            assert bytes(buffer[:read]) == content[offset : offset + read]
            offset += read
        assert offset == len(content)
        assert os.preadv(fd, [bytearray(65_536)], 131_072, os.RWF_NOWAIT) == 65_536
        with pytest.raises(OSError, match="Bad file"):
            disk.preadv_uncached(-1, buffer, 0)
    finally:
        disk.close(fd)


def test_uncached_reads_drop_the_pages_that_they_brought(tmp_path: Path) -> None:
    disk, path = Disk(), tmp_path / "f"
    path.write_bytes(os.urandom(1 << 20))
    fd = disk.open_uncached(path)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        left = []
        for offset in range(0, 1 << 20, 32_768):
            assert disk.preadv_uncached(fd, memoryview(bytearray(32_768)), offset) == 32_768
            left.append(pages_in_memory(fd))
        # Not all: the system keeps pages that another processor is using.
        assert any(after <= before for before, after in pairwise([0, *left]))
    finally:
        disk.close(fd)


def pages_in_memory(fd: int) -> int:
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        bytes_of_map = np.frombuffer(mapped, np.uint8)
        states = ctypes.create_string_buffer(len(mapped) // mmap.PAGESIZE)
        address = ctypes.c_void_p(bytes_of_map.ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), states) == 0
        del bytes_of_map
        return sum(state & 1 for state in states.raw)

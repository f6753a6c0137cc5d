"""Bytes that are on disk and not in memory: how the broker notices them, and how a thread reads them.

Logs are read through maps. Touching a page that is not in memory stops the whole process until the disk has answered,
and a bad sector ends the process. So code that serves others asks first, gets NotInMemory, has its ColdRead run in a
thread, and asks again. The thread reads with preadv, where a bad sector is an exception.

A Fetch reads bytes of the message log as they are, for clients that read the log.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from qmq.errors import BadBytes, StorageError
from qmq.storage.disk.disk import BAD_SECTOR, PAGE, Disk, failure, read_fully


class Fetch:
    """A part of a segment's file. Call ``run`` in a thread; ``data`` then has the bytes, fewer where the file ends."""

    __slots__ = ("_disk", "_offset", "_path", "_position", "_size", "data", "partition")

    def __init__(self, disk: Disk, partition: int, path: Path, offset: int, size: int, position: int) -> None:
        self._disk = disk
        self._path = path
        self._offset = offset
        self._size = size
        self._position = position
        self.partition = partition
        self.data: bytes | memoryview = b""

    def run(self) -> None:
        """[thread] Read the bytes. Raises BadBytes when the file was removed meanwhile, StorageFailed."""
        try:
            fd = self._disk.open(self._path, os.O_RDONLY)
            try:
                self.data = read_fully(self._disk, fd, self._size, self._offset)
            finally:
                self._disk.close(fd)
        except FileNotFoundError as error:
            raise BadBytes(f"{self._path} was removed meanwhile; list the segments again") from error
        except OSError as error:
            raise failure(error, "read", self._path, self._position) from error


#: Bytes that a thread reads in one step.
STEP_BYTES: Final = 1 << 20
#: Bytes that one ColdRead reads, unless one batch is larger, and that the system reads ahead behind them.
READ_BYTES: Final = 4 << 20


class FileRange(NamedTuple):
    """Bytes of a file; *position* is that of the first byte, in a file of the message log."""

    path: Path
    offset: int
    size: int
    position: int | None = None

    def part(self, start: int, size: int) -> FileRange:
        """Return the range of *size* bytes from offset *start* on."""
        position = self.position
        return FileRange(self.path, start, size, None if position is None else position + start - self.offset)


class Unreadable(NamedTuple):
    """A range that the disk cannot read, and the error."""

    file_range: FileRange
    error: StorageError


class NotInMemory(Exception):
    """The bytes are not in memory: run ``read`` in a thread, and ask again."""

    def __init__(self, read: ColdRead) -> None:
        super().__init__(f"{read.key} is not in memory")
        self.read = read


class ColdRead:
    """Parts of files to be read into memory. Call ``step`` in a thread until nothing is left."""

    __slots__ = ("_ahead", "_disk", "_left", "_unadvised", "key", "partition", "unreadable")

    def __init__(self, disk: Disk, partition: int, file_ranges: list[FileRange], ahead: int = 0) -> None:
        """*ahead*: the bytes behind the last range that will be wanted next."""
        self._disk = disk
        self._left = file_ranges[::-1]
        self._unadvised = file_ranges
        self._ahead = ahead
        self.partition = partition
        #: Equal for reads of the same bytes.
        self.key = file_ranges[0].path, file_ranges[0].offset, file_ranges[-1].path, file_ranges[-1].offset
        #: The ranges that the disk could not read.
        self.unreadable: list[Unreadable] = []

    def step(self) -> bool:
        """[thread] Read up to 1 MiB; True while more is left. Raises StorageFailed when nothing can be read."""
        if self._unadvised:
            self._advise()
        file_range = self._left.pop()
        taken = min(file_range.size, STEP_BYTES)
        if taken < file_range.size:
            self._left.append(file_range.part(file_range.offset + taken, file_range.size - taken))
        fd = self._open(file_range.path)
        try:
            self._bring(fd, file_range.part(file_range.offset, taken))
        finally:
            self._disk.close(fd)
        return bool(self._left)

    def _open(self, path: Path) -> int:
        try:
            return self._disk.open(path, os.O_RDONLY)
        except OSError as error:
            raise failure(error, "open", path) from error

    def _advise(self) -> None:
        """Tell the system at once about all ranges."""
        file_ranges, self._unadvised = self._unadvised, []
        last = file_ranges[-1]
        file_ranges[-1] = last._replace(size=last.size + self._ahead)
        for path, group in groupby(file_ranges, key=lambda file_range: file_range.path):
            fd = self._open(path)
            try:
                with suppress(OSError):
                    for file_range in group:
                        self._disk.will_need(fd, file_range.offset, file_range.size)
            finally:
                self._disk.close(fd)

    def _bring(self, fd: int, file_range: FileRange) -> None:
        try:
            if len(read_fully(self._disk, fd, file_range.size, file_range.offset)) < file_range.size:
                self._narrow(fd, file_range)
        except OSError as error:
            if error.errno not in BAD_SECTOR:
                raise failure(error, "read", file_range.path, file_range.position) from error
            if self._narrow(fd, file_range) or file_range.position is None:
                return  # derived files are made again
            if not self._reads_elsewhere(fd, file_range):
                self.unreadable.clear()
                raise failure(error, "read", file_range.path, file_range.position) from error

    def _narrow(self, fd: int, file_range: FileRange) -> bool:
        """Note the pages that cannot be read; return False when that is all of them."""
        start, end = file_range.offset // PAGE * PAGE, file_range.offset + file_range.size
        pages = range(start, end, PAGE)
        bad = 0
        for offset in pages:
            try:
                if read_fully(self._disk, fd, PAGE, offset):
                    continue
                error = OSError("the file ends before that")
            except OSError as refused:
                error = refused
            bad += 1
            self._note(file_range.part(offset, PAGE), error)
        return bad < len(pages)

    def _note(self, page: FileRange, error: OSError) -> None:
        """Note a page that cannot be read; join it to the one before it."""
        last = self.unreadable[-1] if self.unreadable else None
        if (
            last is not None
            and last.file_range.path == page.path
            and last.file_range.offset + last.file_range.size == page.offset
        ):
            self.unreadable[-1] = Unreadable(last.file_range._replace(size=last.file_range.size + PAGE), last.error)
        else:
            self.unreadable.append(Unreadable(page, failure(error, "read", page.path, page.position)))

    def _reads_elsewhere(self, fd: int, file_range: FileRange) -> bool:
        """Return whether other parts of the file can be read: if not, the disk fails, and not some sectors."""
        with suppress(OSError):
            size = self._disk.size(fd)
            for part in range(5):
                offset = size // 5 * part // PAGE * PAGE
                if not file_range.offset - PAGE < offset < file_range.offset + file_range.size:
                    self._disk.pread(fd, PAGE, offset)
                    return True
        return False


class Residence:
    """Tells whether bytes of a partition's maps are in memory."""

    __slots__ = ("disk", "may_wait", "partition")

    def __init__(self, disk: Disk, partition: int) -> None:
        self.disk = disk
        self.partition = partition
        #: While set, the caller reads missing bytes at once.
        self.may_wait = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Read missing bytes at once within this context."""
        before, self.may_wait = self.may_wait, True
        try:
            yield
        finally:
            self.may_wait = before

    def holds(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        """Return whether all of these bytes of a map are in memory."""
        return 0 not in self.disk.residency(mapped, offset, size)

    def require(self, mapped: mmap.mmap, offset: int, size: int, file_range: FileRange) -> None:
        """Return when these bytes of a map are in memory. Raises NotInMemory, with a read of *file_range*, when they
        are not.

        With ``may_wait`` they are read here. Raises StorageFailed when they cannot be read.
        """
        if self.holds(mapped, offset, size):
            return
        read = ColdRead(self.disk, self.partition, [file_range])
        if not self.may_wait:
            raise NotInMemory(read)
        while read.step():
            pass
        if read.unreadable:
            raise read.unreadable[0].error

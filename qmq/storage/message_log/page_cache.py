"""Tells whether batches of a message log are in memory, and makes the reads that bring in the others."""

from __future__ import annotations

import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes, StorageError
from qmq.storage.disk.disk import PAGE, Disk, failure, read_fully
from qmq.storage.message_log.cold_reads import READ_BYTES, ColdRead, FileRange
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.segment import segment_path

#: Batches closer than this are asked about together: a question to the system takes 1 us, and another 1 us for 64
#: pages.
_NEAR_BYTES: Final = 256 << 10
#: The most bytes of one question.
_ASK_BYTES: Final = 16 << 20
#: Batches closer than this are read together.
_JOIN_BYTES: Final = 64 << 10
#: Bytes in memory are taken to stay there for this long: asking takes 10 us beside work that fills the processor's
#: caches, and the system drops first what was not used for long.
_FOUND_US: Final = 100_000

Positions = npt.NDArray[np.int64]


class PageCache:
    """Asks which bytes of one log are in memory, and touches none of them. Bytes that ``view`` refuses count as in
    memory, since they do not make anything wait for a disk.

    The methods raise StorageFailed when a segment cannot be mapped.
    """

    __slots__ = ("_disk", "_found", "_found_end", "_found_until_us", "_log")

    def __init__(self, disk: Disk, log: MessageLog) -> None:
        self._disk = disk
        self._log = log
        # The range found in memory, and until when that counts.
        self._found = self._found_end = self._found_until_us = 0

    def has(self, position: int, size: int, now_us: int | None = None) -> bool:
        """Return whether these bytes are in memory, so that ``view`` shows them without a wait. With *now_us*, of a
        clock that never goes back, an answer may be 0.1 s old, and bytes behind the range are asked about too.
        """
        log = self._log
        if log.residence.may_wait or position >= log.hot_from() or self._finds(position, position + size, now_us):
            return True
        return self.count(np.array([position]), np.array([size])) == 1

    def _finds(self, start: int, end: int, now_us: int | None) -> bool:
        """Return whether [start, end) was found in memory lately, or is found now. False does not mean that it is
        not.
        """
        if now_us is not None and now_us < self._found_until_us and self._found <= start and end <= self._found_end:
            return True
        try:
            span, mapped = self._log.mapped_at(start)
        except StorageError:
            return False
        stop = end if now_us is None else min(max(end, start + _NEAR_BYTES), span.end)
        if stop < end:
            return False
        offset = start - span.base
        pages = self._disk.residency(mapped, offset, stop - start)
        missing = pages.find(0)
        found_end = stop if missing < 0 else span.base + (offset // PAGE + missing) * PAGE
        if found_end < end:
            return False
        if now_us is not None:
            self._found, self._found_end, self._found_until_us = start, found_end, now_us + _FOUND_US
        return True

    def peek(self, position: int, size: int) -> memoryview:
        """Return these bytes, from the map if that waits for no disk, else by a read. Raises as ``view`` does."""
        if self.has(position, size):
            return self._log.view(position, size)
        at = self._log.file_offset_of(position)
        try:
            fd = self._disk.open(at.path, os.O_RDONLY)
            try:
                found = read_fully(self._disk, fd, size, at.offset)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise failure(error, "read", at.path, position) from error
        if len(found) < size:
            raise BadBytes(f"{at} has {len(found)} bytes of {size}; run qmq verify")
        return memoryview(found)

    def count(self, positions: Positions, sizes: Positions, now_us: int | None = None) -> int:
        """Return how many of these batches, ascending, come before the first that is not in memory. *now_us*: see
        ``has``.
        """
        log, count = self._log, len(positions)
        hot = log.hot_from()
        if log.residence.may_wait or positions[0] >= hot:
            return count
        ends = positions + sizes
        first, last = int(positions[0]), int(ends[-1])
        if now_us is not None and last - first <= _NEAR_BYTES and self._finds(first, last, now_us):
            return count
        done = 0
        for following in [*(np.flatnonzero(positions[1:] - ends[:-1] > _NEAR_BYTES) + 1).tolist(), count]:
            while done < following and positions[done] < hot:
                start = int(positions[done])
                try:
                    span, mapped = log.mapped_at(start)
                except StorageError as error:
                    if not isinstance(error.__cause__, FileNotFoundError):
                        raise
                    done += 1  # the segment is gone, as ``view`` says
                    continue
                stop = int(np.searchsorted(positions, min(span.end, start + _ASK_BYTES)))
                stop = max(done + 1, min(stop, following))
                cold = self._first_cold(mapped, span.base, positions[done:stop], ends[done:stop])
                if cold is not None:
                    return done + cold
                done = stop
        return count

    def _first_cold(self, mapped: mmap.mmap, base: int, starts: Positions, ends: Positions) -> int | None:
        """Return the first of these batches of one segment that is neither in memory nor known to be unreadable."""
        start = int(starts[0]) - base
        pages = self._disk.residency(mapped, start, int(ends.max()) - base - start)
        if 0 not in pages:
            return None
        missing = np.concatenate(([0], np.cumsum(np.frombuffer(pages, np.uint8) == 0)))
        first = start // PAGE
        cold = missing[(ends - base - 1) // PAGE - first + 1] > missing[(starts - base) // PAGE - first]
        known = self._log.unreadable
        for index in np.flatnonzero(cold).tolist():
            if known.first_in(int(starts[index]), int(ends[index] - starts[index])) is None:
                return int(index)
        return None

    def read(self, positions: Positions, sizes: Positions, *, onward: bool) -> ColdRead:
        """Return a read of the first of these batches, and of as many as make up READ_BYTES. *onward*: bytes behind
        them will be wanted too, so where batches are close together everything is read.
        """
        first = int(positions[0])
        log = self._log
        span, _ = log.mapped_at(first)
        window = min(span.end, first + READ_BYTES)
        near = max(1, int(np.searchsorted(positions, window)))
        if onward and 4 * int(sizes[:near].sum()) >= int(positions[near - 1] + sizes[near - 1]) - first:
            end = max(window, first + int(sizes[0]))
            ahead = min(READ_BYTES, span.end - end)
            return ColdRead(self._disk, log.owner.partition, [self._range(span.base, first, end)], ahead)
        count = min(int(np.searchsorted(positions, span.end)), int(np.searchsorted(np.cumsum(sizes), READ_BYTES)))
        positions, sizes = positions[: max(1, count)], sizes[: max(1, count)]
        ends = positions + sizes
        heads = np.concatenate(([0], np.flatnonzero(positions[1:] - ends[:-1] > _JOIN_BYTES) + 1))
        tops = np.maximum.reduceat(ends, heads)
        parts = zip(positions[heads].tolist(), tops.tolist(), strict=True)
        return ColdRead(self._disk, log.owner.partition, [self._range(span.base, *part) for part in parts])

    def _range(self, base: int, start: int, end: int) -> FileRange:
        return FileRange(segment_path(self._log.directory, base), start - base, end - start, start)

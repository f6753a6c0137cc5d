"""Reading segments again after a stop: valid batches one after another, and the bad bytes between them.

Bytes that are no batch are skipped up to the next header that names its own position and bears the store's mark, so
bytes in a body cannot pass for a batch. Reads use ``preadv``: a bad sector is an error, not a signal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from qmq.errors import BadBatch, ForeignFile
from qmq.format.batch import (
    Header,
    UnknownBatchVersion,
    header_crc_of,
    parse_header,
    validate_stored,
    validate_stored_header,
)
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk, failure, write_fully
from qmq.storage.message_log.segment import Segment
from qmq.storage.types import Hole

#: Bytes read at once; more only for a larger batch.
WINDOW_BYTES: Final = 8 << 20

_FIRST_SEARCH_BYTES: Final = 64 << 10
_POSITION_OFFSET: Final = 24
_POSITION_BYTES: Final = _POSITION_OFFSET + 8

Feed = Callable[[Header, memoryview], None]


@dataclass(slots=True)
class ScanResult:
    """The result of a scan of one segment. Positions."""

    #: Behind the last batch; where the scan began when there is none.
    end: int
    batches: int = 0
    #: Bad bytes that stay: with a valid batch behind them, or bad batches with good headers at the very end.
    holes: list[Hole] = field(default_factory=list)
    #: How many of these bytes no header explains: their content is unknown.
    blind_bytes: int = 0
    #: Header, runs and table of bad batches in the holes whose headers are good.
    damaged: list[bytes] = field(default_factory=list)
    #: Batches that were fed by their headers although their data is bad.
    rotten: list[Hole] = field(default_factory=list)
    #: Bytes after ``end`` up to the last one that is not zero.
    junk_bytes: int = 0
    #: The file ends within the next batch, so it was cut: a segment that is written has its full size.
    severed: bool = False
    #: The file has no room for another header.
    full: bool = False
    rewritten_bytes: int = 0
    #: Headers that are good but for the mark: those of a store with another secret.
    foreign: int = 0


class Scanner:
    """Reads the batches of one store's segments. Has one buffer, of at most WINDOW_BYTES unless a batch is larger."""

    def __init__(self, disk: Disk, secret: bytes, store_id: bytes, feed: Feed) -> None:
        """*feed* gets the header of each valid batch and a view that begins with the batch, good for the call only."""
        self._disk = disk
        self._secret = secret
        self._store_id = store_id
        self._feed = feed
        self._buffer = bytearray()
        self._foreign = 0

    def scan(
        self, segment: Segment, start: int, stop: int, rewrite_from: int | None = None, *, vouched: bool = False
    ) -> ScanResult:
        """Read positions [start, stop) of *segment*; *start* is that of a batch or the segment's first.

        Valid batches at or after *rewrite_from* are written again in place; the caller syncs. *vouched*: a checkpoint
        knows that these positions were good, so batches are fed by their headers even if their data has rotten since;
        the reader finds out which of their runs are good. Raises StorageFailed, ForeignFile for a batch of a version
        that is not known.
        """
        try:
            return self._scan(segment, start, stop, rewrite_from, vouched)
        except UnknownBatchVersion as error:
            raise ForeignFile(f"{segment.path}: {error}") from error
        except OSError as error:
            raise failure(error, "read or write again", segment.path, start) from error

    def _scan(self, segment: Segment, start: int, stop: int, rewrite_from: int | None, vouched: bool) -> ScanResult:
        start = max(start, segment.base + SEGMENT_HEADER_SIZE)
        stop = min(stop, segment.base + self._disk.data_end(segment.fd))
        if len(self._buffer) < (size := min(WINDOW_BYTES, stop - start)):
            self._buffer = bytearray(size)
        window = _SegmentWindow(self._disk, segment, self._buffer, stop)
        found = ScanResult(start)
        position, blind, known_blind, known, known_end = start, 0, 0, list[bytes](), start
        self._foreign = 0
        while position < stop:
            batch = window.at(position)
            try:
                header = validate_stored(batch, position, self._secret, self._store_id)
            except UnknownBatchVersion:
                raise
            except BadBatch:
                if window.need(position, _wanted(batch, position)):
                    continue
                right = self._right_header(batch, position)
                if right is not None and vouched:
                    header = right
                    found.rotten.append(Hole(position, position + header.size))
                elif right is not None:
                    known.append(bytes(batch[: right.data_start]))
                    known_blind = blind
                    position = known_end = position + right.size
                    continue
                else:
                    following = self._next_position(window, position + 1)
                    blind += following - position
                    position = following
                    continue
            if position > found.end:
                found.holes.append(Hole(found.end, position))
                found.blind_bytes += blind
                found.damaged += known
                blind, known = 0, []
            self._feed(header, batch)
            found.batches += 1
            if rewrite_from is not None and position >= rewrite_from:
                window.rewrite(position, position + header.size)
                found.rewritten_bytes += header.size
            position = found.end = position + header.size
        window.write_again()
        last = window.last_data(found.end)
        if known:  # either torn by the write, or written and rotten since: unknown
            found.holes.append(Hole(found.end, known_end))
            found.blind_bytes += known_blind
            found.damaged += known
            found.end = known_end
        found.junk_bytes = max(last - found.end, 0)
        room = segment.base + segment.size() - found.end
        found.full = room < BATCH_HEADER_SIZE
        found.severed = last > found.end and window.wanted(found.end) > room
        found.foreign = self._foreign
        self._buffer = window.buffer
        return found

    def _next_position(self, window: _SegmentWindow, position: int) -> int:
        """Return the first position from *position* on that has a good header; the end when there is none."""
        step = _FIRST_SEARCH_BYTES
        while position + BATCH_HEADER_SIZE <= window.stop:
            window.need(position, BATCH_HEADER_SIZE)
            view = window.at(position)[:step]
            for candidate in candidates(view, position):
                window.need(candidate, BATCH_HEADER_SIZE)
                window.need(candidate, _wanted(window.at(candidate), candidate))
                if self._right_header(window.at(candidate), candidate) is not None:
                    return candidate
            position += len(view) - _POSITION_BYTES + 1
            step = min(2 * step, WINDOW_BYTES)
        return window.stop

    def _right_header(self, batch: memoryview, position: int) -> Header | None:
        try:
            return validate_stored_header(batch, position, self._secret, self._store_id)
        except UnknownBatchVersion:
            raise
        except BadBatch:
            if len(batch) >= BATCH_HEADER_SIZE:
                header = parse_header(batch)
                ours = header.magic == BATCH_MAGIC and header.position == position and header.size <= len(batch)
                self._foreign += ours and header_crc_of(batch, header.data_start) == header.header_crc
            return None


def candidates(view: memoryview, position: int) -> list[int]:
    """Return the positions in *view*, which begins at *position*, with the magic of a batch and its own position."""
    count = len(view) - _POSITION_BYTES + 1
    if count <= 0:
        return []
    # Batches are not aligned, so every byte offset is looked at as the start of an integer.
    magics = np.ndarray((count,), "<u4", view, 0, (1,))
    found = np.flatnonzero(magics == BATCH_MAGIC)
    if not len(found):
        return []
    positions = np.ndarray((count,), "<u8", view, _POSITION_OFFSET, (1,))[found]
    claimed = found.astype(np.uint64) + np.uint64(position)
    return [int(one) for one in claimed[positions == claimed]]


def _wanted(batch: memoryview, position: int) -> int:
    """Return how many bytes of *position* to read: those of its batch, if a header seems to be there."""
    if len(batch) >= BATCH_HEADER_SIZE:
        header = parse_header(batch)
        if header.magic == BATCH_MAGIC and header.position == position:
            return max(header.size, BATCH_HEADER_SIZE)
    return BATCH_HEADER_SIZE


class _SegmentWindow:
    """The part of a segment that is in memory. Positions, all below ``stop``."""

    def __init__(self, disk: Disk, segment: Segment, buffer: bytearray, stop: int) -> None:
        self._disk = disk
        self._segment = segment
        self._view = memoryview(b"")
        self._start = 0
        self._rewrites: list[tuple[int, int]] = []
        self.buffer = buffer
        self.stop = stop

    def at(self, position: int) -> memoryview:
        """Return the bytes in memory from *position* on, at least one."""
        offset = position - self._start
        if not 0 <= offset < len(self._view):
            self._load(position)
            offset = 0
        return self._view[offset:]

    def need(self, position: int, size: int) -> bool:
        """Have *size* bytes from *position* on in memory, fewer only at the segment's end; True if they were not there
        before.
        """
        size = min(size, self.stop - position)
        if position >= self._start and position + size <= self._start + len(self._view):
            return False
        if size > len(self.buffer):
            self.write_again()
            self.buffer = bytearray(size)
        self._load(position)
        return True

    def wanted(self, position: int) -> int:
        """Return how many bytes the batch that seems to begin at *position* has."""
        self.need(position, BATCH_HEADER_SIZE)
        return _wanted(self.at(position), position)

    def rewrite(self, start: int, end: int) -> None:
        """Have bytes that are in memory written again before they leave it."""
        if self._rewrites and self._rewrites[-1][1] == start:
            self._rewrites[-1] = (self._rewrites[-1][0], end)
        else:
            self._rewrites.append((start, end))

    def write_again(self) -> None:
        """Write the bytes that are to be written again. Raises OSError."""
        for start, end in self._rewrites:
            part = self._view[start - self._start : end - self._start]
            write_fully(self._disk, self._segment.fd, [part], start - self._segment.base)
        self._rewrites.clear()

    def last_data(self, position: int) -> int:
        """Return the position behind the last byte from *position* on that is not zero."""
        last = position
        while position < self.stop:
            part = bytes(self.at(position))
            if used := len(part.rstrip(b"\0")):
                last = position + used
            position += len(part)
        return last

    def _load(self, position: int) -> None:
        self.write_again()
        size, done = min(len(self.buffer), self.stop - position), 0
        whole = memoryview(self.buffer)
        while done < size:
            read = self._disk.preadv(self._segment.fd, [whole[done:size]], position + done - self._segment.base)
            if read <= 0:  # the file was cut meanwhile: zeros are no batch
                whole[done:size] = bytes(size - done)
                break
            done += read
        self._view, self._start = whole[:size], position

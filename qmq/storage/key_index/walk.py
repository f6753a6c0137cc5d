"""Reading a segment for its hashes: batch after batch, in bounded steps, also around bad bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import BadBatch
from qmq.format.batch import validate_stored_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import BAD_SECTOR, PAGE, Disk, failure
from qmq.storage.key_index.hashes import Hashes, Positions, hashes_in
from qmq.storage.message_log.reader import candidates
from qmq.storage.message_log.segment import segment_path

#: Bytes read in one step; more only for a larger batch.
STEP_BYTES: Final = 1 << 20
_SEARCH_OVERLAP: Final = 31
_SIZE_OFFSET: Final = 8

_NONE: Final = np.empty(0, np.uint64)


class WalkStep(NamedTuple):
    """The hashes of the batches that one step has read, each with its batch's position."""

    hashes: Hashes
    positions: Positions
    #: Bytes read, and how many of them the disk could not read.
    size: int
    unread: int


class SegmentWalk:
    """[thread] Reads the batches of one segment from position *start*, that of a batch or the segment's base, up to
    *end*, where a batch ends. Reads with a descriptor of its own; bytes that are bad are passed over.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        store_id: bytes,
        secret: bytes,
        base: int,
        start: int,
        end: int,
        wanted: int | None = None,
    ) -> None:
        """*wanted*: batches that begin behind this position are not needed, so little is read of them."""
        self.path = segment_path(directory, base)
        self._disk = disk
        self._store_id = store_id
        self._secret = secret
        self._base = base
        self._end = end
        self._wanted_to = end if wanted is None else wanted
        self._fd = -1
        self._unread = 0
        #: The position up to which the segment is read.
        self.position = max(start, base + SEGMENT_HEADER_SIZE)

    @property
    def is_done(self) -> bool:
        """Whether all is read."""
        return self.position >= self._end

    def step(self) -> WalkStep:
        """Read a little further. Raises StorageFailed, also where the file is gone."""
        try:
            if self._fd < 0:
                self._fd = self._disk.open(self.path, os.O_RDONLY)
            return self._step()
        except OSError as error:
            raise failure(error, "read", self.path, self.position) from error

    def _step(self) -> WalkStep:
        position, self._unread = self.position, 0
        view = self._read(position, min(STEP_BYTES, max(self._wanted_to - position, BATCH_HEADER_SIZE)))
        found = hashes_in(view, position)
        if not found.size and (size := self._wanted(view, position)) > len(view):
            view = self._read(position, size)
            found = hashes_in(view, position)
        if found.size:
            self.position += found.size
            return WalkStep(found.hashes, found.positions, len(view), self._unread)
        self.position = self._next_position(view, position)
        return WalkStep(_NONE, _NONE, len(view), self._unread)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _wanted(self, view: memoryview, position: int) -> int:
        """Return the size of the batch that seems to begin at *position*, if the segment has room for it; else 0."""
        if len(view) < BATCH_HEADER_SIZE or int.from_bytes(view[:4], "little") != BATCH_MAGIC:
            return 0
        size = int.from_bytes(view[_SIZE_OFFSET : _SIZE_OFFSET + 4], "little")
        return size if position + size <= self._end else 0

    def _next_position(self, view: memoryview, position: int) -> int:
        """Return the position of the first batch in *view* behind its first byte; without one, where to look on."""
        for candidate in candidates(view[1:], position + 1):
            try:
                found = view[candidate - position :]
                if len(found) < BATCH_HEADER_SIZE:  # the view ends within the header
                    found = self._read(candidate, BATCH_HEADER_SIZE)
                if size := self._wanted(found, candidate):
                    found = found if size <= len(found) else self._read(candidate, size)
                    validate_stored_header(found, candidate, self._secret, self._store_id)
                    return candidate
            except BadBatch:
                continue
        return position + max(1, len(view) - _SEARCH_OVERLAP) if len(view) > _SEARCH_OVERLAP else self._end

    def _read(self, position: int, size: int) -> memoryview:
        """Return *size* bytes, fewer at the end; zeros for pages that the disk cannot read. Raises OSError."""
        size = max(0, min(size, self._end - position))
        buffer, done = memoryview(bytearray(size)), 0
        while done < size:
            offset = position - self._base + done
            try:
                read = self._disk.preadv(self._fd, [buffer[done:]], offset)
            except OSError as error:
                if error.errno not in BAD_SECTOR:
                    raise
                read = self._read_page(buffer[done:], offset)
            if read <= 0:
                break
            done += read
        return buffer[:done]

    def _read_page(self, buffer: memoryview, offset: int) -> int:
        """Read up to the next page, or leave zeros there; return how many bytes that is."""
        size = min(len(buffer), PAGE - offset % PAGE)
        try:
            return self._disk.preadv(self._fd, [buffer[:size]], offset)
        except OSError as error:
            if error.errno not in BAD_SECTOR:
                raise
            self._unread += size
            return size

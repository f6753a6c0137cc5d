"""The sealed segments of a partition's consumer log: which exist, which are mapped, and how a rotten one is made
again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from qmq.errors import BadBytes, ForeignFile
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY_DTYPE, ENTRY_SIZE
from qmq.storage.consumer_log.active import ActiveRows
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.consumer_log.sealed_segment import SealedSegment
from qmq.storage.consumer_log.subject_lookup import RangeBlocks
from qmq.storage.consumer_log.subject_order import RowRange as RowRange
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure
from qmq.storage.message_log.cold_reads import ColdRead, FileRange, NotInMemory, Residence

#: Sealed segments that are mapped at a time.
MAPPED_SEGMENTS: Final = 64
#: Bytes of entries that are checked at a start, newest first; the others are checked at their first use.
CHECKED_AT_START: Final = 256 << 20

#: Returns the rows of the batches at positions [base, end) again, in order: one tuple or array a batch.
Reread = Callable[[int, int], Iterable[EntryRow | Rows]]


def find_sealed(
    disk: Disk, directory: Path, owner: DerivedHeader, segments: list[tuple[int, int, bool]], covered: int
) -> dict[int, SealedSegment]:
    """Return the segments, of (base, end, sealed), that are sealed, end before *covered* and have good files, by base.

    *owner* is the header that they have to have. Raises StorageFailed.
    """
    found: dict[int, SealedSegment] = {}
    unchecked = CHECKED_AT_START
    for base, end, sealed in reversed(segments):
        if not sealed or end > covered:
            continue
        try:
            segment = SealedSegment.open(disk, directory, owner._replace(base=base), end)
            unchecked -= segment.count * ENTRY_SIZE
            if unchecked >= 0:
                segment.check()
        except (FileNotFoundError, BadBytes, ForeignFile):
            continue
        except OSError as error:
            if error.errno in BAD_SECTOR:  # the file can be made again
                continue
            raise failure(error, "read the entries in", directory, base) from error
        found[base] = segment
    return found


def make_again(disk: Disk, directory: Path, owner: DerivedHeader, end: int, reread: Reread) -> SealedSegment:
    """Write the files of a sealed segment from the message log. Raises StorageFull, StorageFailed or BadBytes."""
    journal = ActiveRows(disk, directory, owner, is_draft=True)
    try:
        for rows in reread(owner.base, end):
            journal.extend(np.array([rows], ENTRY_DTYPE) if isinstance(rows, tuple) else rows)
        journal.freeze()
        journal.seal()
    finally:
        journal.close()
    assert journal.sealed is not None
    return journal.sealed


def seal(disk: Disk, directory: Path, journal: ActiveRows, reread: Reread | None) -> None:
    """[thread] Finish the files of a frozen journal; make them from the message log when they cannot be read back.
    Raises StorageFull, StorageFailed; BadBytes without *reread*.
    """
    if reread is None or not journal.is_rotten:
        try:
            journal.seal()
            return
        except BadBytes:
            if reread is None:
                raise
    journal.sealed = make_again(disk, directory, journal.owner, journal.covered, reread)


class SegmentRead(ColdRead):
    """A sealed segment's files, to be checked before their first use, and made again if they are bad."""

    __slots__ = ("_segment", "_segments")

    def __init__(self, disk: Disk, partition: int, segments: SealedSegments, segment: SealedSegment) -> None:
        super().__init__(disk, partition, [FileRange(segment.path, -1, 0)])
        self._segments = segments
        self._segment = segment

    def step(self) -> bool:
        """[thread] Check both files, and make bad ones again: they are derived, so nothing is lost. Raises
        StorageError.
        """
        self._segments.make_ready(self._segment)
        return False


class SealedSegments:
    """The sealed segments in use, ascending. ``reread`` makes rotten ones again, if it is set."""

    __slots__ = ("_directory", "_disk", "_mapped", "reread", "residence", "segments", "shelves")

    def __init__(self, disk: Disk, directory: Path, reread: Reread | None) -> None:
        self._disk = disk
        self._directory = directory
        self._mapped: deque[SealedSegment] = deque()
        self.reread = reread
        #: Which bytes of the maps are in memory; None while callers may wait for the disk.
        self.residence: Residence | None = None
        self.segments: list[SealedSegment] = []
        #: The index of subjects.
        self.shelves = RangeBlocks(self._touch_order)

    def add(self, segment: SealedSegment) -> None:
        """Append a segment."""
        segment.residence = self.residence
        self.segments.append(segment)
        if segment.count:
            self.shelves.add(segment)

    def remove(self, base: int) -> SealedSegment:
        """Remove the segment at *base*, and return it."""
        removed = self.at(base)
        self.segments.remove(removed)
        if removed in self._mapped:
            self._mapped.remove(removed)
            removed.unmap()
        if removed.count:
            self.shelves.remove(removed)
        return removed

    def at(self, base: int) -> SealedSegment:
        """Return the segment at *base*."""
        return next(segment for segment in self.segments if segment.header.base == base)

    def attend(self, residence: Residence) -> None:
        """Read only what is in memory from now on, unless *residence* allows to wait."""
        self.residence = residence
        for segment in self.segments:
            segment.residence = residence

    def rows_at(self, row: int, stop: int = 0) -> tuple[Rows, int]:
        """Return the array that has a row, and the number of that array's first row; its rows up to *stop* can be read.
        Raises BadBytes, StorageFailed and NotInMemory.
        """
        segment = self.segments[bisect_right(self.segments, row, key=lambda segment: segment.first_row) - 1]
        self._touch(segment)
        segment.need(row - segment.first_row, min(max(stop, row + 1) - segment.first_row, segment.count))
        return segment.rows(), segment.first_row

    def row_at_position(self, position: int) -> int:
        """Return the first row at or behind a position that lies before the end of the last segment. Raises as
        ``rows_at``.
        """
        at = bisect_right(self.segments, position, key=lambda segment: segment.header.base) - 1
        if at < 0:
            return self.segments[0].first_row
        segment = self.segments[at]
        if not segment.count or position >= segment.header.covered:
            return segment.first_row + segment.count
        self._touch(segment)
        return segment.first_row + segment.index_at(position)

    def distrust(self, path: Path) -> None:
        """Have a file checked again before it is used: a part of it cannot be read."""
        for segment in self.segments:
            if path in (segment.path, segment.order_path):
                segment.distrust()

    def make_ready(self, segment: SealedSegment) -> None:
        """[thread] Check the files of a segment, and make bad ones again. Raises StorageError."""
        try:
            segment.make_ready()
        except BadBytes:
            self._repair(segment)
            segment.make_ready()

    def _touch_order(self, row_range: RowRange) -> None:
        """Map a segment and its order, before it is searched for a subject."""
        self._touch(row_range)
        assert isinstance(row_range, SealedSegment)
        if not self._waits() and not row_range.opens_order():
            row_range.distrust()
            self._touch(row_range)

    def _waits(self) -> bool:
        """Return whether callers may wait for the disk."""
        return self.residence is None or self.residence.may_wait

    def unmap(self) -> None:
        """Drop all maps."""
        while self._mapped:
            self._mapped.pop().unmap()

    def _touch(self, row_range: RowRange) -> None:
        """Map a segment that is about to be used, in place of the one that has been mapped longest."""
        assert isinstance(row_range, SealedSegment)
        if row_range.is_mapped:
            return
        if self.residence is not None and not self.residence.may_wait and not row_range.is_ready:
            raise NotInMemory(SegmentRead(self._disk, self.residence.partition, self, row_range))
        try:
            row_range.rows()
        except BadBytes:
            self._repair(row_range)
            row_range.rows()
        self._mapped.append(row_range)
        if len(self._mapped) > MAPPED_SEGMENTS:
            self._mapped.popleft().unmap()

    def _repair(self, segment: SealedSegment) -> None:
        """Make the rotten files of a segment again; if that is impossible, raise BadBytes, and have the next start make
        them.
        """
        segment.unmap()
        if self.reread is None:
            with suppress(OSError):
                self._disk.unlink(segment.path)
            raise BadBytes(f"{segment.path} does not fit its checksum; restart the broker, which makes it again")
        header = segment.header
        made = make_again(self._disk, self._directory, header.unsealed(), header.covered, self.reread)
        if made.header != header:
            raise BadBytes(f"{segment.path} is rotten, and its part of the message log has changed; run qmq verify")
        segment.checked = True

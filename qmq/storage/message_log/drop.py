"""Sealed segments that retention drops: the age, the messages and the bytes of an old segment, and removing its files.

[thread] An OldSegment reads with descriptors of its own, or through maps that nothing else uses, so that a slow disk
does not delay the broker. A removed segment leaves the log at once, and the disk once no checkpoint names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRY_SIZE
from qmq.storage.consumer_log.header import entries_path, order_path
from qmq.storage.consumer_log.sealed_segment import STORED_AT, SealedSegment
from qmq.storage.consumer_log.sealed_set import SealedSegments
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Disk, failure, read_fully
from qmq.storage.key_index.key_file import keys_path
from qmq.storage.message_log.archive_receipt import read_receipt, receipt_path
from qmq.storage.message_log.segment import SegmentOwner, segment_path
from qmq.storage.message_log.sparse_index import index_path
from qmq.storage.types import Hole, SegmentSpan


class Removals:
    """The removed segments of one partition. Belongs to one thread, but for ``clean_up``."""

    def __init__(self, disk: Disk, log: Path, consumer: Path, removed: tuple[Hole, ...], left: list[int]) -> None:
        """*log* and *consumer* are the directories of the files; *removed* and the bases *left* on disk are as of a
        start.
        """
        self._disk = disk
        self._log = log
        self._consumer = consumer
        #: What checkpoints do without: positions [start, end), ascending, never adjacent.
        self.removed = removed
        self._left = dict.fromkeys(left, 0)  # by base: how many checkpoints do without it
        self._unlinked: list[int] = []

    def add(self, before: int, span: SegmentSpan) -> None:
        """Note that a segment has left the log, in which positions up to *before* precede it."""
        self._left[span.base] = 0
        joined = list[Hole]()
        for hole in sorted([*self.removed, Hole(min(before, span.base), span.end)]):
            if joined and hole.start <= joined[-1].end:
                joined[-1] = Hole(joined[-1].start, max(joined[-1].end, hole.end))
            else:
                joined.append(hole)
        self.removed = tuple(joined)

    @property
    def are_pending(self) -> bool:
        """Whether files are still to be removed, so that more checkpoints are needed."""
        return bool(self._left)

    def begin_checkpoint(self) -> list[int]:
        """Return the bases whose files may go once this checkpoint is written: the one before does without them too."""
        return [base for base, checkpoints in self._left.items() if checkpoints]

    def clean_up(self, bases: list[int]) -> None:
        """[thread] Remove the files, once the checkpoint is written. The next one tries again what the system
        refuses.
        """
        for base in bases:
            beside = index_path(self._log, base), receipt_path(self._log, base), keys_path(self._log, base)
            derived = entries_path(self._consumer, base), order_path(self._consumer, base)
            if all(map(self._unlink, (*beside, *derived, segment_path(self._log, base)))):
                self._unlinked.append(base)

    def _unlink(self, path: Path) -> bool:
        try:
            self._disk.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def finish_checkpoint(self) -> None:
        """Note that one more checkpoint does without the removed segments."""
        self._left = {base: checkpoints + 1 for base, checkpoints in self._left.items() if base not in self._unlinked}
        self._unlinked = []


Numbers = npt.NDArray[np.uint32]
Sequences = npt.NDArray[np.uint64]

_NO_STAMP: Final = 0


class SubjectRanges(NamedTuple):
    """Sequences [start, end) of subjects, by number, ascending by (subject, start); adjacent ones are joined."""

    subjects: Numbers
    starts: Sequences
    ends: Sequences


def subject_ranges_of(rows: Rows) -> SubjectRanges:
    """Return the sequences of the messages of rows of one partition, ENTRY_DTYPE[n] in position order."""
    order = np.argsort(rows["subject"], kind="stable")
    subjects, starts = rows["subject"][order], rows["first_sequence"][order]
    ends = starts + rows["count"][order]
    heads = np.ones(len(rows), np.bool_)
    heads[1:] = (subjects[1:] != subjects[:-1]) | (starts[1:] != ends[:-1])
    tails = np.append(heads[1:], np.ones(min(len(rows), 1), np.bool_))
    return SubjectRanges(subjects[heads], starts[heads], ends[tails])


class SegmentToDrop(NamedTuple):
    """The first segment of a partition, which no new group is to begin in."""

    partition: int
    end_row: int
    had: SubjectRanges

    def sequence_behind(self, number: int) -> int:
        """Return the sequence behind the segment's last message of a subject; 0 when it has none."""
        key: Any = np.uint32(number)  # a plain int would make numpy copy the column
        index = int(self.had.subjects.searchsorted(key, "right")) - 1
        return int(self.had.ends[index]) if index >= 0 and int(self.had.subjects[index]) == number else 0


class OldSegment:
    """A sealed segment that may be dropped. Made by ``Store.old_segment``."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        owner: SegmentOwner,
        span: SegmentSpan,
        files: SealedSegments,
        mine: SealedSegment,
    ) -> None:
        self._disk = disk
        self._files = files
        self._mine = mine
        self.path = segment_path(directory, span.base)
        self.partition = owner.partition
        self._owner = owner
        self.span = span

    def stored_until_us(self) -> int:
        """Return when its last batch was stored; 0 when no batch can be read. Raises BadBytes, StorageFailed."""
        count = self._mine.count
        if not count:
            return _NO_STAMP
        offset = DERIVED_HEADER_SIZE + (count - 1) * ENTRY_SIZE
        last = self._read(self._mine.path, ENTRY_SIZE, offset)
        return int(STORED_AT.unpack_from(last)[0])

    def stored_before_us(self, wall_us: int) -> int:
        """Return when its last batch was stored at the latest, by the wall clock, which shows *wall_us*.

        Stamps stay ahead of a clock that was ahead once. Then it is when the file was last written, and if that was by
        the wrong clock too, now; the file keeps that. Raises BadBytes, StorageFailed.
        """
        until_us = self.stored_until_us()
        if until_us <= wall_us:
            return until_us
        try:
            written_us = self._disk.modified_us(self.path)
            if written_us > wall_us:
                self._disk.set_modified(self.path, wall_us)
        except OSError as error:
            raise failure(error, "look at", self.path) from error
        return min(written_us, wall_us)

    def rows(self) -> Rows:
        """Return the rows of its batches, ENTRY_DTYPE[n], checked. Raises BadBytes, StorageFailed."""
        self._files.make_ready(self._mine)
        return SealedSegment(self._disk, self._mine.path.parent, self._mine.header).rows()

    def is_archived(self) -> bool:
        """Return whether a receipt says that an archive has a verified copy of all of it. Raises StorageFailed."""
        try:
            receipt = read_receipt(self._disk, self.path.parent, self.span.base)
        except BadBytes:  # the next run of qmq archive writes it again
            return False
        return receipt is not None and receipt.covers(self._owner, *self.span)

    def read(self, position: int, size: int) -> memoryview:
        """Return *size* bytes of the message log at *position*. Raises BadBytes, StorageFailed."""
        return memoryview(self._read(self.path, size, position - self.span.base))

    def _read(self, path: Path, size: int, offset: int) -> bytes:
        try:
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                data = read_fully(self._disk, fd, size, offset)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise failure(error, "read", path, offset) from error
        if len(data) < size:
            raise BadBytes(f"{path} has no {size} bytes at offset {offset}; run qmq verify")
        return data

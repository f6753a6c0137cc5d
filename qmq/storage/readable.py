"""What is stored, as it is read: subjects, rows, batches, and batches once more from the disk."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import StorageError
from qmq.format.batch import EntryRow, Header, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.free_space import Room
from qmq.storage.message_log.cold_reads import ColdRead, Fetch
from qmq.storage.message_log.drop import SegmentToDrop, SubjectRanges
from qmq.storage.message_log.page_cache import Positions
from qmq.storage.message_log.segment import FileOffset, segment_path
from qmq.storage.message_log.sparse_index import Records, derive_index
from qmq.storage.meta.checkpoint import SegmentSpan
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.opened import OpenedStore
from qmq.storage.partition import Partition
from qmq.storage.recovery.decide import RecoveryReport
from qmq.storage.recovery.sequences import merge_by_sequence
from qmq.storage.verify.scrub import SegmentReader

_CHUNK_ROWS: Final = 4_096

Sequences = npt.NDArray[np.uint64]


class Readable:
    """The part of a Store that reads."""

    def __init__(self, opened: OpenedStore) -> None:
        self._disk: Disk = opened.disk
        self._directory: Path = opened.directory
        self._subjects: SubjectTable = opened.subjects
        self._partitions = [
            Partition(
                opened.disk,
                number,
                part,
                Room(opened.disk, (part.log.directory, opened.directory), opened.options.keep_free_bytes),
            )
            for number, part in enumerate(opened.partitions)
        ]
        self.store_id: bytes = opened.identity.current.store_id
        self.secret: bytes = opened.identity.current.secret
        self.partitions: int = len(self._partitions)
        #: What opening found and did.
        self.recovery: RecoveryReport = opened.report
        #: What ``begin_checkpoint`` was given for the checkpoint that was recovered.
        self.state: dict[str, bytes] = dict(opened.state)
        #: That checkpoint; None when there was none.
        self.state_path: Path | None = opened.state_path
        #: The highest stamp of any batch that is stored; the next must be above it.
        self.last_stored_at_us: int = opened.last_stored_at_us
        self._leaving: SegmentToDrop | None = None

    # --- subjects ----------------------------------------------------------------------------------------------------

    @property
    def subject_count(self) -> int:
        """How many subjects there are; their numbers are below it."""
        return self._subjects.count

    @property
    def has_private(self) -> bool:
        """There are subjects that are one group's alone."""
        return self._subjects.has_private

    @property
    def ends(self) -> Sequences:
        """The next sequence by subject number, u64; use [:subject_count], and take it anew after ``add_subject``."""
        return self._subjects.ends

    @property
    def firsts(self) -> Sequences:
        """The first sequence that is kept, as ``ends``."""
        return self._subjects.firsts

    def subject_number(self, name: str) -> int | None:
        """The number of a subject, None when it does not exist."""
        return self._subjects.number(name)

    def subject_numbers(self, names: Iterable[str]) -> list[int | None]:
        """The number of each of many subjects, None for those that do not exist."""
        return self._subjects.numbers(names)

    def subject_name(self, number: int) -> str:
        """The name of a subject. Raises BadBytes when its record is damaged."""
        return self._subjects.name(number)

    def subjects_under(self, prefix: str, start: int, end: int) -> list[int]:
        """The numbers in [start, end) of subjects whose names start with *prefix*."""
        return self._subjects.under(prefix, start, end)

    def message_count(self, number: int, first: int, end: int) -> int:
        """How many messages the sequences [first, end) of a subject are, gaps left out."""
        return self._subjects.message_count(number, first, end)

    def messages_between(self, firsts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
        """How many messages the sequences [first, end) of all subjects are, gaps left out: int64[subjects] each."""
        return self._subjects.messages_between(firsts, ends)

    # --- reading -----------------------------------------------------------------------------------------------------

    def first_row(self, partition: int) -> int:
        """The number of the first row that can be read."""
        return self._partitions[partition].consumer.first_row

    def offered_row(self, partition: int) -> int:
        """The first row that is for whoever begins now: what is before it is about to go."""
        leaving = self._leaving
        return self.first_row(partition) if leaving is None or leaving.partition != partition else leaving.end_row

    def offered_sequence(self, number: int) -> int:
        """The first sequence of a subject that is for whoever begins now; 0: the first that there is."""
        return 0 if self._leaving is None else self._leaving.sequence_behind(number)

    def leave(self, partition: int, base: int, had: SubjectRanges) -> int:
        """Offer nothing any more of the first segment of a partition, until it is removed: it is read, by who knows
        its messages, as before. The row behind its rows.
        """
        row = self._partitions[partition].consumer.row_behind(base)
        self._leaving = SegmentToDrop(partition, row, had)
        return row

    def stay(self) -> None:
        """Offer all that there is."""
        self._leaving = None

    def visible_row(self, partition: int) -> int:
        """The number of the row after the last that can be read."""
        return self._partitions[partition].consumer.visible_row

    def hidden_since(self, partition: int) -> int | None:
        """When the first batch was stored that cannot be read yet; None when there is none."""
        return self._partitions[partition].consumer.hidden_since()

    def rows(self, partition: int, row: int, limit: int) -> Rows:
        """At most *limit* rows, ENTRY_DTYPE, from *row* on: a view, shorter at borders, empty only at the end."""
        return self._partitions[partition].consumer.rows(row, limit)

    def read_entry(self, partition: int, row: int) -> EntryRow:
        """One row that can be read, in the order of layout.ENTRY."""
        return self._partitions[partition].consumer.read_entry(row)

    def newest_entries(self, partition: int, row: int, most: int) -> list[EntryRow]:
        """All rows from *row* on, where they are some, at most so many, in memory with their batches, and nothing of
        the partition is marked as unreadable.
        """
        part = self._partitions[partition]
        entries = part.consumer.newest_entries(row, most)
        if not entries or part.log.unreadable or entries[0][1] < part.log.hot_from():
            return []
        return entries

    def row_at_position(self, partition: int, position: int) -> int:
        """The first row at or after *position*; ``visible_row`` when there is none."""
        return self._partitions[partition].consumer.row_at_position(position)

    def row_at_time(self, partition: int, stored_at_us: int) -> int:
        """The first row stored at or after a time; ``visible_row`` when there is none."""
        return self._partitions[partition].consumer.row_at_time(stored_at_us)

    def subject_rows(self, number: int, sequence: int, limit: int) -> list[tuple[int, Rows]]:
        """The rows of one subject from the one that contains or follows *sequence* on, in sequence order: pieces of
        (partition, ENTRY_DTYPE[n]), about *limit* rows in all, none only where nothing is left to read.
        """
        found = [
            (part.number, rows)
            for part in self._partitions
            if len(rows := part.consumer.subject_rows(number, sequence, limit))
        ]
        return found if len(found) < 2 else merge_by_sequence(found, limit)

    def sequence_at_time(self, number: int, stored_at_us: int) -> int | None:
        """The first sequence of a subject stored at or after a time, None when there is none."""
        found = [part.consumer.sequence_at_time(number, stored_at_us) for part in self._partitions]
        return min((sequence for sequence in found if sequence is not None), default=None)

    def view(self, partition: int, position: int, size: int) -> memoryview:
        """*size* mapped bytes of the message log; the view pins its map. Raises BadBytes when they are not there, and
        KnownBad when some were marked as unreadable.
        """
        return self._partitions[partition].log.view(position, size)

    def peek(self, partition: int, position: int, size: int) -> memoryview:
        """As ``view``, also of what is not at hand: a few bytes, which are then read at once. Raises StorageFailed."""
        return self._partitions[partition].at_hand.peek(position, size)

    def may_wait(self, wait: bool) -> None:
        """Whether reading may wait for the disk, as it may from the start on. Else what is not in memory is refused:
        rows and lookups raise NotAtHand; ``view`` is asked only for what is at hand.
        """
        for part in self._partitions:
            part.log.residence.may_wait = wait

    def is_at_hand(self, partition: int, position: int, size: int, now_us: int | None = None) -> bool:
        """Whether ``view`` of these bytes waits for no disk. With *now_us* (of a clock that never goes back) what was
        found a moment ago is not asked about again.
        """
        return self._partitions[partition].at_hand.has(position, size, now_us)

    def count_at_hand(self, partition: int, positions: Positions, sizes: Positions, now_us: int | None = None) -> int:
        """How many of these batches, ascending, come before the first of which ``view`` would wait for the disk;
        *now_us* as for ``is_at_hand``.
        """
        return self._partitions[partition].at_hand.count(positions, sizes, now_us)

    def read_of(self, partition: int, positions: Positions, sizes: Positions, *, onward: bool) -> ColdRead:
        """What brings the first of these batches into memory, and some of those behind it. *onward*: what lies behind
        them will be wanted too. Run its ``step`` in a thread, then hand it to ``finish_read``.
        """
        return self._partitions[partition].at_hand.read(positions, sizes, onward=onward)

    def finish_read(self, read: ColdRead) -> list[StorageError]:
        """Take what a ColdRead came upon: what the disk does not give is marked as unreadable. What is new of it."""
        part = self._partitions[read.partition]
        found = []
        for one_range, error in read.unreadable:
            if one_range.position is None:
                part.consumer.distrust(one_range.path)
            elif not part.log.unreadable.add(one_range.position, one_range.size):
                continue
            found.append(error)
        return found

    def mark_unreadable(self, partition: int, position: int, size: int) -> bool:
        """Let ``view`` refuse these bytes while the store is open: somebody found them bad, and tells of it. False
        when they all were marked before. A bounded number is remembered, the ones marked last.
        """
        return self._partitions[partition].log.unreadable.add(position, size)

    def unreadable(self, partition: int, start: int, end: int) -> list[tuple[int, int]]:
        """What of positions [start, end) is marked as unreadable, as (start, end), ascending; they may overlap."""
        return self._partitions[partition].log.unreadable.within(start, end)

    def marked(self) -> list[int]:
        """The partitions that have bytes marked as unreadable."""
        return [part.number for part in self._partitions if len(part.log.unreadable)]

    def count_marks(self, partition: int, positions: Positions, sizes: Positions) -> Positions:
        """How many marks each of these batches has bytes of: i64[n]."""
        return self._partitions[partition].log.unreadable.count_in(positions, positions + sizes)

    def view_marked(self, partition: int, position: int, size: int) -> memoryview:
        """As ``view``, also where bytes are marked: for who has asked which, and does not touch them."""
        return self._partitions[partition].log.view_marked(position, size)

    def file_offset_of(self, partition: int, position: int) -> FileOffset:
        """In which file a position lies, and where."""
        return self._partitions[partition].log.file_offset_of(position)

    def segment_at(self, partition: int, position: int) -> SegmentSpan | None:
        """The segment that holds *position*; None when it is gone."""
        return self._partitions[partition].log.segment_at(position)

    def segments_from(self, partition: int, position: int, limit: int) -> list[SegmentSpan]:
        """At most *limit* segments, ascending, from the first that ends behind *position*; the current one, last, up to
        its end.
        """
        log = self._partitions[partition].log
        first = bisect_right(log.sealed, position, key=lambda span: span.end)
        found = log.sealed[first : first + limit]
        return found if len(found) == limit else [*found, SegmentSpan(log.current.base, log.end)]

    def batches_from(self, partition: int, position: int, limit: int) -> Records:
        """The batches that can be read from *position* on, INDEX_DTYPE[n]: of at most *limit* rows, fewer at borders,
        none only at the end. Raises BadBytes, StorageFailed, NotAtHand.
        """
        consumer = self._partitions[partition].consumer
        return derive_index(consumer.rows(consumer.row_at_position(position), limit))

    def fetch(self, partition: int, position: int, size: int, end: int) -> Fetch | None:
        """Who reads the bytes from *position* on, as they lie: at most *size*, up to *end* and the segment's end. None
        where there are none.
        """
        log = self._partitions[partition].log
        span = log.segment_at(position)
        size = 0 if span is None else min(size, span.end - position, end - position)
        if span is None or size <= 0:
            return None
        return Fetch(
            self._disk, partition, segment_path(log.directory, span.base), position - span.base, size, position
        )

    # --- reading again -----------------------------------------------------------------------------------------------

    def sealed(self, partition: int) -> list[SegmentSpan]:
        """The segments that are not written any more, ascending."""
        return list(self._partitions[partition].log.sealed)

    def written_bytes(self, partition: int) -> int:
        """Bytes of the segment that is written."""
        log = self._partitions[partition].log
        return log.end - log.current.base

    def reader(self, partition: int, position: int) -> SegmentReader:
        """Who reads the segment around *position* from the disk again, in a thread, as far as it is written by now."""
        part = self._partitions[partition]
        span = next(span for span in reversed(part.log.spans()) if span.base <= position)
        holes = [hole for hole in part.holes if span.base <= hole.start < span.end]
        return SegmentReader(self._disk, part.log.directory, span, part.log.owner, self.secret, holes)

    def headers_since(self, positions: list[int]) -> Iterator[tuple[int, Header]]:
        """The headers of the batches from *positions* on, one a partition (left out: all), as (partition, header), in
        the order in which they were stored. Batches that cannot be read any more are left out.
        """
        streams = [
            self._headers(part, positions[part.number] if part.number < len(positions) else 0)
            for part in self._partitions
        ]
        return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda found: found[1].stored_at_us)

    def _headers(self, part: Partition, position: int) -> Iterator[tuple[int, Header]]:
        row, last = part.consumer.row_at_position(position), -1
        while len(rows := part.consumer.rows(row, _CHUNK_ROWS)):
            row += len(rows)
            for file_offset in derive_index(rows)["position"].tolist():
                if file_offset == last:  # its rows lie in two pieces
                    continue
                last = file_offset
                try:
                    header = parse_header(part.log.view(file_offset, BATCH_HEADER_SIZE))
                except StorageError:
                    continue
                if header.magic == BATCH_MAGIC and header.position == file_offset:  # else it has gone bad since
                    yield part.number, header

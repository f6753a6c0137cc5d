"""Read a range of a segment: windows of whole batches, checked and decoded, 64 k rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from qmq.archive.files import Files, Reading
from qmq.archive.segments import Index, SegmentSource, followed
from qmq.errors import BadBatch, BadBytes, StorageError
from qmq.format.batch import header_crc_of, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, HAS_CREATED_AT, HAS_ORIGIN_ID, HAS_SOURCE
from qmq.format.private import is_private
from qmq_spark.columns import OF_MESSAGES, MessageColumns
from qmq_spark.heads import NO_BATCH, Array, Heads, Ints, Subjects, check_headers, read_heads, with_runs, without

#: The bytes of a window; more only for a larger batch.
WINDOW_BYTES: Final = 8 << 20
#: The rows of a record batch.
ROWS: Final = 65_536
#: Batches that are larger than this on average are read one by one if only their heads are needed.
_SPARSE_BYTES: Final = 16 << 10
#: The size of a head with a few runs.
_HEAD_BYTES: Final = 1 << 10


class SegmentRange(NamedTuple):
    """Whole batches of a segment: those that begin at positions [start, end), with the bytes between them."""

    segment: SegmentSource
    start: int
    end: int

    def pieces(self, files: Files) -> Iterator[tuple[Index, int]]:
        """Yield the beginnings of batches in pieces, with the position after each piece. Raises BadBytes,
        StorageFailed.
        """
        return followed(self.segment.pieces(files, self.start, self.end), self.end)


class SegmentDamage(NamedTuple):
    """Bad bytes at positions [start, end) of a partition, and the number of messages they had."""

    file: str
    partition: int
    start: int
    end: int
    #: None if it is unknown.
    messages: int | None
    reason: str

    def __str__(self) -> str:
        count = "an unknown number of" if self.messages is None else f"{self.messages:,}"
        return (
            f"{self.file}: bytes of partition {self.partition} from position {self.start} to {self.end} are bad "
            f"({self.reason}); they had {count} messages"
        )


@dataclass(frozen=True)
class Wanted:
    """The choice of messages to read. Times are microseconds, from (included) and until (excluded); None: no limit."""

    #: Prefixes and subjects of the messages to read.
    prefixes: tuple[str, ...] = ()
    subjects: frozenset[str] | None = None
    private: bool = False
    stored_from: int = 0
    stored_until: int = 1 << 63
    created_from: int = 0
    created_until: int = 1 << 63
    partitions: frozenset[int] | None = None
    #: Messages whose first key is one of these. Segments with a key index are read only where it has one of them.
    keys: frozenset[str] | None = None
    #: Messages with one of these ids; segments are read as for keys.
    ids: frozenset[str] | None = None

    def takes(self, subject: str) -> bool:
        """Return whether messages of *subject* are wanted."""
        if is_private(subject) and not self.private:
            return False
        return (self.subjects is None or subject in self.subjects) and all(map(subject.startswith, self.prefixes))


class RangeReader:
    """Reads ranges of one tree. ``report`` takes each damage."""

    def __init__(
        self, files: Files, wanted: Wanted, schema: pa.Schema, report: Callable[[SegmentDamage], None]
    ) -> None:
        self._files = files
        self._wanted = wanted
        self._schema = schema
        self._report = report
        self._names = Subjects()
        self._takes: list[bool] = []
        #: If no column needs them, bodies and their checksums are not read.
        self._only_heads = not set(schema.names) & OF_MESSAGES

    def record_batches(self, segment_range: SegmentRange) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range. Raises StorageFailed; BadBytes if its file or its index is gone or damaged."""
        try:
            file = self._files.open(segment_range.segment.path)
        except FileNotFoundError as error:
            raise BadBytes(
                f"{segment_range.segment.path} in {self._files.name} is gone; plan the read again"
            ) from error
        try:
            behind = segment_range.start
            for batches, following in segment_range.pieces(self._files):
                first = int(batches["position"][0])
                if behind < first:
                    self._damage(segment_range.segment, behind, first, None, NO_BATCH)
                behind = following
                base = segment_range.segment.base
                for window in _windows(file, base, batches, following, only_heads=self._only_heads):
                    yield from self._of_window(segment_range, window)
            if behind < segment_range.end:
                self._damage(segment_range.segment, behind, segment_range.end, None, NO_BATCH)
        finally:
            file.close()

    def _of_window(self, segment_range: SegmentRange, window: _BatchWindow) -> Iterator[pa.RecordBatch]:
        segment, (view, offsets, positions, ends) = segment_range.segment, window[:4]
        headers, wrong = check_headers(view, offsets, positions, segment.store_id, data=not self._only_heads)
        sizes, counts = headers["size"].tolist(), headers["messages"].tolist()
        for at, (start, end) in enumerate(zip(positions.tolist(), ends.tolist(), strict=True)):
            reason, behind = wrong[at], start + sizes[at]
            if reason is None and behind > end:
                reason = wrong[at] = "it leads past the next batch"
            if reason is not None:
                self._damage(segment, start, end, None if reason == NO_BATCH else counts[at], reason)
            elif behind < end:
                self._damage(segment, behind, end, None, NO_BATCH)
        good = np.array([reason is None for reason in wrong], np.bool_)
        good &= self._in_time(headers)
        heads, bad = read_heads(view, offsets[good], headers[good], self._names)
        for at, reason in bad.items():
            header = heads.headers[at]
            start = int(header["position"])
            self._damage(segment, start, start + int(header["size"]), int(header["messages"]), reason)
        heads = self._of_subjects(without(heads, bad) if bad else heads)
        for part in _groups(heads):
            yield from self._decoded(segment, view, part)

    def _decoded(self, segment: SegmentSource, view: memoryview, heads: Heads) -> Iterator[pa.RecordBatch]:
        messages = MessageColumns(view, heads, self._names.names)
        try:
            made = messages.record_batch(self._schema)
        except BadBatch as error:
            if len(np.unique(heads.batch_of)) > 1:  # find out which of them is bad
                for at in np.unique(heads.batch_of).tolist():
                    yield from self._decoded(segment, view, with_runs(heads, heads.batch_of == at))
                return
            header = heads.headers[int(heads.batch_of[0])]
            start = int(header["position"])
            self._damage(segment, start, start + int(header["size"]), int(header["messages"]), str(error))
            return
        if messages.undecodable:
            positions = messages.positions()
            for message, reason in messages.undecodable:
                place = int(positions[message])
                self._damage(segment, place, place + 1, 1, reason)
            kept = np.ones(len(messages), np.bool_)
            kept[[message for message, _ in messages.undecodable]] = False
            made = made.filter(pa.array(kept))
        for first in range(0, made.num_rows, ROWS):
            yield made.slice(first, ROWS)

    def _in_time(self, headers: Array) -> Any:
        wanted = self._wanted
        stored, created = headers["stored_at_us"], headers["created_at_us"]
        kept = (stored >= np.uint64(wanted.stored_from)) & (stored < np.uint64(wanted.stored_until))
        have_own = (headers["flags"] & HAS_CREATED_AT) != 0  # none is earlier than that of the header
        kept &= (created >= np.uint64(wanted.created_from)) | have_own
        kept &= created < np.uint64(wanted.created_until)
        return kept

    def _of_subjects(self, heads: Heads) -> Heads:
        for name in self._names.names[len(self._takes) :]:
            self._takes.append(self._wanted.takes(name))
        kept = np.array(self._takes, np.bool_)[heads.subjects] if len(heads.subjects) else np.zeros(0, np.bool_)
        return heads if kept.all() else with_runs(heads, kept)

    def _damage(self, segment: SegmentSource, start: int, end: int, messages: int | None, reason: str) -> None:
        file = f"{self._files.name}/{segment.path}"
        self._report(SegmentDamage(file, segment.partition, start, end, messages, reason))


class _BatchWindow(NamedTuple):
    """Batches in memory: their beginnings there and in the log, and the end of each."""

    view: memoryview
    offsets: Ints
    positions: Ints
    ends: Ints


def _windows(file: Reading, base: int, batches: Index, following: int, *, only_heads: bool) -> Iterator[_BatchWindow]:
    """Yield windows of these batches, as many at a time as fit; *following* is the position after them."""
    positions = batches["position"].astype(np.int64)
    ends = np.append(positions[1:], following)
    first = 0
    while first < len(positions):
        start = int(positions[first])
        stop = max(int(np.searchsorted(ends, start + WINDOW_BYTES, "right")), first + 1)
        here = slice(first, stop)
        first = stop
        if only_heads and file.is_near and (int(ends[here][-1]) - start) > _SPARSE_BYTES * (stop - here.start):
            yield _read_heads_of(file, base, positions[here], ends[here])
            continue
        size = int(ends[here][-1]) - start
        if size > WINDOW_BYTES:  # one batch, or bad bytes after one
            size = _size_of(file, start - base, size)
        data = file.read(start - base, size).ljust(size, b"\0")  # the missing end of a file counts as bad bytes
        yield _BatchWindow(memoryview(data), positions[here] - start, positions[here], ends[here])


def _size_of(file: Reading, offset: int, most: int) -> int:
    """Return how much of a large batch to read: all that its header says if that is good."""
    head = file.read(offset, BATCH_HEADER_SIZE)
    if len(head) == BATCH_HEADER_SIZE and (header := parse_header(head)).data_start <= header.size <= most:
        head = file.read(offset, header.data_start)
        if len(head) == header.data_start and header_crc_of(memoryview(head), len(head)) == header.header_crc:
            return header.size
    return BATCH_HEADER_SIZE


def _read_heads_of(file: Reading, base: int, positions: Ints, ends: Ints) -> _BatchWindow:
    """Return the heads of large batches, one after the other."""
    heads, offsets, done = [], [], 0
    for position, end in zip(positions.tolist(), ends.tolist(), strict=True):
        head = file.read(position - base, min(_HEAD_BYTES, end - position)).ljust(BATCH_HEADER_SIZE, b"\0")
        header = parse_header(head)
        # ids, times and sources of copies are columns
        size = header.size if header.flags & (HAS_CREATED_AT | HAS_ORIGIN_ID | HAS_SOURCE) else header.data_start
        if header.magic == BATCH_MAGIC and len(head) < size <= end - position:
            head = file.read(position - base, size).ljust(BATCH_HEADER_SIZE, b"\0")
        heads.append(head)
        offsets.append(done)
        done += len(head)
    return _BatchWindow(memoryview(b"".join(heads)), np.array(offsets, np.int64), positions, ends)


def _groups(heads: Heads) -> Iterator[Heads]:
    """Yield the same runs in groups of about ROWS messages and whole batches."""
    if not len(heads.runs):
        return
    ends = np.cumsum(heads.runs["count"], dtype=np.int64)
    groups = (ends - 1) // ROWS
    if not groups[-1]:
        yield heads
        return
    for group in np.unique(groups).tolist():
        yield with_runs(heads, groups == group)


def unreadable(segment_range: SegmentRange, files: Files, error: StorageError) -> SegmentDamage:
    """Return the damage of a range that cannot be read at all."""
    return SegmentDamage(
        f"{files.name}/{segment_range.segment.path}",
        segment_range.segment.partition,
        segment_range.start,
        segment_range.end,
        None,
        str(error),
    )

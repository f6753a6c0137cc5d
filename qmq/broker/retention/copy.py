"""Read messages of a segment that goes, and make them into batches for one group alone.

[thread] This code reads only the segment's own files and shares no state with the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.message_ranges import PARTITIONS, Rows
from qmq.broker.groups.order_slots import offset_of
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.retention.references import Found, SegmentTarget
from qmq.errors import BadBatch, BadBytes
from qmq.format.batch import clock_us_of, header_crc_of, parse_header
from qmq.format.copies.for_group import Origin, copied_batch, origin_of
from qmq.format.pieces import bad_messages, stored_runs
from qmq.format.private import is_private
from qmq.format.run import Run
from qmq.storage.store import OldSegment

#: About the most bytes and messages of one batch of copies.
_BATCH_BYTES: Final = 1 << 20
_BATCH_MESSAGES: Final = 4_096
#: About the most bytes of copies of one read; the caller asks again for the rest.
_MOST_BYTES: Final = 4 << 20


class CopiedBatch(NamedTuple):
    """A batch of copies of so many messages of the segment."""

    batch: bytearray
    messages: int


class UnreadableMessages(NamedTuple):
    """Messages that cannot be read."""

    messages: MessageRange


#: In the order of the range: copies, ranges that lie elsewhere or are left for later, and lost messages.
Pieces = list[CopiedBatch | MessageRange | UnreadableMessages]


class CopyRequest(NamedTuple):
    """A reference into the segment. *matches* says which subjects its prefix takes, by number; None: all."""

    found: Found
    matches: npt.NDArray[np.bool_] | None


class _Part(NamedTuple):
    """Messages [start, stop) of a row."""

    row: int
    start: int
    stop: int


class CopyRead:
    """One read of the segment's files for several references of a group."""

    def __init__(
        self, old: OldSegment, target: SegmentTarget, next_base: int, group: str, requests: list[CopyRequest]
    ) -> None:
        """*next_base* is where the next segment begins."""
        self._old = old
        self._target = target
        self._next_base = next_base
        self._group = group
        self._requests = requests
        self._size = 0
        self._batch: tuple[int, memoryview] = -1, memoryview(b"")
        self.partition = target.partition
        #: The pieces made for each reference.
        self.made: list[tuple[Found, Pieces]] = []

    def step(self) -> bool:
        """[thread] Do the whole read. Raises StorageError."""
        rows = self._old.rows()
        for found, matches in self._requests:
            if self._size >= _MOST_BYTES:
                break
            self.made.append((found, list(self._pieces(rows, found.messages, matches))))
        return False

    def _pieces(
        self, rows: Rows, messages: MessageRange, matches: npt.NDArray[np.bool_] | None
    ) -> Iterator[CopiedBatch | MessageRange | UnreadableMessages]:
        done = 0
        by_position = messages.log >= PARTITIONS
        for part in self._by_position(rows, messages, matches) if by_position else self._by_sequence(rows, messages):
            if self._size >= _MOST_BYTES and done:
                yield messages.part(done, messages.total)
                return
            if isinstance(part, _Part):
                yield from self._copies(rows[part.row], part, messages, done)
                done += part.stop - part.start
            else:
                yield part
                done += part.total if isinstance(part, MessageRange) else part.messages.total

    # --- find the messages --------------------------------------------------------------------------------------------

    def _by_position(
        self, rows: Rows, messages: MessageRange, matches: npt.NDArray[np.bool_] | None
    ) -> Iterator[_Part | MessageRange | UnreadableMessages]:
        first = int(rows["position"].searchsorted(np.uint64(messages.first)))
        if messages.run and first < len(rows) and int(rows["position"][first]) == messages.first:
            first += messages.run
        numbers = np.arange(first, int(rows["position"].searchsorted(np.uint64(messages.end), "right")))
        if matches is not None:
            numbers = numbers[matches[rows["subject"][numbers]]]
        ends = np.cumsum(rows["count"][numbers], dtype=np.int64)
        inside = int(ends[-1]) if len(ends) else 0
        start, stop = min(messages.skip, inside), min(messages.skip + messages.total, inside)
        place = int(ends.searchsorted(start, "right"))
        while start < stop:
            before = int(ends[place - 1]) if place else 0
            until = min(int(ends[place]), stop)
            yield _Part(int(numbers[place]), start - before, until - before)
            start, place = until, place + 1
        taken = stop - min(messages.skip, inside)
        if taken == messages.total:
            return
        if messages.end < self._next_base:  # rows that were there are gone
            yield UnreadableMessages(messages.part(taken, messages.total))
            return
        skip = max(messages.skip - inside, 0)
        yield MessageRange(messages.log, self._next_base, 0, skip, messages.total - taken, messages.end)

    def _by_sequence(self, rows: Rows, messages: MessageRange) -> Iterator[_Part | MessageRange | UnreadableMessages]:
        start = messages.first + messages.skip
        end, mark = start + messages.total, messages.end
        of_subject = np.flatnonzero(rows["subject"] == messages.log)
        firsts = rows["first_sequence"][of_subject].astype(np.int64)
        behinds = firsts + rows["count"][of_subject]
        for row in of_subject[(behinds > start) & (firsts < end)].tolist():
            first = int(rows["first_sequence"][row])
            behind = first + int(rows["count"][row])
            if start < first:
                yield MessageRange(messages.log, start, 0, 0, first - start, mark)
                start = first
            yield _Part(row, start - first, min(behind, end) - first)
            start = min(behind, end)
        if start < end:
            yield MessageRange(messages.log, start, 0, 0, end - start, mark)

    # --- copy the messages --------------------------------------------------------------------------------------------

    def _copies(
        self, row: np.void, part: _Part, messages: MessageRange, done: int
    ) -> Iterator[CopiedBatch | UnreadableMessages]:
        run = self._run(row)
        if run is None:
            yield UnreadableMessages(messages.part(done, done + part.stop - part.start))
            return
        clock_us = clock_us_of(self._batch[1], parse_header(self._batch[1]))
        passed = 0
        for piece in _sound(run.slice(part.start, part.stop)):
            if isinstance(piece, int):
                yield UnreadableMessages(messages.part(done, done + piece))
                done, passed = done + piece, passed + piece
                continue
            size = len(piece.data)
            step = max(min(_BATCH_MESSAGES, piece.count * _BATCH_BYTES // max(size, 1)), 1)
            for start in range(0, piece.count, step):
                some = piece.slice(start, min(start + step, piece.count))
                origin = self._origin(row, run, part.start + passed + start)
                copy = copied_batch(some, self._group, clock_us, origin, replayed=messages.resent)
                yield CopiedBatch(copy, some.count)
            done, passed = done + piece.count, passed + piece.count
            self._size += size

    def _origin(self, row: np.void, run: Run, index: int) -> Origin:
        """Return the place of message *index* of a row, or of the message that it is a copy of."""
        if not is_private(run.subject):
            return Origin(int(row["stored_at_us"]), offset_of(int(row["run"]), index))
        origin = origin_of(parse_header(self._batch[1]))  # such a batch has one run
        return origin._replace(offset=origin.offset + index)

    def _run(self, row: np.void) -> Run | None:
        """Return the run of a row; None when its bytes are not those that were written."""
        position, size = int(row["position"]), int(row["batch_size"])
        if self._batch[0] != position:
            try:
                self._batch = position, self._old.read(position, size)
            except BadBytes:
                return None
        batch = self._batch[1]
        header = parse_header(batch)
        try:
            if header.data_start > size or header_crc_of(batch, header.data_start) != header.header_crc:
                return None
            return stored_runs(batch, header)[int(row["run"])]
        except BadBatch:
            return None


def _sound(run: Run) -> Iterator[Run | int]:
    """Yield the parts of a run whose messages fit their checksums, and for the bad ones between them their number."""
    bad = bad_messages(run)
    if bad is None:
        yield run.count
        return
    start = 0
    for index in [*bad, run.count]:
        if start < index:
            yield run.slice(start, index)
        if index < run.count:
            yield 1
        start = index + 1

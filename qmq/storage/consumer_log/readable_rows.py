"""The rows of one partition as they are read: by row, by place, by time, by subject. consumer_log.py adds them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY, ENTRY_SIZE
from qmq.storage.consumer_log.active import Journal
from qmq.storage.consumer_log.sealed_segment import NO_ROWS, PLACE, SEQUENCES, STORED_AT
from qmq.storage.consumer_log.sealed_set import SealedSegments
from qmq.storage.consumer_log.subject_lookup import Found, Shelves, in_stretch, no_touch, take
from qmq.storage.consumer_log.subject_order import BLOCK_ROWS, Rows
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.cold_reads import Residence

_unpack_from: Final = ENTRY.unpack_from


class ReadableRows:
    """See ConsumerLog, which fills it in: the rows [``first_row``, ``visible_row``) can be read."""

    __slots__ = (
        "_data", "_disk", "_frozen", "_journal", "_residence", "_retired", "_sealed", "buffer_row", "end_row",
        "first_row", "visible_row",
    )  # fmt: skip

    _disk: Disk
    _residence: Residence | None
    #: Segments whose files are finished, those that were rolled, and the one that is being written.
    _sealed: SealedSegments
    _frozen: list[Journal]
    _journal: Journal
    #: Its buffer.
    _data: memoryview
    #: Descriptors of sealed segments that a checkpoint may be syncing.
    _retired: list[int]
    #: The number of the first row, of the row after the last that can be read, and of the row after the last.
    first_row: int
    visible_row: int
    end_row: int
    #: The rows from here on are in the buffer.
    buffer_row: int

    def attend(self, residence: Residence) -> None:
        """Look at nothing that is not in memory, unless *residence* allows to wait: reading raises NotAtHand then."""
        self._residence = residence
        for journal in (*self._frozen, self._journal):
            journal.residence = residence
        self._sealed.attend(residence)

    def distrust(self, path: Path) -> None:
        """A part of that file cannot be read: it is made again before it is used, where it is a sealed segment's."""
        self._sealed.distrust(path)

    def _settle(self) -> None:
        """Go over to the sealed files that ``seal_pending`` has finished."""
        while self._frozen and (sealed := self._frozen[0].sealed) is not None:
            sealed.first_row = self._frozen[0].first_row  # its header says what that was at first
            self._sealed.add(sealed)
            self._retired.append(self._frozen.pop(0).retire())

    # --- reading by row --------------------------------------------------------------------------------------------

    def hidden_since(self) -> int | None:
        """When the first of the rows was stored that cannot be read yet; None when there is none."""
        return self._stored_at(self.visible_row) if self.visible_row < self.end_row else None

    def rows(self, row: int, limit: int) -> Rows:
        """At most *limit* rows from number *row* on: fewer where a segment or the buffer ends, none only where nothing
        is left to read. A view, never a copy. Raises BadBytes or StorageFailed for rows of sealed segments.
        """
        stop = min(row + limit, self.visible_row)
        if row >= stop:
            return NO_ROWS
        rows, start = self._rows_at(row, stop)
        return rows[row - start : stop - start]

    def read_entry(self, row: int) -> EntryRow:
        """One row that can be read, as a tuple in the order of layout.ENTRY. Raises as ``rows`` does."""
        if row >= self.buffer_row:
            return _unpack_from(self._data, (row - self.buffer_row) * ENTRY_SIZE)
        rows, start = self._rows_at(row)
        return _unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)

    def newest_entries(self, row: int, most: int) -> list[EntryRow]:
        """All rows from number *row* on that can be read, where they are some, at most so many, and in the buffer."""
        end, buffer = self.visible_row, self.buffer_row
        if not row < end <= row + most or row < buffer:
            return []
        return [_unpack_from(self._data, at * ENTRY_SIZE) for at in range(row - buffer, end - buffer)]

    def rows_since(self, position: int) -> Iterator[Rows]:
        """All rows of batches at or behind *position*, also those that cannot be read yet. Raises as ``rows`` does."""
        stored = range(self.first_row, self.end_row)
        row = self.first_row + bisect_left(stored, position, key=lambda row: self._place(row)[0])
        while row < self.end_row:
            rows, start = self._rows_at(row)
            rows = rows[row - start : self.end_row - start]
            yield rows
            row += len(rows)

    def rows_between(self, start: int, end: int) -> Iterator[Rows]:
        """The rows of batches at positions [start, end) that can be read, in pieces. Raises as ``rows`` does."""
        row, stop = self.row_at_position(start), self.row_at_position(end)
        while row < stop:
            rows = self.rows(row, min(BLOCK_ROWS, stop - row))
            row += len(rows)
            yield rows

    def row_at_position(self, position: int) -> int:
        """The first row at or after *position* that can be read; ``visible_row`` when there is none. About 50 us."""
        readable = range(self.first_row, self.visible_row)
        return self.first_row + bisect_left(readable, position, key=lambda row: self._place(row)[0])

    def row_at_time(self, stored_at_us: int) -> int:
        """The first row stored at or after a time that can be read; ``visible_row`` when there is none. About 50 us."""
        readable = range(self.first_row, self.visible_row)
        return self.first_row + bisect_left(readable, stored_at_us, key=self._stored_at)

    def _place(self, row: int) -> tuple[int, int]:
        """Where the batch of a row begins, and its size."""
        if row >= self.buffer_row:
            return PLACE.unpack_from(self._data, (row - self.buffer_row) * ENTRY_SIZE)
        rows, start = self._rows_at(row)
        return PLACE.unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)

    def _stored_at(self, row: int) -> int:
        rows, start = self._rows_at(row)
        return int(STORED_AT.unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)[0])

    def _rows_at(self, row: int, stop: int = 0) -> tuple[Rows, int]:
        """The array that holds a row, and the number of that array's first row; those up to *stop* that it holds too
        can be looked at.
        """
        stop = max(stop, row + 1)
        journal = self._journal
        if row < journal.first_row:
            for journal in reversed(self._frozen):
                if row >= journal.first_row:
                    break
            else:
                return self._sealed.rows_at(row, stop)
        journal.need(row - journal.first_row, stop - journal.first_row)
        rows, start = journal.rows_at(row - journal.first_row)
        return rows, journal.first_row + start

    # --- reading by subject ----------------------------------------------------------------------------------------

    def subject_rows(self, number: int, sequence: int, limit: int) -> Rows:
        """At most *limit* rows of one subject in sequence order, from the one that contains or follows *sequence*:
        fewer only when there are no more to read. A view where they lie together. Raises as ``rows`` does.

        6 to 8 us where the subject's next row is among the last 65,536 of the partition. Otherwise the first call
        builds what lookup.py keeps, 2 ms a segment of 100,000 subjects; then 40 us with 10 segments, 115 with 100, of
        which 64 are mapped at a time; and 3 us, or 15 where it has to be mapped, for each more segment that rows come
        from. The number of subjects does not matter.
        """
        parts: list[Rows] = []
        for found in self._from_sequence(number, sequence):
            part = take(found, self.visible_row, limit)
            if part is None:
                break
            parts.append(part)
            limit -= len(part)
            if limit <= 0:
                break
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else NO_ROWS

    def sequence_at_time(self, number: int, stored_at_us: int) -> int | None:
        """The first sequence of a subject stored at or after a time that can be read here, None when there is none."""
        row = self.row_at_time(stored_at_us)
        for found in self._from_row(number, row):
            index = found.span[found.start]
            if found.stretch.first_row + index >= self.visible_row:
                return None
            return int(SEQUENCES.unpack_from(found.stretch.data(), index * ENTRY_SIZE)[0])
        return None

    def _levels(self) -> list[Shelves]:
        self._settle()
        return [self._sealed.shelves, *(journal.shelves for journal in self._frozen), self._journal.shelves]

    def _from_sequence(self, number: int, sequence: int) -> Iterator[Found]:
        recent = self._journal.recent
        span = recent.span(number)
        if not span or SEQUENCES.unpack_from(self._data, span[0] * ENTRY_SIZE)[0] > sequence:
            levels = self._levels()
            start = len(levels) - 1
            while start > 0 and not levels[start].starts_by(number, sequence):
                start -= 1
            for level in levels[start:]:
                yield from level.from_sequence(number, sequence)
        found = in_stretch(recent, number, sequence, no_touch)
        if found is not None:
            yield found

    def _from_row(self, number: int, row: int) -> Iterator[Found]:
        for level in self._levels():
            yield from level.from_row(number, row)
        recent = self._journal.recent
        span = recent.span(number)
        start = bisect_left(span, row - recent.first_row)
        if start < len(span):
            yield Found(recent, span, start)

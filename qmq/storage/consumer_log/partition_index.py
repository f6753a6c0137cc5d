"""The consumer logs of one partition: every run of its message log, found by row, position, time and subject.

    directory/<base:016x>.entries   the rows of one segment, in position order          sealed_segment.py, active.py
    directory/<base:016x>.order     the same rows by subject, once it is sealed         subject_order.py

A row is one run of a batch; rows are numbered through the partition, in position order. All of it is derived from the
message log: deleted and fed again, the files of sealed segments are equal byte for byte. Sends never sync them; the
checkpoint says how far they are good.

Costs: a row added 0.6 us, in arrays 0.12; a range of rows 1 us; the rows of one subject 6 to 8 us where they are among
the last 65,536 of the partition, else 40 us and more (subject_lookup.py), however many subjects there are. Memory: 3
MiB of rows, their index, 2 bytes for each row of a segment that is not sealed, and what subject_lookup.py says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes, StorageError
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY, ENTRY_SIZE
from qmq.storage.consumer_log.active import ActiveRows
from qmq.storage.consumer_log.header import DerivedHeader, delete_others
from qmq.storage.consumer_log.sealed_segment import BATCH_RANGE, NO_ROWS, SEQUENCES, STORED_AT, SealedSegment
from qmq.storage.consumer_log.sealed_set import Reread, SealedSegments, find_sealed, make_again, seal
from qmq.storage.consumer_log.subject_lookup import RangeBlocks, SubjectRows, in_row_range, no_touch, take
from qmq.storage.consumer_log.subject_order import BLOCK_ROWS, Rows
from qmq.storage.disk.disk import Disk, failure
from qmq.storage.message_log.cold_reads import Residence

_unpack_from: Final = ENTRY.unpack_from

#: (base, rows, crc32c): how much of the current segment's file is known to be good.
JournalState = tuple[int, int, int]

#: The newest rows, whose orders are checked when a log is loaded; the others are checked at their first use.
CHECKED_ORDER_ROWS: Final = 1 << 24

_pack_into: Final = ENTRY.pack_into

_NO_NUMBERS: Final = np.empty(0, np.int64)


class ConsumerLog:
    """The rows [``first_row``, ``visible_row``) can be read; the others up to ``end_row`` wait to be published.

    All methods but ``seal_pending`` belong to one thread. Arrays that are returned are read-only and stay good.
    """

    __slots__ = (
        "_data", "_disk", "_frozen", "_is_fed_again", "_journal", "_last_position", "_last_time", "_orders_missing",
        "_partition", "_residence", "_retired", "_sealed", "_started", "_store_id", "buffer_row", "directory",
        "end_row", "first_row", "visible_row",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: Path, partition: int, store_id: bytes) -> None:
        self._disk = disk
        self.directory = directory
        self._partition = partition
        self._store_id = store_id
        self._residence: Residence | None = None
        self._reset(None)

    @classmethod
    def open(cls, disk: Disk, directory: Path, partition: int, store_id: bytes) -> ConsumerLog:
        """Make the directory if it is missing. The log is empty until ``load``. Raises StorageFull or StorageFailed."""
        try:
            disk.mkdir(directory.parent)
            disk.mkdir(directory)
        except OSError as error:
            raise failure(error, "make the directory", directory) from error
        return cls(disk, directory, partition, store_id)

    def _reset(self, reread: Reread | None) -> None:
        self._sealed = SealedSegments(self._disk, self.directory, reread)
        self._orders_missing: list[SealedSegment] = []
        #: The journals of segments that were rolled and are not sealed yet.
        self._frozen: list[ActiveRows] = []
        #: Descriptors of sealed segments that a checkpoint may be syncing.
        self._retired: list[int] = []
        #: The numbers of the first row, of the row after the last that can be read, and of the row after the last.
        self.first_row = self.visible_row = self.end_row = 0
        self._started = False
        #: The rows that come are known to a checkpoint.
        self._is_fed_again = reread is not None
        self._last_position: int | None = None  # of the last row, where it is known without reading it
        self._forget_time()
        self._use(self._new_journal(0, is_draft=False))

    def _forget_time(self) -> None:
        """Forget the last answer of row_at_time, since rows get other numbers."""
        #: The time and the first and last row that it was of, and the answer.
        self._last_time: tuple[tuple[int, int, int], int] = (-1, 0, 0), 0

    def _header(self, base: int) -> DerivedHeader:
        return DerivedHeader(self._partition, self._store_id, False, base, 0, 0, self.end_row, 0)

    def _use(self, journal: ActiveRows) -> None:
        """Add rows to *journal* from here on."""
        journal.residence = self._residence
        self._journal = journal
        self._data = journal.data
        #: Rows from here on are in the buffer of the journal.
        self.buffer_row = journal.first_row + journal.sorted_count

    def attend(self, residence: Residence) -> None:
        """Read only what is in memory from now on, unless *residence* allows to wait: reading raises NotInMemory
        then.
        """
        self._residence = residence
        for journal in (*self._frozen, self._journal):
            journal.residence = residence
        self._sealed.attend(residence)

    def distrust(self, path: Path) -> None:
        """Have a file of a sealed segment made again before it is used: a part of it cannot be read."""
        self._sealed.distrust(path)

    def _settle(self) -> None:
        """Switch to the sealed files that ``seal_pending`` has finished."""
        while self._frozen and (sealed := self._frozen[0].sealed) is not None:
            sealed.first_row = self._frozen[0].first_row  # the header has the number from before removals
            self._sealed.add(sealed)
            self._retired.append(self._frozen.pop(0).retire())

    # --- after a start ---------------------------------------------------------------------------------------------

    def load(
        self,
        segments: list[tuple[int, int, bool]],
        covered: int,
        journal: JournalState | None = None,
        reread: Reread | None = None,
        *,
        renumber: bool = False,
    ) -> int:
        """Load the good part of the files, and return the position from which rows are to be fed again.

        *segments* are (base, end, sealed) of the message log, ascending. Nothing at or past position *covered* (of the
        checkpoint, a batch's start) is used; *journal* is what ``journal_state`` returned for it, without which the
        segment that was being written is fed again. The loaded rows are published.

        The position is a batch's start: the base of a segment, or within the segment that is written on; from there
        call ``append`` for every batch and ``roll`` where a later segment begins. A sealed segment with bad files is
        made again by *reread* alone; without it everything from that segment on is to be fed. With *reread*, call
        ``settle_claimed`` once all before *covered* has been fed. Files of other segments are deleted. With *renumber*,
        after segments were removed, files may give their rows other numbers. Raises StorageFull or StorageFailed.
        """
        self._reset(reread)
        found = find_sealed(self._disk, self.directory, self._header(0), segments, covered)
        for base, end, sealed in segments:
            segment = found.get(base)
            if segment is None and reread is not None and sealed and end <= covered:
                segment = make_again(self._disk, self.directory, self._header(base), end, reread)
            if segment is not None and renumber:
                segment.first_row = self.end_row
            if segment is None or (self._sealed.segments and segment.first_row != self.end_row):
                position = self._resume(base, covered, journal, renumber=renumber)
                break
            if not self._sealed.segments:
                self.first_row = segment.first_row
            self.end_row = segment.first_row + segment.count
            self._sealed.add(segment)
        else:
            position = segments[-1][1] if segments else 0
        self._clean()
        self.visible_row = self.end_row
        self._orders_missing = [
            segment
            for segment in self._sealed.segments
            if not segment.has_order(check=self.end_row - segment.first_row <= CHECKED_ORDER_ROWS)
        ]
        return position

    def _resume(self, base: int, covered: int, state: JournalState | None, *, renumber: bool) -> int:
        """Go on in the segment at *base*, with the good part of its journal; see ``load`` for the result."""
        has_rows = state is None or state[0] != base or state[1] > 0  # the file that the checkpoint knows
        journal = self._new_journal(base, is_draft=self._is_fed_again and has_rows)
        position = base
        if state is not None and state[0] == base and journal.resume(*state[1:], covered, renumber=renumber):
            position = journal.end()
        self.end_row = journal.first_row + journal.count
        self._started = True
        self._use(journal)
        return position

    def _new_journal(self, base: int, *, is_draft: bool) -> ActiveRows:
        return ActiveRows(self._disk, self.directory, self._header(base), is_draft=is_draft)

    def settle_claimed(self) -> None:
        """Bring the rows that were fed again to the disk, in files that get their names then: the checkpoint that knows
        them has to hold after a loss of power. Never fails: the next checkpoint tries again. No checkpoint knows the
        rows that come from here on.
        """
        self._is_fed_again = False
        for journal in (*self._frozen, self._journal):
            if journal.is_draft and journal.count:
                with suppress(StorageError, OSError):
                    journal.sync(journal.flush())

    def _clean(self) -> None:
        """Delete the files of segments that are gone, and of the one that is fed again."""
        in_use = {path.name for segment in self._sealed.segments for path in (segment.path, segment.order_path)}
        if self._journal.count:
            in_use.add(self._journal.path.name)
        delete_others(self._disk, self.directory, in_use)

    # --- adding ----------------------------------------------------------------------------------------------------

    def append(self, rows: EntryRow | Rows) -> None:
        """Add the rows of one batch, in order: one tuple, or ENTRY_DTYPE[n]. Never fails; see ``waiting_blocks``."""
        journal = self._journal
        if type(rows) is tuple:
            fill = journal.fill
            if fill == BLOCK_ROWS:
                journal.sort_buffer()
                self._use(journal)
                fill = 0
            _pack_into(self._data, fill * ENTRY_SIZE, *rows)
            journal.fill = fill + 1
            self.end_row += 1
            self._last_position = rows[1]
        else:
            journal.extend(rows)  # type: ignore[arg-type]  # type() does not narrow the other branch
            self._use(journal)
            self.end_row += len(rows)
            self._last_position = None

    def publish(self, position: int) -> None:
        """Let the rows of batches before *position* be read; rows once published stay so."""
        end = self.end_row
        if self.visible_row < end:
            last = self._last_position
            if (self._batch_range(end - 1)[0] if last is None else last) < position:
                self.visible_row = end
            else:
                waiting = range(self.visible_row, end)
                self.visible_row += bisect_left(waiting, position, key=lambda row: self._batch_range(row)[0])

    def roll(self, base: int) -> None:
        """End the full segment, and begin the next one at *base*. Never fails.

        Its rows go to the file here; ``seal_pending`` sorts them, 100 ms for a million, and syncs.
        """
        self._settle()
        if self._started:
            assert base > self._journal.base, "segments are rolled in order"
            self._journal.freeze()
            self._frozen.append(self._journal)
        self._started = True
        self._use(self._new_journal(base, is_draft=self._is_fed_again))

    def seal_pending(self) -> None:
        """[thread] Finish the files of segments that were rolled, on disk when this returns. Call it before a
        checkpoint that covers them is written: otherwise the next start feeds them again.

        Raises StorageFull or StorageFailed; the next call tries again what was not done.
        """
        for journal in tuple(self._frozen):
            if journal.sealed is None:
                seal(self._disk, self.directory, journal, self._sealed.reread)
        while self._orders_missing:
            with suppress(BadBytes):  # the entries are made again when they are used
                self._orders_missing[-1].write_order()
            self._orders_missing.pop()

    def flush(self) -> list[int]:
        """Write the rows of the segment that is being written; return the descriptors to sync before a checkpoint may
        use ``journal_state``. They stay open until the next ``flush``, or ``close``.

        Raises StorageFull or StorageFailed; nothing is lost then.
        """
        self._close_retired()
        self._settle()
        return [self._journal.flush()] if self._started else []

    @property
    def sync(self) -> Callable[[int], None]:
        """[thread] The function that syncs the descriptors of ``flush``, until the next ``roll``."""
        return self._journal.sync

    def journal_state(self) -> JournalState | None:
        """Return (base, rows, crc32c) of the file of the current segment after the last ``flush``."""
        return (self._journal.base, self._journal.flushed, self._journal.crc) if self._started else None

    @property
    def waiting_blocks(self) -> int:
        """The number of blocks of 65,536 rows (3 MiB) that are only in memory, because the disk takes no writes: store
        no more batches until it is 0.
        """
        return sum(journal.waiting_blocks for journal in (*self._frozen, self._journal))

    def unfinished(self) -> set[int]:
        """Return the bases of closed segments whose files ``seal_pending`` has still to finish."""
        self._settle()
        return {journal.base for journal in self._frozen}

    def row_behind(self, base: int) -> int:
        """Return the number of the row behind the last one of a segment whose files are finished."""
        _, segment = self.sealed_at(base)
        return segment.first_row + segment.count

    def sealed_at(self, base: int) -> tuple[SealedSegments, SealedSegment]:
        """Return the finished files of a segment, and the set that they are in."""
        self._settle()
        return self._sealed, self._sealed.at(base)

    def close(self) -> None:
        """Close the files; rows that were not flushed are not in them. No ``seal_pending`` may be running."""
        self._close_retired()
        for journal in (*self._frozen, self._journal):
            journal.close()
        self._sealed.unmap()

    def _close_retired(self) -> None:
        """Close the files of sealed segments that a checkpoint may have been syncing."""
        while self._retired:
            self._disk.close(self._retired.pop())

    def remove(self, base: int) -> None:
        """Leave the rows of a sealed segment out from now on; if there are rows before them, those behind them get
        lower numbers.

        No ``seal_pending`` may be running.
        """
        self._settle()
        self._forget_time()
        removed = self._sealed.remove(base)
        self._orders_missing = [segment for segment in self._orders_missing if segment is not removed]
        if removed.first_row == self.first_row:
            self.first_row += removed.count
            return
        for segment in self._sealed.segments:
            segment.first_row -= removed.count if segment.header.base > base else 0
        for journal in (*self._frozen, self._journal):
            journal.first_row -= removed.count
        self.buffer_row -= removed.count
        self.visible_row -= removed.count
        self.end_row -= removed.count

    # --- reading by row --------------------------------------------------------------------------------------------

    def hidden_since(self) -> int | None:
        """Return when the first row that cannot be read yet was stored; None when there is none."""
        return self._stored_at(self.visible_row) if self.visible_row < self.end_row else None

    def rows(self, row: int, limit: int) -> Rows:
        """Return at most *limit* rows from number *row* on: fewer where a segment or the buffer ends, none only where
        nothing is left to read. A view, never a copy. Raises BadBytes or StorageFailed for rows of sealed segments.
        """
        stop = min(row + limit, self.visible_row)
        if row >= stop:
            return NO_ROWS
        rows, start = self._rows_at(row, stop)
        return rows[row - start : stop - start]

    def read_entry(self, row: int) -> EntryRow:
        """Return one row that can be read, as a tuple in the order of layout.ENTRY. Raises as ``rows`` does."""
        if row >= self.buffer_row:
            return _unpack_from(self._data, (row - self.buffer_row) * ENTRY_SIZE)
        rows, start = self._rows_at(row)
        return _unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)

    def newest_entries(self, row: int, most: int) -> list[EntryRow]:
        """Return all readable rows from number *row* on, if there are 1 to *most* and all are in the buffer; else
        none.
        """
        end, buffer = self.visible_row, self.buffer_row
        if not row < end <= row + most or row < buffer:
            return []
        return [_unpack_from(self._data, at * ENTRY_SIZE) for at in range(row - buffer, end - buffer)]

    def rows_since(self, position: int) -> Iterator[Rows]:
        """Yield all rows of batches at or behind *position*, also those that cannot be read yet. Raises as ``rows``."""
        stored = range(self.first_row, self.end_row)
        row = self.first_row + bisect_left(stored, position, key=lambda row: self._batch_range(row)[0])
        while row < self.end_row:
            rows, start = self._rows_at(row)
            rows = rows[row - start : self.end_row - start]
            yield rows
            row += len(rows)

    def rows_between(self, start: int, end: int) -> Iterator[Rows]:
        """Yield the readable rows of batches at positions [start, end), in pieces. Raises as ``rows`` does."""
        row, stop = self.row_at_position(start), self.row_at_position(end)
        while row < stop:
            rows = self.rows(row, min(BLOCK_ROWS, stop - row))
            row += len(rows)
            yield rows

    def row_at_position(self, position: int) -> int:
        """Return the first readable row at or after *position*; ``visible_row`` when there is none. About 50 us."""
        first, visible = self.first_row, self.visible_row
        oldest = self._frozen[0] if self._frozen else self._journal
        if position < oldest.base and self._sealed.segments:
            return min(max(self._sealed.row_at_position(position), first), visible)
        first = min(max(first, oldest.first_row), visible)
        return first + bisect_left(range(first, visible), position, key=lambda row: self._batch_range(row)[0])

    def row_at_time(self, stored_at_us: int) -> int:
        """Return the first readable row stored at or after a time; ``visible_row`` when there is none. About 50 us."""
        first, visible = self.first_row, self.visible_row
        if stored_at_us <= 0 or first >= visible:
            return first
        asked = stored_at_us, first, visible
        if self._last_time[0] == asked:  # of many subjects the same time is looked for
            return self._last_time[1]
        if self._stored_at(visible - 1) < stored_at_us:
            row = visible  # as of most searches
        else:
            row = first + bisect_left(range(first, visible - 1), stored_at_us, key=self._stored_at)
        self._last_time = asked, row
        return row

    def _batch_range(self, row: int) -> tuple[int, int]:
        """Return position and size of the batch of a row."""
        if row >= self.buffer_row:
            return BATCH_RANGE.unpack_from(self._data, (row - self.buffer_row) * ENTRY_SIZE)
        rows, start = self._rows_at(row)
        return BATCH_RANGE.unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)

    def _stored_at(self, row: int) -> int:
        rows, start = self._rows_at(row)
        return int(STORED_AT.unpack_from(rows.data.cast("B"), (row - start) * ENTRY_SIZE)[0])

    def _rows_at(self, row: int, stop: int = 0) -> tuple[Rows, int]:
        """Return the array that has a row, and the number of that array's first row; its rows up to *stop* can be read
        without a wait.
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
        """Return at most *limit* rows of one subject in sequence order, from the one that contains or follows
        *sequence*: fewer only when there are no more to read. A view where they are adjacent. Raises as ``rows`` does.

        6 to 8 us where the subject's next row is among the last 65,536 of the partition. Otherwise the first call
        builds the shelves of subject_lookup.py, 2 ms a segment of 100,000 subjects; then 40 us with 10 segments, 115
        with 100, of which 64 are mapped at a time; and 3 us, or 15 where it has to be mapped, for each further segment
        that rows come from. The number of subjects does not matter.
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

    def subject_rows_between(self, number: int, row: int, end: int, limit: int) -> tuple[npt.NDArray[np.int64], Rows]:
        """Return the numbers of at most *limit* of the readable rows [row, end) of one subject, ascending, and these
        rows. Raises as ``rows`` does.
        """
        numbers, parts, stop = list[npt.NDArray[np.int64]](), list[Rows](), min(end, self.visible_row)
        for found in self._from_row(number, row):
            part = take(found, stop, limit)
            if part is None:
                break
            indexes = found.span[found.start : found.start + len(part)]
            numbers.append(np.asarray(indexes, np.int64) + found.row_range.first_row)
            parts.append(part)
            limit -= len(part)
            if limit <= 0:
                break
        return (np.concatenate(numbers), np.concatenate(parts)) if parts else (_NO_NUMBERS, NO_ROWS)

    def sequence_at_time(self, number: int, stored_at_us: int) -> int | None:
        """Return the first readable sequence of a subject stored at or after a time; None when there is none."""
        row = self.row_at_time(stored_at_us)
        for found in self._from_row(number, row):
            index = found.span[found.start]
            if found.row_range.first_row + index >= self.visible_row:
                return None
            return int(SEQUENCES.unpack_from(found.row_range.data(), index * ENTRY_SIZE)[0])
        return None

    @property
    def look_up_us(self) -> int:
        """How many microseconds a look-up of a subject may take beside the usual, as few were made before."""
        return sum(level.question_us for level in self._levels())

    def _levels(self) -> list[RangeBlocks]:
        self._settle()
        return [self._sealed.shelves, *(journal.shelves for journal in self._frozen), self._journal.shelves]

    def _from_sequence(self, number: int, sequence: int) -> Iterator[SubjectRows]:
        recent = self._journal.recent
        span = recent.span(number)
        if not span or SEQUENCES.unpack_from(self._data, span[0] * ENTRY_SIZE)[0] > sequence:
            levels = self._levels()
            start = len(levels) - 1
            while start > 0 and not levels[start].starts_by(number, sequence):
                start -= 1
            for level in levels[start:]:
                yield from level.from_sequence(number, sequence)
        found = in_row_range(recent, number, sequence, no_touch)
        if found is not None:
            yield found

    def _from_row(self, number: int, row: int) -> Iterator[SubjectRows]:
        for level in self._levels():
            yield from level.from_row(number, row)
        recent = self._journal.recent
        span = recent.span(number)
        start = bisect_left(span, row - recent.first_row)
        if start < len(span):
            yield SubjectRows(recent, span, start)

"""Consumer-log rows made from stored batches: recovery makes the rows that the broker made when it stored the batch."""

from __future__ import annotations

from typing import Final, NamedTuple

from qmq.format.batch import (
    EntryRow,
    Header,
    entries_of,
    entry_flags,
    numbers_by_run,
    parse_header,
    runs_of,
    stored_names,
)
from qmq.format.layout import BATCH_HEADER_SIZE, LANE_NORMAL, RUN, RUN_SIZE
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.meta.subjects import SubjectTable

_ONE_RUN_TABLE: Final = BATCH_HEADER_SIZE + RUN_SIZE
#: How many tables that name one subject are remembered while a log is replayed, and the bytes of the largest.
_TABLES_KEPT: Final = 1 << 17
_TABLE_BYTES_KEPT: Final = 256


class Damaged(NamedTuple):
    """One run of a bad batch whose header is good."""

    subject: int
    first_sequence: int
    end_sequence: int


class RowMaker:
    """Makes consumer-log rows of stored batches, and registers new subjects and lanes."""

    def __init__(self, subjects: SubjectTable) -> None:
        self._subjects = subjects
        self._by_table: dict[bytes, int] = {}
        self._generation = subjects.generation

    def number(self, name: str, lane: int) -> int:
        """Return the number of a lane of a subject, which is registered if it is new."""
        number = self._subjects.number(name, lane)
        return self._subjects.add(name, lane) if number is None else number

    def rows(self, header: Header, batch: memoryview) -> EntryRow | Rows:
        """Return the rows of a valid batch: a tuple when it has one run, else ENTRY_DTYPE[runs]."""
        if self._generation != self._subjects.generation:
            self._generation = self._subjects.generation
            self._by_table.clear()  # a name may have another number now
        if header.runs == 1:
            subject, lane, flags, _, count, _, size, _, first = RUN.unpack_from(batch, BATCH_HEADER_SIZE)
            table = bytes(batch[_ONE_RUN_TABLE : header.data_start])
            number = self._by_table.get(table) if lane == LANE_NORMAL else None
            if number is None:
                number = self.number(stored_names(batch, header)[subject], lane)
                is_kept = lane == LANE_NORMAL and len(table) < _TABLE_BYTES_KEPT and subject == 0
                if is_kept and len(self._by_table) < _TABLES_KEPT:
                    self._by_table[table] = number
            flags = entry_flags(flags, header.flags)
            return (first, header.position, header.stored_at_us, number, count, 0, lane, 1, flags, size, header.size)
        runs = runs_of(batch, header)
        numbers = numbers_by_run(stored_names(batch, header), runs, self.number)
        return entries_of(runs, header, header.position, header.stored_at_us, numbers)

    def damaged(self, prefix: bytes) -> list[Damaged]:
        """Return the runs of a bad batch; *prefix* is its header, runs and table, all good."""
        view = memoryview(prefix)
        rows = self.rows(parse_header(view), view)
        if isinstance(rows, tuple):
            return [Damaged(rows[3], rows[0], rows[0] + rows[4])]
        columns = (rows["subject"].tolist(), rows["first_sequence"].tolist(), rows["count"].tolist())
        return [Damaged(subject, first, first + count) for subject, first, count in zip(*columns, strict=True)]

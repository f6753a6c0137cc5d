"""Rows sorted by subject, so that the rows of one subject are found without looking at others.

A sealed segment has a file ``<base:016x>.order`` beside its entries, for n rows of k subjects:

    header (64)       header.py, magic "QMQORDER"
    subjects u32[k]   the subjects that have rows here, ascending
    starts u32[k+1]   where each subject's part of the permutation begins; the last one is n
    permutation u32[n]  indexes of rows in the segment, sorted by (subject, lane, index)

k follows from the size of the file. Sequences of a consumer log grow with the position, so the order by index is the
order by sequence.

The rows of the segment that is being written (active.py) are sorted in blocks of 65,536, kept in memory as u16. The
newest, in the journal's buffer, have a dict.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRY_SIZE, ORDER_MAGIC
from qmq.storage.consumer_log.header import DerivedHeader, crc_of_body, draft_of, parse_derived
from qmq.storage.disk.disk import Disk, read_fully, write_fully

#: Rows of a block: an index in one takes 16 bits.
BLOCK_ROWS: Final = 65_536
#: The subject of an entry.
SUBJECT: Final = struct.Struct("<24xI")

Rows = npt.NDArray[np.void]
Numbers = npt.NDArray[np.uint32]

_SUBJECT_SHIFT: Final = np.uint64(32)
_LANE_SHIFT: Final = np.uint64(16)


class RowRange(Protocol):
    """Consecutive rows of a partition that can be searched for a subject."""

    @property
    def first_row(self) -> int:
        """The number of the first row in the partition."""

    @property
    def count(self) -> int:
        """The number of rows."""

    def rows(self) -> Rows:
        """Return ENTRY_DTYPE[count]."""

    def data(self) -> memoryview:
        """Return the bytes of rows()."""

    def span(self, subject: int) -> Sequence[int]:
        """Return the indexes in rows() of a subject's rows, ascending."""

    def subjects(self) -> Numbers:
        """Return the subjects that have rows here, some perhaps more than once."""

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) can be read without a wait. Raises NotInMemory or StorageFailed."""


class OrderColumns(NamedTuple):
    """The body of an order file; a block in memory has a narrower permutation."""

    subjects: Numbers
    starts: Numbers
    permutation: Numbers | npt.NDArray[np.uint16]


def sort_block(rows: Rows) -> npt.NDArray[np.uint16]:
    """Return the indexes of at most 65,536 rows sorted by (subject, lane, index): 20 ns a row."""
    keys = rows["subject"].astype(np.uint64)
    keys <<= _SUBJECT_SHIFT
    lanes = rows["lane"].astype(np.uint64)
    lanes <<= _LANE_SHIFT
    keys |= lanes
    keys |= np.arange(len(rows), dtype=np.uint64)
    keys.sort()
    return keys.astype(np.uint16)


def order_block(rows: Rows) -> OrderColumns:
    """Return the order of at most 65,536 rows: 30 ns a row, and 2 bytes a row and 8 a subject of memory."""
    permutation = sort_block(rows)
    subjects, heads, _ = _groups(rows["subject"].take(permutation))
    return OrderColumns(subjects, np.append(heads, len(rows)).astype(np.uint32), permutation)


def _groups(subjects: Numbers) -> tuple[Numbers, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return, for each group of equal subjects in a sorted column, the subject, its first index and its length."""
    heads = np.flatnonzero(np.concatenate(([True], subjects[1:] != subjects[:-1])))
    return subjects[heads], heads, np.diff(heads, append=len(subjects))


def derive_order(rows: Rows) -> OrderColumns:
    """Sort the rows of a segment, a block at a time: beyond the result, memory does not grow with the rows."""
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, len(rows), BLOCK_ROWS)]
    top = max((int(rows["subject"][block].max()) for block in blocks), default=0)
    counts = np.zeros(top + 1, np.uint32)
    for block in blocks:
        of_block = np.bincount(rows["subject"][block])
        counts[: len(of_block)] += of_block.astype(np.uint32)
    subjects = np.flatnonzero(counts).astype(np.uint32)
    starts = np.zeros(len(subjects) + 1, np.uint32)
    np.cumsum(counts[subjects], out=starts[1:])
    free = np.zeros_like(counts)
    free[subjects] = starts[:-1]
    permutation = np.empty(len(rows), np.uint32)
    for block in blocks:
        _place_block(rows[block], block.start, free, permutation)
    if any(rows["lane"][block].any() for block in blocks):
        permutation = np.lexsort((rows["lane"], rows["subject"])).astype(np.uint32)
    return OrderColumns(subjects, starts, permutation)


def _place_block(rows: Rows, start: int, free: Numbers, permutation: Numbers) -> None:
    """Put the rows of one block into the permutation; *free* is the next free index of each subject."""
    block = sort_block(rows)
    subjects, heads, lengths = _groups(rows["subject"].take(block))
    targets = np.repeat(free[subjects] - heads, lengths) + np.arange(len(block))
    permutation[targets] = block.astype(np.uint32) + np.uint32(start)
    free[subjects] += lengths.astype(np.uint32)


def write_order(disk: Disk, path: Path, entries: DerivedHeader, order: OrderColumns) -> None:
    """Write, sync and close the order file of a sealed segment, in place of any that exists. Raises OSError."""
    columns = [column.astype("<u4", copy=False).data.cast("B") for column in order if len(column)]
    crc = 0
    for column in columns:
        crc = crc32c(column, crc)
    temporary = draft_of(path)
    try:
        fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_fully(disk, fd, [entries._replace(body_crc=crc).pack(ORDER_MAGIC), *columns], 0)
            disk.fdatasync(fd)
        finally:
            disk.close(fd)
        disk.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            disk.unlink(temporary)
        raise


def open_order(disk: Disk, path: Path, entries: DerivedHeader, *, check: bool) -> OrderColumns:
    """Map the order file that belongs to a segment's *entries*. Without *check*, when it was checked before, nothing of
    it is read. Raises OSError; BadBytes when it does not fit the entries or its checksum.
    """
    fd = disk.open(path, os.O_RDONLY)
    try:
        size = disk.size(fd)
        subjects, odd = divmod(size - DERIVED_HEADER_SIZE - 4 * (entries.rows + 1), 8)
        if odd or not 0 <= subjects <= entries.rows:
            raise BadBytes(f"{path} does not belong to the entries beside it; delete it, it is made again")
        if check:
            _check_order(disk, fd, path, entries, size - DERIVED_HEADER_SIZE)
        mapped = disk.map(fd, size)
    finally:
        disk.close(fd)
    starts = DERIVED_HEADER_SIZE + 4 * subjects
    return OrderColumns(
        np.frombuffer(mapped, "<u4", subjects, DERIVED_HEADER_SIZE),
        np.frombuffer(mapped, "<u4", subjects + 1, starts),
        np.frombuffer(mapped, "<u4", entries.rows, starts + 4 * (subjects + 1)),
    )


def _check_order(disk: Disk, fd: int, path: Path, entries: DerivedHeader, size: int) -> None:
    header = parse_derived(read_fully(disk, fd, DERIVED_HEADER_SIZE, 0), ORDER_MAGIC, path)
    if header[:-1] != entries[:-1]:
        raise BadBytes(f"{path} does not belong to the entries beside it; delete it, it is made again")
    if crc_of_body(disk, fd, size) != header.body_crc:
        raise BadBytes(f"{path} does not fit its checksum; delete it, it is made again")


#: Called with a part of an order file, counted in numbers of 4 bytes behind its header, before that part is read.
NeedNumbers = Callable[[int, int], None]


def _at_hand(first: int, stop: int) -> None:
    """Do nothing: the order is in memory."""


class Order:
    """An order that is searched. ``span`` costs one binary search over the subjects, about 1 us."""

    __slots__ = ("_need", "_permutation", "_starts", "_subjects")

    def __init__(self, columns: OrderColumns, need: NeedNumbers = _at_hand) -> None:
        self._need = need
        self._subjects = columns.subjects
        self._starts = columns.starts.data
        self._permutation = columns.permutation.data

    def subjects(self) -> Numbers:
        """Return the subjects that have rows, ascending. Raises what *need* does."""
        self._need(0, len(self._subjects))
        return self._subjects

    def span(self, subject: int) -> Sequence[int]:
        """Return the indexes of a subject's rows, ascending. Raises what *need* does."""
        subjects = self.subjects()
        count = len(subjects)
        key: Any = np.uint32(subject)  # a plain int would make numpy copy the column
        index = int(subjects.searchsorted(key))
        if index == count or subjects[index] != subject:
            return ()
        self._need(count + index, count + index + 2)
        start, stop = self._starts[index], self._starts[index + 1]
        self._need(2 * count + 1 + start, 2 * count + 1 + stop)
        return self._permutation[start:stop]


#: Up to this many new rows go into the dict one by one; more are sorted at once.
FEW_ROWS: Final = 4_096


class JournalRows(Protocol):
    """The rows of a segment that is being written: the part of a journal that is used here."""

    #: The number of the first row in the partition, rows before the buffer, rows in it, and its bytes.
    first_row: int
    sorted_count: int
    fill: int
    data: memoryview

    def rows_at(self, index: int) -> tuple[Rows, int]:
        """Return the array that has a row, and the index of that array's first row."""

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) of one array can be read without a wait."""


class Block:
    """65,536 rows of a journal, sorted: 2 bytes a row in memory. ``span`` costs two binary searches, about 10 us."""

    __slots__ = ("_answer", "_asked", "_journal", "_order", "_start", "count", "first_row")

    def __init__(self, journal: JournalRows, start: int, rows: Rows) -> None:
        self._journal = journal
        self._start = start
        self._order = sort_block(rows).data
        self._asked, self._answer = -1, self._order[:0]  # a lookup asks for the same subject several times
        self.first_row = journal.first_row + start
        self.count = len(rows)

    def rows(self) -> Rows:
        """Return ENTRY_DTYPE[count]."""
        rows, start = self._journal.rows_at(self._start)
        return rows[self._start - start : self._start - start + self.count]

    def data(self) -> memoryview:
        """Return the bytes of rows()."""
        return self.rows().data.cast("B")

    def span(self, subject: int) -> Sequence[int]:
        """Return the indexes of a subject's rows, ascending."""
        if subject != self._asked:
            self._asked, self._answer = subject, sorted_span(self._order, self.data(), subject)
        return self._answer

    def subjects(self) -> Numbers:
        """Return the subject of every row."""
        return np.asarray(self.rows()["subject"])

    def need(self, first: int, stop: int) -> None:
        """Do nothing: ``touch`` has made all rows readable."""

    def touch(self) -> None:
        """Return when the whole block can be read without a wait. Raises as need_rows() does."""
        self._journal.need(self._start, self._start + self.count)


def sorted_span(order: memoryview, data: memoryview, subject: int) -> memoryview:
    """Return the part of *order*, indexes of the rows in *data* sorted by subject, that belongs to one subject."""
    unpack = SUBJECT.unpack_from

    def subject_of(index: int) -> int:
        return unpack(data, index * ENTRY_SIZE)[0]  # type: ignore[no-any-return]  # an int, by its layout

    low = bisect_left(order, subject, key=subject_of)
    return order[low : bisect_right(order, subject, low, key=subject_of)]


def touch(block: RowRange) -> None:
    """Touch a block: the callback of shelves (subject_lookup.py)."""
    assert isinstance(block, Block)
    block.touch()


class RecentIndex:
    """The rows in the buffer of a journal, by subject: the last ones in a dict, those before sorted.

    Searches bring it up to date, so that rows that are never searched by subject cost nothing.
    """

    __slots__ = ("_indexed", "_journal", "_late", "_order")

    def __init__(self, journal: JournalRows) -> None:
        self._journal = journal
        self._order: Order | None = None
        self._late: dict[int, list[int]] = {}
        self._indexed = 0

    @property
    def first_row(self) -> int:
        """The row number of the buffer's first row."""
        return self._journal.first_row + self._journal.sorted_count

    @property
    def count(self) -> int:
        """The number of rows in the buffer."""
        return self._journal.fill

    def rows(self) -> Rows:
        """Return ENTRY_DTYPE[count]."""
        return self._journal.rows_at(self._journal.sorted_count)[0]

    def data(self) -> memoryview:
        """Return the bytes of the buffer."""
        return self._journal.data

    def subjects(self) -> Numbers:
        """Return the subject of every row."""
        return np.asarray(self.rows()["subject"])

    def need(self, first: int, stop: int) -> None:
        """Do nothing: the buffer is in memory."""

    def span(self, subject: int) -> Sequence[int]:
        """Return the indexes of a subject's rows, ascending: 0.1 us a row added since the last call, at most 2 ms."""
        if self._indexed < self._journal.fill:
            self._catch_up()
        late: Sequence[int] = self._late.get(subject, ())
        if self._order is None:
            return late
        early = self._order.span(subject)
        return [*early, *late] if late else early

    def _catch_up(self) -> None:
        start, fill = self._indexed, self._journal.fill
        self._indexed = fill
        if fill - start > FEW_ROWS:
            self._order = Order(order_block(self.rows()))
            self._late.clear()
            return
        late = self._late
        for index, number in enumerate(self.subjects()[start:].tolist(), start):
            if number in late:
                late[number].append(index)
            else:
                late[number] = [index]

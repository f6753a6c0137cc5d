"""Rows sorted by subject: how the rows of one subject are found without looking at the others'.

The file ``<base:016x>.order`` stands beside the entries of a sealed segment, n rows of k subjects:

    header (64)       derived.py, magic "QMQORDER"
    subjects u32[k]   the subjects that have rows here, ascending
    starts u32[k+1]   where each subject's part of the permutation begins; the last one is n
    permutation u32[n]  indexes of rows in the segment, sorted by (subject, lane, index)

k follows from the size of the file. Sequences of a consumer log grow with the position, so the order by index is the
order by sequence. Rows of the segment that is being written are sorted in blocks of 65,536, kept in memory as u16.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, ORDER_MAGIC
from qmq.storage.consumer_log.header import DerivedHeader, crc_of_body, parse_derived
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
    """Consecutive rows of a partition that can be asked for one subject's."""

    @property
    def first_row(self) -> int:
        """The number of the first row in the partition."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def rows(self) -> Rows:
        """ENTRY_DTYPE[count]."""

    def data(self) -> memoryview:
        """The bytes of rows()."""

    def span(self, subject: int) -> Sequence[int]:
        """The indexes in rows() of a subject's rows, ascending."""

    def subjects(self) -> Numbers:
        """The subjects that have rows here, some perhaps more than once."""

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) can be looked at without a wait. Raises NotAtHand or StorageFailed."""


class OrderColumns(NamedTuple):
    """The body of an order file; that of a block in memory has a narrower permutation."""

    subjects: Numbers
    starts: Numbers
    permutation: Numbers | npt.NDArray[np.uint16]


def sort_block(rows: Rows) -> npt.NDArray[np.uint16]:
    """Indexes of at most 65,536 rows sorted by (subject, lane, index): 20 ns a row."""
    keys = rows["subject"].astype(np.uint64)
    keys <<= _SUBJECT_SHIFT
    lanes = rows["lane"].astype(np.uint64)
    lanes <<= _LANE_SHIFT
    keys |= lanes
    keys |= np.arange(len(rows), dtype=np.uint64)
    keys.sort()
    return keys.astype(np.uint16)


def order_block(rows: Rows) -> OrderColumns:
    """The order of at most 65,536 rows: 30 ns a row, and 2 bytes a row and 8 a subject of memory."""
    permutation = sort_block(rows)
    subjects, heads, _ = _groups(rows["subject"].take(permutation))
    return OrderColumns(subjects, np.append(heads, len(rows)).astype(np.uint32), permutation)


def _groups(subjects: Numbers) -> tuple[Numbers, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The groups of equal subjects in a sorted column: which, where each begins, and how long it is."""
    heads = np.flatnonzero(np.concatenate(([True], subjects[1:] != subjects[:-1])))
    return subjects[heads], heads, np.diff(heads, append=len(subjects))


def derive_order(rows: Rows) -> OrderColumns:
    """Sort the rows of a segment, a block at a time: beyond the result, memory does not grow with the rows."""
    blocks = [slice(start, start + BLOCK_ROWS) for start in range(0, len(rows), BLOCK_ROWS)]
    top = max((int(rows["subject"][block].max()) for block in blocks), default=0)
    counts = np.zeros(top + 1, np.uint32)
    for block in blocks:
        found = np.bincount(rows["subject"][block])
        counts[: len(found)] += found.astype(np.uint32)
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
    """Put the rows of one block into the permutation; *free* says where each subject's next one goes."""
    block = sort_block(rows)
    subjects, heads, lengths = _groups(rows["subject"].take(block))
    places = np.repeat(free[subjects] - heads, lengths) + np.arange(len(block))
    permutation[places] = block.astype(np.uint32) + np.uint32(start)
    free[subjects] += lengths.astype(np.uint32)


def write_order(disk: Disk, path: Path, entries: DerivedHeader, order: OrderColumns) -> None:
    """Write, sync and close the order file of a sealed segment. A file that is there is replaced. Raises OSError."""
    columns = [column.astype("<u4", copy=False).data.cast("B") for column in order if len(column)]
    crc = 0
    for column in columns:
        crc = crc32c(column, crc)
    temporary = path.with_name(path.name + ".tmp")
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
    """Map the order file that belongs to a segment's *entries*; without *check*, which has been done before then,
    nothing of it is read. Raises OSError; BadBytes when it does not fit them or its checksum.
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


#: Called with a part of an order file, in numbers of 4 bytes behind its header, before it is looked at.
NeedNumbers = Callable[[int, int], None]


def _at_hand(first: int, stop: int) -> None:
    """For what is always in memory."""


class Order:
    """An order in use. ``span`` costs one binary search over the subjects, about 1 us."""

    __slots__ = ("_need", "_permutation", "_starts", "_subjects")

    def __init__(self, columns: OrderColumns, need: NeedNumbers = _at_hand) -> None:
        self._need = need
        self._subjects = columns.subjects
        self._starts = columns.starts.data
        self._permutation = columns.permutation.data

    def subjects(self) -> Numbers:
        """The subjects that have rows, ascending. Raises what *need* does."""
        self._need(0, len(self._subjects))
        return self._subjects

    def span(self, subject: int) -> Sequence[int]:
        """The indexes of a subject's rows, ascending. Raises what *need* does."""
        subjects = self.subjects()
        count = len(subjects)
        key: Any = np.uint32(subject)  # a plain int would make numpy copy the column
        place = int(subjects.searchsorted(key))
        if place == count or subjects[place] != subject:
            return ()
        self._need(count + place, count + place + 2)
        start, stop = self._starts[place], self._starts[place + 1]
        self._need(2 * count + 1 + start, 2 * count + 1 + stop)
        return self._permutation[start:stop]

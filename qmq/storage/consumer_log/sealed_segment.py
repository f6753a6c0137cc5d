"""The rows of one segment: ``<base:016x>.entries``, a header (header.py) and then ENTRY records in position order.

The file of the segment that is being written is a journal: its header has sealed 0, rows are added as they come, and
they are trusted only as far as a checkpoint gives their number and crc32c. When the segment is full the header is
written again with sealed 1, the count and the checksum of the body.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes, StorageError
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRIES_MAGIC, ENTRY_DTYPE, ENTRY_SIZE
from qmq.storage.consumer_log.header import DerivedHeader, crc_of_body, entries_path, order_path, parse_derived
from qmq.storage.consumer_log.subject_order import Order, Rows, derive_order, open_order, write_order
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_fully
from qmq.storage.message_log.cold_reads import FileRange, Residence

#: Fields of an entry: position and size of the batch; first sequence and count of the run; when it was stored.
BATCH_RANGE: Final = struct.Struct("<8xQ28xI")
SEQUENCES: Final = struct.Struct("<Q20xI")
STORED_AT: Final = struct.Struct("<16xQ")

#: A search for a position looks so many rows away from where it lies if all batches have one size; then further.
_FIRST_STEP: Final = 4
#: Bytes read at once where some rows are not in memory.
_AROUND_BYTES: Final = 256 << 10
_RESTART: Final = "restart the broker, which makes it again"
NO_ROWS: Final[Rows] = np.empty(0, ENTRY_DTYPE)

assert BATCH_RANGE.size == ENTRY_SIZE


def map_entries(disk: Disk, fd: int, count: int) -> Rows:
    """Map the first *count* rows of an entries file. Raises OSError, or ValueError when the file is shorter."""
    if not count:
        return NO_ROWS
    mapped = disk.map(fd, DERIVED_HEADER_SIZE + count * ENTRY_SIZE)
    return np.frombuffer(mapped, ENTRY_DTYPE, count, DERIVED_HEADER_SIZE)


def _map_of(array: Any) -> mmap.mmap | None:
    """Return the map that an array is a view of; None when it is of none."""
    while isinstance(array, np.ndarray):
        array = array.base
    shown = array.obj if isinstance(array, memoryview) else None
    return shown if isinstance(shown, mmap.mmap) else None


def need_rows(residence: Residence, path: Path, rows: Rows, first: int, stop: int) -> None:
    """Return when rows [first, stop) of a mapped entries file can be read without a wait.

    Raises NotInMemory, or StorageFailed where waiting is allowed and the disk cannot read them.
    """
    mapped = _map_of(rows)
    if mapped is not None and first < stop:
        _need(residence, path, mapped, len(rows), first, stop)


def _need(residence: Residence, path: Path, mapped: mmap.mmap, count: int, first: int, stop: int) -> None:
    """As need_rows, for the map of a file with so many rows."""
    offset, end = DERIVED_HEADER_SIZE + first * ENTRY_SIZE, DERIVED_HEADER_SIZE + stop * ENTRY_SIZE
    if residence.holds(mapped, offset, end - offset):
        return
    start = offset // _AROUND_BYTES * _AROUND_BYTES
    size = min(max(end - start, _AROUND_BYTES), DERIVED_HEADER_SIZE + count * ENTRY_SIZE - start)
    residence.require(mapped, offset, end - offset, FileRange(path, start, size))


def count_before(rows: Rows, position: int) -> int:
    """Return how many of the rows lie before *position*."""
    data = rows.data.cast("B") if len(rows) else memoryview(b"")
    return bisect_left(
        range(len(rows)), position, key=lambda index: BATCH_RANGE.unpack_from(data, index * ENTRY_SIZE)[0]
    )


class SealedSegment:
    """The files of a full segment. They are mapped at first use, and checked then unless they were before."""

    __slots__ = (
        "_data", "_directory", "_disk", "_order", "_order_checked", "_order_map", "_rows", "_rows_map", "checked",
        "count", "first_row", "header", "order_path", "path", "residence",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: Path, header: DerivedHeader, *, checked: bool = False) -> None:
        self._disk = disk
        self._directory = directory
        #: Whether the body of the entries has been compared with its checksum; with *checked* both files were just
        #: made.
        self.checked = checked
        self._order_checked = checked
        #: Which bytes of its maps are in memory; None while callers may wait for the disk.
        self.residence: Residence | None = None
        self._rows: Rows | None = None
        self._rows_map: mmap.mmap | None = None
        self._data = memoryview(b"")
        self._order: Order | None = None
        self._order_map: mmap.mmap | None = None
        self.header = header
        self.first_row = header.first_row
        self.count = header.rows
        #: The entries file, and the order file.
        self.path = entries_path(directory, header.base)
        self.order_path = order_path(directory, header.base)

    @classmethod
    def open(cls, disk: Disk, directory: Path, owner: DerivedHeader, end: int) -> SealedSegment:
        """Check the header of the segment that *owner* names and that ends at position *end*; first_row is not
        compared. Raises OSError, BadBytes or ForeignFile when the file is not that segment's.
        """
        path = entries_path(directory, owner.base)
        fd = disk.open(path, os.O_RDONLY)
        try:
            header = parse_derived(read_fully(disk, fd, DERIVED_HEADER_SIZE, 0), ENTRIES_MAGIC, path)
            size = disk.size(fd)
        finally:
            disk.close(fd)
        same = header.base == owner.base and header[:2] == owner[:2] and header.sealed and header.covered <= end
        if not same or size != DERIVED_HEADER_SIZE + header.rows * ENTRY_SIZE:
            raise BadBytes(f"{path} is not a whole sealed segment; delete it, it is made again")
        return cls(disk, directory, header)

    @property
    def is_mapped(self) -> bool:
        """Whether the entries are mapped."""
        return self._rows is not None

    def check(self) -> None:
        """Compare the body of the entries with its checksum, once. Raises BadBytes, also for bytes that the disk cannot
        read, or StorageFailed.
        """
        if self.checked:
            return
        try:
            fd = self._disk.open(self.path, os.O_RDONLY)
            try:
                crc = crc_of_body(self._disk, fd, self.count * ENTRY_SIZE)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise self._unreadable(error) from error
        if crc != self.header.body_crc:
            raise BadBytes(f"{self.path} does not fit its checksum; {_RESTART}")
        self.checked = True

    def _unreadable(self, error: OSError) -> StorageError:
        """Return BadBytes when the file is bad; StorageFailed when something else is, and the file must stay."""
        if error.errno == errno.ENOENT or error.errno in BAD_SECTOR:
            return BadBytes(f"cannot read {self.path}: {error.strerror}; {_RESTART}")
        return failure(error, "read", self.path)

    def rows(self) -> Rows:
        """Return ENTRY_DTYPE[count], mapped. Raises BadBytes or StorageFailed."""
        if self._rows is None:
            self.check()
            try:
                fd = self._disk.open(self.path, os.O_RDONLY)
                try:
                    self._rows = map_entries(self._disk, fd, self.count)
                finally:
                    self._disk.close(fd)
            except ValueError as error:
                raise BadBytes(f"cannot map {self.path}: {error}; {_RESTART}") from error
            except OSError as error:
                raise self._unreadable(error) from error
            self._data = self._rows.data.cast("B") if self.count else memoryview(b"")
            self._rows_map = _map_of(self._rows)
        return self._rows

    def data(self) -> memoryview:
        """Return the bytes of rows()."""
        self.rows()
        return self._data

    def has_order(self, *, check: bool) -> bool:
        """Return whether the order file exists; with *check*, whether it is also right."""
        if not check:
            return self._disk.exists(self.order_path)
        try:
            open_order(self._disk, self.order_path, self.header, check=True)
        except (OSError, StorageError, ValueError):
            return False
        self._order_checked = True
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the files have been checked, so that they only need to be mapped."""
        return self.checked and (self._order_checked or self._order is not None)

    def make_ready(self) -> None:
        """[thread] Check the files, which nothing uses meanwhile; make a missing or rotten order again. Raises as
        check() does.
        """
        self.check()
        if not self.opens_order():
            order = SealedSegment(self._disk, self._directory, self.header).order()
            if not self.opens_order():  # the disk took no file
                self._order = order

    def opens_order(self) -> bool:
        """Map the order file, and check it, unless that was done before; return False when it is not good."""
        if self._order is None:
            try:
                columns = open_order(self._disk, self.order_path, self.header, check=not self._order_checked)
            except (OSError, StorageError, ValueError):
                return False
            self._order_checked = True
            self._order_map = _map_of(columns.subjects)
            self._order = Order(columns, self._need_order)
        return True

    def order(self) -> Order:
        """Return the order of the rows; make a missing or rotten file again. Raises as rows() does."""
        if not self.opens_order():
            columns = derive_order(self.rows())
            with suppress(OSError):  # the order is of use without the file
                write_order(self._disk, self.order_path, self.header, columns)
            self._order = Order(columns)
        assert self._order is not None
        return self._order

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) can be read without a wait. Raises as need_rows() does."""
        if self.residence is not None:
            self.rows()
            if self._rows_map is not None and first < stop:
                _need(self.residence, self.path, self._rows_map, self.count, first, stop)

    def index_at(self, position: int) -> int:
        """Return the index of the first row at or behind a position; ``count`` when there is none. Raises as rows() and
        need() do.
        """
        low, high, step = 0, self.count, _FIRST_STEP
        data, span = self.data(), max(1, self.header.covered - self.header.base)
        # Batches of a segment mostly have about the same size: few looks around the place where it would lie then.
        middle = min(max(position - self.header.base, 0), span) * self.count // span
        while low < high:
            middle = min(max(middle, low), high - 1)
            self.need(middle, middle + 1)
            if BATCH_RANGE.unpack_from(data, middle * ENTRY_SIZE)[0] < position:
                low = middle + 1
                middle += step
            else:
                high = middle
                middle -= step
            if 2 * step > high - low:
                middle = (low + high) // 2
            step *= 4
        return low

    def _need_order(self, first: int, stop: int) -> None:
        """Return when numbers [first, stop) of the order file can be read without a wait. If some are missing the whole
        file is read.
        """
        mapped = self._order_map
        if self.residence is not None and mapped is not None and first < stop:
            offset, end = DERIVED_HEADER_SIZE + 4 * first, DERIVED_HEADER_SIZE + 4 * stop
            self.residence.require(mapped, offset, end - offset, FileRange(self.order_path, 0, len(mapped)))

    def distrust(self) -> None:
        """Have the files checked, and made again, before they are used: a part of them cannot be read."""
        self.unmap()
        self.checked = self._order_checked = False

    def write_order(self) -> None:
        """[thread] Make the order file, on disk when this returns. Raises BadBytes, StorageFull or StorageFailed."""
        segment = SealedSegment(self._disk, self._directory, self.header)
        order = derive_order(segment.rows())
        try:
            write_order(self._disk, self.order_path, self.header, order)
        except OSError as error:
            raise failure(error, "write", self.order_path) from error

    def span(self, subject: int) -> Sequence[int]:
        """Return the indexes of a subject's rows, ascending."""
        return self.order().span(subject)

    def subjects(self) -> npt.NDArray[np.uint32]:
        """Return the subjects that have rows here, ascending."""
        return self.order().subjects()

    def unmap(self) -> None:
        """Drop the maps; views of them that are in use keep them alive."""
        self._rows = self._rows_map = self._order = self._order_map = None
        self._data = memoryview(b"")

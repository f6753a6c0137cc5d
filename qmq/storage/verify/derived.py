"""Whether derived files agree with the message log: index, entries and order of one segment.

The records that the log implies are compared with those in the file, a megabyte at a time. The file may have records of
batches that are bad now but were good when it was written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.layout import (
    DERIVED_HEADER_SIZE,
    ENTRIES_MAGIC,
    ENTRY_DTYPE,
    INDEX_DTYPE,
    INDEX_MAGIC,
    ORDER_MAGIC,
)
from qmq.storage.consumer_log.header import DerivedHeader, parse_derived
from qmq.storage.consumer_log.subject_order import derive_order
from qmq.storage.disk.disk import Disk, read_fully
from qmq.storage.types import Hole
from qmq.storage.verify.report import VerifyReport

#: The columns that order files are derived from: 6 bytes a row, in memory for one segment at a time.
KEY_DTYPE: Final = np.dtype([("subject", "<u4"), ("lane", "<u2")])

_PIECE_RECORDS: Final = 20_480
_READ_BYTES: Final = 1 << 20
_MADE_AGAIN: Final = "nothing: it is made again"
_DELETE: Final = "delete it: it is made again at the next start"

Records = npt.NDArray[np.void]
JournalState = tuple[int, int, int]


class DerivedCheck:
    """One index or entries file, compared with the records given to ``expect``, in order; ``finish`` checks the
    rest.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        report: VerifyReport,
        owner: DerivedHeader,
        *,
        first_row: int | None = None,
        journal: JournalState | None = None,
    ) -> None:
        """*owner* is the header of the unsealed file, but for *first_row*, which may be unknown. *journal* is the
        checkpoint's entry for the segment that was being written: only that part of its file is checked.
        """
        self._disk = disk
        self._path = path
        self._report = report
        self._is_index = path.suffix == ".index"
        self._dtype = INDEX_DTYPE if self._is_index else ENTRY_DTYPE
        self._fd = -1
        self._next = 0  # the next record of the file
        self._trusted = 0
        self._expected: list[Records] = []
        self._expected_records = 0
        self._missing = 0
        self._failed = False
        self._crc = 0
        self._want_crc: int | None = None
        #: The header of a sealed file; None when it is bad or not sealed.
        self.header: DerivedHeader | None = None
        #: Subject and lane of every row read so far, of an entries file.
        self.keys: list[Records] = []
        self._open(owner, first_row, journal)

    def _open(self, owner: DerivedHeader, first_row: int | None, journal: JournalState | None) -> None:
        try:
            self._fd = self._disk.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            self._report.note(self._path, None, "is missing", _MADE_AGAIN)
            return
        size = self._disk.size(self._fd)
        self._report.count(self._path.suffix[1:], size)
        magic = INDEX_MAGIC if self._is_index else ENTRIES_MAGIC
        try:
            header = parse_derived(read_fully(self._disk, self._fd, DERIVED_HEADER_SIZE, 0), magic, self._path)
        except (BadBytes, ForeignFile) as error:
            self._failed = True
            self._report.fault(self._path, 0, str(error), _DELETE)
            return
        if header.unsealed() != owner._replace(first_row=header.first_row if first_row is None else first_row):
            self._failed = True
            self._report.fault(self._path, 0, "is of another store, partition, segment or first row", _DELETE)
            return
        there, odd = divmod(size - DERIVED_HEADER_SIZE, self._dtype.itemsize)
        if journal is not None:
            self._trusted, self._want_crc = journal[1:]
            if there < self._trusted:
                what = f"has {there} rows, the checkpoint knows {self._trusted}"
                self._report.fault(self._path, size, what, _DELETE)
                self._failed = True
        elif not header.sealed:
            self._failed = True
            self._report.note(self._path, None, "is not finished", _MADE_AGAIN)
        else:
            self._trusted, self._want_crc, self.header = header.rows, header.body_crc, header
            if there != header.rows or odd:
                self._report.fault(
                    self._path, size, f"does not have exactly the {header.rows} records of its header", _DELETE
                )
                self._failed, self.header = True, None

    def expect(self, records: Records, holes: list[Hole]) -> None:
        """Compare the next records that the log implies; *holes* are the bad bytes of the partition so far."""
        if self._fd < 0 or self._failed:
            return
        self._expected.append(records)
        self._expected_records += len(records)
        if self._expected_records >= _PIECE_RECORDS:
            self._compare(holes)

    def _compare(self, holes: list[Hole]) -> None:
        expected = np.concatenate(self._expected) if self._expected else np.empty(0, self._dtype)
        self._expected, self._expected_records = [], 0
        while len(expected) and not self._failed:
            found = self._read(len(expected))
            if not len(found):
                self._missing += len(expected)
                return
            good = _outside(found, holes)
            same = good == expected[: len(good)]
            if not same.all():
                at = int(np.flatnonzero(~same)[0])
                self._differs(self._next - len(found) + at, expected[at])
            expected = expected[len(good) :]

    def _differs(self, record: int, expected: Any) -> None:
        self._failed = True
        what = f"record {record} is not that of the batch at position {int(expected['position'])}"
        self._report.fault(self._path, DERIVED_HEADER_SIZE + record * self._dtype.itemsize, what, _DELETE)

    def _read(self, count: int) -> Records:
        """Return the next trusted records, at most *count*."""
        count = min(count, self._trusted - self._next)
        if count <= 0:
            return np.empty(0, self._dtype)
        itemsize = self._dtype.itemsize
        data = read_fully(self._disk, self._fd, count * itemsize, DERIVED_HEADER_SIZE + self._next * itemsize)
        self._crc = crc32c(data, self._crc)
        found = np.frombuffer(data, self._dtype, len(data) // itemsize)
        self._next += len(found)
        self._report.counts[self._path.suffix[1:]].records += len(found)
        if not self._is_index:
            keys = np.empty(len(found), KEY_DTYPE)
            keys["subject"], keys["lane"] = found["subject"], found["lane"]
            self.keys.append(keys)
        return found

    def finish(self, holes: list[Hole], covered: int) -> None:
        """End the comparison: the last batch of the segment ends at position *covered*."""
        if self._fd < 0:
            return
        if not self._failed:
            self._compare(holes)
        if not self._failed:
            self._finish(holes, covered)
        if self._failed:
            self.header = None
        self._disk.close(self._fd)
        self._fd = -1

    def _finish(self, holes: list[Hole], covered: int) -> None:
        extra = 0
        while len(found := self._read(_PIECE_RECORDS)):
            extra += len(_outside(found, holes))
        problems = []
        if extra:
            problems.append(f"has {extra} records for which the message log has no batch")
        if self._missing:
            problems.append(f"lacks the last {self._missing} records of its segment")
        if self._crc != self._want_crc:
            problems.append("does not fit its checksum")
        if self.header is not None and not self._is_index and self.header.covered != covered and not holes:
            problems.append(f"says that it covers position {self.header.covered}, its segment ends at {covered}")
        for what in problems:
            self._failed = True
            self._report.fault(self._path, None, what, _DELETE)


def _outside(found: Records, holes: list[Hole]) -> Records:
    """Return the records whose batches do not lie in a hole."""
    for hole in holes:
        positions = found["position"]
        inside = (positions >= hole.start) & (positions < hole.end)
        if inside.any():
            found = found[~inside]
    return found


def check_order(disk: Disk, path: Path, report: VerifyReport, entries: DerivedCheck) -> None:
    """Compare the order file of a sealed segment with its entries, which have been read."""
    try:
        fd = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        report.note(path, None, "is missing", _MADE_AGAIN)
        return
    try:
        size = disk.size(fd)
        report.count("order", size, entries.header.rows if entries.header is not None else 0)
        header = entries.header
        if header is None:
            report.note(path, None, "cannot be checked without good entries", _MADE_AGAIN)
            return
        keys = np.concatenate(entries.keys) if entries.keys else np.empty(0, KEY_DTYPE)
        columns = [column.astype("<u4").tobytes() for column in derive_order(keys)]
        crc = 0
        for column in columns:
            crc = crc32c(column, crc)
        expected = [header._replace(body_crc=crc).pack(ORDER_MAGIC), *columns]
        position = _first_difference(disk, fd, expected)
        if position is not None or size != sum(map(len, expected)):
            what = "is not the order of the entries beside it"
            report.fault(path, size if position is None else position, what, _DELETE)
    finally:
        disk.close(fd)


def _first_difference(disk: Disk, fd: int, expected: list[bytes]) -> int | None:
    """Return the offset of the first byte that differs from *expected*; None when none does."""
    offset = 0
    for part in expected:
        for start in range(0, len(part), _READ_BYTES):
            wanted = part[start : start + _READ_BYTES]
            found = read_fully(disk, fd, len(wanted), offset)
            if found != wanted:
                same = np.frombuffer(found, np.uint8) == np.frombuffer(wanted, np.uint8, len(found))
                return offset + (len(found) if same.all() else int(np.flatnonzero(~same)[0]))
            offset += len(wanted)
    return None

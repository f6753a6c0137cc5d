"""The rows of the segment that is being written, on their way to its ``.entries`` file (sealed_segment.py).

The last rows, up to 65,536, are in a buffer that both numpy and struct write to. A full buffer is written, sorted by
subject (subject_order.py) and from then on read through a map of the file, so memory does not grow with the rows: 3 MiB
of buffer, a dict of at most 65,536 rows, and 2 bytes for each older row of the segment.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile, StorageError
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRIES_MAGIC, ENTRY_DTYPE, ENTRY_SIZE, SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log.header import (
    DerivedHeader,
    crc_of_body,
    draft_of,
    entries_path,
    order_path,
    parse_derived,
)
from qmq.storage.consumer_log.sealed_segment import (
    BATCH_RANGE,
    NO_ROWS,
    SealedSegment,
    count_before,
    map_entries,
    need_rows,
)
from qmq.storage.consumer_log.subject_lookup import RangeBlocks, no_touch
from qmq.storage.consumer_log.subject_order import (
    BLOCK_ROWS,
    Block,
    RecentIndex,
    Rows,
    derive_order,
    touch,
    write_order,
)
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_fully, write_fully
from qmq.storage.disk.fsync import SureSync
from qmq.storage.message_log.cold_reads import Residence


class ActiveRows:
    """The rows of a segment that has not been sealed.

    The last rows, up to 65,536, are in ``buffer`` (``data`` is its bytes), ``fill`` of them. The ``sorted_count`` rows
    before them are in the file and mapped, or in memory while the disk takes no writes. Only full buffers and ``flush``
    write to the file.
    """

    __slots__ = (
        "_disk", "_fd", "_mapped", "_resumed", "_sure_sync", "_view", "_waiting", "base", "buffer", "covered", "crc",
        "data", "directory", "fill", "first_row", "flushed", "is_draft", "is_rotten", "owner", "path", "recent",
        "residence", "sealed", "shelves", "sorted_count",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: Path, owner: DerivedHeader, *, is_draft: bool = False) -> None:
        """*owner* is the header of the file; the first write makes the file. A draft gets its name with the first
        ``sync``: a checkpoint counts on the file that has that name.
        """
        self._disk = disk
        self._fd = -1
        self._sure_sync = SureSync(disk)
        self.directory = directory
        self.owner = owner
        self.base = owner.base
        #: The path of the file, which may not exist yet.
        self.path = entries_path(directory, owner.base)
        #: Whether the file has another name until it is on disk.
        self.is_draft = is_draft
        if is_draft:
            self.path = draft_of(self.path)
        self.first_row = owner.first_row
        #: Rows before the buffer, rows in the file, and the checksum of those in the file.
        self.sorted_count = self.flushed = self.crc = 0
        #: The blocks of rows before the buffer.
        self.shelves = RangeBlocks(touch)
        #: Where the last batch ends; known once the journal is frozen.
        self.covered = 0
        #: The file cannot be read back: another has to replace it.
        self.is_rotten = False
        #: The result of ``seal``.
        self.sealed: SealedSegment | None = None
        #: Which bytes of its map are in memory; None while callers may wait for the disk.
        self.residence: Residence | None = None
        self._mapped: Rows = NO_ROWS
        self._resumed = 0  # rows that were in the file before this process wrote to it
        self._waiting: list[Rows] = []
        self._new_buffer()

    def _new_buffer(self) -> None:
        self.buffer: Rows = np.empty(BLOCK_ROWS, ENTRY_DTYPE)
        self.data = self.buffer.data.cast("B")
        self._view = self.buffer.view()
        self._view.flags.writeable = False
        self.fill = 0
        self.recent = RecentIndex(self)

    @property
    def count(self) -> int:
        """The number of rows of the segment so far."""
        return self.sorted_count + self.fill

    @property
    def waiting_blocks(self) -> int:
        """The number of full buffers that the disk has not taken."""
        return len(self._waiting)

    # --- writing ---------------------------------------------------------------------------------------------------

    def extend(self, rows: Rows) -> None:
        """Add rows, ENTRY_DTYPE[n] in position order. Never fails."""
        done = 0
        while done < len(rows):
            if self.fill == BLOCK_ROWS:
                self.sort_buffer()
            take = min(len(rows) - done, BLOCK_ROWS - self.fill)
            self.buffer[self.fill : self.fill + take] = rows[done : done + take]
            self.fill += take
            done += take

    def sort_buffer(self) -> None:
        """Sort the buffer into a block, and begin another one. Never fails: what the disk refuses stays in memory."""
        if not self.fill:
            return
        start, rows = self.sorted_count, self._view[: self.fill]
        self._waiting.append(rows)
        self.sorted_count += self.fill
        self._new_buffer()
        with suppress(StorageError):
            self.flush()
        self.shelves.add(Block(self, start, rows))

    def flush(self) -> int:
        """Write the rows that are not in the file, and return its descriptor. Raises StorageFull or StorageFailed."""
        try:
            self._write_rows()
            if self._waiting:
                self._mapped = map_entries(self._disk, self._fd, self.sorted_count)
                self._waiting.clear()
        except OSError as error:
            raise failure(error, "write", self.path) from error
        return self._fd

    def _write_rows(self) -> None:
        """Bring the file up to date. Raises OSError; what was written before it counts."""
        if self._fd < 0:
            with suppress(FileNotFoundError):  # not truncated: readers may have it mapped
                self._disk.unlink(self.path)
            self._fd = self._disk.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                write_fully(self._disk, self._fd, [self.owner.pack(ENTRIES_MAGIC)], 0)
            except OSError:
                self._disk.close(self._fd)
                self._fd = -1
                raise
        start = self.sorted_count - sum(map(len, self._waiting))
        for rows in (*self._waiting, self._view[: self.fill]):
            new = rows[max(0, self.flushed - start) :]
            start += len(rows)
            if len(new):
                data = new.data.cast("B")
                write_fully(self._disk, self._fd, [data], DERIVED_HEADER_SIZE + self.flushed * ENTRY_SIZE)
                self.crc = crc32c(data, self.crc)
                self.flushed += len(new)

    def sync(self, fd: int) -> None:
        """[thread] Bring the file, whose descriptor ``flush`` gave, to the disk; a draft gets its name then. Raises
        OSError.
        """
        self._sure_sync(fd)
        if self.is_draft:
            path = entries_path(self.directory, self.base)
            self._disk.rename(self.path, path)
            self.path, self.is_draft = path, False

    def freeze(self) -> None:
        """Write what the disk takes, and a header that says so: the segment is full. Never fails."""
        self.covered = self.end()
        self.sort_buffer()
        self.buffer = self._view = NO_ROWS
        self.data = memoryview(b"")
        with suppress(StorageError):
            self.flush()
            with suppress(OSError):
                write_fully(self._disk, self._fd, [self.final_header().pack(ENTRIES_MAGIC)], 0)

    def final_header(self) -> DerivedHeader:
        """Return the header of the file of a frozen segment."""
        return self.owner._replace(sealed=True, covered=self.covered, rows=self.sorted_count, body_crc=self.crc)

    def end(self) -> int:
        """Return the position where the last batch ends; where the first one would begin when there is none."""
        if not self.count:
            return self.base + SEGMENT_HEADER_SIZE
        rows, start = self.rows_at(self.count - 1)
        position, size = BATCH_RANGE.unpack_from(rows.data.cast("B"), (self.count - 1 - start) * ENTRY_SIZE)
        return int(position + size)

    def seal(self) -> None:
        """[thread] Finish the files of a frozen segment, on disk when this returns, and set ``sealed``.

        Nothing else writes to a frozen journal, and what readers use of it stays as it is. Raises StorageFull,
        StorageFailed or BadBytes; it can be called again.
        """
        try:
            self._write_rows()
            header = self.final_header()
            write_fully(self._disk, self._fd, [header.pack(ENTRIES_MAGIC)], 0)
            self.sync(self._fd)
            self._check()
            rows = map_entries(self._disk, self._fd, self.sorted_count)
            write_order(self._disk, order_path(self.directory, self.base), header, derive_order(rows))
        except OSError as error:
            raise failure(error, "seal", self.path) from error
        self.sealed = SealedSegment(self._disk, self.directory, header, checked=True)

    def _check(self) -> None:
        """Raise BadBytes when the file cannot be read back: looking at it through a map would end the process."""
        try:
            if crc_of_body(self._disk, self._fd, self.sorted_count * ENTRY_SIZE) == self.crc:
                return
            error: OSError | None = None
        except OSError as refused:
            error = refused
        self.is_rotten = True
        raise BadBytes(f"{self.path} is not what was written; restart the broker, which makes it again") from error

    def close(self) -> None:
        """Close the file; rows that were not flushed are not in it."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def retire(self) -> int:
        """Free all memory, now that there is a sealed segment; return the descriptor, for the caller to close."""
        self.shelves = RangeBlocks(
            no_touch
        )  # its blocks refer to the journal: only the garbage collector would free them
        self._mapped = NO_ROWS
        self._waiting = []
        fd, self._fd = self._fd, -1
        return fd

    # --- reading ---------------------------------------------------------------------------------------------------

    def rows_at(self, index: int) -> tuple[Rows, int]:
        """Return the array that has row *index* of the segment, and the index of that array's first row."""
        if index >= self.sorted_count:
            return self._view[: self.fill], self.sorted_count
        if index < len(self._mapped):
            return self._mapped, 0
        start = len(self._mapped)
        for rows in self._waiting:
            if index < start + len(rows):
                return rows, start
            start += len(rows)
        raise IndexError(index)

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) of one array can be read without a wait; the newest rows are taken to be in
        memory. Raises as need_rows() does.
        """
        old = max(self._resumed, self.sorted_count - BLOCK_ROWS)
        if self.residence is not None and first < min(old, len(self._mapped)):
            need_rows(self.residence, self.path, self._mapped, first, min(stop, len(self._mapped)))

    # --- after a start ---------------------------------------------------------------------------------------------

    def resume(self, count: int, crc: int, covered: int, *, renumber: bool = False) -> bool:
        """Take over the first *count* rows of the file, whose checksum in a checkpoint is *crc*, up to position
        *covered*; return False, with nothing changed, when they are not there. With *renumber* the file may give its
        rows other numbers. Raises StorageFull or StorageFailed.
        """
        fd, path = -1, entries_path(self.directory, self.base)
        try:
            fd = self._disk.open(path, os.O_RDWR)
            header, rows = self._trusted_rows(fd, count, crc, renumber=renumber)
            taken = count_before(rows, covered)
            if not taken:
                self._disk.close(fd)
                return False
            self._disk.ftruncate(fd, DERIVED_HEADER_SIZE + taken * ENTRY_SIZE)
            if header != self.owner:  # it was full, or has other numbers now
                write_fully(self._disk, fd, [self.owner.pack(ENTRIES_MAGIC)], 0)
        except (FileNotFoundError, BadBytes, ForeignFile, ValueError):
            if fd >= 0:
                self._disk.close(fd)
            return False
        except OSError as error:
            if fd >= 0:
                self._disk.close(fd)
            if error.errno in BAD_SECTOR:
                return False
            raise failure(error, "open", path) from error
        self._fd, self.path, self.is_draft = fd, path, False
        self._take_over(rows[:taken])
        return True

    def _trusted_rows(self, fd: int, count: int, crc: int, *, renumber: bool) -> tuple[DerivedHeader, Rows]:
        """Return the header, and the rows that a checkpoint knows. Raises BadBytes, ValueError or OSError."""
        path = entries_path(self.directory, self.base)
        header = parse_derived(read_fully(self._disk, fd, DERIVED_HEADER_SIZE, 0), ENTRIES_MAGIC, path)
        first_row = self.first_row if renumber else header.first_row
        if header.unsealed()._replace(first_row=first_row) != self.owner:
            raise BadBytes(f"{path} belongs to another segment")
        rows = map_entries(self._disk, fd, count)
        if crc_of_body(self._disk, fd, count * ENTRY_SIZE) != crc:
            raise BadBytes(f"{path} does not fit the checksum in the checkpoint")
        return header, rows

    def _take_over(self, rows: Rows) -> None:
        self.crc = crc32c(rows.data.cast("B"))
        self.flushed = len(rows)
        self.sorted_count = len(rows) // BLOCK_ROWS * BLOCK_ROWS
        self._mapped = rows[: self.sorted_count]
        self._resumed = self.sorted_count
        self.fill = len(rows) - self.sorted_count
        self.buffer[: self.fill] = rows[self.sorted_count :]
        for start in range(0, self.sorted_count, BLOCK_ROWS):
            self.shelves.add(Block(self, start, rows[start : start + BLOCK_ROWS]))

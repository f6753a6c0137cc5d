"""The sparse index beside a segment: ``<base:016x>.index``, one record a batch, to find a batch by position or time.

Bytes: DERIVED_HEADER (magic ``QMQINDEX``), then INDEX_ENTRY records in position order. All of it is derived from the
segment: it is written after the sends, and made again from the consumer log where it is missing, behind or rotten.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import StorageError
from qmq.format.layout import (
    DERIVED_HEADER,
    DERIVED_HEADER_SIZE,
    DERIVED_VERSION,
    INDEX_DTYPE,
    INDEX_ENTRY,
    INDEX_ENTRY_SIZE,
    INDEX_MAGIC,
)
from qmq.storage.consumer_log.header import DRAFT_SUFFIX, crc_of_body, draft_of
from qmq.storage.disk.disk import Disk, failure, read_fully, write_fully
from qmq.storage.disk.fsync import SureSync
from qmq.storage.message_log.segment import SegmentOwner

SUFFIX: Final = ".index"
#: Records that are buffered in memory before they are written.
BUFFER_RECORDS: Final = 16_384

_BUFFER_BYTES: Final = BUFFER_RECORDS * INDEX_ENTRY_SIZE
_CHECKED: Final = DERIVED_HEADER_SIZE - 4

Records = npt.NDArray[np.void]


def index_path(directory: Path, base: int) -> Path:
    """Return the path of the index of the segment that begins at *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def derive_index(rows: npt.NDArray[Any]) -> Records:
    """Return the index records, INDEX_DTYPE[batches], of consumer-log rows, ENTRY_DTYPE[n] in position order."""
    positions = rows["position"]
    first = np.empty(len(rows), np.bool_)
    first[:1] = True
    np.not_equal(positions[1:], positions[:-1], out=first[1:])
    records = np.empty(int(first.sum()), INDEX_DTYPE)
    records["position"] = positions[first]
    records["stored_at_us"] = rows["stored_at_us"][first]
    return records


def pack_index_header(
    owner: SegmentOwner, base: int, *, sealed: bool, covered: int, count: int, body_crc: int
) -> bytes:
    """Return the 64 bytes that an index begins with; covered, count and body_crc are 0 until it is sealed."""
    draft = DERIVED_HEADER.pack(
        INDEX_MAGIC, DERIVED_VERSION, owner.partition, owner.store_id, sealed, b"", base, covered, count, 0, body_crc, 0
    )
    return draft[:_CHECKED] + crc32c(draft[:_CHECKED]).to_bytes(4, "little")


def is_sealed_index(
    disk: Disk, directory: Path, owner: SegmentOwner, base: int, covered: int, *, check: bool = True
) -> bool:
    """Return whether there is a sealed index of that segment, up to position *covered*: header and size are checked,
    with *check* the checksum of the whole file too.
    """
    try:
        fd = disk.open(index_path(directory, base), os.O_RDONLY)
    except OSError:
        return False
    try:
        data = read_fully(disk, fd, DERIVED_HEADER_SIZE, 0)
        size = disk.size(fd)
        if len(data) < DERIVED_HEADER_SIZE:
            return False
        *_, count, _, body_crc, _ = DERIVED_HEADER.unpack(data)
        if check and crc_of_body(disk, fd, size - DERIVED_HEADER_SIZE) != body_crc:
            return False
    except OSError:
        return False
    finally:
        disk.close(fd)
    whole = DERIVED_HEADER_SIZE + count * INDEX_ENTRY_SIZE
    expected = pack_index_header(owner, base, sealed=True, covered=covered, count=count, body_crc=body_crc)
    return size == whole and data == expected


def remove_drafts(disk: Disk, directory: Path) -> None:
    """Remove the drafts that a process has left which made indexes again."""
    with suppress(OSError):
        for name in disk.listdir(directory):
            if name.endswith(SUFFIX + DRAFT_SUFFIX):
                disk.unlink(directory / name)


class SegmentIndex:
    """The index of a segment while it is written. Records are buffered; ``flush`` and ``seal`` write them."""

    def __init__(self, disk: Disk, directory: Path, owner: SegmentOwner, base: int, *, is_draft: bool = False) -> None:
        """A draft gets its name when it is sealed: a checkpoint may count on the file that has that name."""
        self._disk = disk
        self._name = index_path(directory, base)
        self._path = draft_of(self._name) if is_draft else self._name
        self.owner = owner
        self._base = base
        self._buffer = bytearray(_BUFFER_BYTES)
        self._used = 0
        self._written = 0
        self._crc = 0
        self._fd = -1
        self._sure_sync = SureSync(disk)

    def append(self, position: int, stored_at_us: int) -> None:
        """Add a batch. Never fails: what the disk does not take stays in memory and is written later."""
        if self._used == len(self._buffer):
            with suppress(StorageError):
                self.flush()
            if self._used:
                self._buffer += bytes(_BUFFER_BYTES)
        INDEX_ENTRY.pack_into(self._buffer, self._used, position, stored_at_us)
        self._used += INDEX_ENTRY_SIZE

    def extend(self, records: Records) -> None:
        """Add many batches, INDEX_DTYPE[n]. Never fails, as ``append``."""
        self._buffer[self._used :] = records.tobytes()
        self._used = len(self._buffer)
        with suppress(StorageError):
            self.flush()

    def flush(self) -> int:
        """Write what is buffered; return the descriptor to sync. Raises StorageFull or StorageFailed."""
        if self._used or self._fd < 0:
            self._write(bytes(memoryview(self._buffer)[: self._used]))
            self._used = 0
            if len(self._buffer) != _BUFFER_BYTES:
                self._buffer = bytearray(_BUFFER_BYTES)
        return self._fd

    def seal(self, covered: int) -> None:
        """[thread] Write everything, and the header that says so: the segment ends at position *covered*. On disk when
        it returns.

        The file is closed then. Raises StorageFull or StorageFailed; it can be called again.
        """
        self._sync(self.flush())
        count = self._written // INDEX_ENTRY_SIZE
        self._put(self._header(sealed=True, covered=covered, count=count, body_crc=self._crc), 0)
        self._sync(self._fd)
        self._take_name()
        self.close()

    def _sync(self, fd: int) -> None:
        try:
            self._sure_sync(fd)
        except OSError as error:
            raise failure(error, "sync", self._path) from error

    def _take_name(self) -> None:
        if self._path != self._name:
            try:
                self._disk.rename(self._path, self._name)
            except OSError as error:
                raise failure(error, "rename", self._path) from error
            self._path = self._name

    def close(self) -> None:
        """Close the file; what has not been flushed is dropped."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            try:
                self._fd = self._disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            except OSError as error:
                raise failure(error, "create", self._path) from error
            try:
                self._put(self._header(sealed=False, covered=0, count=0, body_crc=0), 0)
            except StorageError:
                self.close()
                raise
        self._put(data, DERIVED_HEADER_SIZE + self._written)
        self._written += len(data)
        self._crc = crc32c(data, self._crc)

    def _put(self, data: bytes, offset: int) -> None:
        try:
            write_fully(self._disk, self._fd, [data], offset)
        except OSError as error:
            raise failure(error, "write", self._path, offset) from error

    def _header(self, *, sealed: bool, covered: int, count: int, body_crc: int) -> bytes:
        return pack_index_header(self.owner, self._base, sealed=sealed, covered=covered, count=count, body_crc=body_crc)

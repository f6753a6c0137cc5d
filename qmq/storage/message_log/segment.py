"""One file of a partition's message log: ``<base:016x>.messages``.

Bytes: SEGMENT_HEADER (layout.py), then batches back to back. The position of a byte is the segment's base plus its
offset in the file. The current segment is extended sparsely to its full size and mapped once, whole; when it is sealed
the file is cut to its exact end. Zeros follow the last batch of a current segment, so its size does not show its end.

The first 8 of the header's 20 reserved bytes are previous_end u64: the position where the segment before ended. It
equals the base, but for the first segment after a power loss, whose base is the reserve: so a gap is not taken for a
loss. The checksum has the same place in every version, so that rot never passes for a newer one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.errors import ForeignFile
from qmq.format.layout import SEGMENT_HEADER, SEGMENT_HEADER_SIZE, SEGMENT_MAGIC, SEGMENT_VERSION
from qmq.format.versions import check_version
from qmq.storage.disk.disk import IOV_MAX, WRITE_BYTES, Buffer, Disk, failure, read_fully, write_fully

SUFFIX: Final = ".messages"
#: The suffix of a file that is not whole yet.
_UNFINISHED: Final = ".tmp"
_CHECKED: Final = SEGMENT_HEADER_SIZE - 4
_DIGITS: Final = frozenset("0123456789abcdef")
_PREVIOUS_END: Final = struct.Struct("<Q")


class ForeignSegment(ForeignFile):
    """A whole segment of another store, or one that belongs in another place."""

    code = "foreign_segment"


class SegmentOwner(NamedTuple):
    """The store and the partition that segments belong to."""

    store_id: bytes
    partition: int


class FileOffset(NamedTuple):
    """The file and the offset of a position."""

    path: Path
    offset: int
    partition: int
    position: int

    def __str__(self) -> str:
        return f"{self.path} at offset {self.offset} (position {self.position} of partition {self.partition})"


def segment_path(directory: Path, base: int) -> Path:
    """Return the path of the segment that begins at *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def base_of(name: str) -> int | None:
    """Return the base in a file name; None when it is not the name of a segment."""
    digits = name.removesuffix(SUFFIX)
    if digits == name or len(digits) != 16 or not _DIGITS.issuperset(digits):
        return None
    return int(digits, 16)


def list_bases(disk: Disk, directory: Path) -> list[int]:
    """Return the bases of all segments in *directory*, ascending; other files do not count. Raises StorageFailed."""
    try:
        names = disk.listdir(directory)
    except OSError as error:
        raise failure(error, "list", directory) from error
    return sorted(base for name in names if (base := base_of(name)) is not None)


def remove_unfinished(disk: Disk, directory: Path) -> None:
    """Remove the files that interrupted rolls left. Raises StorageFailed."""
    path = directory
    try:
        for name in disk.listdir(directory):
            if name.endswith(_UNFINISHED) and base_of(name.removesuffix(_UNFINISHED)) is not None:
                path = directory / name
                disk.unlink(path)
    except OSError as error:
        raise failure(error, "remove", path) from error


def pack_header(owner: SegmentOwner, base: int, previous_end: int, created_at_us: int) -> bytes:
    """Return the 64 bytes that a segment begins with."""
    rest = _PREVIOUS_END.pack(previous_end)
    draft = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC, SEGMENT_VERSION, owner.partition, owner.store_id, b"", base, created_at_us, rest, 0
    )
    return draft[:_CHECKED] + crc32c(draft[:_CHECKED]).to_bytes(4, "little")


def check_header(data: bytes, path: Path, owner: SegmentOwner, base: int) -> int | None:
    """Check the first 64 bytes of the file at *path*; return previous_end, None when they are not what was written.

    Raises ForeignSegment when they are whole, but of another store or another place; ForeignFile when they are of a
    newer version.
    """
    if len(data) < SEGMENT_HEADER_SIZE:
        return None
    magic, version, partition, store_id, _, found_base, _, rest, crc = SEGMENT_HEADER.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc32c(data[:_CHECKED]) != crc:
        return None
    if store_id != owner.store_id:
        raise ForeignSegment(
            f"{path} belongs to store {store_id.hex()}, this is store {owner.store_id.hex()}; move it where it belongs"
        )
    if partition != owner.partition or found_base != base:
        raise ForeignSegment(
            f"{path} was written as partition {partition}, position {found_base:#x}; move it back there"
        )
    check_version(path, version, SEGMENT_VERSION)
    (previous_end,) = _PREVIOUS_END.unpack_from(rest)
    return int(previous_end)


def is_of(disk: Disk, directory: Path, owner: SegmentOwner, base: int) -> bool:
    """Return whether the header of the segment at *base* names *owner*. Raises OSError, and ForeignFile for a newer
    version.
    """
    path = segment_path(directory, base)
    fd = disk.open(path, os.O_RDONLY)
    try:
        return check_header(read_fully(disk, fd, SEGMENT_HEADER_SIZE, 0), path, owner, base) is not None
    except ForeignSegment:
        return False
    finally:
        disk.close(fd)


class Segment:
    """An open segment file. Offsets are in the file; the descriptor stays open until ``close``."""

    __slots__ = ("_disk", "base", "capacity", "fd", "path", "view")

    def __init__(self, disk: Disk, fd: int, path: Path, base: int, capacity: int) -> None:
        self._disk = disk
        self.fd = fd
        self.path = path
        self.base = base
        #: The size that the file may grow to, and that ``view`` spans.
        self.capacity = capacity
        #: The whole file, mapped; empty until ``map``.
        self.view = memoryview(b"")

    @classmethod
    def create(
        cls,
        disk: Disk,
        directory: Path,
        owner: SegmentOwner,
        base: int,
        previous_end: int,
        capacity: int,
        created_at_us: int,
    ) -> Segment:
        """Make the file, extended to *capacity* and mapped. The directory is not synced.

        It gets its name once it is whole: a file that is shorter than its full size was cut from outside. Raises
        StorageFull or StorageFailed; no file is left then.
        """
        path = segment_path(directory, base)
        unfinished = path.with_name(path.name + _UNFINISHED)
        fd = -1
        try:
            fd = disk.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_fully(disk, fd, [pack_header(owner, base, previous_end, created_at_us)], 0)
            segment = cls(disk, fd, path, base, capacity)
            segment.grow()
            disk.rename(unfinished, path)
            segment.map()
        except OSError as error:
            if fd >= 0:
                disk.close(fd)
                for left in (unfinished, path):
                    with suppress(OSError):
                        disk.unlink(left)
            raise failure(error, "create", path) from error
        return segment

    @classmethod
    def open(cls, disk: Disk, directory: Path, base: int, capacity: int, *, writable: bool) -> Segment:
        """Open an existing file, not mapped. Raises StorageFailed."""
        path = segment_path(directory, base)
        try:
            fd = disk.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise failure(error, "open", path) from error
        return cls(disk, fd, path, base, capacity)

    def previous_end(self, owner: SegmentOwner) -> int | None:
        """Check the header as ``check_header`` does. Raises ForeignFile or StorageFailed."""
        try:
            data = read_fully(self._disk, self.fd, SEGMENT_HEADER_SIZE, 0)
        except OSError as error:
            raise failure(error, "read", self.path, self.base) from error
        return check_header(data, self.path, owner, self.base)

    def size(self) -> int:
        """Return the size of the file. Raises StorageFailed."""
        try:
            return self._disk.size(self.fd)
        except OSError as error:
            raise failure(error, "look at", self.path) from error

    def map(self) -> None:
        """Map the file up to its capacity; the part that is read must not be cut from here on. Raises OSError."""
        self.view = memoryview(self._disk.map(self.fd, self.capacity))

    def extend(self, end: int) -> None:
        """Put zeros behind offset *end*, up to the capacity, sparse where the file system can. Raises OSError."""
        self._disk.ftruncate(self.fd, end)
        self.grow()

    def grow(self) -> None:
        """Give the file its full size. Raises OSError."""
        self._disk.ftruncate(self.fd, self.capacity)

    def cut(self, end: int) -> None:
        """End the file at offset *end*, for good. Raises OSError."""
        self._disk.ftruncate(self.fd, end)

    def write(self, buffers: Sequence[Buffer], size: int, offset: int) -> None:
        """Write *buffers*, *size* bytes in all, at *offset*: one call to the system unless they are many.

        Raises OSError; some of the bytes may be in the file then.
        """
        if not size:
            return
        few = size <= WRITE_BYTES and len(buffers) <= IOV_MAX
        if not few or self._disk.pwritev(self.fd, buffers, offset) != size:
            write_fully(self._disk, self.fd, buffers, offset)

    def sync(self) -> None:
        """[thread] Bring what was written to the disk. Raises OSError."""
        self._disk.fdatasync(self.fd)

    def close(self) -> None:
        """Close the descriptor; the map lives as long as views of it do."""
        if self.fd >= 0:
            self._disk.close(self.fd)
            self.fd = -1

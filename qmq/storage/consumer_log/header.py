"""The header of the consumer log's files, and their names: ``<base:016x>.entries`` and ``<base:016x>.order``.

Bytes:

    0   magic 8s          "QMQENTRY" or "QMQORDER"
    8   version u16 | partition u16 | store_id 6s | sealed u8 | reserved 5s
    24  base u64          of the segment
    32  covered u64       where the segment's last batch ends           0 until sealed
    40  count u64         rows in the file                              0 until sealed
    48  first_row u64     the row number of the segment's first row in the partition
    56  body_crc u32      crc32c of all after this header               0 until sealed
    60  crc32c u32        of the 60 bytes before

Nothing in these files depends on when they were written: deleted, and derived again from the message log and the
registry of subjects, they are equal byte for byte once sealed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER, DERIVED_HEADER_SIZE, DERIVED_VERSION
from qmq.format.versions import check_version
from qmq.storage.disk.disk import Disk, failure

ENTRIES_SUFFIX: Final = ".entries"
ORDER_SUFFIX: Final = ".order"
#: Of a file that gets its name once it is on disk: a checkpoint may count on the one that has the name.
DRAFT_SUFFIX: Final = ".tmp"

_CHECKED: Final = DERIVED_HEADER_SIZE - 4
_READ_BYTES: Final = 1 << 20


class DerivedHeader(NamedTuple):
    """The header of a file of the consumer log."""

    partition: int
    store_id: bytes
    sealed: bool
    base: int
    covered: int
    rows: int
    first_row: int
    body_crc: int

    def pack(self, magic: bytes) -> bytes:
        """Return the 64 bytes at the beginning of the file."""
        fields = DERIVED_HEADER.pack(
            magic, DERIVED_VERSION, self.partition, self.store_id, self.sealed, b"", *self[3:7], self.body_crc, 0
        )
        return fields[:_CHECKED] + crc32c(fields[:_CHECKED]).to_bytes(4, "little")

    def unsealed(self) -> DerivedHeader:
        """Return the header that the file had while its segment was being written."""
        return self._replace(sealed=False, covered=0, rows=0, body_crc=0)


def parse_derived(data: bytes, magic: bytes, path: Path) -> DerivedHeader:
    """Read a header. Raises BadBytes when it is rotten or of another kind, ForeignFile for a newer version."""
    if len(data) < DERIVED_HEADER_SIZE:
        raise BadBytes(f"{path} has {len(data)} bytes, fewer than its header; delete it, it is made again")
    found, version, partition, store_id, sealed, _, base, covered, rows, first_row, body_crc, crc = (
        DERIVED_HEADER.unpack_from(data)
    )
    if found != magic or crc != crc32c(data[:_CHECKED]):
        raise BadBytes(f"the header of {path} does not fit its checksum or kind; delete it, it is made again")
    check_version(path, version, DERIVED_VERSION)
    return DerivedHeader(partition, store_id, bool(sealed), base, covered, rows, first_row, body_crc)


def crc_of_body(disk: Disk, fd: int, size: int) -> int:
    """Return the crc32c of *size* bytes after the header of such a file, read in pieces. Raises OSError."""
    crc, offset, end = 0, DERIVED_HEADER_SIZE, DERIVED_HEADER_SIZE + size
    while offset < end:
        piece = disk.pread(fd, min(_READ_BYTES, end - offset), offset)
        if not piece:
            break
        crc = crc32c(piece, crc)
        offset += len(piece)
    return crc


def delete_others(disk: Disk, directory: Path, kept: set[str]) -> None:
    """Delete the files of segments whose names are not in *kept*. Raises StorageFull or StorageFailed."""
    try:
        for name in disk.listdir(directory):
            if base_of(name.removesuffix(DRAFT_SUFFIX)) is not None and name not in kept:
                disk.unlink(directory / name)
    except OSError as error:
        raise failure(error, "clean", directory) from error


def entries_path(directory: Path, base: int) -> Path:
    """Return the path of the entries of the segment that begins at *base*."""
    return directory / f"{base:016x}{ENTRIES_SUFFIX}"


def order_path(directory: Path, base: int) -> Path:
    """Return the path of the order of the segment that begins at *base*."""
    return directory / f"{base:016x}{ORDER_SUFFIX}"


def draft_of(path: Path) -> Path:
    """Return the path of a file until it is on disk."""
    return path.with_name(path.name + DRAFT_SUFFIX)


def base_of(name: str) -> int | None:
    """Return the base in the name of a consumer log's file; None for any other file."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix not in (ENTRIES_SUFFIX, ORDER_SUFFIX) or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None

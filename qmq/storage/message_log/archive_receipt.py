"""The receipt beside a segment: ``<base:016x>.receipt`` says that an archive has a verified copy of the segment.

Bytes: one line of JSON with a checksum (`storage/disk/checksummed_json.py`). The archive job writes it, also while a
broker runs. A segment may grow after it was archived: then its receipt ends before the segment, and does not cover all
of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from qmq.errors import BadBytes
from qmq.storage.disk.checksummed_json import pack_json, parse_json
from qmq.storage.disk.disk import SHARED_FILE, Disk, failure, read_whole, write_atomically
from qmq.storage.message_log.segment import SegmentOwner

SUFFIX: Final = ".receipt"
VERSION: Final = 1
_ADVICE: Final = "remove it: the next run of qmq archive verifies its segment's copy and writes it again"


@dataclass(frozen=True)
class ArchiveReceipt:
    """A note that a part of a segment is in an archive, and was verified there. Times are in microseconds."""

    #: In hex.
    store_id: str
    partition: int
    base: int
    #: Behind the last batch that was archived.
    end: int
    #: Size and crc32c of the archived copy, which are those of the segment's bytes up to ``end``.
    messages_bytes: int
    messages_crc: int
    #: The archive: an absolute path, or a URL.
    destination: str
    verified_at_us: int

    def covers(self, owner: SegmentOwner, base: int, end: int) -> bool:
        """Return whether the receipt is for that segment, which ends at *end*, and for all of it.

        One that goes further is of other bytes: those of a directory that this one is an older copy of.
        """
        return self.is_of(owner, base) and self.end == end

    def is_of(self, owner: SegmentOwner, base: int) -> bool:
        """Return whether the receipt is for the segment of *owner* that begins at *base*."""
        own = (bytes.fromhex(self.store_id), self.partition, self.base)
        return own == (*owner, base) and bool(self.destination)


def receipt_path(directory: Path, base: int) -> Path:
    """Return the path of the receipt of the segment that begins at *base*."""
    return directory / f"{base:016x}{SUFFIX}"


def write_receipt(disk: Disk, directory: Path, receipt: ArchiveReceipt) -> None:
    """Write a receipt beside its segment, on disk when this returns. Raises StorageFull or StorageFailed."""
    # The broker has to read it, whichever user runs qmq archive.
    path, data = receipt_path(directory, receipt.base), pack_json(VERSION, asdict(receipt))
    write_atomically(disk, path, data, SHARED_FILE)


def read_receipt(disk: Disk, directory: Path, base: int) -> ArchiveReceipt | None:
    """Return the receipt of a segment; None when it has none.

    Raises BadBytes when it is not what was written, ForeignFile for a newer version, StorageFailed.
    """
    path = receipt_path(directory, base)
    try:
        data = read_whole(disk, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(error, "read", path) from error
    return parse_receipt(data, path)


def parse_receipt(data: bytes, path: Path) -> ArchiveReceipt:
    """Return the receipt in *data*, the bytes of the file at *path*. Raises BadBytes, ForeignFile."""
    content = parse_json(data, VERSION, str(path), _ADVICE)
    try:
        receipt = ArchiveReceipt(**{field.name: content[field.name] for field in fields(ArchiveReceipt)})
        numbers = (receipt.partition, receipt.base, receipt.end, receipt.messages_bytes, receipt.messages_crc)
        if len(bytes.fromhex(receipt.store_id)) != 6 or not all(isinstance(number, int) for number in numbers):
            raise ValueError("fields of another kind")
    except (ValueError, KeyError, TypeError) as error:
        raise BadBytes(f"{path} is no receipt ({error!r:.80}); {_ADVICE}") from error
    return receipt

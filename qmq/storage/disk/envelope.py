"""A small file that is written whole: a header and msgpack, with one checksum over both. Identity and checkpoints use
it.

Bytes: magic 8s | version u16 | reserved u16 | size u32 (of the msgpack) | crc32c u32 (of the 16 bytes before and of the
msgpack) | msgpack. Every version has this header and checksum, so that rot never passes for a newer version.
"""

from __future__ import annotations

import enum
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq.errors import BadBytes, ForeignFile
from qmq.format.versions import check_version
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_whole

_FIELDS: Final = struct.Struct("<8sHHI")
_CRC: Final = struct.Struct("<I")
ENVELOPE_SIZE: Final = _FIELDS.size + _CRC.size

assert ENVELOPE_SIZE == 20


class FileState(enum.Enum):
    """The state of a file that was read."""

    GOOD = "good"
    ROTTEN = "rotten"
    MISSING = "missing"
    #: Whole, but of a format version that this program does not read.
    UNKNOWN = "unknown"


class OpenedFile(NamedTuple):
    """A file that was read: ``content`` is set when it is good, ``reason`` when it is not."""

    state: FileState
    content: dict[str, Any] | None
    reason: str


def pack_envelope(magic: bytes, version: int, content: dict[str, Any]) -> list[bytes]:
    """Return the buffers of a file with *content* (str, int, bytes, list, dict, bool, None)."""
    body = msgpack.packb(content, use_bin_type=True)
    fields = _FIELDS.pack(magic, version, 0, len(body))
    return [fields, _CRC.pack(crc32c(body, crc32c(fields))), body]


def unpack_envelope(data: bytes, magic: bytes, version: int, name: str, oldest: int = 1) -> dict[str, Any]:
    """Return the content of a file's bytes. Raises BadBytes, or ForeignFile for a version not from *oldest* to
    *version*.
    """
    if len(data) < ENVELOPE_SIZE:
        raise BadBytes(f"{name} has {len(data)} bytes, fewer than its header")
    found, found_version, _, size = _FIELDS.unpack_from(data)
    if found != magic:
        raise BadBytes(f"{name} does not begin with {magic.decode()}")
    (crc,) = _CRC.unpack_from(data, _FIELDS.size)
    body = memoryview(data)[ENVELOPE_SIZE:]
    if len(body) != size or crc32c(body, crc32c(data[: _FIELDS.size])) != crc:
        raise BadBytes(f"{name} does not fit its checksum")
    check_version(name, found_version, version, oldest)
    try:
        content = msgpack.unpackb(body, raw=False, strict_map_key=False, max_bin_len=size, max_str_len=size)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: an unhashable key
        raise BadBytes(f"{name} does not hold a map: {error}") from error
    if not isinstance(content, dict):
        raise BadBytes(f"{name} does not hold a map")
    return content


def read_envelope(disk: Disk, path: Path, magic: bytes, version: int, oldest: int = 1) -> OpenedFile:
    """Read the file at *path*, of a version from *oldest* to *version*; a bad sector is rot. Raises StorageFailed when
    the system refuses to read it.
    """
    try:
        data = read_whole(disk, path)
    except FileNotFoundError:
        return OpenedFile(FileState.MISSING, None, f"{path} is missing")
    except OSError as error:
        if error.errno in BAD_SECTOR:
            return OpenedFile(FileState.ROTTEN, None, str(failure(error, "read", path)))
        raise failure(error, "read", path) from error
    try:
        return OpenedFile(FileState.GOOD, unpack_envelope(data, magic, version, str(path), oldest), "")
    except ForeignFile as error:
        return OpenedFile(FileState.UNKNOWN, None, str(error))
    except (BadBytes, ValueError) as error:
        return OpenedFile(FileState.ROTTEN, None, str(error))

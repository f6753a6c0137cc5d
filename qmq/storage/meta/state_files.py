"""Large parts of the broker's state beside the checkpoints: files ``state-<n>-<name>``, each written once.

A checkpoint is taken every second, and some parts of the state take tens of megabytes and change every half minute. So
a part that is large has a file of its own, which the checkpoints name as long as it stays the same. Programs of before
do not know these files; they do without the parts that may have one, and read the logs instead.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import STATE_FILE_MAGIC, STATE_FILE_VERSION
from qmq.format.versions import check_version
from qmq.storage.disk.disk import BAD_SECTOR, Disk, failure, read_whole, write_atomically

PREFIX: Final = "state-"
#: The parts that may have a file, and from which size on.
_APART: Final = frozenset(("producers", "unique"))
APART_BYTES: Final = 1 << 20
#: magic 8s | version u16 | reserved u16 | crc32c u32 (of the part)
_HEADER: Final = struct.Struct("<8sHHI")


class StatePart:
    """A part of the state and its file."""

    def __init__(self, name: str, number: int, part: bytes, *, is_written: bool = False) -> None:
        """*number* is that of the first checkpoint that names it."""
        self.name = name
        self.number = number
        self.part = part
        self._is_written = is_written
        self._crc = crc32c(part) if is_written else 0

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{PREFIX}{self.number}-{self.name}"

    def claim(self) -> list[int]:
        """Return what a checkpoint says of it: number, size and checksum."""
        return [self.number, len(self.part), self._crc]

    def write(self, disk: Disk, directory: Path) -> None:
        """[thread] Write the file, unless that is done. Raises StorageFull or StorageFailed."""
        if self._is_written:
            return
        self._crc = crc32c(self.part)
        header = _HEADER.pack(STATE_FILE_MAGIC, STATE_FILE_VERSION, 0, self._crc)
        write_atomically(disk, directory / self.file_name, [header, self.part])
        self._is_written = True


def split(
    state: Mapping[str, bytes], number: int, known: Iterable[StatePart]
) -> tuple[dict[str, bytes], list[StatePart]]:
    """Return the parts of the state that checkpoint *number* has itself, and the files of the others: *known* ones, as
    far as they have the same parts.
    """
    own, files = dict[str, bytes](), list[StatePart]()
    before = {file.name: file for file in known}
    for name, part in state.items():
        if name not in _APART or len(part) < APART_BYTES:
            own[name] = part
        elif (file := before.get(name)) is not None and file.part is part:
            files.append(file)
        else:
            files.append(StatePart(name, number, part))
    return own, files


def read_files(disk: Disk, directory: Path, claims: Mapping[str, Any]) -> tuple[list[StatePart], str]:
    """Return the files that a checkpoint names, without those that are bad or missing, and what is wrong with these.

    Raises ForeignFile for another version, StorageFailed.
    """
    files, wrong = list[StatePart](), list[str]()
    for name, (number, size, crc) in claims.items():
        file = StatePart(str(name), int(number), b"")
        path = directory / file.file_name
        try:
            part = _read(disk, path)
        except BadBytes as error:
            wrong.append(str(error))
            continue
        if len(part) != size or crc32c(part) != crc:
            wrong.append(f"{path} does not fit the checkpoint that names it")
            continue
        files.append(StatePart(file.name, file.number, part, is_written=True))
    return files, "; ".join(wrong)


def _read(disk: Disk, path: Path) -> bytes:
    try:
        data = read_whole(disk, path)
    except FileNotFoundError:
        raise BadBytes(f"{path} is missing, which a checkpoint names") from None
    except OSError as error:
        if error.errno in BAD_SECTOR:
            raise BadBytes(f"{path} cannot be read: {error.strerror}") from None
        raise failure(error, "read", path) from error
    if len(data) < _HEADER.size or not data.startswith(STATE_FILE_MAGIC):
        raise BadBytes(f"{path} does not begin with {STATE_FILE_MAGIC.decode()}")
    check_version(str(path), _HEADER.unpack_from(data)[1], STATE_FILE_VERSION, STATE_FILE_VERSION)
    return data[_HEADER.size :]


def remove_files(disk: Disk, directory: Path, kept: set[str]) -> None:
    """[thread] Remove the files that none of the kept checkpoints names; one that stays does no harm."""
    with suppress(OSError):
        for name in disk.listdir(directory):
            if name.startswith(PREFIX) and name not in kept:
                with suppress(OSError):
                    disk.unlink(directory / name)

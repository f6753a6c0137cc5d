"""Trees of files that are read by ranges and written once: the interface, and a local directory.

Paths are relative to the root of the tree, with ``/`` between names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, Self
from urllib.parse import unquote, urlsplit

from crc32c import crc32c

from qmq.errors import InvalidOption, StorageFailed
from qmq.net.client.address import shown_location
from qmq.storage.disk.disk import SHARED_DIRECTORY, SHARED_FILE, Disk, failure, make_directory, read_fully, write_fully

#: How many bytes are copied at a time.
COPY_BYTES: Final = 4 << 20

#: A function that takes the number of bytes that were copied or read.
Progress = Callable[[int], None]


class Reading(Protocol):
    """A file that is open for reading."""

    #: Whether a small read is cheap, as it is on this machine.
    is_near: bool

    def size(self) -> int:
        """Return the size of the file. Raises StorageFailed."""

    def read(self, offset: int, size: int) -> bytes:
        """Return *size* bytes, fewer only at the end of the file. Raises StorageFailed."""

    def close(self) -> None:
        """Close the file."""


class Files(Protocol):
    """A tree of files that segments are read from."""

    #: The name of the tree for users.
    name: str

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, ascending; none if it does not exist. Raises StorageFailed."""

    def open(self, path: str) -> Reading:
        """Open a file. Raises StorageFailed, FileNotFoundError if it does not exist."""

    def read_whole(self, path: str) -> bytes:
        """Return all bytes of a small file. Raises as ``open`` and ``Reading.read``."""

    def close(self) -> None:
        """Close connections to the tree; a later call opens them again."""


class WritableFiles(Files, Protocol):
    """A tree that an archive is written to. When a call returns, what it wrote is on disk."""

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents. Raises StorageFull or StorageFailed."""

    def write(self, path: str, data: bytes) -> None:
        """Write a small file, replacing an existing one. Raises StorageFull or StorageFailed."""

    def copy_in(self, source: LocalReading, size: int, path: str, progress: Progress) -> int:
        """Write the first *size* bytes of *source*, and return their crc32c. Raises StorageFull or StorageFailed."""

    def checksum(self, path: str, progress: Progress) -> tuple[int, int]:
        """Return the size of a file and the crc32c of the bytes that the tree has stored.

        Raises FileNotFoundError if it does not exist, StorageFailed.
        """

    def rename(self, path: str, to: str) -> None:
        """Rename a file, replacing an existing one. Raises StorageFailed."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists. Raises StorageFailed."""

    def claim(self, path: str, data: bytes) -> bool:
        """Create a file with *data* atomically; return False if it exists already. Raises StorageFailed."""


class LocalReading:
    """A local file. It is read, not mapped: a bad disk is an error here, and would end the process if it were
    mapped.
    """

    is_near = True

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self._disk = disk
        try:
            self._fd = disk.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise failure(error, "open", path) from error

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._fd

    def size(self) -> int:
        try:
            return self._disk.size(self._fd)
        except OSError as error:
            raise failure(error, "look at", self.path) from error

    def read(self, offset: int, size: int) -> bytes:
        try:
            return read_fully(self._disk, self._fd, size, offset)
        except OSError as error:
            raise failure(error, "read", self.path, offset) from error

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalFiles:
    """A directory of this machine."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self._root = root
        self._disk = disk if disk is not None else Disk()
        self.name = str(root)

    def names(self, path: str) -> list[str]:
        try:
            return self._disk.listdir(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise failure(error, "list", self._at(path)) from error

    def open(self, path: str) -> LocalReading:
        return LocalReading(self._disk, self._at(path))

    def read_whole(self, path: str) -> bytes:
        with self.open(path) as file:
            return file.read(0, file.size())

    def close(self) -> None:
        """Do nothing: no connections stay open."""

    def make_directory(self, path: str) -> None:
        make_directory(self._disk, self._at(path), SHARED_DIRECTORY)

    def write(self, path: str, data: bytes) -> None:
        target = self._at(path)
        try:
            fd = self._disk.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, SHARED_FILE)
        except OSError as error:
            raise failure(error, "write", target) from error
        self._fill(fd, target, data)

    def copy_in(self, source: LocalReading, size: int, path: str, progress: Progress) -> int:
        target, crc = self._at(path), 0
        try:
            fd = self._disk.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, SHARED_FILE)
            try:
                for offset, piece in pieces_of(source, size):
                    crc = crc32c(piece, crc)
                    write_fully(self._disk, fd, [piece], offset)
                    progress(len(piece))
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise failure(error, "write", target) from error
        return crc

    def checksum(self, path: str, progress: Progress) -> tuple[int, int]:
        crc = 0
        with self.open(path) as file:
            size = file.size()
            for _, piece in pieces_of(file, size):
                crc = crc32c(piece, crc)
                progress(len(piece))
        return size, crc

    def rename(self, path: str, to: str) -> None:
        try:
            self._disk.rename(self._at(path), self._at(to))
            self._disk.fsync_directory(self._at(to).parent)
        except OSError as error:
            raise failure(error, "rename", self._at(path)) from error

    def remove(self, path: str) -> None:
        try:
            with suppress(FileNotFoundError):
                self._disk.unlink(self._at(path))
        except OSError as error:
            raise failure(error, "remove", self._at(path)) from error

    def claim(self, path: str, data: bytes) -> bool:
        target, draft = self._at(path), draft_of(path, self._disk.random(8))
        self.write(draft, data)
        try:
            self._disk.link(self._at(draft), target)
            self._disk.fsync_directory(target.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise failure(error, "make", target) from error
        finally:
            self.remove(draft)
        return True

    def _fill(self, fd: int, path: Path, data: bytes) -> None:
        """Write all of *data* to an open file, and close it."""
        try:
            try:
                write_fully(self._disk, fd, [data], 0)
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
        except OSError as error:
            raise failure(error, "write", path) from error

    def _at(self, path: str) -> Path:
        return self._root / path if path else self._root


def pieces_of(source: LocalReading, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the first *size* bytes of a file in pieces, each with its offset. Raises StorageFailed."""
    done = 0
    while done < size:
        piece = source.read(done, min(COPY_BYTES, size - done))
        if not piece:
            raise StorageFailed(f"{source.path} ends at {done} of {size} bytes; run qmq verify")
        yield done, piece
        done += len(piece)


def draft_of(path: str, chance: bytes) -> str:
    """Return the path at which the file *path* is first written; names that begin with ``_`` belong to unfinished
    files.
    """
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}_{name}.{chance.hex()}"


def local_path(location: str) -> Path | None:
    """Return the path of *location* (a path, or file:// and a path); None for any other scheme. Raises
    InvalidOption.
    """
    scheme, _, _ = location.partition("://")
    if "://" not in location:
        return Path(location)
    if scheme != "file":
        return None
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost"):
        raise InvalidOption(
            f"{shown_location(location)} names the machine {parts.hostname}; file:// is for paths of this one: file:///path"
        )
    return Path(unquote(parts.path))

"""Bytes of the message log as they lie, for who reads history: a part of a file, read in a thread by ``preadv``."""

from __future__ import annotations

import os
from pathlib import Path

from qmq.errors import BadBytes
from qmq.storage.disk.disk import Disk, failure, read_fully


class Fetch:
    """A part of a segment's file. Call ``run`` in a thread; ``data`` is what was read, fewer bytes where it was cut."""

    __slots__ = ("_disk", "_offset", "_path", "_position", "_size", "data", "partition")

    def __init__(self, disk: Disk, partition: int, path: Path, offset: int, size: int, position: int) -> None:
        self._disk = disk
        self._path = path
        self._offset = offset
        self._size = size
        self._position = position
        self.partition = partition
        self.data: bytes | memoryview = b""

    def run(self) -> None:
        """[thread] Read it. Raises BadBytes when the file was removed meanwhile, StorageFailed."""
        try:
            fd = self._disk.open(self._path, os.O_RDONLY)
            try:
                self.data = read_fully(self._disk, fd, self._size, self._offset)
            finally:
                self._disk.close(fd)
        except FileNotFoundError as error:
            raise BadBytes(f"{self._path} is gone, it was removed meanwhile; look for what there is again") from error
        except OSError as error:
            raise failure(error, "read", self._path, self._position) from error

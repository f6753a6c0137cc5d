"""Disks that fail as a test asks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from qmq.storage.disk.disk import Buffer, Disk


class FullDisk(Disk):
    """Takes a part of one write and then no more while ``full`` is set, but for where room was allocated before."""

    def __init__(self) -> None:
        self.full = False
        self._allocated: dict[int, int] = {}  # bytes by descriptor

    def allocate(self, fd: int, size: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size)
        self._allocated[fd] = size

    def close(self, fd: int) -> None:
        self._allocated.pop(fd, None)
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if self.full and offset + sum(map(len, buffers)) > self._allocated.get(fd, 0):
            if len(buffers[0]) > 3:
                os.pwrite(fd, bytes(buffers[0])[:3], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)


class HastyDisk(Disk):
    """Does not wait for the disk: for tests that write many files and lose no power."""

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync(self, fd: int) -> None:
        pass

    def fsync_directory(self, path: Path) -> None:
        pass

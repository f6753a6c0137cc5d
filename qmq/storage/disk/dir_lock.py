"""One broker per data directory: the file ``lock``, locked with flock. Its text names the process that holds the
lock.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from qmq.errors import DirectoryInUse, SyncFailed
from qmq.storage.disk.disk import Disk, failure, read_fully, write_fully

LOCK_NAME = "lock"


class DirectoryLock:
    """The lock on a data directory. The system drops it when the process ends, in whatever way."""

    def __init__(self, disk: Disk, fd: int, path: Path) -> None:
        self._disk = disk
        self._fd = fd
        self._path = path

    @classmethod
    def acquire(cls, disk: Disk, directory: Path, now_us: int) -> DirectoryLock:
        """Lock the directory. Raises DirectoryInUse, which names the holder, or StorageFailed."""
        path = directory / LOCK_NAME
        try:
            fd = disk.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise failure(error, "open", path) from error
        try:
            if not disk.flock(fd):
                raise DirectoryInUse(
                    f"{directory} is in use by {_holder(disk, fd)}; stop it or choose another directory"
                )
            started = datetime.fromtimestamp(now_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            text = f"process {os.getpid()} on {socket.gethostname()}, since {started}\n".encode()
            with suppress(OSError):  # a full disk must not prevent reading
                disk.ftruncate(fd, 0)
                write_fully(disk, fd, [text], 0)
        except OSError as error:
            disk.close(fd)
            raise failure(error, "lock", path) from error
        except DirectoryInUse:
            disk.close(fd)
            raise
        return cls(disk, fd, path)

    def check_in_flight(self) -> None:
        """[thread] Check that the data directory still has the lock file that was locked. Raises SyncFailed."""
        try:
            is_there = self._disk.is_at(self._fd, self._path)
        except OSError as error:
            raise failure(error, "look at", self._path) from error
        if not is_there:
            raise SyncFailed(
                f"{self._path.parent} was removed, moved or replaced while the broker runs (its {self._path.name} is "
                "not the locked file); nothing more is stored: put the directory back, then restart the broker"
            )

    def release(self) -> None:
        """Unlock the directory. A second call does nothing."""
        if self._fd >= 0:
            with suppress(OSError):
                self._disk.ftruncate(self._fd, 0)
            self._disk.close(self._fd)
            self._fd = -1


def holder_of(disk: Disk, directory: Path) -> str | None:
    """Return which process holds the directory now ("process 12 on host, since ..."), None when none does, without
    locking it.

    Raises StorageFailed when the system refuses to read the lock file.
    """
    path = directory / LOCK_NAME
    try:
        fd = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failure(error, "open", path) from error
    try:
        # If this locks the file, close() below unlocks it, a few microseconds later.
        return None if disk.flock(fd) else _holder(disk, fd)
    finally:
        disk.close(fd)


def _holder(disk: Disk, fd: int) -> str:
    text = read_fully(disk, fd, 256, 0).decode("utf-8", "replace").strip()
    return text or "another process that has just started"

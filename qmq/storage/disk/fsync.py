"""Syncs that are sure, also after a sync of the same file has failed."""

from __future__ import annotations

from contextlib import suppress

from qmq.storage.disk.disk import WRITE_BYTES, Disk, write_fully


class SureSync:
    """[thread] Syncs a file that only grows: called with a descriptor, it returns when the whole file is on disk.

    Bytes that a failed sync left unwritten read well until they leave memory, and the system does not write them again.
    So after a failure the whole file is written again in place, for the next sync. Raises OSError.
    """

    __slots__ = ("_disk", "_is_behind")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_behind = False

    def __call__(self, fd: int) -> None:
        if self._is_behind:
            self._write_again(fd)
        try:
            self._disk.fdatasync(fd)
        except OSError:
            self._is_behind = True
            with suppress(OSError):  # now, while the bytes are in memory; the next call tries again
                self._write_again(fd)
            raise

    def _write_again(self, fd: int) -> None:
        offset, size = 0, self._disk.size(fd)
        while offset < size and (part := self._disk.pread(fd, min(WRITE_BYTES, size - offset), offset)):
            write_fully(self._disk, fd, [part], offset)
            offset += len(part)
        self._is_behind = False

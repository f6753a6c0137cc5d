"""A disk that fails as a test asks: the nth call of an operation, with an errno, or writes that come short."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qmq.storage.disk import Buffer, Disk


class FaultyDisk(Disk):
    """Counts every operation. ``fail`` makes one fail; ``short`` cuts writes; ``boot`` says which boot this is.

    What is written and not synced is known by file, so that ``without_power`` can take it away from a copy.
    """

    def __init__(self, boot: str = "boot-1") -> None:
        self.calls: Counter[str] = Counter()
        self.boot = boot
        self.short: int | None = None
        self._faults: dict[tuple[str, int], int] = {}
        self._lasting: dict[str, tuple[int, str]] = {}
        self._synced: dict[str, bytes] = {}
        self._paths: dict[int, str] = {}
        self.track = False

    def fail(self, operation: str, nth: int = 1, code: int = errno.EIO) -> None:
        """Let the nth call of *operation* from now on fail with errno *code*."""
        self._faults[operation, self.calls[operation] + nth] = code

    def fail_always(self, operation: str, code: int = errno.ENOSPC, path_part: str = "") -> None:
        """Let every call of *operation* fail until ``heal``, for paths that contain *path_part*."""
        self._lasting[operation] = (code, path_part)

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()
        self._lasting.clear()
        self.short = None

    def _count(self, operation: str, path: Path | str = "") -> None:
        self.calls[operation] += 1
        code = self._faults.pop((operation, self.calls[operation]), None)
        lasting = self._lasting.get(operation)
        if code is None and lasting is not None and lasting[1] in str(path):
            code = lasting[0]
        if code is not None:
            raise OSError(code, os.strerror(code))

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        self._count("open", path)
        fd = super().open(path, flags, mode)
        self._paths[fd] = str(path)
        return fd

    def close(self, fd: int) -> None:
        self._count("close", self._paths.get(fd, ""))
        super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._count("pwritev", self._paths.get(fd, ""))
        if self.short is not None:
            whole = b"".join(buffers)
            return super().pwritev(fd, [whole[: self.short]], offset)
        return super().pwritev(fd, buffers, offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._count("pread", self._paths.get(fd, ""))
        return super().pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._count("preadv", self._paths.get(fd, ""))
        return super().preadv(fd, buffers, offset)

    def map(self, fd: int, length: int) -> mmap.mmap:
        self._count("map", self._paths.get(fd, ""))
        return super().map(fd, length)

    def ftruncate(self, fd: int, length: int) -> None:
        self._count("ftruncate", self._paths.get(fd, ""))
        super().ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        self._count("fdatasync", self._paths.get(fd, ""))
        super().fdatasync(fd)
        self._remember(fd)

    def fsync(self, fd: int) -> None:
        self._count("fsync", self._paths.get(fd, ""))
        super().fsync(fd)
        self._remember(fd)

    def fsync_directory(self, path: Path) -> None:
        self._count("fsync_directory", path)
        super().fsync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", target)
        super().rename(source, target)
        if str(source) in self._synced:
            self._synced[str(target)] = self._synced.pop(str(source))

    def unlink(self, path: Path) -> None:
        self._count("unlink", path)
        super().unlink(path)
        self._synced.pop(str(path), None)

    def listdir(self, path: Path) -> list[str]:
        self._count("listdir", path)
        return super().listdir(path)

    def mkdir(self, path: Path) -> None:
        self._count("mkdir", path)
        super().mkdir(path)

    def boot_id(self) -> str:
        return self.boot

    def _remember(self, fd: int) -> None:
        if self.track:
            self._synced[self._paths[fd]] = super().pread(fd, super().data_end(fd), 0)

    def without_power(self, source: Path, target: Path) -> None:
        """Copy a directory as a loss of power may leave it: every file as it was when it was last synced."""
        assert self.track
        for path in sorted(source.rglob("*")):
            copy = target / path.relative_to(source)
            if path.is_dir():
                copy.mkdir(parents=True)
            elif str(path) in self._synced:
                copy.write_bytes(self._synced[str(path)])


def copy_killed(source: Path, target: Path) -> None:
    """Copy a directory as kill -9 leaves it: everything that was written is there."""
    shutil.copytree(source, target)

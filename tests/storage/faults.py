"""A disk that fails as a test asks: the nth call of an operation, or of any, with an errno; short writes."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from qmq.storage.disk.disk import Buffer, Disk

_CHANGES: Final = {"create", "pwritev", "ftruncate", "rename", "unlink", "mkdir"}
_SYNCS: Final = {"fdatasync", "fsync", "fsync_directory"}
_READS: Final = {"open", "map", "pread", "preadv", "listdir"}

#: The operations that may fail so. Opening a file for writing is "create" here.
FAILING: Final = {
    errno.EIO: _CHANGES | _SYNCS | _READS,
    errno.ENOSPC: {"create", "pwritev", "ftruncate", "rename", "mkdir"} | _SYNCS,
    errno.EDQUOT: {"create", "pwritev", "ftruncate", "rename", "mkdir"} | _SYNCS,
    errno.EROFS: _CHANGES | _SYNCS,
    errno.EMFILE: {"create", "open", "listdir", "fsync_directory"},
    errno.ENFILE: {"create", "open", "listdir", "fsync_directory"},
}

#: Writes of so many bytes, headers that is, are done whole or not at all.
_NOT_TORN_BYTES: Final = 64


class FaultyDisk(Disk):
    """Counts every operation, and waits for no disk. ``fail`` makes one fail; ``short`` cuts writes.

    After ``track``, ``without_power`` makes a copy that has only what was synced: bytes of files, names in directories.
    """

    def __init__(self, boot: str = "boot-1") -> None:
        self.calls: Counter[str] = Counter()
        self.boot = boot
        self.short: int | None = None
        self._faults: dict[tuple[str, int], int] = {}
        self._lasting: dict[str, tuple[int, str]] = {}
        self._kinds: Counter[str] = Counter()
        #: Writes that fail put the first half of their bytes there, as on a disk that fills up meanwhile.
        self.tears = False
        self._strike: tuple[int, int, bool] | None = None  # how many operations pass before, errno, whether it lasts
        #: How often an operation failed with an errno as ``strike`` asked.
        self.struck: Counter[tuple[str, int]] = Counter()
        self._paths: dict[int, str] = {}
        self._tracks = False
        self._root = Path()
        self._file_of: dict[int, object] = {}  # by inode; an inode is used again for another file
        self._synced: dict[object, bytes] = {}
        self._names: dict[Path, dict[str, object | None]] = {}  # None: a directory

    def fail(self, operation: str, nth: int = 1, code: int = errno.EIO) -> None:
        """Let the nth call of *operation* from now on fail with errno *code*."""
        self._faults[operation, self.calls[operation] + nth] = code

    def fail_always(self, operation: str, code: int = errno.ENOSPC, path_part: str = "") -> None:
        """Let every call of *operation* fail until ``heal``, for paths that contain *path_part*."""
        self._lasting[operation] = (code, path_part)

    def strike(self, code: int, after: int, *, lasting: bool) -> None:
        """Let the operation behind the next *after* of those that may fail so fail with errno *code*, and with
        *lasting* all of them from there on.
        """
        self._strike = after, code, lasting

    @property
    def code(self) -> int:
        """The errno that ``strike`` was given, 0 when nothing is to fail."""
        return self._strike[1] if self._strike is not None else 0

    def is_failing_for_good(self) -> bool:
        """Something fails until it is healed."""
        return bool(self._lasting) or (self._strike is not None and self._strike[2])

    def count_failing(self, code: int) -> int:
        """How many operations so far might have failed so."""
        return sum(count for kind, count in self._kinds.items() if kind in FAILING[code])

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()
        self._strike = None
        self._lasting.clear()
        self.short = None

    def _count(self, operation: str, path: Path | str = "", kind: str = "") -> None:
        self.calls[operation] += 1
        self._kinds[kind or operation] += 1
        code = self._faults.pop((operation, self.calls[operation]), None)
        lasting = self._lasting.get(operation)
        if code is None and lasting is not None and lasting[1] in str(path):
            code = lasting[0]
        if code is None:
            code = self._struck_by(kind or operation)
        if code is not None:
            raise OSError(code, os.strerror(code))

    def _struck_by(self, kind: str) -> int | None:
        if self._strike is None or kind not in FAILING[self._strike[1]]:
            return None
        after, code, lasting = self._strike
        if after:
            self._strike = after - 1, code, lasting
            return None
        if not lasting:
            self._strike = None
        self.struck[kind, code] += 1
        return code

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        self._count("open", path, "create" if flags & (os.O_WRONLY | os.O_RDWR) else "open")
        is_new = not path.exists()
        fd = super().open(path, flags, mode)
        inode = os.fstat(fd).st_ino
        if is_new or inode not in self._file_of:
            self._file_of[inode] = object()
        self._paths[fd] = str(path)
        return fd

    def close(self, fd: int) -> None:
        self._count("close", self._paths.get(fd, ""))
        del self._paths[fd]  # before another thread may be given its number
        super().close(fd)

    def still_open(self) -> list[str]:
        """The files whose descriptors have not been closed."""
        return sorted(self._paths.values())

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            self._count("pwritev", self._paths.get(fd, ""))
        except OSError:
            whole = b"".join(buffers)
            if self.tears and len(whole) > _NOT_TORN_BYTES:
                self.calls["torn"] += 1
                super().pwritev(fd, [whole[: len(whole) // 2]], offset)
            raise
        if self.short is not None:
            self.calls["short"] += 1
            whole = b"".join(buffers)
            return super().pwritev(fd, [whole[: self.short]], offset)
        return super().pwritev(fd, buffers, offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._count("pread", self._paths.get(fd, ""))
        return super().pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._count("preadv", self._paths.get(fd, ""))
        return super().preadv(fd, buffers, offset)

    def preadv_aside(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.preadv(fd, [buffer], offset)

    def map(self, fd: int, length: int) -> mmap.mmap:
        self._count("map", self._paths.get(fd, ""))
        return super().map(fd, length)

    def ftruncate(self, fd: int, length: int) -> None:
        self._count("ftruncate", self._paths.get(fd, ""))
        super().ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        self._count("fdatasync", self._paths.get(fd, ""))
        self._remember(fd)

    def fsync(self, fd: int) -> None:
        self._count("fsync", self._paths.get(fd, ""))
        self._remember(fd)

    def fsync_directory(self, path: Path) -> None:
        self._count("fsync_directory", path)
        if self._tracks and self._root in (path, *path.parents):
            self._remember_names(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename", target)
        super().rename(source, target)
        renamed = str(source)
        self._paths.update({fd: str(target) for fd, path in self._paths.items() if path == renamed})

    def unlink(self, path: Path) -> None:
        self._count("unlink", path)
        super().unlink(path)

    def listdir(self, path: Path) -> list[str]:
        self._count("listdir", path)
        return super().listdir(path)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        self._count("mkdir", path)
        super().mkdir(path, mode)

    def boot_id(self) -> str:
        return self.boot

    def track(self, directory: Path, *, synced: bool = False) -> None:
        """Begin: the files in *directory* have their names on disk and, with *synced*, their bytes."""
        self._tracks, self._root = True, directory
        directory.mkdir(parents=True, exist_ok=True)
        for path in [directory, *directory.rglob("*")]:
            if path.is_dir():
                self._remember_names(path)
            elif synced:
                self._synced[self._file_of.setdefault(path.stat().st_ino, object())] = path.read_bytes()

    def go_on_from(self, other: FaultyDisk) -> None:
        """Know what *other* knows to be on disk: another process on the same machine."""
        self._tracks, self._root = True, other._root
        self._file_of, self._synced, self._names = other._file_of, other._synced, other._names

    def _remember_names(self, path: Path) -> None:
        names = {name: path / name for name in os.listdir(path)}
        self._names[path] = {
            name: None if file.is_dir() else self._file_of.setdefault(file.stat().st_ino, object())
            for name, file in names.items()
        }

    def _remember(self, fd: int) -> None:
        if self._tracks:
            copy = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            try:
                self._synced[self._file_of[os.fstat(fd).st_ino]] = os.pread(copy, super().data_end(fd), 0)
            finally:
                os.close(copy)

    def without_power(self, source: Path, target: Path) -> None:
        """Copy a directory as a loss of power may leave it: names and bytes as they were last synced."""
        assert self._tracks
        target.mkdir()
        for name, file in self._names[source].items():
            if file is not None:
                (target / name).write_bytes(self._synced.get(file, b""))
            elif source / name in self._names:
                self.without_power(source / name, target / name)
            else:
                (target / name).mkdir()


def copy_killed(source: Path, target: Path) -> None:
    """Copy a directory as kill -9 leaves it: everything that was written is there."""
    shutil.copytree(source, target)

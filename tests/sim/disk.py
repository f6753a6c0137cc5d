"""A machine's disk in memory, under the storage seam: it loses power at any operation, and fails as it is told.

``before`` is called ahead of every operation that changes something, so a test can take a ``clone`` there and crash it:
the workload goes on, and every moment of it is looked at in one run. ``stop`` ends the process, maybe with the power.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from qmq.storage.disk.disk import PAGE, Buffer, Disk
from tests.sim.platter import SECTOR, Change, Directory, File

_FIRST_DESCRIPTOR: Final = 1_000_000
SYNCS: Final = ("fdatasync", "fsync", "fsync_directory")


class Operation(NamedTuple):
    """An operation that changes something; descriptors and paths are those of the disk, and of its clones."""

    kind: str
    path: str
    arguments: tuple[Any, ...]


class SimulatedDisk(Disk):
    """One machine. ``struck`` counts each fault where it struck, over this disk and all its clones."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.before: Callable[[Operation], None] | None = None
        self.operations: Counter[str] = Counter()
        self.boot = 1
        self._directories: dict[str, Directory] = {"": Directory()}
        self._files: dict[int, File] = {}
        self._paths: dict[int, str] = {}
        self._descriptor = _FIRST_DESCRIPTOR
        self._writes = 0
        self._faults: dict[tuple[str, int], int] = {}

    def clone(self, seed: int) -> SimulatedDisk:
        """The same machine at this moment, to do something else with."""
        other = SimulatedDisk(seed)
        other.struck, other.boot = self.struck, self.boot
        other._descriptor, other._writes = self._descriptor, self._writes
        made: dict[int, File] = {}

        def copied(file: File | None) -> File | None:
            if file is None:
                return None
            if id(file) not in made:
                made[id(file)] = file.clone()
            return made[id(file)]

        for path, directory in self._directories.items():
            mine = other._directories[path] = Directory()
            mine.names = {name: copied(file) for name, file in directory.names.items()}
            mine.platter = {name: copied(file) for name, file in directory.platter.items()}
            mine.pending = [change._replace(file=copied(change.file)) for change in directory.pending]
        other._files = {fd: cast(File, copied(file)) for fd, file in self._files.items()}
        other._paths = dict(self._paths)
        return other

    # --- faults ------------------------------------------------------------------------------------------------------

    def fail(self, kind: str, nth: int = 1, code: int = errno.EIO) -> None:
        """Let the nth call of *kind* from now on fail; of *kind* "sync", the nth of any sync."""
        self._faults[kind, self.operations[kind] + nth] = code

    def heal(self) -> None:
        """Let nothing fail that has not yet."""
        self._faults.clear()

    def interrupt(self, operation: Operation) -> None:
        """Do some of an operation, as a process that is killed within it."""
        kind, arguments = operation.kind, operation.arguments
        if kind in SYNCS or self.chance.random() < 0.3:
            return
        if kind == "pwritev" and self.chance.random() < 0.6:
            fd, data, offset = arguments
            ends = range(SECTOR - offset % SECTOR, len(data), SECTOR)
            arguments = fd, data[: self.chance.choice([0, *ends])], offset
            self.struck["write cut short"] += 1
        getattr(self, f"_do_{kind}")(*arguments)

    def stop(self, *, power: bool, evict: bool = False) -> bool:
        """The process is gone, and with *power* all that is not on disk. Whether anything may be lost.

        With *evict*, what a failed sync left in memory may be gone without a loss of power.
        """
        self._files.clear()
        self._paths.clear()
        self._faults.clear()
        self.operations.clear()
        self.before = None
        evicted = 0
        for file in self._all_files():
            file.locked = -1
            if evict and not power and self.chance.random() < 0.5:
                evicted += file.evict()
        if power:
            self._lose_power()
        self.struck["page evicted"] += evicted
        return power or evicted > 0

    def _all_files(self) -> list[File]:
        found: dict[int, File] = {}
        for directory in self._directories.values():
            named = [*directory.names.values(), *directory.platter.values()]
            for file in [*named, *(change.file for change in directory.pending)]:
                if file is not None:
                    found[id(file)] = file
        return list(found.values())

    def _lose_power(self) -> None:
        self.boot += 1
        for file in self._all_files():
            file.lose_power(self.chance, self.struck)
        for directory in self._directories.values():
            directory.lose_power(self.chance, self.struck)
        for path in sorted(self._directories):
            parent, _, name = path.rpartition("/")
            if path and (parent not in self._directories or name not in self._directories[parent].names):
                del self._directories[path]

    def _begin(self, kind: str, path: str, *arguments: Any) -> None:
        """Count an operation, let a test look, and fail if that is wanted."""
        self.operations[kind] += 1
        self.operations["any"] += 1
        self.operations["sync"] += kind in SYNCS
        if self.before is not None:
            self.before(Operation(kind, path, arguments))
        code = self._faults.pop((kind, self.operations[kind]), None)
        if code is None and kind in SYNCS:
            code = self._faults.pop(("sync", self.operations["sync"]), None)
        if code is None:
            return
        if kind == "pwritev":
            fd, data, offset = arguments
            self._do_pwritev(fd, data[: self.chance.randrange(len(data) + 1)], offset)
            self.struck["write failed"] += 1
        elif kind in ("fdatasync", "fsync"):
            self.struck["page of a failed sync"] += self._files[arguments[0]].fail_sync(self.chance)
            self.struck["sync failed"] += 1
        else:
            self.struck["sync of names failed" if kind in SYNCS else "other call failed"] += 1
        raise OSError(code, os.strerror(code), path)

    # --- files -------------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        directory, name = self._place(path)
        file = directory.names.get(name)
        if file is None and name in directory.names:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if file is None and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if file is None or flags & os.O_TRUNC:
            self._begin("open", str(path), path, flags)
            file = self._do_open(path, flags)
        self._descriptor += 1
        self._files[self._descriptor] = file
        self._paths[self._descriptor] = str(path)
        return self._descriptor

    def _do_open(self, path: Path, flags: int) -> File:
        directory, name = self._place(path)
        file = directory.names.get(name)
        if file is None:
            file = File()
            directory.change(Change("name", name, file))
        elif flags & os.O_TRUNC:
            file.truncate(self._next_write(), 0)
        return file

    def close(self, fd: int) -> None:
        file = self._files.pop(fd)
        del self._paths[fd]
        if file.locked == fd:
            file.locked = -1

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        self._begin("pwritev", self._paths[fd], fd, data, offset)
        self._do_pwritev(fd, data, offset)
        return len(data)

    def _do_pwritev(self, fd: int, data: bytes, offset: int) -> None:
        if data:
            self._files[fd].write(self._next_write(), data, offset)

    def _next_write(self) -> int:
        self._writes += 1
        return self._writes

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self._files[fd].read(size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        done = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            data = self._files[fd].read(len(view), offset + done)
            view[: len(data)] = data
            done += len(data)
            if len(data) < len(view):
                break
        return done

    def map(self, fd: int, length: int) -> mmap.mmap:
        file = self._files[fd]
        if length > file.size or not length:
            raise ValueError("mmap length is greater than file size")
        return cast(mmap.mmap, memoryview(file.buffer)[:length].toreadonly())

    hot_bytes = Disk.hot_bytes

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        return b"\1" * ((offset + size - 1) // PAGE - offset // PAGE + 1)

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """All of it is in memory."""

    def open_aside(self, path: Path) -> int:
        return self.open(path, os.O_RDONLY)

    def preadv_aside(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.preadv(fd, [buffer], offset)

    def aside(self) -> None:
        """The simulation does every sync itself."""

    def ftruncate(self, fd: int, length: int) -> None:
        if length != self._files[fd].size:
            self._begin("ftruncate", self._paths[fd], fd, length)
            self._do_ftruncate(fd, length)

    def _do_ftruncate(self, fd: int, length: int) -> None:
        self._files[fd].truncate(self._next_write(), length)

    def allocate(self, fd: int, size: int) -> None:
        if size > self._files[fd].size:
            self._begin("ftruncate", self._paths[fd], fd, size)
            self._do_ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return self._files[fd].size

    def room(self, path: Path) -> tuple[int, int]:
        """Enough for everything; what is full is told by a failing call."""
        return 1 << 40, 1 << 40

    def data_end(self, fd: int) -> int:
        return self._files[fd].data_end()

    def fdatasync(self, fd: int) -> None:
        self._begin("fdatasync", self._paths[fd], fd)
        self._files[fd].sync()

    def fsync(self, fd: int) -> None:
        self._begin("fsync", self._paths[fd], fd)
        self._files[fd].sync()

    # --- names -------------------------------------------------------------------------------------------------------

    def _place(self, path: Path) -> tuple[Directory, str]:
        parent, _, name = str(path).rpartition("/")
        directory = self._directories.get(parent)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return directory, name

    def fsync_directory(self, path: Path) -> None:
        directory = self._directories.get(str(path).removesuffix("/"))
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._begin("fsync_directory", str(path))
        directory.sync()

    def rename(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        self._begin("rename", str(target), source, target)
        self._do_rename(source, target)

    def _do_rename(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        assert source.parent == target.parent
        directory.change(Change("rename", target.name, directory.names[name], name))

    def link(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        if target.name in directory.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        self._begin("link", str(target), source, target)
        self._do_link(source, target)

    def _do_link(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        assert source.parent == target.parent
        directory.change(Change("name", target.name, directory.names[name]))

    def unlink(self, path: Path) -> None:
        directory, name = self._place(path)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._begin("unlink", str(path), path)
        self._do_unlink(path)

    def _do_unlink(self, path: Path) -> None:
        directory, name = self._place(path)
        directory.change(Change("unlink", name, None))

    def listdir(self, path: Path) -> list[str]:
        directory = self._directories.get(str(path).removesuffix("/"))
        if directory is None:
            code = errno.ENOTDIR if self.exists(path) else errno.ENOENT
            raise OSError(code, os.strerror(code), str(path))
        return sorted(directory.names)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        parent, name = self._place(path)
        if name not in parent.names:
            self._begin("mkdir", str(path), path)
            self._do_mkdir(path)
        if str(path) not in self._directories:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def _do_mkdir(self, path: Path) -> None:
        parent, name = self._place(path)
        parent.change(Change("directory", name, None))
        self._directories[str(path)] = Directory()

    def resolve(self, path: Path) -> Path:
        return path  # there are no links

    def kind(self, path: Path) -> str:
        directory, name = self._place(path)
        return "a file" if directory.names.get(name) is not None else "a directory"

    def is_at(self, fd: int, path: Path) -> bool:
        return self.exists(path) and self._place(path)[0].names.get(path.name) is self._files[fd]

    def exists(self, path: Path) -> bool:
        parent, _, name = str(path).rpartition("/")
        return not str(path).strip("/") or (parent in self._directories and name in self._directories[parent].names)

    # --- the machine -------------------------------------------------------------------------------------------------

    def flock(self, fd: int) -> bool:
        file = self._files[fd]
        if file.locked >= 0 and file.locked != fd:
            return False
        file.locked = fd
        return True

    def boot_id(self) -> str:
        return f"boot-{self.boot}"

    def random(self, size: int) -> bytes:
        return self.chance.randbytes(size)

"""A machine in memory, under the fake disk of tests: it loses power at any operation, and fails as it is told.

``before`` is called ahead of every operation that changes something, so a test can take a ``clone`` there and crash it:
the workload goes on, and every moment of it is looked at in one run. ``stop`` ends the process, maybe with the power.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from qmq.storage.disk.disk import PAGE, Buffer, Disk
from tests.fake_disk import SYNCS, FakeDisk, Operation
from tests.sim.platter import SECTOR, Change, Directory, File

_FIRST_DESCRIPTOR: Final = 1_000_000


class SimulatedDisk(FakeDisk):
    """One machine. ``struck`` counts each fault where it struck, over this disk and all its clones."""

    files: SimulatedFiles

    def __init__(self, seed: int, files: SimulatedFiles | None = None) -> None:
        super().__init__(files=files if files is not None else SimulatedFiles(), seed=seed)
        self.files.chance = self.chance
        #: Files that were opened to be written over since the last start: a stop may leave them torn.
        self.overwritten: set[str] = set()

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_WRONLY and not flags & os.O_CREAT:
            self.overwritten.add(str(path))
        return super().open(path, flags, mode)

    def clone(self, seed: int) -> SimulatedDisk:
        """The same machine at this moment, to do something else with."""
        other = SimulatedDisk(seed, self.files.clone())
        other.struck, other.is_lying, other._paths = self.struck, self.is_lying, dict(self._paths)
        other.overwritten = set(self.overwritten)
        return other

    def interrupt(self, operation: Operation) -> None:
        """Do some of an operation, as a process that is killed within it."""
        kind, arguments = operation.kind, operation.arguments
        if kind in SYNCS or self.chance.random() < 0.3:
            return
        if kind == "pwritev":
            fd, buffers, offset = arguments
            data = b"".join(buffers)
            if self.chance.random() < 0.6:
                data = data[: self.chance.choice([0, *_borders(offset, data)])]
                self.struck["write cut short"] += 1
            arguments = fd, [data], offset
        with suppress(OSError):
            getattr(self.files, kind)(*arguments)

    def _leave_failed(self, operation: str, *arguments: Any) -> None:
        if operation == "pwritev":
            fd, buffers, offset = arguments
            data = b"".join(buffers)
            self.files.pwritev(fd, [data[: self.chance.choice([0, *_borders(offset, data), len(data)])]], offset)
            self.struck["write failed"] += 1
        elif operation in ("fdatasync", "fsync"):
            self.struck["page of a failed sync"] += self.files.fail_sync(arguments[0])
            self.struck["sync failed"] += 1
        else:
            self.struck["sync of names failed" if operation in SYNCS else "other call failed"] += 1

    def stop(self, *, power: bool, evict: bool = False) -> bool:
        """The process is gone, and with *power* all that is not on disk. Whether anything may be lost.

        With *evict*, what a failed sync left in memory may be gone without a loss of power.
        """
        self._paths.clear()
        self._faults.clear()
        self.calls.clear()
        self.before = None
        evicted = self.files.stop(evict=evict and not power)
        if power:
            self.files.lose_power(self.struck)
        self.struck["page evicted"] += evicted
        return power or evicted > 0

    def close(self, fd: int) -> None:
        del self._paths[fd]
        self.files.close(fd)

    def allocate(self, fd: int, size: int) -> None:
        if size > self.size(fd):
            self.ftruncate(fd, size)

    def _sync(self, fd: int) -> None:
        if not self.is_lying:
            self.files.fsync(fd)

    def _sync_names(self, path: Path) -> None:
        if not self.is_lying:
            self.files.fsync_directory(path)


def _borders(offset: int, data: bytes) -> range:
    """The lengths at which sectors end within a write: the system takes what lies in one as a whole, or not at all."""
    return range(SECTOR - offset % SECTOR, len(data), SECTOR)


class SimulatedFiles(Disk):
    """Files and directories of a machine in memory, and what of them is on its disk."""

    hot_bytes = Disk.hot_bytes

    def __init__(self) -> None:
        self.chance: random.Random
        self.boot = 1
        self.directories: dict[str, Directory] = {"": Directory()}
        self._files: dict[int, File] = {}
        self._descriptor = _FIRST_DESCRIPTOR
        self._writes = 0

    def clone(self) -> SimulatedFiles:
        """The same on another machine."""
        other = SimulatedFiles()
        other.boot = self.boot
        other._descriptor, other._writes = self._descriptor, self._writes
        made: dict[int, File] = {}

        def copied(file: File | None) -> File | None:
            if file is None:
                return None
            if id(file) not in made:
                made[id(file)] = file.clone()
            return made[id(file)]

        for path, directory in self.directories.items():
            mine = other.directories[path] = Directory()
            mine.names = {name: copied(file) for name, file in directory.names.items()}
            mine.platter = {name: copied(file) for name, file in directory.platter.items()}
            mine.pending = [change._replace(file=copied(change.file)) for change in directory.pending]
        other._files = {fd: cast(File, copied(file)) for fd, file in self._files.items()}
        return other

    # --- the machine stops -------------------------------------------------------------------------------------------

    def stop(self, *, evict: bool) -> int:
        """Nothing is open any more; how many sectors that a failed sync left in memory are gone."""
        self._files.clear()
        evicted = 0
        for file in self.all_files():
            file.locked = -1
            if evict and self.chance.random() < 0.5:
                evicted += file.evict()
        return evicted

    def all_files(self) -> list[File]:
        """Each once, also those that have a name only in memory, or only on disk."""
        found: dict[int, File] = {}
        for directory in self.directories.values():
            named = [*directory.names.values(), *directory.platter.values()]
            for file in [*named, *(change.file for change in directory.pending)]:
                if file is not None:
                    found[id(file)] = file
        return list(found.values())

    def lose_power(self, struck: Counter[str]) -> None:
        """What is not on disk may be gone."""
        self.boot += 1
        for file in self.all_files():
            file.lose_power(self.chance, struck)
        for directory in self.directories.values():
            directory.lose_power(self.chance, struck)
        for path in sorted(self.directories):
            parent, _, name = path.rpartition("/")
            if path and (parent not in self.directories or name not in self.directories[parent].names):
                del self.directories[path]

    def fail_sync(self, fd: int) -> int:
        """Some of it is on disk: how many sectors are not."""
        return self._files[fd].fail_sync(self.chance)

    # --- files -------------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        directory, name = self._place(path)
        file = directory.names.get(name)
        if file is None and name in directory.names:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if file is None and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if file is None or flags & os.O_TRUNC:
            file = self._make(directory, name, flags)
        self._descriptor += 1
        self._files[self._descriptor] = file
        return self._descriptor

    def _make(self, directory: Directory, name: str, flags: int) -> File:
        file = directory.names.get(name)
        if file is None:
            file = File()
            directory.change(Change("name", name, file))
        elif flags & os.O_TRUNC:
            file.truncate(self._next_write(), 0)
        return file

    def close(self, fd: int) -> None:
        file = self._files.pop(fd)
        if file.locked == fd:
            file.locked = -1

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        if data:
            self._files[fd].write(self._next_write(), data, offset)
        return len(data)

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

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        return b"\1" * ((offset + size - 1) // PAGE - offset // PAGE + 1)

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """All of it is in memory."""

    def open_uncached(self, path: Path) -> int:
        return self.open(path, os.O_RDONLY)

    def preadv_uncached(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.preadv(fd, [buffer], offset)

    def aside(self) -> None:
        """The simulation does every sync itself."""

    def ftruncate(self, fd: int, length: int) -> None:
        if length != self._files[fd].size:
            self._files[fd].truncate(self._next_write(), length)

    def allocate(self, fd: int, size: int) -> None:
        if size > self._files[fd].size:
            self.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return self._files[fd].size

    def modified_us(self, path: Path) -> int:
        return self._named(path).modified_us

    def set_modified(self, path: Path, us: int) -> None:
        self._named(path).modified_us = us

    def room(self, path: Path) -> tuple[int, int]:
        """Enough for everything; what is full is told by a failing call."""
        return 1 << 40, 1 << 40

    def data_end(self, fd: int) -> int:
        return self._files[fd].data_end()

    def fdatasync(self, fd: int) -> None:
        self._files[fd].sync()

    def fsync(self, fd: int) -> None:
        self._files[fd].sync()

    # --- names -------------------------------------------------------------------------------------------------------

    def _place(self, path: Path) -> tuple[Directory, str]:
        parent, _, name = str(path).rpartition("/")
        directory = self.directories.get(parent)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return directory, name

    def _named(self, path: Path) -> File:
        directory, name = self._place(path)
        file = directory.names.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file

    def fsync_directory(self, path: Path) -> None:
        directory = self.directories.get(str(path).removesuffix("/"))
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        directory.sync()

    def rename(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        assert source.parent == target.parent
        directory.change(Change("rename", target.name, directory.names[name], name))

    def link(self, source: Path, target: Path) -> None:
        directory, name = self._place(source)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        if target.name in directory.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        assert source.parent == target.parent
        directory.change(Change("name", target.name, directory.names[name]))

    def unlink(self, path: Path) -> None:
        directory, name = self._place(path)
        if directory.names.get(name) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        directory.change(Change("unlink", name, None))

    def listdir(self, path: Path) -> list[str]:
        directory = self.directories.get(str(path).removesuffix("/"))
        if directory is None:
            code = errno.ENOTDIR if self.exists(path) else errno.ENOENT
            raise OSError(code, os.strerror(code), str(path))
        return sorted(directory.names)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        parent, name = self._place(path)
        if name not in parent.names:
            parent.change(Change("directory", name, None))
            self.directories[str(path)] = Directory()
        if str(path) not in self.directories:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def resolve(self, path: Path) -> Path:
        return path  # there are no links

    def kind(self, path: Path) -> str:
        directory, name = self._place(path)
        return "a file" if directory.names.get(name) is not None else "a directory"

    def is_at(self, fd: int, path: Path) -> bool:
        return self.exists(path) and self._place(path)[0].names.get(path.name) is self._files[fd]

    def exists(self, path: Path) -> bool:
        parent, _, name = str(path).rpartition("/")
        return not str(path).strip("/") or (parent in self.directories and name in self.directories[parent].names)

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

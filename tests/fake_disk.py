"""The disk of tests: it does what the disk below it does, counts every call, and fails as a test asks.

A ``FakeDisk`` waits for no sync, so tests that write many files are quick. Its knobs:

=====================  ==========================================================================================
``fail``               the nth call of an operation fails with an errno
``fail_always``        every call of an operation fails, for all paths or some, until ``heal``
``strike``             the nth of all operations that can fail with an errno fails so, once or from there on
``kill_at``            the process ends at the nth step (Killed); a write that it ends in is half done
``short``, ``tears``   writes take a part of their bytes; writes that fail leave half of them
``full``, ``fits``     bytes are taken only where there are some, or room was allocated; ``fits`` of a write elsewhere
``room_left``          the answer of ``room``
``stall``              calls of an operation wait until ``go_on``
``is_lying``           syncs do nothing
``flips``              a bit of each write to some files is wrong
``is_read_only``       what changes something is an AssertionError
``forgets``            pages are in memory only since they were read or written: ``forget``, ``spoil``
``track``              ``without_power`` copies what was synced: bytes of files, names in directories
``before``, ``after``  a function of the test that is called with each Operation that changes or closes a file
=====================  ==========================================================================================

``boot`` is the start of the machine; a disk of another boot is that of a machine that lost its power.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from qmq.storage.disk.disk import PAGE, Buffer, Disk

SYNCS: Final = ("fdatasync", "fsync", "fsync_directory")
_CHANGES: Final = {"create", "pwritev", "ftruncate", "rename", "unlink", "mkdir"}
_READS: Final = {"open", "map", "pread", "preadv", "listdir"}

#: The operations that may fail so. To open a file for writing is "create" here.
FAILING: Final = {
    errno.EIO: _CHANGES | {*SYNCS} | _READS,
    errno.ENOSPC: {"create", "pwritev", "ftruncate", "rename", "mkdir", *SYNCS},
    errno.EDQUOT: {"create", "pwritev", "ftruncate", "rename", "mkdir", *SYNCS},
    errno.EROFS: _CHANGES | {*SYNCS},
    errno.EMFILE: {"create", "open", "listdir", "fsync_directory"},
    errno.ENFILE: {"create", "open", "listdir", "fsync_directory"},
}
#: What ``kill_at`` counts.
_STEPS: Final = {"open", "create", "pwritev", "rename", "link", "unlink", "mkdir"}
#: Writes of so many bytes, headers that is, are done whole or not at all.
_NOT_TORN_BYTES: Final = 64
_TIMEOUT_S: Final = 60
#: A disk that was in use by another start of the machine than this one.
REBOOTED: Final = "another boot"


class Killed(BaseException):
    """The process is no more."""


class Operation(NamedTuple):
    """An operation that changes or closes a file: the method of Disk, the file, and the arguments of the call."""

    kind: str
    path: str
    arguments: tuple[Any, ...]


class _Stall:
    """Calls that wait."""

    def __init__(self, path_part: str) -> None:
        self.path_part = path_part
        self.entered = threading.Event()
        self.go_on = threading.Event()


class FakeDisk(Disk):
    """``calls`` counts each operation; ``struck`` what happened as ``strike`` or ``forgets`` asked, and Disk would not
    have done.
    """

    hot_bytes = Disk.hot_bytes

    def __init__(
        self,
        boot: str | None = None,
        *,
        files: Disk | None = None,
        forgets: float | None = None,
        seed: int = 0,
        is_read_only: bool = False,
    ) -> None:
        """*boot*: None: this one. *forgets*: how often a question about pages finds them forgotten; None: they are in
        memory as the system says.
        """
        self.files = files if files is not None else Disk()
        self.boot = boot
        self.is_read_only = is_read_only
        self.chance = random.Random(seed)
        self.calls: Counter[str] = Counter()
        self.struck: Counter[Any] = Counter()
        self.short: int | None = None
        self.tears = False
        self.full = False
        self.fits = 3
        #: Bytes that are free, by path ("": anywhere else), and the size of the disk.
        self.room_left: dict[str, int] | None = None
        self.total = 1 << 40
        self.is_lying = False
        self.flips = ""
        self.before: Callable[[Operation], None] | None = None
        self.after: Callable[[Operation], None] | None = None
        #: Names that files were given, in order.
        self.renamed: list[str] = []
        #: How many calls wait now, or have waited.
        self.stalled = 0
        self._faults: dict[tuple[str, int], int] = {}
        self._lasting: dict[str, tuple[int, str]] = {}
        self._strike: tuple[int, int, bool] | None = None  # how many operations pass before, errno, whether it lasts
        self._kinds: Counter[str] = Counter()
        self._last_step: int | None = None
        self._steps = 0
        self._stalls: dict[str, _Stall] = {}
        self._paths: dict[int, str] = {}
        self._allocated: dict[int, int] = {}  # bytes by descriptor
        self._written: Counter[str] = Counter()  # the end of what a file has, by path
        self._tracks = False
        self._root = Path()
        self._file_of: dict[int, object] = {}  # by inode; an inode is used again for another file
        self._synced: dict[object, bytes] = {}
        self._names: dict[Path, dict[str, object | None]] = {}  # None: a directory
        self.forgets = forgets
        if forgets is not None:
            self.hot_bytes = 0
        self._in_memory: set[tuple[str, int]] = set()
        self._mapped: dict[int, tuple[mmap.mmap, str]] = {}  # by id of a map, which is kept so that it stays its own
        #: (path, page number) of pages that cannot be read.
        self.bad: set[tuple[str, int]] = set()

    # --- what is to fail ---------------------------------------------------------------------------------------------

    def fail(self, operation: str, nth: int = 1, code: int = errno.EIO) -> None:
        """Let the nth call of *operation* from now on fail with errno *code*. Of any sync that is "sync", of opening a
        file for writing "create", of anything that changes something "change".
        """
        self._faults[operation, self.calls[operation] + nth] = code

    def fail_always(self, operation: str, code: int = errno.ENOSPC, path_part: str = "") -> None:
        """Let every call of *operation* fail until ``heal``, for paths that contain *path_part*."""
        self._lasting[operation] = (code, path_part)

    def strike(self, code: int, after: int, *, lasting: bool) -> None:
        """Let the operation behind the next *after* of those that may fail so fail with errno *code*, and with
        *lasting* all of them from there on.
        """
        self._strike = after, code, lasting

    def kill_at(self, step: int) -> FakeDisk:
        """End the process behind so many steps more."""
        self._steps, self._last_step = 0, step
        return self

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

    def stall(self, operation: str, path_part: str = "") -> threading.Event:
        """Let calls of *operation* wait until ``go_on``, for paths that contain *path_part*; is set once one waits."""
        stall = self._stalls[operation] = _Stall(path_part)
        return stall.entered

    def use_up_allocated(self) -> None:
        """Something is written wherever room was allocated: a full disk takes nothing there either."""
        self._allocated.clear()

    def go_on(self) -> None:
        """Nothing waits any more."""
        stalls, self._stalls = self._stalls, {}
        for stall in stalls.values():
            stall.go_on.set()

    def _begin(self, operation: str, path: Path | str, *arguments: Any, kind: str = "", changes: bool = False) -> None:
        """Count a call, let it wait, and fail it if that is wanted."""
        self._kinds[kind or operation] += 1
        calls = self._count(operation, kind, changes)
        assert not (changes and self.is_read_only), (operation, path)
        if self.before is not None and (changes or operation == "close"):
            self.before(Operation(operation, str(path), arguments))
        stall = self._stalls.get(operation)
        if stall is not None and stall.path_part in str(path):
            self.stalled += 1
            stall.entered.set()
            assert stall.go_on.wait(_TIMEOUT_S), f"{operation} of {path} still waits"
        if self._last_step is not None and operation in _STEPS:
            self._steps += 1
            if self._steps > self._last_step:
                raise Killed
        code = None
        for call in calls:
            code = self._faults.pop(call, code)
        lasting = self._lasting.get(operation)
        if code is None and lasting is not None and lasting[1] in str(path):
            code = lasting[0]
        if code is None:
            code = self._struck_by(kind or operation)
        if code is not None:
            self._leave_failed(operation, *arguments)
            raise OSError(code, os.strerror(code), str(path))

    def _count(self, operation: str, kind: str, changes: bool) -> list[tuple[str, int]]:
        """Count a call by all names that ``fail`` knows it by: the name and number of each."""
        names = [operation]
        if kind and kind != operation:
            names.append(kind)
        if changes:
            names.append("change")
        if operation in SYNCS:
            names.append("sync")
        self.calls.update(names)
        return [(name, self.calls[name]) for name in names]

    def _leave_failed(self, operation: str, *arguments: Any) -> None:
        """Do what is done of a call that fails."""
        if operation == "pwritev" and self.tears:
            fd, buffers, offset = arguments
            whole = b"".join(buffers)
            if len(whole) > _NOT_TORN_BYTES:
                self.calls["torn"] += 1
                self.files.pwritev(fd, [whole[: len(whole) // 2]], offset)

    def _end(self, operation: str, path: Path | str, *arguments: Any) -> None:
        if self.after is not None:
            self.after(Operation(operation, str(path), arguments))

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

    # --- files -------------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        assert not (writes and self.is_read_only), path
        changes = bool(flags & os.O_TRUNC) or (bool(flags & os.O_CREAT) and not self.files.exists(path))
        self._begin("open", path, path, flags, mode, kind="create" if writes else "", changes=changes)
        is_new = self._tracks and not path.exists()
        fd = self.files.open(path, flags, mode)
        if self._tracks:
            inode = os.fstat(fd).st_ino
            if is_new or inode not in self._file_of:
                self._file_of[inode] = object()
        self._paths[fd] = str(path)
        if self.full:
            self._written[str(path)] = self.files.data_end(fd)
        self._end("open", path, path, flags, mode)
        return fd

    def close(self, fd: int) -> None:
        self._begin("close", self._paths.get(fd, ""), fd)
        self._allocated.pop(fd, None)
        del self._paths[fd]  # before another thread may be given its number
        self.files.close(fd)

    def still_open(self) -> list[str]:
        """The files whose descriptors have not been closed."""
        return sorted(self._paths.values())

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        path = self._paths.get(fd, "")
        if self.before is not None or self.after is not None:
            buffers = [b"".join(buffers)]  # a test may keep it
        try:
            self._begin("pwritev", path, fd, buffers, offset, changes=True)
        except Killed:
            if self._last_step is not None and self._steps == self._last_step + 1:
                whole = b"".join(buffers)
                self.files.pwritev(fd, [whole[: len(whole) // 2]], offset)
            raise
        if self.full:
            self._take_no_more(fd, path, buffers, offset)
        if self.short is not None:
            self.calls["short"] += 1
            buffers = [b"".join(buffers)[: self.short]]
        if self.flips and self.flips in path:
            flipped = bytearray(b"".join(buffers))
            flipped[len(flipped) // 2] ^= 1
            buffers = [flipped]
        written = self.files.pwritev(fd, buffers, offset)
        self._written[path] = max(self._written[path], offset + written)
        if self.forgets is not None:
            self._in_memory.update(self._pages(path, offset, written))
        self._end("pwritev", path, fd, buffers, offset)
        return written

    def _take_no_more(self, fd: int, path: str, buffers: Sequence[Buffer], offset: int) -> None:
        """Raises OSError unless all bytes have room where there are some already."""
        whole = b"".join(buffers)
        if offset + len(whole) > max(self._allocated.get(fd, 0), self._written[path]):
            if len(whole) > self.fits:
                self.files.pwritev(fd, [whole[: self.fits]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._begin("pread", self._paths.get(fd, ""))
        self._look(fd, size, offset)
        return self.files.pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._begin("preadv", self._paths.get(fd, ""))
        self._look(fd, sum(map(len, buffers)), offset)
        return self.files.preadv(fd, buffers, offset)

    def open_uncached(self, path: Path) -> int:
        return self.open(path, os.O_RDONLY)

    def preadv_uncached(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.preadv(fd, [buffer], offset)

    def map(self, fd: int, length: int) -> mmap.mmap:
        self._begin("map", self._paths.get(fd, ""))
        mapped = self.files.map(fd, length)
        if self.forgets is not None:
            self._mapped[id(mapped)] = mapped, self._paths[fd]
        return mapped

    def will_need(self, fd: int, offset: int, size: int) -> None:
        self.files.will_need(fd, offset, size)

    def ftruncate(self, fd: int, length: int) -> None:
        path = self._paths.get(fd, "")
        self._begin("ftruncate", path, fd, length, changes=length != self.files.size(fd))
        self.files.ftruncate(fd, length)
        self._written[path] = min(self._written[path], length)
        self._end("ftruncate", path, fd, length)

    def allocate(self, fd: int, size: int) -> None:
        self._begin("allocate", self._paths.get(fd, ""), fd, size, changes=True)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.files.allocate(fd, size)
        self._allocated[fd] = size

    def size(self, fd: int) -> int:
        return self.files.size(fd)

    def modified_us(self, path: Path) -> int:
        self._begin("modified_us", path)
        return self.files.modified_us(path)

    def set_modified(self, path: Path, us: int) -> None:
        self._begin("set_modified", path, path, us, changes=True)
        self.files.set_modified(path, us)
        self._end("set_modified", path, path, us)

    def data_end(self, fd: int) -> int:
        return self.files.data_end(fd)

    def room(self, path: Path) -> tuple[int, int]:
        self._begin("room", path)
        if self.room_left is None:
            return self.files.room(path)
        return self.room_left.get(str(path), self.room_left[""]), self.total

    def fdatasync(self, fd: int) -> None:
        path = self._paths.get(fd, "")
        self._begin("fdatasync", path, fd, changes=True)
        self._sync(fd)
        self._end("fdatasync", path, fd)

    def fsync(self, fd: int) -> None:
        path = self._paths.get(fd, "")
        self._begin("fsync", path, fd, changes=True)
        self._sync(fd)
        self._end("fsync", path, fd)

    def _sync(self, fd: int) -> None:
        if self._tracks and not self.is_lying:
            file = self._file_of.setdefault(os.fstat(fd).st_ino, object())
            copy = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            try:
                self._synced[file] = os.pread(copy, self.files.data_end(fd), 0)
            finally:
                os.close(copy)

    def aside(self) -> None:
        """Every sync is a call of this disk."""

    # --- names -------------------------------------------------------------------------------------------------------

    def fsync_directory(self, path: Path) -> None:
        self._begin("fsync_directory", path, path, changes=True)
        self._sync_names(path)
        self._end("fsync_directory", path, path)

    def _sync_names(self, path: Path) -> None:
        if self._tracks and not self.is_lying and self._root in (path, *path.parents):
            self._remember_names(path)

    def rename(self, source: Path, target: Path) -> None:
        self._begin("rename", target, source, target, changes=True)
        self.files.rename(source, target)
        renamed = str(source)
        self._paths.update({fd: str(target) for fd, path in list(self._paths.items()) if path == renamed})
        self.renamed.append(target.name)
        self._written[str(target)] = self._written.pop(renamed, 0)
        self._renew(target)
        self._end("rename", target, source, target)

    def link(self, source: Path, target: Path) -> None:
        self._begin("link", target, source, target, changes=True)
        self.files.link(source, target)
        self._end("link", target, source, target)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path, path, changes=True)
        self.files.unlink(path)
        self._written.pop(str(path), None)
        self._renew(path)
        self._end("unlink", path, path)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        self._begin("mkdir", path, path, mode, changes=not self.files.exists(path))
        self.files.mkdir(path, mode)
        self._end("mkdir", path, path, mode)

    def listdir(self, path: Path) -> list[str]:
        self._begin("listdir", path)
        return self.files.listdir(path)

    def kind(self, path: Path) -> str:
        return self.files.kind(path)

    def is_at(self, fd: int, path: Path) -> bool:
        return self.files.is_at(fd, path)

    def resolve(self, path: Path) -> Path:
        return self.files.resolve(path)

    def exists(self, path: Path) -> bool:
        return self.files.exists(path)

    # --- the machine -------------------------------------------------------------------------------------------------

    def flock(self, fd: int) -> bool:
        return self.files.flock(fd)

    def boot_id(self) -> str:
        return self.files.boot_id() if self.boot is None else self.boot

    def random(self, size: int) -> bytes:
        return self.files.random(size)

    # --- memory ------------------------------------------------------------------------------------------------------

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        if self.forgets is None:
            return self.files.residency(mapped, offset, size)
        pages = self._pages(self._mapped[id(mapped)][1], offset, size)
        if self.forgets and self.chance.random() < self.forgets:
            self._in_memory.difference_update(pages)
        answer = bytes(page in self._in_memory for page in pages)
        self.struck["missing"] += 0 in answer
        return answer

    def forget(self) -> None:
        """Nothing is in memory any more."""
        self._in_memory.clear()

    def spoil(self, path: Path, offset: int) -> None:
        """Let the page of *path* that holds *offset* be unreadable, and forgotten."""
        page = str(path), offset // PAGE
        self.bad.add(page)
        self._in_memory.discard(page)

    def _look(self, fd: int, size: int, offset: int) -> None:
        """Raises OSError for a page that cannot be read; what can be is in memory then."""
        if not self.bad and self.forgets is None:
            return
        pages = self._pages(self._paths[fd], offset, size)
        if not self.bad.isdisjoint(pages):
            self.struck["unreadable"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.forgets is not None:
            self._in_memory.update(pages)

    def _renew(self, path: Path) -> None:
        """Another file of that name lies elsewhere on the disk."""
        if self.bad:
            self.bad = {page for page in self.bad if page[0] != str(path)}

    @staticmethod
    def _pages(path: str, offset: int, size: int) -> list[tuple[str, int]]:
        return [(path, page) for page in range(offset // PAGE, (offset + max(size, 1) - 1) // PAGE + 1)]

    # --- a loss of power ---------------------------------------------------------------------------------------------

    def track(self, directory: Path, *, synced: bool = False) -> None:
        """Begin: the files in *directory* have their names on disk and, with *synced*, their bytes."""
        self._tracks, self._root = True, directory
        directory.mkdir(parents=True, exist_ok=True)
        for path in [directory, *directory.rglob("*")]:
            if path.is_dir():
                self._remember_names(path)
            elif synced:
                self._synced[self._file_of.setdefault(path.stat().st_ino, object())] = path.read_bytes()

    def go_on_from(self, other: FakeDisk) -> None:
        """Know what *other* knows to be on disk: another process on the same machine."""
        self._tracks, self._root = True, other._root
        self._file_of, self._synced, self._names = other._file_of, other._synced, other._names

    def _remember_names(self, path: Path) -> None:
        names = {name: path / name for name in os.listdir(path)}
        self._names[path] = {
            name: None if file.is_dir() else self._file_of.setdefault(file.stat().st_ino, object())
            for name, file in names.items()
        }

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

"""The operating system behind one small interface: all of storage uses files through a Disk.

Tests put a faulty disk in its place; users with a bug can trace here. The methods raise OSError as the system does;
``failure`` turns one into the StorageError that says what happened, to what, and what to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from qmq import ownership
from qmq.errors import StorageError, StorageFailed, StorageFull
from qmq.storage.disk.aio import AioSyncs

Buffer = bytes | bytearray | memoryview

#: The most buffers one pwritev takes.
IOV_MAX: Final = 1_024

#: The most bytes given to one pwritev. One call of 8 MiB into a fresh page cache takes three to four times as much
#: processor time a byte as pieces of up to 2 MiB (measured: 0.9 to 1.2 s a GiB, against 0.22 to 0.29).
WRITE_BYTES: Final = 1 << 20

#: The size of a page of the page cache.
PAGE: Final = mmap.PAGESIZE

#: Only the user that runs the broker may read messages: modes of what is made in a data directory.
PRIVATE_FILE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700
#: Others may read as far as the umask allows: for archives, and for files that hold no messages.
SHARED_FILE: Final = 0o666
SHARED_DIRECTORY: Final = 0o777

#: Errors for bytes that the disk cannot read. Other errors say nothing about the bytes.
BAD_SECTOR: Final = frozenset((errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO))

_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_ADVICE: Final = {
    errno.EACCES: "give the user that runs QMQ read and write access",
    errno.EPERM: "give the user that runs QMQ read and write access",
    errno.EROFS: "mount the file system for writing",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.EIO: "check the disk: the system's log says more",
    errno.ENOENT: "check that the disk is mounted and the path is right",
    errno.ENOTDIR: "a part of the path is a file; choose another directory",
    errno.ENXIO: "move it away; if there was a file of that name, put that back",
    errno.EISDIR: "move it away; if there was a file of that name, put that back",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or lower segment_bytes",
}


_KINDS: Final = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(mode: int) -> str:
    """Return the kind of file with this st_mode, in a word or two."""
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")


def _no_file(path: Path, mode: int) -> OSError:
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
    return OSError(number, f"it is {kind_of(mode)}, not a file", str(path))


def _find_mincore() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    """Return the system's mincore, called without releasing the interpreter: it takes a microsecond."""
    function = getattr(ctypes.PyDLL(None), "mincore", None)
    if function is not None:
        function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p]
    return function


_mincore: Final = _find_mincore()


class _Map(mmap.mmap):
    """A map that knows its address."""

    address = 0


class Disk:
    """The disk of the operating system."""

    #: The last bytes written to a segment are taken to be in memory, without asking the system.
    hot_bytes = 16 << 20

    def open(self, path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
        """Open a regular file; one that root makes belongs to the owner of its directory. Raises IsADirectoryError, and
        OSError (ENXIO) for a FIFO, a socket or a device, which could make the caller wait for ever.
        """
        try:
            fd = ownership.open_file(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a socket, or a FIFO without a reader
                raise
            raise _no_file(path, os.stat(path).st_mode) from None
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind):
            return fd
        os.close(fd)
        raise _no_file(path, kind)

    def close(self, fd: int) -> None:
        os.close(fd)

    #: Write buffers at an offset, as ``os.pwritev``: no call of Python lies between, since each message takes two.
    pwritev: Callable[[int, Sequence[Buffer], int], int] = staticmethod(os.pwritev)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def open_uncached(self, path: Path) -> int:
        """Open a file for ``preadv_uncached``, without read-ahead."""
        fd = self.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def preadv_uncached(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read bytes and leave the page cache as it was: pages from the first one that was not in memory are dropped
        again.
        """
        try:
            cached = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            cached = 0
        if cached == len(buffer):
            return cached
        read = self.preadv(fd, [buffer[cached:]], offset + cached)
        os.posix_fadvise(fd, offset + cached, read, os.POSIX_FADV_DONTNEED)
        return cached + read

    def map(self, fd: int, length: int) -> mmap.mmap:
        """Map the first *length* bytes, read-only; later writes show. Raises ValueError when the file is shorter."""
        mapped = _Map(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        with suppress(OSError):
            mapped.madvise(mmap.MADV_RANDOM)  # otherwise each access would read ahead, 8 MiB at once here
        mapped.address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        return mapped

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        """Return a byte for each page of a map that [offset, offset + size) touches: 0 where the page is not in memory.
        Touching such a page waits for the disk, and ends the process where the disk cannot read it.

        Takes 1.2 us for a page, 3 us for 4 MiB, 22 us for the first look through this map. All 1 on systems without
        mincore.
        """
        first = offset // PAGE
        pages = (offset + size - 1) // PAGE - first + 1
        if _mincore is None or not isinstance(mapped, _Map):
            return b"\1" * pages
        vector = (ctypes.c_char * pages)()
        if _mincore(mapped.address + first * PAGE, pages * PAGE, vector):
            return b"\1" * pages
        return vector.raw

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """Have the system begin to read a part of a file."""
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def allocate(self, fd: int, size: int) -> None:
        """Allocate the first *size* bytes, with zeros where nothing was written."""
        os.posix_fallocate(fd, 0, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def modified_us(self, path: Path) -> int:
        """Return when a file was last written, by the wall clock of then. Raises OSError."""
        return os.stat(path).st_mtime_ns // 1_000

    def set_modified(self, path: Path, us: int) -> None:
        """Note that a file was last written then. Raises OSError."""
        os.utime(path, ns=(us * 1_000, us * 1_000))

    def room(self, path: Path) -> tuple[int, int]:
        """Return the bytes that can still be written to the disk of *path*, and the size of that disk."""
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize

    def data_end(self, fd: int) -> int:
        """Return the offset behind which the file holds only zeros; its size where the file system cannot say."""
        size, end = self.size(fd), 0
        try:
            while end < size:
                end = os.lseek(fd, os.lseek(fd, end, os.SEEK_DATA), os.SEEK_HOLE)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return size
            if error.errno != errno.ENXIO:  # no data from there on
                raise
        return end

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file another name. Raises FileExistsError when there is a file of that name."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def listdir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: Path, mode: int = PRIVATE_DIRECTORY) -> None:
        """Make one directory, unless it exists."""
        with suppress(FileExistsError):
            ownership.mkdir(path, mode)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def kind(self, path: Path) -> str:
        """Return the kind of file that *path* names, in a word or two: "a file", "a directory", "a FIFO". Raises
        OSError.
        """
        return kind_of(os.stat(path).st_mode)

    def is_at(self, fd: int, path: Path) -> bool:
        """Return whether *path* still names the file that is open as *fd*. Raises OSError."""
        try:
            there = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(fd))

    def resolve(self, path: Path) -> Path:
        """Return the absolute path without symbolic links; the file need not exist."""
        return Path(os.path.realpath(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def flock(self, fd: int) -> bool:
        """Lock the file for this process; False when another process has locked it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def boot_id(self) -> str:
        """Return a text that differs after every start of the machine; empty where the system has none, then any stop
        may be one.
        """
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def aside(self) -> AioSyncs | None:
        """Return AioSyncs for fdatasyncs without a thread; None where the system has none, or a subclass syncs in its
        own way.
        """
        if type(self).fdatasync is Disk.fdatasync:
            with suppress(OSError):
                return AioSyncs()
        return None

    def random(self, size: int) -> bytes:
        return os.urandom(size)


def failure(error: OSError, doing: str, path: Path | str, position: int | None = None) -> StorageError:
    """Return the StorageError for *error*, met while *doing* something ("write", "open") to *path*, maybe at a
    position.
    """
    where = f"{path}" if position is None else f"{path} at position {position}"
    text = f"cannot {doing} {where}: {error.strerror or error}"
    if error.errno in _FULL:
        return StorageFull(f"{text}; free some space: sends are taken again as soon as there is room")
    advice = _ADVICE.get(error.errno or 0)
    return StorageFailed(f"{text}; {advice}" if advice else text)


def write_fully(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all of *buffers* at *offset*, at most WRITE_BYTES and IOV_MAX buffers a call.

    Raises OSError; some of the bytes may be written then.
    """
    for group, size in _calls(buffers):
        while (written := disk.pwritev(fd, group, offset)) != size:
            if written <= 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            group, size = _behind(group, written), size - written
            offset += written
        offset += size


def _calls(buffers: Sequence[Buffer]) -> Iterator[tuple[list[Buffer], int]]:
    """Split *buffers* into groups that one call can take, each with its size."""
    if len(buffers) == 1 and isinstance(buffers[0], bytes) and 0 < len(buffers[0]) <= WRITE_BYTES:
        yield [buffers[0]], len(buffers[0])
        return
    group: list[Buffer] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while len(view):
            part = view[: WRITE_BYTES - size]
            view = view[len(part) :]
            group.append(part)
            size += len(part)
            if size == WRITE_BYTES or len(group) == IOV_MAX:
                yield group, size
                group, size = [], 0
    if group:
        yield group, size


def _behind(buffers: list[Buffer], written: int) -> list[Buffer]:
    """Return what is left of *buffers* after *written* bytes."""
    done = 0
    while written >= len(buffers[done]):
        written -= len(buffers[done])
        done += 1
    return [buffers[done][written:], *buffers[done + 1 :]]


def read_whole(disk: Disk, path: Path) -> bytes:
    """Return all of a file. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        return read_fully(disk, fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def read_fully(disk: Disk, fd: int, size: int, offset: int) -> bytes:
    """Return *size* bytes at *offset*, fewer only where the file ends. Raises OSError."""
    parts = []
    while size > 0:
        part = disk.pread(fd, size, offset)
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_around(disk: Disk, fd: int, size: int, offset: int) -> tuple[bytes, int]:
    """Read as ``read_fully``, with zeros for pages that the disk cannot read; return also how many bytes these are.

    Raises OSError for other errors.
    """
    try:
        return read_fully(disk, fd, size, offset), 0
    except OSError as error:
        if error.errno not in BAD_SECTOR:
            raise
    size = max(0, min(size, disk.size(fd) - offset))
    parts, lost = [], 0
    while size > 0:
        step = min(size, PAGE - offset % PAGE)
        try:
            part = read_fully(disk, fd, step, offset)
        except OSError as error:
            if error.errno not in BAD_SECTOR:
                raise
            part, lost = bytes(step), lost + step
        parts.append(part)
        size, offset = size - step, offset + step
    return b"".join(parts), lost


def write_atomically(disk: Disk, path: Path, content: Buffer | list[bytes], mode: int = PRIVATE_FILE) -> None:
    """Replace the file at *path* by *content*, on disk when this returns; the old file stays whole if it fails.

    Raises StorageFull or StorageFailed.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            write_fully(disk, fd, content if isinstance(content, list) else [content], 0)
            disk.fsync(fd)
        finally:
            disk.close(fd)
        disk.rename(temporary, path)
        disk.fsync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            disk.unlink(temporary)
        raise failure(error, "write", path) from error


def write_in_place(disk: Disk, path: Path, content: list[bytes]) -> None:
    """Write *content* over the file at *path*, on disk when this returns; the file is torn if it fails.

    Raises StorageFull or StorageFailed.
    """
    try:
        fd = disk.open(path, os.O_WRONLY)
        try:
            write_fully(disk, fd, content, 0)
            disk.ftruncate(fd, sum(map(len, content)))
            disk.fsync(fd)
        finally:
            disk.close(fd)
    except OSError as error:
        raise failure(error, "write", path) from error


def make_directory(disk: Disk, path: Path, mode: int = PRIVATE_DIRECTORY) -> None:
    """Make a directory and its missing parents, on disk when this returns: a name that is not synced is lost with the
    power.

    The first parent that exists is synced too: a start that was killed may have made it. Raises StorageFull or
    StorageFailed.
    """
    missing = []
    parent = path
    while not disk.exists(parent):
        missing.append(parent)
        parent = parent.parent
    try:
        if not missing:
            disk.mkdir(path, mode)
        with suppress(PermissionError):  # another user made it, and this process may not sync it
            disk.fsync_directory(parent.parent)
        for made in reversed(missing):
            disk.mkdir(made, mode if made == path else SHARED_DIRECTORY)
            disk.fsync_directory(made.parent)
    except OSError as error:
        raise failure(error, "make the directory", path) from error

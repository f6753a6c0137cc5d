"""The operating system behind one small interface: everything in storage goes through a Disk.

Tests put a faulty one in its place; a user with a bug can trace here. The methods raise OSError as the system does;
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

from qmq.errors import StorageError, StorageFailed, StorageFull
from qmq.storage.disk.aio import Aside

Buffer = bytes | bytearray | memoryview

#: The most buffers one pwritev takes.
IOV_MAX: Final = 1_024

#: The most bytes one pwritev is asked to take. One of 8 MiB into fresh page cache costs three to four times as much
#: processor time a byte as pieces of up to 2 MiB do (measured: 0.9 to 1.2 s a GiB, against 0.22 to 0.29).
WRITE_BYTES: Final = 1 << 20

#: The unit in which files are in memory.
PAGE: Final = mmap.PAGESIZE

#: Messages are for the user that runs the broker: nobody else may read what is made in a data directory.
PRIVATE_FILE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700
#: As far as the umask lets others read it: for archives, which are made to be read, and for what holds no messages.
SHARED_FILE: Final = 0o666
SHARED_DIRECTORY: Final = 0o777

#: What a disk says of bytes that it cannot give. Other errors of the system say nothing about the bytes.
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
    """The kind of thing that has this st_mode, in a word or two."""
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")


def _no_file(path: Path, mode: int) -> OSError:
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
    return OSError(number, f"it is {kind_of(mode)}, not a file", str(path))


def _find_mincore() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    """The system's own, called without letting go of the interpreter: it takes a microsecond."""
    function = getattr(ctypes.PyDLL(None), "mincore", None)
    if function is not None:
        function.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p]
    return function


_mincore: Final = _find_mincore()


class _Map(mmap.mmap):
    """A map that knows where it is."""

    address = 0


class Disk:
    """The real one."""

    #: The last bytes of what is written to a segment are taken to be in memory: they are not asked about.
    hot_bytes = 16 << 20

    def open(self, path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
        """Open a regular file. Raises OSError (ENXIO) for a FIFO, a socket or a device, which might have the caller
        wait for ever, and IsADirectoryError.
        """
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
        except OSError as error:
            if error.errno != errno.ENXIO:  # of a socket, and of a FIFO that nobody reads
                raise
            raise _no_file(path, os.stat(path).st_mode) from None
        kind = os.fstat(fd).st_mode
        if stat.S_ISREG(kind):
            return fd
        os.close(fd)
        raise _no_file(path, kind)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def open_aside(self, path: Path) -> int:
        """Open for ``preadv_aside``: the system reads nothing ahead."""
        fd = self.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd

    def preadv_aside(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read bytes that nobody else wants now: they are let go of again from the first one that was not in memory."""
        try:
            held = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            held = 0
        if held == len(buffer):
            return held
        read = self.preadv(fd, [buffer[held:]], offset + held)
        os.posix_fadvise(fd, offset + held, read, os.POSIX_FADV_DONTNEED)
        return held + read

    def map(self, fd: int, length: int) -> mmap.mmap:
        """The first *length* bytes, read-only; sees later writes. ValueError when the file is shorter."""
        mapped = _Map(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        with suppress(OSError):
            mapped.madvise(mmap.MADV_RANDOM)  # or whoever looks at it would be made to read ahead, 8 MiB at once here
        mapped.address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        return mapped

    def residency(self, mapped: mmap.mmap, offset: int, size: int) -> bytes:
        """A byte for each page of a map that [offset, offset + size) touches: 0 where the page is not in memory, so
        that to look at it would wait for the disk, or end the process where the disk cannot read it.

        1.2 us for a page, 3 us for 4 MiB, 22 where nobody looked at them through this map yet. All 1 on systems that
        do not tell.
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
        """Have room for the first *size* bytes, zeros where nothing was written."""
        os.posix_fallocate(fd, 0, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def room(self, path: Path) -> tuple[int, int]:
        """Bytes that may still be written to the disk of *path*, and its size."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def data_end(self, fd: int) -> int:
        """The offset from which on the file surely holds only zeros; its size where the file system does not tell."""
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
        """Give a file another name too, unless that is there: FileExistsError."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def listdir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mkdir(self, path: Path, mode: int = PRIVATE_DIRECTORY) -> None:
        """Make one directory; nothing happens when it is there."""
        with suppress(FileExistsError):
            os.mkdir(path, mode)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))

    def kind(self, path: Path) -> str:
        """The kind of thing that *path* names, in a word or two: "a file", "a directory", "a FIFO". Raises OSError."""
        return kind_of(os.stat(path).st_mode)

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether *path* still names the file that is open as *fd*. Raises OSError."""
        try:
            there = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(fd))

    def resolve(self, path: Path) -> Path:
        """The absolute path without symbolic links, of what may not be there yet."""
        return Path(os.path.realpath(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def flock(self, fd: int) -> bool:
        """Take the whole file for this process alone; False when another has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def boot_id(self) -> str:
        """Differs after every start of the machine; empty when the system does not tell, then any stop may be one."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""

    def aside(self) -> Aside | None:
        """What does fdatasyncs without a thread; None where the system has no such calls, and for who does it otherwise
        than the system.
        """
        if type(self).fdatasync is Disk.fdatasync:
            with suppress(OSError):
                return Aside()
        return None

    def random(self, size: int) -> bytes:
        return os.urandom(size)


def failure(error: OSError, doing: str, path: Path | str, position: int | None = None) -> StorageError:
    """The StorageError for *error*, met while *doing* something ("write", "open") to *path*, maybe at a position."""
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
    """*buffers* cut into what one call takes each, with its size."""
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
    """What is left of *buffers* after *written* bytes."""
    done = 0
    while written >= len(buffers[done]):
        written -= len(buffers[done])
        done += 1
    return [buffers[done][written:], *buffers[done + 1 :]]


def read_whole(disk: Disk, path: Path) -> bytes:
    """All of a file. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        return read_fully(disk, fd, disk.size(fd), 0)
    finally:
        disk.close(fd)


def read_fully(disk: Disk, fd: int, size: int, offset: int) -> bytes:
    """*size* bytes at *offset*, fewer only where the file ends. Raises OSError."""
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
    """As ``read_fully``, with zeros for pages that the disk does not give; and how many bytes these are.

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
    """Put *content* in the place of *path*, on disk when this returns; the old file stays whole if it fails.

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
    """Make a directory and those above it, for good: a name that is not synced goes with the power, and all below it.

    Raises StorageFull or StorageFailed.

    The first one that is there may have been made by a start that was killed before it could sync the name.
    """
    missing = []
    parent = path
    while not disk.exists(parent):
        missing.append(parent)
        parent = parent.parent
    try:
        if not missing:
            disk.mkdir(path, mode)
        with suppress(PermissionError):  # made by somebody who may do more than this process
            disk.fsync_directory(parent.parent)
        for made in reversed(missing):
            disk.mkdir(made, mode if made == path else SHARED_DIRECTORY)
            disk.fsync_directory(made.parent)
    except OSError as error:
        raise failure(error, "make the directory", path) from error

"""What no broker takes now, kept on this machine until one does: messages that failed, and acknowledgements for a
broker that is gone.

Each client has files of its own, ``<random>.spool`` in the directory ``spool`` of the user's state, held by a lock as
long as its process lives; what a process left behind is for any client that knows one of the same brokers.

    header       magic "QMQSPOOL" 8s | version u16 | reserved 6s
    record       size u32 (of what follows the checksum) | crc32c u32 | msgpack

The first record is a list of the addresses of the client; each other one a map: what a HAND_OVER says, its batch among
it, and in ``ack`` what is to be told after it to the broker that the message came from; or ``ack`` alone. A record that
is not whole at the end was being written when its process ended: nobody was told of it; or its size is wrong. The file
is then set aside when what can be read of it is with a broker. Where a part is, a file of the rest takes its place.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq.errors import StorageFailed
from qmq.format.packed import unpack
from qmq.net.client.consumer.ack_file import make_private, state_directory, write_all

log = logging.getLogger("qmq.client")

SUFFIX: Final = ".spool"
_HEADER: Final = struct.Struct("<8sH6s")
_MAGIC: Final = b"QMQSPOOL"
_VERSION: Final = 1
_RECORD: Final = struct.Struct("<II")

Record = dict[str, Any]
#: What a record has, and of which type.
_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "group": (str,),
    "attempt": (int,),
    "disposition": (int,),
    "delay_us": (int, type(None)),
    "reason": (str,),
    "at_us": (int,),
    "batch": (bytes,),
}
_ACK_FIELDS: Final[dict[str, tuple[type, ...]]] = {
    "store": (bytes,),
    "group": (str,),
    "consumer": (str,),
    "since_us": (int,),
    "generation": (int,),
    "handled": (list,),
}


class Late(NamedTuple):
    """Messages [start, end), ... that a consumer has handled, told to their broker when that is back."""

    store: bytes
    group: str
    consumer: str
    since_us: int
    generation: int
    handled: list[int]


class WaitingSpool(NamedTuple):
    """A file whose process has ended or that is this client's own, held by a lock: what waits in it."""

    path: Path
    fd: int
    #: Of the client that wrote it.
    addresses: list[str]
    records: list[Record]
    #: There are bytes that are bad, or no whole record.
    is_damaged: bool


class Spool:
    """Of one client. Every method but ``close`` may wait for the disk, and is for a thread; they go one at a time."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self._directory = state_directory() / "spool"
        self._path: Path | None = None
        self._fd = -1
        self._mutex = threading.Lock()  # who waited for a thread may have been cancelled, and others come
        self._closed = False

    @property
    def may_wait(self) -> bool:
        """Whether there may be anything for ``take``."""
        return self._directory.is_dir()

    def put(self, record: Record) -> None:
        """Keep it: it is on disk when this returns. Raises StorageFailed."""
        with self._mutex:
            self._put(record)
        if self._closed:  # while this was at it
            self.close()

    def _put(self, record: Record) -> None:
        try:
            if self._path is None:
                self._begin()
            end = os.fstat(self._fd).st_size
            try:
                write_all(self._fd, _packed(record))
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, end)
                raise
        except OSError as error:
            raise StorageFailed(
                f"no broker takes it now, and {self._directory} can't be written: {error}; set QMQ_STATE_DIR to a "
                "directory that can"
            ) from error

    def _begin(self) -> None:
        make_private(self._directory)
        path = self._directory / f"{secrets.token_hex(8)}{SUFFIX}"
        self._path, self._fd = path, _made(path, self._addresses, [])

    def close(self) -> None:
        """This client writes no more; what is in its file is for others, once nobody writes to it."""
        self._closed = True
        if self._mutex.acquire(blocking=False):
            try:
                if self._path is not None:
                    os.close(self._fd)
                    self._path = None
            finally:
                self._mutex.release()

    def take(self) -> list[WaitingSpool]:
        """The files that wait for a broker of this client: its own, and those of processes that have ended.

        Each is to be ``removed`` or ``kept``. What cannot be read is left alone, and logged.
        """
        with self._mutex:
            return self._take()

    def _take(self) -> list[WaitingSpool]:
        own, own_fd, self._path = self._path, self._fd, None
        found = list[WaitingSpool]()
        try:
            names = sorted(path for path in self._directory.iterdir() if path.suffix == SUFFIX)
        except OSError:
            names = []
        for path in names:
            try:
                fd = own_fd if path == own else _locked(path)
            except OSError as error:
                log.warning("%s can't be read: %s", path, error)
                continue
            if fd is None:
                continue
            waiting = _read(path, fd, set(self._addresses))
            if waiting is None:
                os.close(fd)
            else:
                found.append(waiting)
        return found

    @staticmethod
    def removed(waiting: WaitingSpool) -> None:
        """A broker has all of it; a file with bad bytes is set aside."""
        with suppress(OSError):
            if waiting.is_damaged:
                log.error("%s has bytes that are no whole record: it was set aside as .bad", waiting.path)
                os.rename(waiting.path, waiting.path.with_suffix(".bad"))
            else:
                os.unlink(waiting.path)
        os.close(waiting.fd)

    @staticmethod
    def kept(waiting: WaitingSpool, left: Sequence[Record]) -> None:
        """No broker takes these of its records now: they wait on."""
        try:
            if len(left) < len(waiting.records) or any(a is not b for a, b in zip(left, waiting.records, strict=True)):
                _replace(waiting, left)
        finally:
            os.close(waiting.fd)


def _made(path: Path, addresses: Sequence[str], records: Sequence[Record]) -> int:
    """Make a file, or put it in the place of another one: on disk when this returns. The open file, held by a lock.

    Raises OSError.
    """
    new = path.with_suffix(".new")  # so that nobody else locks it first
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        packed = [_packed(content) for content in (list(addresses), *records)]
        write_all(fd, _HEADER.pack(_MAGIC, _VERSION, bytes(6)) + b"".join(packed))
        os.fdatasync(fd)
        os.rename(new, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(new)
        raise
    return fd


def _replace(waiting: WaitingSpool, left: Sequence[Record]) -> None:
    """Write what is left in its place; where that cannot be, or bytes are bad, all of it stays: brokers know what they
    have had.
    """
    if waiting.is_damaged:
        return
    try:
        os.close(_made(waiting.path, waiting.addresses, left))
    except OSError as error:
        log.debug("%s can't be written anew: %s", waiting.path, error)


def _locked(path: Path) -> int | None:
    """The open file, when no other process holds it, and it is still there."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _read(path: Path, fd: int, addresses: set[str]) -> WaitingSpool | None:
    """What is in a file; None when it is not for a client of these brokers."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[:2] != (_MAGIC, _VERSION):
        return None
    contents, at, is_damaged = list[Any](), _HEADER.size, False
    while at + _RECORD.size <= len(data):
        size, crc = _RECORD.unpack_from(data, at)
        body = data[at + _RECORD.size : at + _RECORD.size + size]
        if len(body) < size:
            break
        content = _unpacked(body) if crc32c(body) == crc else None
        if content is None or (contents and not _is_record(content)):
            is_damaged = True
        else:
            contents.append(content)
        at += _RECORD.size + size
    if not contents or not isinstance(contents[0], list) or not all(isinstance(one, str) for one in contents[0]):
        log.warning("%s is damaged where it says for whom it is; it is left alone", path)
        return None
    if not addresses & set(contents[0]):
        return None
    return WaitingSpool(path, fd, contents[0], contents[1:], is_damaged or at < len(data))


def _unpacked(body: bytes) -> Any:
    """What a record says; None when no client has written it."""
    try:
        return unpack(body)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _is_record(content: Any) -> bool:
    if not isinstance(content, dict) or not _has(content.get("ack"), _ACK_FIELDS):
        return False
    handled = content["ack"]["handled"]
    if len(handled) % 2 or not all(type(number) is int for number in handled):
        return False
    rest = {name: value for name, value in content.items() if name != "ack"}
    return not rest or _has(rest, _FIELDS)


def _has(content: Any, fields: dict[str, tuple[type, ...]]) -> bool:
    if not isinstance(content, dict) or content.keys() != fields.keys():
        return False
    return all(type(content[name]) in kinds for name, kinds in fields.items())


def _packed(content: object) -> bytes:
    body: bytes = msgpack.packb(content)
    return _RECORD.pack(len(body), crc32c(body)) + body

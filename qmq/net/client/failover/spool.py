"""The spool: files on this machine with failed messages that no broker takes now, and acks for brokers out of reach.

Each client has files of its own, ``<random>.spool`` in the directory ``spool`` of the user's state, and locks them
while its process lives. Files of a process that has ended go to any client that knows one of the same brokers.

    header       magic "QMQSPOOL" 8s | version u16 | reserved 6s
    record       size u32 (of the msgpack) | crc32c u32 | msgpack

The first record is a list of the addresses of the client. Each other one is a map: the fields and batch of a HAND_OVER,
and in ``ack`` the delivery sequences that the message's own broker must hear of after it; or ``ack`` alone. An
incomplete record at the end was not finished when its process ended, so was never confirmed; or its size is wrong. Such
a file is renamed to ``.bad`` once a broker has its readable records. When a broker has some records of a file, a new
file with the others replaces it.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
from crc32c import crc32c

from qmq import ownership
from qmq.errors import ForeignFile, StorageFailed
from qmq.format.bounded_msgpack import unpack
from qmq.format.versions import check_version
from qmq.net.client.consumer.ack_file import make_private, state_directory, write_all

log = logging.getLogger("qmq.client")

SUFFIX: Final = ".spool"
_HEADER: Final = struct.Struct("<8sH6s")
_MAGIC: Final = b"QMQSPOOL"
_VERSION: Final = 1
_RECORD: Final = struct.Struct("<II")

#: The last time that is shown: a record may have any.
_LATEST_US: Final = 1 << 57

Record = dict[str, Any]
#: The fields of a record with a message, and their types.
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


class SpooledDispositions(NamedTuple):
    """Delivery sequences start, end, ... that a consumer has handled, for their broker when it is back."""

    store: bytes
    group: str
    consumer: str
    since_us: int
    generation: int
    handled: list[int]


class WaitingSpool(NamedTuple):
    """A locked file of this client, or of a process that has ended, and its records."""

    path: Path
    fd: int
    #: The addresses of the client that wrote the file.
    addresses: list[str]
    records: list[Record]
    #: Some bytes of the file are bad, or an incomplete record.
    is_damaged: bool


class WaitingMessages(NamedTuple):
    """Failed messages of one group in the spool, which no broker has taken yet."""

    #: The addresses of their brokers, with commas between.
    brokers: str
    group: str
    messages: int
    #: When the first of them failed.
    oldest: datetime
    directory: Path


class Spool:
    """The spool of one client. Methods except ``close`` may wait for the disk: call them in a thread, one at a time."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)
        self.directory = state_directory() / "spool"
        self._path: Path | None = None
        self._fd = -1
        self._mutex = threading.Lock()  # a cancelled caller may leave its thread at work while another call comes
        self._closed = False

    @property
    def may_wait(self) -> bool:
        """Whether ``take`` may find a file."""
        return self.directory.is_dir()

    def put(self, record: Record) -> None:
        """Write a record; it is on disk when this returns. Raises StorageFailed."""
        with self._mutex:
            self._put(record)
        if self._closed:  # by another thread, meanwhile
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
                f"no broker takes the message now, and {self.directory} cannot be written: {error}; set QMQ_STATE_DIR "
                "to a directory that can be"
            ) from error

    def _begin(self) -> None:
        make_private(self.directory)
        path = self.directory / f"{secrets.token_hex(8)}{SUFFIX}"
        self._path, self._fd = path, _made(path, self._addresses, [])

    def close(self) -> None:
        """Write no more; unlock the file for other clients once no thread writes to it."""
        self._closed = True
        if self._mutex.acquire(blocking=False):
            try:
                if self._path is not None:
                    os.close(self._fd)
                    self._path = None
            finally:
                self._mutex.release()

    def take(self) -> list[WaitingSpool]:
        """Return the files with records for a broker of this client: its own, and those of processes that have ended.

        Call ``removed`` or ``kept`` for each. Files that cannot be read are logged and left alone.
        """
        with self._mutex:
            return self._take()

    def _take(self) -> list[WaitingSpool]:
        own, own_fd, self._path = self._path, self._fd, None
        found = list[WaitingSpool]()
        try:
            names = sorted(path for path in self.directory.iterdir() if path.suffix == SUFFIX)
        except OSError:
            names = []
        for path in names:
            try:
                fd = own_fd if path == own else _locked(path)
            except OSError as error:
                log.warning("%s cannot be read: %s", path, error)
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
        """Delete a file whose records a broker has; rename one with bad bytes."""
        with suppress(OSError):
            if waiting.is_damaged:
                log.error("%s has damaged or incomplete records: it was renamed to .bad", waiting.path)
                os.rename(waiting.path, waiting.path.with_suffix(".bad"))
            else:
                os.unlink(waiting.path)
        os.close(waiting.fd)

    @staticmethod
    def kept(waiting: WaitingSpool, left: Sequence[Record]) -> None:
        """Keep the records in *left*, which no broker takes now."""
        try:
            if len(left) < len(waiting.records) or any(a is not b for a, b in zip(left, waiting.records, strict=True)):
                _replace(waiting, left)
        finally:
            os.close(waiting.fd)


def _made(path: Path, addresses: Sequence[str], records: Sequence[Record]) -> int:
    """Write a file, or replace one; return it open and locked. It is on disk when this returns. Raises OSError."""
    new = path.with_suffix(".new")  # so that no other process locks it first
    fd = ownership.open_file(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
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
    """Replace a file by one with the records in *left*. All records stay if that fails or the file is damaged: brokers
    recognize those that they have.
    """
    if waiting.is_damaged:
        return
    try:
        os.close(_made(waiting.path, waiting.addresses, left))
    except OSError as error:
        log.debug("%s cannot be replaced: %s", waiting.path, error)


def _locked(path: Path) -> int | None:
    """Return the open file, if no other process has locked it and it still exists."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def waiting_messages() -> list[WaitingMessages]:
    """Return the failed messages in the spool of this user, by their brokers and group; lock and change nothing."""
    directory, counts = state_directory() / "spool", dict[tuple[str, str], list[int]]()
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:  # brokers have taken it meanwhile, or it is another user's
            continue
        addresses, records, _ = _decoded(data)
        for record in records if addresses is not None else ():
            if "batch" in record:
                counts.setdefault((",".join(addresses or ()), record["group"]), []).append(record["at_us"])
    return [
        WaitingMessages(
            brokers, group, len(times), datetime.fromtimestamp(max(0, min(*times, _LATEST_US)) / 1e6, UTC), directory
        )
        for (brokers, group), times in counts.items()
    ]


def _read(path: Path, fd: int, addresses: set[str]) -> WaitingSpool | None:
    """Return the records of a file; None if it is not for a client of these brokers."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    if not _is_spool(data):
        return None
    try:
        check_version(path, _HEADER.unpack_from(data)[1], _VERSION)
    except ForeignFile as error:
        log.warning("%s; its failed messages wait there", error)
        return None
    known, records, is_damaged = _decoded(data)
    if known is None:
        log.warning("%s is left alone: its list of brokers is damaged", path)
        return None
    if not addresses & set(known):
        return None
    return WaitingSpool(path, fd, known, records, is_damaged)


def _is_spool(data: bytes) -> bool:
    return len(data) >= _HEADER.size and _HEADER.unpack_from(data)[0] == _MAGIC


def _decoded(data: bytes) -> tuple[list[str] | None, list[Record], bool]:
    """Return the addresses in a file (None: they cannot be read), its records, and whether some of it is damaged."""
    contents, at, is_damaged = list[Any](), _HEADER.size, False
    is_known = _is_spool(data) and _HEADER.unpack_from(data)[1] == _VERSION
    while is_known and at + _RECORD.size <= len(data):
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
        return None, [], True
    return contents[0], contents[1:], is_damaged or at < len(data)


def _unpacked(body: bytes) -> Any:
    """Return the content of a record; None if it is not valid."""
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

"""The state file of a consumer: its acks that the broker has not confirmed, for the next process under its id.

There is one file per (store id, group, consumer), in ``$QMQ_STATE_DIR``, else ``$XDG_STATE_HOME/qmq``, else
``~/.local/state/qmq``:

    magic 8 bytes | crc32c u32 of the following bytes | msgpack [store id, group, consumer, since_us, generation,
    expected, [start, end, start, end, ...]]

The file is replaced as a whole (a new one is written, then renamed), so a reader finds the old state or the new one. A
file with a wrong checksum counts as missing: it would only have added acks that were lost. A process that uses the file
holds a lock on a ``.lock`` file beside it, and removes that at the end. Other users may not read them: directories have
mode 0700, files 0600. ``AckFile`` writes the file in the background.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

import msgpack
from crc32c import crc32c

from qmq import ownership
from qmq.errors import ForeignFile
from qmq.format.bounded_msgpack import unpack
from qmq.format.versions import check_version
from qmq.net.client.consumer.in_flight import MAX_INTERVALS
from qmq.net.client.in_thread import going_on, in_thread, taken_in_thread
from qmq.net.client.tasks import begin_task
from qmq.net.protocol.types import KnownConsumer

#: With the version before the end of the line.
MAGIC: Final = b"QMQSTA1\n"
_VERSION: Final = 1
_CRC: Final = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 20


def state_directory() -> Path:
    """Return the directory of the user's state files."""
    own = os.environ.get("QMQ_STATE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "qmq"


class StateFile:
    """The state file of one consumer. Its methods may block on the disk, and may be called in any thread."""

    def __init__(self, path: Path, key: list[bytes | str], lock: int) -> None:
        self.path = path
        self._key = key
        self._lock: int | None = lock
        self._mutex = threading.Lock()

    @classmethod
    def open(cls, directory: Path, store_id: bytes, group: str, consumer: str) -> Self:
        """Lock the file and create what is missing. Raises BlockingIOError if another process has it, else OSError."""
        make_private(directory)
        digest = hashlib.blake2b(f"{group}\0{consumer}".encode(), digest_size=8).hexdigest()
        path = directory / f"{store_id.hex()}-{group[:60]}-{consumer[:60]}-{digest}.state"
        return cls(path, [store_id, group, consumer], _locked(path.with_suffix(".lock")))

    def read(self) -> KnownConsumer | None:
        """Return the state in the file; None if there is no file or it is damaged. Raises OSError, ForeignFile for a
        version that is not known.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read(_MAX_BYTES)
        except FileNotFoundError:
            return None
        digit = content[len(MAGIC) - 2 : len(MAGIC) - 1]
        if digit.isdigit() and content.startswith(MAGIC.replace(b"1", digit)):
            check_version(self.path, int(digit), _VERSION)
        body = content[len(MAGIC) + _CRC.size :]
        if content != MAGIC + _CRC.pack(crc32c(body)) + body:
            return None
        try:
            *key, since_us, generation, expected, handled = unpack(memoryview(body), max_array_len=2 * MAX_INTERVALS)
            numbers = [since_us, generation, expected, *handled]
        except (ValueError, TypeError, msgpack.UnpackException):  # no client has written that
            return None
        if key != self._key or any(type(number) is not int or number < 0 for number in numbers):
            return None
        if len(handled) % 2 or handled != sorted(handled):
            return None
        return KnownConsumer(since_us, generation, 0, expected, tuple(handled))

    def write(self, known: KnownConsumer) -> None:
        """Replace the file; do nothing after ``close``, since another process may have it. Raises OSError."""
        body = msgpack.packb([*self._key, known.since_us, known.generation, known.expected, list(known.handled)])
        beside = self.path.with_suffix(".new")
        with self._mutex:
            if self._lock is None:
                return
            fd = ownership.open_file(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, MAGIC + _CRC.pack(crc32c(body)) + body)
            finally:
                os.close(fd)
            os.replace(beside, self.path)

    def close(self) -> None:
        """Unlock the file for other processes, and remove the lock file."""
        with self._mutex:
            if self._lock is None:
                return
            with suppress(OSError):
                os.unlink(
                    self.path.with_suffix(".lock")
                )  # before it is unlocked: a process that waits for it tries again
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int:
    """Create the lock file if it is missing, and lock it. Raises BlockingIOError if another process has it."""
    while True:
        lock = ownership.open_file(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its owner removed it after it was opened here


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def write_all(fd: int, data: bytes) -> None:
    """Write all of *data*, in several calls if the system takes less at once. Raises OSError."""
    written = 0
    while written < len(data):
        written += os.write(fd, data[written:])


def make_private(directory: Path) -> None:
    """Make a directory and its missing parents, closed to other users. Raises OSError."""
    if not directory.is_dir():
        make_private(directory.parent)
        with suppress(FileExistsError):
            ownership.mkdir(directory, 0o700)


log = logging.getLogger("qmq.client")

#: Acks that are not confirmed are written after WRITE_DELAY seconds, or at once when there are WRITE_COUNT.
WRITE_DELAY: Final = 0.2
WRITE_COUNT: Final = 10_000


class AckFile:
    """Keeps the state file up to date, for a consumer with an id of its own. If the file cannot be used, it logs that
    once and keeps no file.
    """

    def __init__(self, group: str, consumer: str, snapshot: Callable[[], tuple[KnownConsumer | None, int]]) -> None:
        """*snapshot* returns the state to write, and how many acks are not confirmed."""
        self._group = group
        self._consumer = consumer
        self._snapshot = snapshot
        self._store_id: bytes | None = None
        self._file: StateFile | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._written: KnownConsumer | None = None

    async def open(self, store_id: bytes) -> KnownConsumer | None:
        """Open the file of a store; return the state that an earlier process has left there, if any."""
        if self._store_id == store_id:
            return None
        self._store_id = store_id
        self._close_file()
        try:
            self._file = await taken_in_thread(
                lambda: StateFile.open(state_directory(), store_id, self._group, self._consumer), StateFile.close
            )
            return await in_thread(self._file.read)
        except BlockingIOError:
            self._warn_not_kept("another process has it")
        except ForeignFile as error:
            self._warn_not_kept(str(error))
            self._close_file()  # as it is
        except (OSError, RuntimeError) as error:  # the home directory is unknown
            self._warn_not_kept(str(error))
        return None

    def _warn_not_kept(self, why: str) -> None:
        log.warning(
            "consumer %s has no state file in %s (%s): acks that are not confirmed when it ends may be lost, and their "
            "messages come again", self._consumer, state_directory(), why,
        )  # fmt: skip

    @property
    def has_file(self) -> bool:
        """Whether acks are kept in a file."""
        return self._file is not None

    def want_write(self) -> None:
        """Write the file soon, since a message was acked."""
        if self._file is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_DELAY, self._due)

    def hurry(self) -> None:
        """Write the file now, since many messages were acked."""
        if self._timer is not None:
            self._timer.cancel()
            self._due()

    def _due(self) -> None:
        self._timer = None
        if self._writing is None or self._writing.done():
            self._writing = begin_task(
                going_on(self._write, f"writing the state file of consumer {self._consumer}"),
                asyncio.get_running_loop(),
                "qmq-state",
            )

    async def _write(self, *, again: bool = True) -> None:
        file, (known, unconfirmed) = self._file, self._snapshot()
        if file is None or known is None or not unconfirmed:
            return
        try:
            await in_thread(partial(file.write, known))
        except OSError as error:
            self._warn_not_kept(str(error))
            if self._file is file:
                self._close_file()
            return
        self._written = known
        if again and self._file is file:  # until all acks are confirmed
            self.want_write()

    async def save(self) -> None:
        """Write the pending state, so that ``close`` has nothing to write."""
        self._stop_timer()
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._stop_timer()
        await self._write(again=False)

    def close(self) -> None:
        """Close the file. State that ``save`` has not written is written here, which blocks the loop: there is no later
        time.
        """
        self._stop_timer()
        known, unconfirmed = self._snapshot()
        if self._file is not None and known is not None and unconfirmed and known != self._written:
            try:
                self._file.write(known)
            except OSError as error:
                self._warn_not_kept(str(error))
        self._close_file()
        self._store_id = self._written = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

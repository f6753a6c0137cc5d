"""The lock on an archive, so that one run at a time writes to it: the file ``_lock`` names the run, which renews it.

The lock of a process of this host that has ended is taken at once, another one if it was not renewed for 60 s.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from qmq.archive.files import WritableFiles
from qmq.errors import DirectoryInUse, StorageError

LOCK: Final = "_lock"
RENEW_US: Final = 10_000_000
LOCK_EXPIRY_US: Final = 60_000_000
#: How often a thread checks whether the lock is to be renewed.
_LOOK_EVERY_S: Final = 5.0


@dataclass(frozen=True)
class LockOwner:
    """A process. ``started`` tells it from a later one with the same number: clock ticks since the boot, and the boot's
    id.
    """

    host: str
    process: int
    started: str

    def is_gone(self) -> bool:
        """Return whether it has certainly ended; processes of other hosts never count as ended."""
        return self.host == socket.gethostname() and started_of(self.process) != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def started_of(process: int) -> str:
    """Return when a process of this host started; empty if it does not run."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return f"{fields[19]} {boot}" if fields[0] not in "ZX" else ""


def this_process() -> LockOwner:
    """Return the process that calls."""
    return LockOwner(socket.gethostname(), os.getpid(), started_of(os.getpid()))


class ArchiveLock:
    """A lock on an archive, or on the part of it that another *path* stands for. ``clock`` gives microseconds since
    1970.
    """

    def __init__(self, files: WritableFiles, clock: Callable[[], int], owner: LockOwner, path: str = LOCK) -> None:
        self._files = files
        self._path = path
        self._name = files.name if path == LOCK else f"{files.name}/{path}"
        self._clock = clock
        self._owner = owner
        self._draft = f"{path}.{owner.process}"
        #: Its file names, which nobody else may remove while it is held.
        self.names: Final = frozenset((path, self._draft))
        self._renewed_us = 0
        self._renewing = threading.Lock()

    def __enter__(self) -> Self:
        """Take the lock. Raises DirectoryInUse, naming its owner; StorageFull or StorageFailed."""
        if not self._files.claim(self._path, self._text()):
            held, renewed_us = self._read()
            if held is not None and not held.is_gone() and self._clock() - renewed_us < LOCK_EXPIRY_US:
                raise DirectoryInUse(
                    f"{self._name} is held by {held}; wait until that has ended, or for a minute after it was killed"
                )
            self._write()
            self.confirm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._read()[0] == self._owner:
                self._files.remove(self._path)
        except StorageError:
            if error is None:  # the error of the block matters more; the lock ends with this process
                raise

    def renew(self) -> None:
        """Renew the lock if it is time to. Raises as ``confirm`` does. Several threads may call it."""
        with self._renewing:
            if self._clock() - self._renewed_us >= RENEW_US:
                self.confirm()
                self._write()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lock in a thread until the block ends, however long a call in it takes, such as a sync or a rename.

        If another run has taken the lock, or it cannot be written, ``renew`` and ``confirm`` raise that in the block.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._renew_until, args=(ended,), name="qmq-archive-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _renew_until(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_EVERY_S):
            with suppress(StorageError):
                self.renew()

    def confirm(self) -> None:
        """Raise DirectoryInUse if another run has taken the lock; StorageFailed."""
        held, _ = self._read()
        if held != self._owner:
            raise DirectoryInUse(f"{self._name} was taken by {held or 'another run'}; run it again later")

    def _text(self) -> bytes:
        self._renewed_us = self._clock()
        return json.dumps({**asdict(self._owner), "renewed_at_us": self._renewed_us}).encode() + b"\n"

    def _write(self) -> None:
        self._files.write(self._draft, self._text())
        self._files.rename(self._draft, self._path)

    def _read(self) -> tuple[LockOwner | None, int]:
        """Return its owner and when it was renewed; None for the owner if the file does not exist or is damaged."""
        try:
            content = json.loads(self._files.read_whole(self._path))
            return LockOwner(content["host"], content["process"], content["started"]), content["renewed_at_us"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, 0

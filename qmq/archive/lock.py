"""One run at a time writes to an archive: the file ``_lock`` says which, and is renewed as long as it runs.

A lock of a process of this host that has ended is taken at once; another one when it has not been renewed for 60 s.
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
#: How often it is looked whether it is time to renew it.
_LOOK_EVERY_S: Final = 5.0


@dataclass(frozen=True)
class LockOwner:
    """A process. ``started`` tells it from a later one of that number: clock ticks since the boot, and the boot."""

    host: str
    process: int
    started: str

    def is_gone(self) -> bool:
        """Whether it surely runs no more: nobody can tell of other hosts."""
        return self.host == socket.gethostname() and started_of(self.process) != self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


def started_of(process: int) -> str:
    """When a process of this host started; empty when it does not run."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return f"{fields[19]} {boot}" if fields[0] not in "ZX" else ""


def this_process() -> LockOwner:
    """The process that asks."""
    return LockOwner(socket.gethostname(), os.getpid(), started_of(os.getpid()))


class ArchiveLock:
    """The hold on an archive, or by another *path* on something that lies in it. ``clock`` gives microseconds since
    1970.
    """

    def __init__(self, files: WritableFiles, clock: Callable[[], int], owner: LockOwner, path: str = LOCK) -> None:
        self._files = files
        self._path = path
        self._name = files.name if path == LOCK else f"{files.name}/{path}"
        self._clock = clock
        self._owner = owner
        self._draft = f"{path}.{owner.process}"
        #: Its names in the tree, while it is held: nobody else's to remove.
        self.names: Final = frozenset((path, self._draft))
        self._renewed_us = 0
        self._renewing = threading.Lock()

    def __enter__(self) -> Self:
        """Take it. Raises DirectoryInUse, naming who has it; StorageFull or StorageFailed."""
        if not self._files.claim(self._path, self._text()):
            held, renewed_us = self._read()
            if held is not None and not held.is_gone() and self._clock() - renewed_us < LOCK_EXPIRY_US:
                raise DirectoryInUse(
                    f"{self._name} is held by {held}; wait until it has ended, or for a minute after it was killed"
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
            if error is None:  # else that says what happened; the lock ends with this process
                raise

    def renew(self) -> None:
        """Say that this run goes on, if it is time to. Raises as ``confirm`` does. Several threads may call it."""
        with self._renewing:
            if self._clock() - self._renewed_us >= RENEW_US:
                self.confirm()
                self._write()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew it as long as the block goes on, however long a call takes there: the sync of a file, its rename.

        That another run has taken it, or that it cannot be written, ``renew`` and ``confirm`` tell the block.
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
        """Raises DirectoryInUse when another run has taken it; StorageFailed."""
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
        """Who has it, and when it was renewed; None where nobody has, or the file is not one of ours."""
        try:
            content = json.loads(self._files.read_whole(self._path))
            return LockOwner(content["host"], content["process"], content["started"]), content["renewed_at_us"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, 0

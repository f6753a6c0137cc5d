"""Run archiving in tests, with a clock and a process of their choice."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from crc32c import crc32c

from qmq.archive import files as history_files
from qmq.archive import lock as archive_lock
from qmq.archive.data_directory import open_data_directory
from qmq.archive.files import LocalFiles
from qmq.archive.lock import LOCK, RENEW_US, ArchiveLock, LockOwner, this_process
from qmq.archive.segments import SegmentSource
from qmq.archive.write import Archived, archive_segments
from qmq.format.layout import INDEX_DTYPE, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import pack_index_header
from tests.fake_disk import FakeDisk, Operation

NOW_US: Final = 1_800_000_000_000_000
#: One that has ended.
GONE: Final = LockOwner(this_process().host, this_process().process, "long ago")


def archive(source: Path, to: Path, disk: Disk | None = None, owner: LockOwner | None = None) -> Archived:
    """Run it once."""
    files = LocalFiles(to, disk)
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, owner if owner is not None else this_process()) as lock:
        return archive_segments(open_data_directory(source, disk), files, lock, lambda: NOW_US)


def files_in(archive: Path) -> dict[str, bytes]:
    """Return all files of an archive."""
    return {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}


def large_index(directory: Path, count: int) -> tuple[LocalFiles, SegmentSource]:
    """Return a segment of many small batches, 300 bytes each: only its index exists."""
    batches, owner = np.empty(count, INDEX_DTYPE), SegmentOwner(b"origin", 3)
    end = SEGMENT_HEADER_SIZE + 300 * count
    batches["position"] = np.arange(SEGMENT_HEADER_SIZE, end, 300)
    batches["stored_at_us"] = np.arange(count)
    body = batches.tobytes()
    head = pack_index_header(owner, 0, sealed=True, covered=end, count=count, body_crc=crc32c(body))
    (directory / "large.index").write_bytes(head + body)
    return LocalFiles(directory), SegmentSource(*owner, 0, end, "large.messages", "large.index", None)


class SlowArchive:
    """An archive on a disk that delays one kind of call for files with that ending until the lock was renewed often,
    with a clock by which it is always time to renew it.
    """

    def __init__(self, operation: str, ending: str) -> None:
        self.held = 0
        self._operation = operation
        self._ending = ending
        self._renewed = threading.Semaphore(0)
        self._times_us = count(NOW_US, RENEW_US)
        self._disk = FakeDisk()
        self._disk.before, self._disk.after = self._hold, self._note

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Put all archives on this disk, and check their locks without a pause."""
        patch.setattr(history_files, "Disk", lambda: self._disk)
        patch.setattr(archive_lock, "_LOOK_EVERY_S", 0.0001)

    def clock(self) -> int:
        """Return a time at which the lock is to be renewed."""
        return next(self._times_us)

    def _note(self, operation: Operation) -> None:
        if operation.kind == "rename" and Path(operation.path).name == LOCK:
            self._renewed.release()

    def _hold(self, operation: Operation) -> None:
        if operation.kind == self._operation and operation.path.endswith(self._ending):
            while self._renewed.acquire(blocking=False):
                """Those from before."""
            assert all(self._renewed.acquire(timeout=30) for _ in range(10))
            self.held += 1

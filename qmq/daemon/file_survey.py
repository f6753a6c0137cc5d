"""Looks at the files of a broker: the bytes that each kind takes, and the messages that are in no archive yet.

A thread looks, and only while somebody asks for statistics: after each look it rests for 10 s and for 200 times as long
as the look took, so that a directory with very many files costs little too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from qmq.broker.ports.commands import Now
from qmq.daemon.threads import CallThread
from qmq.errors import QmqError, StorageError
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, SEGMENT_HEADER_SIZE
from qmq.storage.disk.disk import Disk, read_fully
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, read_receipt
from qmq.storage.message_log.segment import SegmentOwner, segment_path
from qmq.storage.types import SegmentSpan

#: Nobody waits longer for a look, in seconds: the answer then has what the last one found.
TIMEOUT_S: Final = 1.0
#: A look is good for so long, and for so many times the processor time that it took.
REST_US: Final = 10_000_000
REST_TIMES: Final = 200
#: The kinds of files, by the end of their names and by the first directory on their paths.
KINDS_BY_SUFFIX: Final = {".messages": "message_log", ".index": "indexes", ".keys": "key_indexes"}
KINDS_BY_DIRECTORY: Final = {
    "consumer-log": "consumer_log", "pulls": "pull_log", "groups": "error_log", "delayed": "delay_log",
    "due": "delay_log",
}  # fmt: skip
OTHER: Final = "other"
KINDS: Final = tuple(dict.fromkeys((*KINDS_BY_SUFFIX.values(), *KINDS_BY_DIRECTORY.values(), OTHER)))


class ArchiveState(NamedTuple):
    """How far an archive is behind, by the receipts beside the segments. ``oldest_us``: when the first message that is
    in no archive was stored, None without one; ``verified_us``: when the newest receipt was written.
    """

    unarchived_bytes: int
    unarchived_segments: int
    oldest_us: int | None
    verified_us: int


class SurveyedFiles(NamedTuple):
    """The bytes on disk of each of KINDS, and the state of the archive: None without any receipt."""

    kinds: dict[str, int]
    archive: ArchiveState | None


class LogSegments(NamedTuple):
    """The segments of one partition, with the one that is written."""

    owner: SegmentOwner
    directory: Path
    spans: list[SegmentSpan]


class FileSurvey:
    """Knows what the files of one broker take."""

    def __init__(
        self, disk: Disk, directories: Iterable[Path], logs: Callable[[], list[LogSegments]], clock: Callable[[], Now]
    ) -> None:
        """*logs* returns the segments of all partitions; it is called in the loop."""
        self._disk = disk
        self._directories = outermost(directories)
        self._logs = logs
        self._clock = clock
        self._worker = CallThread("qmq-files")
        self._receipts = dict[Path, ArchiveReceipt]()  # those that cover the whole of their segments
        self._stored = dict[tuple[Path, int], int]()  # when the message at a position was stored
        self._waiting: list[Callable[[SurveyedFiles | None], None]] = []
        self._is_looking = False
        self._rest_until_us = 0  # monotonic
        self._looked_at = list[LogSegments]()
        #: The result of the last look; None before the first one.
        self.found: SurveyedFiles | None = None

    def ask(self, then: Callable[[SurveyedFiles | None], None]) -> None:
        """Call *then* with what the files take, at once where the last look is good; after TIMEOUT_S at the latest."""
        if self._is_looking or self._clock().monotonic_us < self._rest_until_us:
            if not self._waiting:
                then(self.found)
            else:
                self._waiting.append(then)
            return
        self._is_looking = True
        self._waiting.append(then)
        self._looked_at = self._logs()
        self._timer = asyncio.get_running_loop().call_later(TIMEOUT_S, self._answer)
        self._worker.call(self._look, self._looked)

    def _look(self) -> None:
        """[thread] Look at all files."""
        began = time.thread_time()
        kinds = dict.fromkeys(KINDS, 0) | kinds_of(self._directories)
        self.found = SurveyedFiles(kinds, self._archive_state(self._looked_at))
        rest_us = max(REST_US, REST_TIMES * int((time.thread_time() - began) * 1e6))
        self._rest_until_us = self._clock().monotonic_us + rest_us

    def _looked(self, error: QmqError | None) -> None:
        self._is_looking = False
        self._answer()

    def _answer(self) -> None:
        self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(self.found)

    def _archive_state(self, logs: list[LogSegments]) -> ArchiveState | None:
        receipts, stored = dict[Path, ArchiveReceipt](), dict[tuple[Path, int], int]()
        verified_us = unarchived = segments = 0
        oldest_us: int | None = None
        for log in logs:
            for span in log.spans:
                path = segment_path(log.directory, span.base)
                receipt = self._receipts.get(path) or self._receipt(log, span.base)
                position = span.base + SEGMENT_HEADER_SIZE
                if receipt is not None and receipt.end <= span.end:
                    verified_us = max(verified_us, receipt.verified_at_us)
                    position = max(position, receipt.end)
                    if receipt.end == span.end:
                        receipts[path] = receipt
                if position >= span.end:
                    continue
                segments += 1
                unarchived += span.end - position
                stored_us = self._stored.get((path, position)) or self._stored_at(path, span.base, position)
                if stored_us:
                    stored[path, position] = stored_us
                    oldest_us = stored_us if oldest_us is None else min(oldest_us, stored_us)
        self._receipts, self._stored = receipts, stored
        return ArchiveState(unarchived, segments, oldest_us, verified_us) if verified_us else None

    def _receipt(self, log: LogSegments, base: int) -> ArchiveReceipt | None:
        with suppress(StorageError):
            receipt = read_receipt(self._disk, log.directory, base)
            if receipt is not None and receipt.is_of(log.owner, base):
                return receipt
        return None

    def _stored_at(self, path: Path, base: int, position: int) -> int:
        """Return when the batch at a position was stored; 0 where it cannot be read."""
        with suppress(OSError):
            fd = self._disk.open(path, os.O_RDONLY)
            try:
                data = read_fully(self._disk, fd, BATCH_HEADER_SIZE, position - base)
            finally:
                self._disk.close(fd)
            if len(data) == BATCH_HEADER_SIZE:
                header = parse_header(data)
                return header.stored_at_us if header.position == position else 0
        return 0

    def close(self) -> None:
        """End the thread, without waiting for a disk."""
        self._worker.stop(0)


def outermost(directories: Iterable[Path]) -> list[Path]:
    """Return the directories without those that lie within another one."""
    different = sorted({directory.absolute() for directory in directories})
    return [one for one in different if not any(one != other and one.is_relative_to(other) for other in different)]


def kinds_of(directories: Iterable[Path]) -> dict[str, int]:
    """[thread] Return the bytes that the files below these directories take on their disks, by kind."""
    sizes = Counter[str]()
    for directory in directories:
        for name, kind, size in _files(directory):
            sizes[KINDS_BY_SUFFIX.get(os.path.splitext(name)[1], OTHER) if kind == OTHER else kind] += size
    return dict(sizes)


def _files(directory: Path) -> Iterable[tuple[str, str, int]]:
    """Yield the name, the kind by its directory, and the bytes on disk of each file."""
    left = [(str(directory), OTHER)]
    while left:
        path, kind = left.pop()
        with suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append((entry.path, KINDS_BY_DIRECTORY.get(entry.name, kind) if kind == OTHER else kind))
                    elif entry.is_file(follow_symlinks=False):
                        yield entry.name, kind, entry.stat(follow_symlinks=False).st_blocks * 512

"""Sealed segments that nobody needs any more: out of the log at once, off the disk once no checkpoint names them."""

from __future__ import annotations

from pathlib import Path

from qmq.storage.consumer_log.header import entries_path, order_path
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import receipt_path
from qmq.storage.message_log.segment import segment_path
from qmq.storage.message_log.sparse_index import index_path
from qmq.storage.meta.checkpoint import Hole, SegmentSpan


class Removals:
    """Of one partition. Belongs to one thread, but for ``clean_up``."""

    def __init__(self, disk: Disk, log: Path, consumer: Path, removed: tuple[Hole, ...], left: list[int]) -> None:
        """*log* and *consumer* are where the files lie; *removed* and the bases *left* on disk are as of a start."""
        self._disk = disk
        self._log = log
        self._consumer = consumer
        #: What checkpoints do without: positions [start, end), ascending, never next to each other.
        self.removed = removed
        self._left = dict.fromkeys(left, 0)  # how many checkpoints do without the segment at that base
        self._unlinked: list[int] = []

    def add(self, before: int, span: SegmentSpan) -> None:
        """A segment is out of the log, in which positions up to *before* precede it."""
        self._left[span.base] = 0
        joined = list[Hole]()
        for hole in sorted([*self.removed, Hole(min(before, span.base), span.end)]):
            if joined and hole.start <= joined[-1].end:
                joined[-1] = Hole(joined[-1].start, max(joined[-1].end, hole.end))
            else:
                joined.append(hole)
        self.removed = tuple(joined)

    @property
    def are_pending(self) -> bool:
        """There are files to be removed: more checkpoints are needed."""
        return bool(self._left)

    def begin_checkpoint(self) -> list[int]:
        """The bases whose files may go once this checkpoint is written, as the one before does without them too."""
        return [base for base, checkpoints in self._left.items() if checkpoints]

    def clean_up(self, bases: list[int]) -> None:
        """[thread] The checkpoint is written: remove the files. What the system refuses is tried again by the next."""
        for base in bases:
            beside = index_path(self._log, base), receipt_path(self._log, base)
            derived = entries_path(self._consumer, base), order_path(self._consumer, base)
            if all(map(self._unlink, (*beside, *derived, segment_path(self._log, base)))):
                self._unlinked.append(base)

    def _unlink(self, path: Path) -> bool:
        try:
            self._disk.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def finish_checkpoint(self) -> None:
        """One more checkpoint does without them."""
        self._left = {base: checkpoints + 1 for base, checkpoints in self._left.items() if base not in self._unlinked}
        self._unlinked = []

"""A checkpoint in the making: everything it will claim is brought to the disk, then it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.disk import Disk, failure
from qmq.storage.disk.fsync import SureSync
from qmq.storage.error_log.group_files import GroupSync
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.removals import Removals
from qmq.storage.message_log.sparse_index import SegmentIndex
from qmq.storage.meta.checkpoint import Claims, SubjectsClaim, write_checkpoint
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.subjects import SubjectTable


def claim_subjects(table: SubjectTable, gaps: Gaps) -> SubjectsClaim:
    """What a checkpoint says of the subjects, all of which have been flushed, and of what is missing of them."""
    count = table.count
    return SubjectsClaim(
        length_bytes=table.length_bytes,
        count=count,
        ends=table.ends[:count].astype("<u8").tobytes(),
        firsts=table.firsts[:count].astype("<u8").tobytes(),
        gaps=gaps.pack(),
    )


class Checkpoint:
    """Made by ``Store.begin_checkpoint``; ``write`` may run in a thread while the store goes on."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        claims: Claims,
        *,
        logs: list[MessageLog],
        sync_log: Callable[[MessageLog], None],
        consumers: list[ConsumerLog],
        syncs: list[tuple[SureSync, int]],
        indexes: list[tuple[SegmentIndex, int]],
        directories: list[Path],
        renew: Callable[[], object],
        groups: GroupSync,
        removals: list[tuple[Removals, list[int]]],
    ) -> None:
        """*syncs* bring rows and subjects to the disk: what to call, with which descriptor. *indexes* are to be sealed
        at a position each; those that were are taken from the list's front. *directories* have names of files that a
        loss of power must not take away. *removals* may remove the segments at these bases then.
        """
        self._disk = disk
        self._directory = directory
        self._consumers = consumers
        self._syncs = syncs
        self._indexes = indexes
        self._index_count = len(indexes)
        self._directories = directories
        self._renew = renew
        self.groups = groups
        self._removals = removals
        #: Of the delay log: written before this one.
        self.before: Checkpoint | None = None
        self.claims = claims
        self.logs = logs
        self._sync_log = sync_log

    def write(self) -> None:
        """[thread] Sync all logs, the rows and the registry, renew the reserves, then write the checkpoint.

        Raises SyncFailed, StorageFull or StorageFailed; the older checkpoints stand then.
        """
        if self.before is not None:
            self.before.write()
        for log in self.logs:
            self._sync_log(log)
        for consumer in self._consumers:
            consumer.seal_pending()
        for sync, descriptor in self._syncs:
            try:
                sync(descriptor)
            except OSError as error:
                raise failure(error, "sync rows or subjects in", self._directory) from error
        while self._index_count:
            index, covered = self._indexes[0]
            index.seal(covered)
            self._indexes.pop(0)
            self._index_count -= 1
        self.groups.run()
        for directory in self._directories:
            try:
                self._disk.fsync_directory(directory)
            except OSError as error:
                raise failure(error, "sync", directory) from error
        self._renew()
        write_checkpoint(self._disk, self._directory, self.claims)
        self.groups.clean_up()
        for removals, bases in self._removals:
            removals.clean_up(bases)

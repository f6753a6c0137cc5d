"""The one door to the files: a data directory with its message logs, consumer logs, registry and checkpoints.

All methods belong to one thread, but for ``sync`` and ``Checkpoint.write``. Positions, sequences, rows and subject
numbers are plain ints; times are microseconds UTC. Every error is a StorageError. Storing is here, reading in
readable.py, checkpoints in checkpointed.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qmq.errors import StorageError, SyncFailed, TooManySubjects
from qmq.format.batch import EntryRow
from qmq.format.layout import DELAY_PARTITION, ENTRY, SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.aio import Aside
from qmq.storage.disk.disk import Buffer, Disk
from qmq.storage.error_log.item_file import ItemLog, ItemLogClaim
from qmq.storage.error_log.timer_queue import Schedule, ScheduleClaim
from qmq.storage.message_log.bad_ranges import KnownBad
from qmq.storage.message_log.cold_reads import ColdRead, Fetch, NotAtHand
from qmq.storage.message_log.drop import OldSegment, SubjectRanges, subject_ranges_of
from qmq.storage.message_log.sparse_index import SegmentIndex
from qmq.storage.meta.checkpoint import DELAYED_NAME, Hole
from qmq.storage.meta.take_checkpoint import Checkpoint, Checkpointed
from qmq.storage.opened import OpenedStore, StoreOptions
from qmq.storage.partition import Partition
from qmq.storage.pull_log.log import PullSync
from qmq.storage.pull_log.records import PullRecord
from qmq.storage.recovery.decide import RecoveryReport
from qmq.storage.recovery.open import open_directory
from qmq.storage.verify.scrub import PartitionDamage

__all__ = [
    "Checkpoint",
    "ColdRead",
    "Disk",
    "Fetch",
    "Hole",
    "ItemLog",
    "ItemLogClaim",
    "KnownBad",
    "NotAtHand",
    "OldSegment",
    "PartitionDamage",
    "PullRecord",
    "PullSync",
    "RecoveryReport",
    "Schedule",
    "ScheduleClaim",
    "Store",
    "StoreOptions",
    "SubjectRanges",
    "subject_ranges_of",
]


class Store(Checkpointed):
    """An open data directory. Made by ``open``; ``close`` it."""

    def __init__(self, opened: OpenedStore) -> None:
        super().__init__(opened)
        self._options = opened.options
        self._closed = False
        self._created_at_us = opened.now_us
        #: The delay log: a data directory of its own within this one, made with the first delayed message.
        self.delay_log: Store | None = None
        self._delay_claimed = -1  # how far the delay log's last checkpoint goes

    @classmethod
    def open(
        cls, directory: Path, options: StoreOptions, disk: Disk, now_us: int, discarded: Iterable[Path] = ()
    ) -> Store:
        """Open a data directory, or make one: take the lock, recover, be ready. Files in *discarded* are removed first.

        Raises DirectoryInUse; ForeignFile for files of another store or a newer version; BadBytes when what cannot be
        done without is rotten; StorageFull and StorageFailed; InvalidOption.
        """
        opened = open_directory(directory, options, disk, now_us, discarded)
        try:
            store = cls(opened)
        except BaseException:
            opened.close()
            raise
        try:
            if disk.exists(directory / DELAYED_NAME):
                store.open_delay_log(now_us)
        except BaseException:
            store.close(clean=False)
            raise
        return store

    def open_delay_log(self, now_us: int) -> Store:
        """Open the delay log, or make it. Raises as ``open`` does."""
        options = replace(self._options, partitions=1, partition_dirs=(), store_id_hint=self.store_id)
        log = self.delay_log = Store.open(self._directory / DELAYED_NAME, options, self._disk, now_us)
        for part in log.recovery.partitions:
            part.partition += DELAY_PARTITION
        self.recovery.partitions += log.recovery.partitions
        self.recovery.notes += log.recovery.notes
        return log

    def log_of(self, partition: int) -> tuple[Store, int]:
        """The store that holds a partition, and its number there: from DELAY_PARTITION on the delay log's."""
        if partition < DELAY_PARTITION:
            return self, partition
        assert self.delay_log is not None
        return self.delay_log, partition - DELAY_PARTITION

    def all_partitions(self) -> list[int]:
        """The numbers of all partitions, with the delay log's where there is one."""
        return [*range(self.partitions), *([DELAY_PARTITION] if self.delay_log is not None else [])]

    # --- storing -----------------------------------------------------------------------------------------------------

    def add_subject(self, name: str, *, forced: bool = False) -> int:
        """Register a subject, whose name was checked and is new; on disk with the next checkpoint.

        Raises TooManySubjects, unless it is *forced*: there is a message for it already.
        """
        if self._subjects.count >= self._options.max_subjects and not forced:
            raise TooManySubjects(
                f"there are {self._subjects.count} subjects, as many as max_subjects allows; raise it to add {name!r}"
            )
        return self._subjects.add(name)

    def skip_sequences(self, numbers: npt.ArrayLike, firsts: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Note that no message has these sequences of some subjects, unless the next start finds one: columns, or ints
        of one subject.
        """
        self._subjects.gaps.add(numbers, firsts, np.asarray(firsts, np.uint64) + np.asarray(counts, np.uint64))

    @property
    def segment_bytes(self) -> int:
        """What a segment of the message log takes, its header among it."""
        return self._options.segment_bytes

    @property
    def max_batch_bytes(self) -> int:
        """How large a stored batch may be, since clients could once send such; a copy may take a little more."""
        return self._identity.current.max_batch_bytes

    def position_for(self, partition: int, size: int) -> int:
        """The position of the next batch, of *size* bytes; nothing is stored by this. One that is larger than a segment
        (it was stored when segments were larger, and is copied now) gets a segment of its own size.

        Raises StorageFull, StorageFailed, SyncFailed: all that is staged in the partition has been taken back then.
        """
        log = self._partitions[partition].log
        position = log.staged_end
        return position if position + size <= log.limit else self._make_room(self._partitions[partition], size)

    def seal(self, partition: int) -> int:
        """Close the segment that is being written, where it has a batch; nothing may be staged. Gives the position
        before which all lies in closed segments. Raises as ``place`` does, and as ``write``.
        """
        part = self._partitions[partition]
        assert not part.rows, "what is staged is written first"
        if part.log.end > part.log.current.base + SEGMENT_HEADER_SIZE:
            self._make_room(part, 0, seal=True)
            self.write(partition)
        return part.log.current.base

    def _make_room(self, part: Partition, size: int, *, seal: bool = False) -> int:
        log = part.log
        try:
            log.check()
            roll = seal or not log.fits_segment(size)
            end = log.staged_end + size + (SEGMENT_HEADER_SIZE if roll else 0)
            if end > log.reserve:
                self._renew_reserve(part, end)
            if roll:
                part.rows.append(log.roll(self.last_stored_at_us or self._created_at_us, size))
        except StorageError:
            self._unstage(part)
            raise
        return log.staged_end

    def _renew_reserve(self, part: Partition, end: int) -> None:
        ends = [other.log.staged_end for other in self._partitions]
        ends[part.number] = end
        self._identity.renew(ends, self._reserve_bytes)
        self._take_reserves()

    def stage(self, partition: int, position: int, buffer: Buffer, rows: EntryRow | Rows) -> None:
        """Add a stamped batch to the next ``write``. *position* is what ``place`` gave for its size; the buffer must
        not change until then. *rows* are its consumer-log rows: a tuple for one run, else ENTRY_DTYPE[runs].
        """
        part = self._partitions[partition]
        assert position == part.log.staged_end, "batches are staged where they were placed"
        part.log.stage(buffer, len(buffer))
        part.rows.append(rows)

    def write(self, partition: int) -> None:
        """Store all that is staged, with a call to the system for each MiB. It can be read after ``publish``.

        Raises StorageFull, StorageFailed: none of it is stored then, and nothing is staged; a later write may work
        again. Raises SyncFailed when the next start may find a part of it; until then the partition takes nothing more.
        """
        part = self._partitions[partition]
        if not part.rows:
            return
        consumer, index = part.consumer, part.index
        try:
            if consumer.buffer_row != part.written_rows:
                self._write_rows(part)
            part.room.take(part.log.staged_end - part.log.end)
            part.log.write()
        except StorageError:
            self._unstage(part)
            raise
        for rows in part.rows:
            if type(rows) is tuple:
                position, stored_at_us = rows[1], rows[2]
                consumer.append(rows)
            elif type(rows) is int:
                consumer.roll(rows)
                self._unsealed.append((index, rows))
                part.index = index = SegmentIndex(self._disk, part.log.directory, part.log.owner, rows)
                continue
            else:
                _, position, stored_at_us, *_ = ENTRY.unpack_from(rows)  # type: ignore[arg-type]  # an array is a buffer
                consumer.append(rows)  # type: ignore[arg-type]  # type() does not narrow it
            index.append(position, stored_at_us)
            if stored_at_us > self.last_stored_at_us:  # partitions are not written in the order of their stamps
                self.last_stored_at_us = stored_at_us
        part.rows.clear()

    def unstage(self, partition: int) -> None:
        """Forget all that is staged."""
        self._unstage(self._partitions[partition])

    def _write_rows(self, part: Partition) -> None:
        """Keep memory from growing while the disk takes no rows: then it shall take no batches either."""
        if part.consumer.waiting_blocks:
            part.consumer.flush()
        part.written_rows = part.consumer.buffer_row

    def _unstage(self, part: Partition) -> None:
        part.log.unstage()
        part.rows.clear()

    def end(self, partition: int) -> int:
        """The position after the last batch that was written."""
        return self._partitions[partition].log.end

    def sync(self, partition: int) -> None:
        """[thread] Bring everything written before the call to the disk. Take ``end`` before, for ``mark_synced``.

        Raises SyncFailed; the partition takes nothing more then until the directory is opened again. Raises
        StorageFailed when it could not begin; it can be tried again.
        """
        log, number = self.log_of(partition)
        log._sync_log(log._partitions[number].log)

    def aside(self) -> Aside | None:
        """What may do syncs without a thread, where the system can."""
        return self._disk.aside()

    def begin_sync(self, partition: int) -> int | None:
        """The descriptor of which an fdatasync is all that ``sync`` would do now: have it done, then call ``end_sync``,
        and if it has failed ``sync``, which raises that. None: call ``sync``.
        """
        log, number = self.log_of(partition)
        return log._partitions[number].log.begin_sync()

    def end_sync(self, partition: int, error: OSError | None) -> None:
        """It is done, or has failed."""
        log, number = self.log_of(partition)
        log._partitions[number].log.end_sync(error)

    def broken(self, partition: int) -> SyncFailed | None:
        """Why a partition takes nothing more until the directory is opened again; None while it does."""
        log, number = self.log_of(partition)
        reason = log._partitions[number].log.broken
        return None if reason is None else SyncFailed(reason)

    def synced(self, partition: int) -> int:
        """The position up to which all is known to be on disk."""
        return self._partitions[partition].log.synced

    def mark_synced(self, partition: int, position: int) -> None:
        """Note that a ``sync`` that began when ``end`` was *position* has succeeded."""
        self._partitions[partition].log.mark_synced(position)

    def publish(self, partition: int, position: int) -> None:
        """Let the batches before *position* be read by row, place, time and subject."""
        self._partitions[partition].consumer.publish(position)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unsynced_bytes(self) -> int:
        """What was written since the last checkpoint began, with the delay log."""
        return super().unsynced_bytes + (self.delay_log.unsynced_bytes if self.delay_log is not None else 0)

    def check_there(self) -> None:
        """[thread] Check it of the delay log, too: without that one all else goes on."""
        super().check_there()
        if self.delay_log is not None:
            with suppress(SyncFailed):
                self.delay_log.check_there()

    def begin_checkpoint(self, state: dict[str, bytes], now_us: int | None = None) -> Checkpoint:
        """As of all else, with one of the delay log where that has news: it is written first."""
        log, before = self.delay_log, None
        if log is not None and not log.is_lost and (log.claimable(0) != self._delay_claimed or log.removes_files(0)):
            before = log.begin_checkpoint({}, now_us)
        try:
            checkpoint = super().begin_checkpoint(state, now_us)
        except BaseException as error:
            if log is not None and before is not None:
                log.fail_checkpoint(before, error)
            raise
        checkpoint.before = before
        return checkpoint

    def finish_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Note that ``checkpoint.write`` has succeeded."""
        if self.delay_log is not None and checkpoint.before is not None:
            self.delay_log.finish_checkpoint(checkpoint.before)
            self._delay_claimed = checkpoint.before.claims.partitions[0].position
        super().finish_checkpoint(checkpoint)

    def fail_checkpoint(self, checkpoint: Checkpoint, error: BaseException) -> None:
        """Note that it has failed."""
        if self.delay_log is not None and checkpoint.before is not None:
            self.delay_log.fail_checkpoint(checkpoint.before, error)
        super().fail_checkpoint(checkpoint, error)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, clean: bool = True) -> None:
        """Close all files and let go of the directory; no sync and no checkpoint may be running. Views stay good.

        With *clean* the stop is marked as such when all is on disk, so the last checkpoint and its finish come before.
        Calling it again does nothing. Raises StorageFull or StorageFailed when the mark cannot be written; all is
        closed even so.
        """
        if self._closed:
            return
        self._closed = True
        if self.delay_log is not None:
            self.delay_log.close(clean)
        whole = all(part.log.broken is None and part.log.synced == part.log.end for part in self._partitions)
        try:
            if clean and whole and self.groups.is_claimed:
                self._identity.mark_clean()
        finally:
            for part in self._partitions:
                part.log.close()
                part.consumer.close()
                part.index.close()
            for index, _ in self._unsealed:
                index.close()
            self._subjects.close()
            self.groups.close()
            self._lock.release()

"""A checkpoint in the making: everything it will claim is brought to the disk, then it is written.

Checkpoints of what is stored: what each of them claims, and what has to be on disk before it may.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from qmq.errors import StorageError, SyncFailed
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk, failure
from qmq.storage.disk.fsync import SureSync
from qmq.storage.error_log.group_files import GroupSync
from qmq.storage.message_log.drop import OldSegment, Removals, SubjectRanges
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.sparse_index import SegmentIndex
from qmq.storage.meta.checkpoint import (
    GROUP_STATE,
    CheckpointClaims,
    PartitionClaim,
    SegmentSpan,
    SubjectsClaim,
    write_checkpoint,
)
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.identity import IdentityFile
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.opened import CONSUMER_LOG_NAME, OpenedStore
from qmq.storage.partition import Partition
from qmq.storage.readable import Readable


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
        claims: CheckpointClaims,
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


class Checkpointed(Readable):
    """The part of a Store that takes checkpoints."""

    def __init__(self, opened: OpenedStore) -> None:
        super().__init__(opened)
        self._identity: IdentityFile = opened.identity
        self._lock: DirectoryLock = opened.lock
        #: The directory was removed or replaced.
        self.is_lost = False
        self._reserve_bytes = opened.options.reserve_bytes
        self._checkpoint_number = opened.checkpoint_number
        self._checkpointed_bytes = sum(part.log.end for part in self._partitions)
        self._dropped_end = 0  # above the sequences of messages that were dropped
        #: How many have been taken since the start.
        self.checkpoints_taken = 0
        self._unsealed: list[tuple[SegmentIndex, int]] = opened.unsealed
        self._claimed_gaps: tuple[list[tuple[int, int]], Gaps] = ([], self._subjects.gaps)
        #: Subjects with lower numbers keep them over any start: a checkpoint of this life knows them.
        self.subjects_claimed = 0
        #: The files of groups.
        self.groups = opened.groups

    @property
    def unsynced_bytes(self) -> int:
        """What was written since the last checkpoint began."""
        return sum(part.log.end for part in self._partitions) - self._checkpointed_bytes

    def check_there(self) -> None:
        """[thread] Check that directories and files are those that were opened: what is written to a file without a
        name ends with the process. Partitions that it is about take nothing more. Before each checkpoint.

        Raises SyncFailed when the data directory was removed or replaced, StorageFailed when nobody can tell.
        """
        try:
            self._lock.check_in_flight()
        except SyncFailed as error:
            self.is_lost = True
            for part in self._partitions:
                part.log.give_up(str(error))
            raise
        for part in self._partitions:
            part.log.check_there()

    def begin_checkpoint(self, state: dict[str, bytes], now_us: int | None = None) -> Checkpoint:
        """Note how far everything is, and write rows and subjects behind it to their files. Then run its ``write`` in
        a thread, and hand it to ``finish_checkpoint``. One at a time. *state* is kept with it.

        A partition that was given up stays where its last checkpoint left it. Raises StorageFull, StorageFailed.
        """
        assert not any(part.rows for part in self._partitions), "a checkpoint knows of no batch that may yet fail"
        table, identity = self._subjects, self._identity.current
        for part in self._partitions:
            part.room.measure_again()
        sound = [part for part in self._partitions if not part.given_up]
        syncs = [(table.sync, table.flush())]
        for part in sound:
            syncs += [(part.consumer.sync, descriptor) for descriptor in part.consumer.flush()]
            part.index.flush()
        claims = [part.claim if part.given_up else self._claim(part) for part in self._partitions]
        groups_claim, groups = self.groups.begin_checkpoint()
        self._checkpoint_number += 1
        self._checkpointed_bytes = sum(part.log.end for part in self._partitions)
        content = CheckpointClaims(
            number=self._checkpoint_number,
            created_at_us=self.last_stored_at_us if now_us is None else now_us,
            store_id=self.store_id,
            sequence_base=identity.sequence_base,
            last_stored_at_us=self.last_stored_at_us,
            partitions=tuple(claims),
            subjects=claim_subjects(table, self._gaps_to_claim()),
            state={**state, GROUP_STATE: groups_claim},
        )
        return Checkpoint(
            self._disk,
            self._directory,
            content,
            logs=[part.log for part in sound],
            sync_log=self._sync_log,
            consumers=[part.consumer for part in sound],
            syncs=syncs,
            indexes=self._indexes_to_seal(),
            directories=self._unlisted(sound),
            renew=lambda: self._renew([claim.position for claim in claims]),
            groups=groups,
            removals=[(part.removals, part.removals.begin_checkpoint()) for part in sound],
        )

    def removable(self, partition: int) -> list[SegmentSpan]:
        """The segments that ``remove_segment`` takes: sealed, and all of it known to the last checkpoint."""
        part = self._partitions[partition]
        if part.given_up:
            return []
        unsealed = {end for index, end in self._unsealed if index.owner.partition == partition}
        known = [span for span in part.log.sealed if span.end <= part.claim.position and span.end not in unsealed]
        unfinished = part.consumer.unfinished() if known else ()
        return [span for span in known if span.base not in unfinished]

    def is_settled(self, partition: int, position: int) -> bool:
        """Whether all segments before *position* are closed, with all that belongs to them on disk."""
        part = self._partitions[partition]
        unsealed = [end for index, end in self._unsealed if index.owner.partition == partition]
        return position <= min(part.claim.position, part.log.current.base, *unsealed)

    def remove_segment(self, partition: int, base: int) -> None:
        """Do without a segment from now on, of those that are ``removable``, while no checkpoint is being written. Its
        files go once the last two checkpoints do not name it; so it comes back should one that does be begun at.
        """
        part = self._partitions[partition]
        part.removals.add(*part.log.remove(base))
        part.consumer.remove(base)

    def old_segment(self, partition: int, base: int) -> OldSegment:
        """To look into a segment that is ``removable``, in a thread."""
        part = self._partitions[partition]
        span = next(span for span in part.log.sealed if span.base == base)
        return OldSegment(self._disk, part.log.directory, part.log.owner, span, *part.consumer.sealed_at(base))

    def drop_segment(self, partition: int, base: int, had: SubjectRanges) -> None:
        """As ``remove_segment``, of a segment that has messages which are gone then: *had* are theirs. What is kept of
        a subject begins behind what is missing at its beginning.
        """
        self.remove_segment(partition, base)
        self.stay()
        table = self._subjects
        self._dropped_end = max(self._dropped_end, int(had.ends.max(initial=0)))
        table.gaps.add(*had)
        table.gaps.advance(table.firsts)
        self._claimed_gaps = [(-1, -1)], table.gaps  # it is another one for partitions that were given up, too

    def removes_files(self, partition: int) -> bool:
        """Whether files wait for more checkpoints, to be removed."""
        return self._partitions[partition].removals.are_pending

    def give_up(self, partition: int) -> None:
        """Leave a partition whose sync has failed out of all further checkpoints: the next start sees what is there."""
        self._partitions[partition].given_up = True

    def claimable(self, partition: int) -> int:
        """The position up to which a checkpoint that begins now claims a partition."""
        part = self._partitions[partition]
        return part.claim.position if part.given_up else part.log.end

    def claimed(self, partition: int) -> int:
        """The position up to which the last checkpoint claims a partition."""
        return self._partitions[partition].claim.position

    def _gaps_to_claim(self) -> Gaps:
        """The gaps, and what lies in partitions that were given up behind their claims: it may not be there later."""
        given_up = [(part.number, part.claim.position) for part in self._partitions if part.given_up]
        if given_up != self._claimed_gaps[0]:
            gaps = Gaps.unpack(self._subjects.gaps.pack())
            for number, position in given_up:
                with self._partitions[number].log.residence.waiting():
                    found = [
                        (rows["subject"], rows["first_sequence"], rows["first_sequence"] + rows["count"])
                        for rows in self._partitions[number].consumer.rows_since(position)
                    ]
                if found:
                    gaps.add(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
            self._claimed_gaps = given_up, gaps
        return self._claimed_gaps[1]

    def _renew(self, ends: list[int]) -> None:
        if any(part.given_up for part in self._partitions):
            self._identity.forget_boot()
        self._identity.renew(ends, self._reserve_bytes)
        self._identity.note_dropped(self._dropped_end)

    def _indexes_to_seal(self) -> list[tuple[SegmentIndex, int]]:
        """Without those of partitions that were given up: their disk may refuse for good."""
        kept = []
        for index, end in self._unsealed:
            if self._partitions[index.owner.partition].given_up:
                index.close()
            else:
                kept.append((index, end))
        self._unsealed = kept
        return kept

    def _unlisted(self, parts: list[Partition]) -> list[Path]:
        """The directories that have got files since they were last synced."""
        consumers = self._directory / CONSUMER_LOG_NAME
        changed = [part for part in parts if part.listed != part.log.current.base]
        directories = [self._directory, consumers] if any(part.listed < 0 for part in changed) else []
        for part in changed:
            directories += [consumers / str(part.number), part.log.directory]
        return directories

    def _claim(self, part: Partition) -> PartitionClaim:
        log = part.log
        journal, removed = part.consumer.journal_state(), part.removals.removed
        return PartitionClaim(log.end, tuple(log.spans()), tuple(part.holes), journal, removed)

    def finish_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Note that ``checkpoint.write`` has succeeded."""
        for part, claim in zip(self._partitions, checkpoint.claims.partitions, strict=True):
            if part.log in checkpoint.logs:
                part.log.mark_synced(claim.position)
                part.listed = claim.segments[-1].base
                part.removals.finish_checkpoint()
            part.claim = claim
        self.checkpoints_taken += 1
        self.subjects_claimed = checkpoint.claims.subjects.count
        self.groups.finish_checkpoint(checkpoint.groups)
        self._take_reserves()

    def fail_checkpoint(self, checkpoint: Checkpoint, error: BaseException) -> None:
        """Note that it has failed."""
        self.groups.fail_checkpoint(checkpoint.groups, error)

    def _take_reserves(self) -> None:
        for part, identity in zip(self._partitions, self._identity.current.partitions, strict=True):
            part.log.set_reserve(identity.reserve)

    def _sync_log(self, log: MessageLog) -> None:
        """[thread] Sync a log; that it failed is kept, as pages of a failed sync read well until they leave memory."""
        try:
            log.sync()
        except SyncFailed:
            with suppress(StorageError):  # the next checkpoint tries again
                self._identity.forget_boot()
            raise

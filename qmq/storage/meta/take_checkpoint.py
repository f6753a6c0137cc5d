"""Take checkpoints: bring everything that a checkpoint claims to the disk, then write it.

``CheckpointTaker`` notes how far everything is, in the thread of the store; ``Checkpoint.write`` does the slow part, in
another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qmq.errors import SyncFailed
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk, failure
from qmq.storage.error_log.group_files import GroupFiles, GroupSync
from qmq.storage.message_log.drop import Removals, SubjectRanges
from qmq.storage.message_log.sparse_index import SegmentIndex
from qmq.storage.meta.checkpoint import GROUP_STATE, CheckpointClaims, SubjectsClaim, pack_numbers, write_checkpoint
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.state_files import StatePart, split
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.partition import Partition, SharedState
from qmq.storage.types import CONSUMER_LOG_NAME


def claim_subjects(table: SubjectTable, gaps: Gaps) -> SubjectsClaim:
    """Return the claim for the subjects, all of which have been flushed, with their gaps."""
    count = table.count
    known: Any = slice(count) if not table.forgotten_count else np.flatnonzero(~table.is_forgotten[:count])
    return SubjectsClaim(
        length_bytes=table.length_bytes,
        count=count,
        ends=table.ends[known].astype("<u8", copy=False).tobytes(),
        firsts=table.firsts[known].astype("<u8", copy=False).tobytes(),
        gaps=gaps.pack(),
        forgotten=pack_numbers(table.is_forgotten[:count]) if table.forgotten_count else b"",
        forgotten_end=table.forgotten_end,
    )


class Checkpoint:
    """One checkpoint that is being taken. ``write`` may run in a thread while the store goes on."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        claims: CheckpointClaims,
        *,
        partitions: list[Partition],
        syncs: list[tuple[Callable[[int], None], int]],
        indexes: list[tuple[SegmentIndex, int]],
        directories: list[Path],
        renew: Callable[[], object],
        groups: GroupSync,
        removals: list[tuple[Removals, list[int]]],
    ) -> None:
        """*partitions* are those that were not given up. *syncs* bring rows and subjects to the disk: a function and
        the descriptor for it. *indexes* are to be sealed at a position each; sealed ones are removed from the list's
        front. *directories* have names of files that a loss of power must not take away. *removals* may then remove
        the files of the segments at these bases.
        """
        self._disk = disk
        self._directory = directory
        self._syncs = syncs
        self._indexes = indexes
        self._index_count = len(indexes)
        self._directories = directories
        self._renew = renew
        self.groups = groups
        self._removals = removals
        #: The files with parts of the state that the checkpoint before names; None: other ones stay.
        self.kept_files: set[str] | None = None
        #: The checkpoint of the delay log, written before this one.
        self.before: Checkpoint | None = None
        self.claims = claims
        self.partitions = partitions

    def write(self) -> None:
        """[thread] Sync all logs, the rows and the registry, renew the reserves, then write the checkpoint.

        Raises SyncFailed, StorageFull or StorageFailed; the older checkpoints stand then.
        """
        if self.before is not None:
            self.before.write()
        for part in self.partitions:
            part.sync()
        for part in self.partitions:
            part.consumer_log.seal_pending()
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
        write_checkpoint(self._disk, self._directory, self.claims, self.kept_files)
        self.groups.clean_up()
        for removals, bases in self._removals:
            removals.clean_up(bases)


class CheckpointTaker:
    """Takes the checkpoints of one store, one at a time."""

    def __init__(
        self,
        shared: SharedState,
        *,
        lock: DirectoryLock,
        subjects: SubjectTable,
        groups: GroupFiles,
        number: int,
        state_files: Sequence[StatePart] = (),
    ) -> None:
        """*number* is the number of the latest checkpoint, *state_files* those of the one that was recovered."""
        self._shared = shared
        self._partitions = shared.partitions
        self._identity = shared.identity
        self._lock = lock
        self._subjects = subjects
        self._groups = groups
        self._number = number
        self._state_files = list(state_files)
        #: The files that the last checkpoint of this process names; None before it. And whether there may be others.
        self._named_files: set[str] | None = None
        self._may_have_files = bool(state_files)
        #: The directory was removed or replaced.
        self.is_lost = False
        self._claimed_bytes = sum(part.message_log.end for part in self._partitions)
        self._dropped_end = 0  # above the sequences of messages that were dropped
        #: How many checkpoints have been taken since the start.
        self.taken = 0
        self._claimed_gaps: tuple[list[tuple[int, int]], Gaps] = ([], subjects.gaps)
        #: Subjects with lower numbers keep them over any start: a checkpoint taken since the start knows them.
        self.subjects_claimed = 0
        self._last_claimed = 0, subjects.forgotten_count  # numbers, and forgotten ones, in the last checkpoint

    @property
    def unsynced_bytes(self) -> int:
        """The bytes written since the last checkpoint began."""
        return sum(part.message_log.end for part in self._partitions) - self._claimed_bytes

    def check_there(self) -> None:
        """[thread] Check, before each checkpoint, that directories and files are those that were opened: bytes written
        to a file without a name end with the process. Partitions whose files are gone take no more batches.

        Raises SyncFailed when the data directory was removed or replaced, StorageFailed when the system does not tell.
        """
        try:
            self._lock.check_in_flight()
        except SyncFailed as error:
            self.is_lost = True
            for part in self._partitions:
                part.message_log.give_up(str(error))
            raise
        for part in self._partitions:
            part.message_log.check_there()

    def begin(self, state: dict[str, bytes], now_us: int | None = None) -> Checkpoint:
        """Note how far everything is, and write rows and subjects behind it to their files. Then run its ``write`` in
        a thread, and pass it to ``finish``. *state* is stored with it.

        A partition that was given up stays at its last claim. Raises StorageFull, StorageFailed.
        """
        parts, shared, table, identity = self._partitions, self._shared, self._subjects, self._identity.current
        assert not any(part.staged_rows for part in parts), "a checkpoint knows of no batch that may yet fail"
        for part in parts:
            part.room.measure_again()
        sound = [part for part in parts if not part.given_up]
        syncs: list[tuple[Callable[[int], None], int]] = [(table.sync, table.flush())]
        for part in sound:
            syncs += [(part.consumer_log.sync, descriptor) for descriptor in part.consumer_log.flush()]
            part.index.flush()
        claims = [part.current_claim() for part in parts]
        groups_claim, groups = self._groups.begin_checkpoint()
        self._number += 1
        self._claimed_bytes = sum(part.message_log.end for part in parts)
        own, self._state_files = split({**state, GROUP_STATE: groups_claim}, self._number, self._state_files)
        self._may_have_files = self._may_have_files or bool(self._state_files)
        content = CheckpointClaims(
            number=self._number,
            created_at_us=shared.last_stored_at_us if now_us is None else now_us,
            store_id=identity.store_id,
            sequence_base=identity.sequence_base,
            last_stored_at_us=shared.last_stored_at_us,
            partitions=tuple(claims),
            subjects=claim_subjects(table, self._gaps_to_claim()),
            state=own,
            state_files=tuple(self._state_files),
        )
        checkpoint = Checkpoint(
            shared.disk,
            shared.directory,
            content,
            partitions=sound,
            syncs=syncs,
            indexes=self._indexes_to_seal(),
            directories=self._unlisted(sound),
            renew=lambda: self._renew([claim.position for claim in claims]),
            groups=groups,
            removals=[(part.removals, part.removals.begin_checkpoint()) for part in sound],
        )
        if self._may_have_files:
            checkpoint.kept_files = self._named_files
        return checkpoint

    def finish(self, checkpoint: Checkpoint) -> None:
        """Note that ``checkpoint.write`` has succeeded."""
        for part, claim in zip(self._partitions, checkpoint.claims.partitions, strict=True):
            if part in checkpoint.partitions:
                part.message_log.mark_synced(claim.position)
                part.listed = claim.segments[-1].base
                part.removals.finish_checkpoint()
            part.claim = claim
        named = {file.file_name for file in checkpoint.claims.state_files}
        if self._named_files is not None:
            self._may_have_files = bool(named or self._named_files)
        self._named_files = named
        self.taken += 1
        self._claim_numbers(checkpoint.claims.subjects)
        self._groups.finish_checkpoint(checkpoint.groups)
        self._shared.take_reserves()

    def _claim_numbers(self, subjects: SubjectsClaim) -> None:
        """Note which numbers are sure. Where names were forgotten since the last checkpoint, those that came back have
        their former numbers again in a start from that one, so numbers after it are sure one checkpoint later.
        """
        before, self._last_claimed = self._last_claimed, (subjects.count, subjects.forgotten_count())
        self.subjects_claimed = subjects.count if before[1] == self._last_claimed[1] else before[0]

    def fail(self, checkpoint: Checkpoint, error: BaseException) -> None:
        """Note that ``checkpoint.write`` has failed."""
        self._groups.fail_checkpoint(checkpoint.groups, error)

    def note_dropped(self, had: SubjectRanges) -> None:
        """Note that the messages *had* are gone: a subject begins behind the gap at its beginning."""
        table = self._subjects
        self._dropped_end = max(self._dropped_end, int(had.ends.max(initial=0)))
        firsts = table.firsts[had.subjects]
        begins = np.ones(len(firsts), np.bool_)  # the first range of each subject
        begins[1:] = had.subjects[1:] != had.subjects[:-1]
        inside = begins & (had.starts <= firsts) & (firsts < had.ends)
        table.firsts[had.subjects[inside]] = had.ends[inside]
        table.gaps.add(*(column[~inside] for column in had))
        table.gaps.advance(table.firsts)
        self._claimed_gaps = [(-1, -1)], table.gaps  # the gaps differ for partitions that were given up, too

    def _gaps_to_claim(self) -> Gaps:
        """Return the gaps, with the sequences behind the claims of partitions that were given up: their messages may
        be gone later.
        """
        given_up = [(part.number, part.claim.position) for part in self._partitions if part.given_up]
        if given_up != self._claimed_gaps[0]:
            gaps = Gaps.unpack(self._subjects.gaps.pack())
            for number, position in given_up:
                part = self._partitions[number]
                with part.message_log.residence.waiting():
                    found = [
                        (rows["subject"], rows["first_sequence"], rows["first_sequence"] + rows["count"])
                        for rows in part.consumer_log.rows_since(position)
                    ]
                if found:
                    gaps.add(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
            self._claimed_gaps = given_up, gaps
        return self._claimed_gaps[1]

    def _renew(self, ends: list[int]) -> None:
        if self._groups.broken or any(part.given_up for part in self._partitions):
            self._identity.forget_boot()
        self._identity.renew(ends, self._shared.reserve_bytes)
        self._identity.note_dropped(self._dropped_end)

    def _indexes_to_seal(self) -> list[tuple[SegmentIndex, int]]:
        """Return the unsealed indexes, but for those of partitions that were given up: their disk may refuse for
        good.
        """
        kept = []
        for index, end in self._shared.unsealed:
            if self._partitions[index.owner.partition].given_up:
                index.close()
            else:
                kept.append((index, end))
        self._shared.unsealed = kept
        return kept

    def _unlisted(self, parts: list[Partition]) -> list[Path]:
        """Return the directories that got files since they were last synced."""
        directory = self._shared.directory
        consumers = directory / CONSUMER_LOG_NAME
        changed = [part for part in parts if part.listed != part.message_log.current.base]
        directories = [directory, consumers] if any(part.listed < 0 for part in changed) else []
        for part in changed:
            directories += [consumers / str(part.number), part.message_log.directory]
        return directories

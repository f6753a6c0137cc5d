"""Open a data directory: lock, identity, checkpoint, registry, then each partition, in an order that survives a crash.

The identity is written only when every tail has been read and is on disk again: after a crash before that, the next
start finds the same facts. Its new floors, reserves and sequence base take effect only after it is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from qmq.errors import BadBytes, ForeignFile, InvalidOption, StorageError
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.disk.dir_lock import DirectoryLock
from qmq.storage.disk.disk import Disk, failure, make_directory
from qmq.storage.disk.envelope import FileState
from qmq.storage.error_log.group_files import GroupFiles
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.segment import SegmentOwner
from qmq.storage.message_log.sparse_index import SegmentIndex, derive_index, is_sealed_index, remove_drafts
from qmq.storage.meta.checkpoint import (
    GROUP_STATE,
    CheckpointClaims,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
)
from qmq.storage.meta.checkpoint import PREFIX as CHECKPOINT_PREFIX
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.identity import (
    COPY_NAMES,
    Identity,
    IdentityFile,
    PartitionIdentity,
    latest,
    read_copies,
)
from qmq.storage.meta.state_files import StatePart
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.partition import OpenedPartition
from qmq.storage.pull_log.kept import PullLogKeep
from qmq.storage.pull_log.log import FILE_BYTES, ForgetBoot
from qmq.storage.recovery.create import make_identity, with_partitions
from qmq.storage.recovery.decide import Action, Facts, RecoveryReport, Tail, decide, facts_of
from qmq.storage.recovery.lost_names import NameLookupLog, restore_names
from qmq.storage.recovery.replay import PartitionReplay
from qmq.storage.recovery.sequences import SequenceReplay, missing_sequences, rows_in_order
from qmq.storage.types import CONSUMER_LOG_NAME, SUBJECTS_NAME, StoreOptions

#: Opening a directory checks the checksums of the indexes for this many newest bytes of a partition's log.
CHECKED_LOG_BYTES: Final = 1 << 30


@dataclass(slots=True)
class OpenedStore:
    """A data directory that has been recovered and is ready: a Store is made from it."""

    disk: Disk
    directory: Path
    options: StoreOptions
    now_us: int
    lock: DirectoryLock
    identity: IdentityFile
    subjects: SubjectTable
    partitions: list[OpenedPartition]
    #: Indexes of sealed segments that could not be written yet, and the positions where those segments end.
    unsealed: list[tuple[SegmentIndex, int]]
    #: The files of groups.
    groups: GroupFiles
    checkpoint_number: int
    state: dict[str, bytes]
    #: The checkpoint that the state is from; None when there is none.
    state_path: Path | None
    #: The files with parts of the state that this checkpoint names.
    state_files: tuple[StatePart, ...]
    last_stored_at_us: int
    report: RecoveryReport

    def close(self) -> None:
        """Close everything and change nothing."""
        for part in self.partitions:
            part.message_log.close()
            part.consumer_log.close()
            part.index.close()
        for index, _ in self.unsealed:
            index.close()
        self.subjects.close()
        self.groups.close()
        self.lock.release()


def open_directory(
    directory: Path, options: StoreOptions, disk: Disk, now_us: int, discarded: Iterable[Path] = ()
) -> OpenedStore:
    """Open or create a data directory. Files in *discarded* are removed first: derived files, which are rebuilt, or
    checkpoints.

    Raises StorageError and its subclasses, or InvalidOption; nothing stays open or locked then.
    """
    if options.segment_bytes < options.max_frame_bytes + SEGMENT_HEADER_SIZE:
        raise InvalidOption(
            f"segment_bytes = {options.segment_bytes} has no room for a batch of max_frame_bytes = "
            f"{options.max_frame_bytes}; raise it to {options.max_frame_bytes + SEGMENT_HEADER_SIZE} or more"
        )
    make_directory(disk, directory)
    lock = DirectoryLock.acquire(disk, directory, now_us)
    opening = _Opening(directory, options, disk, now_us, lock)
    try:
        discarded = list(discarded)
        _discard(disk, discarded)
        opened = opening.run()
        opened.report.lost_checkpoint |= any(path.name.startswith(CHECKPOINT_PREFIX) for path in discarded)
        return opened
    except BaseException:
        opening.abandon()
        lock.release()
        raise


def _discard(disk: Disk, paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            disk.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise failure(error, "remove", path) from error


class _Opening:
    def __init__(self, directory: Path, options: StoreOptions, disk: Disk, now_us: int, lock: DirectoryLock) -> None:
        self._directory = directory
        self._options = options
        self._disk = disk
        self._now_us = now_us
        self._lock = lock
        self._boot_id = disk.boot_id()
        self._subjects: SubjectTable | None = None
        self._consumers: list[ConsumerLog] = []
        self._logs: list[MessageLog] = []
        self._groups: GroupFiles | None = None
        self._notes: list[str] = []
        self._lost_end = 0  # the highest next sequence among subjects whose names are lost
        self._unsealed: list[tuple[SegmentIndex, int]] = []
        self._opened_indexes: list[SegmentIndex] = []
        self._is_copy_behind = False
        self._bad_copy = COPY_NAMES[0]  # if one is

    def abandon(self) -> None:
        """Close everything that has been opened."""
        for log in self._logs:
            log.close()
        for consumer in self._consumers:
            consumer.close()
        for index in self._opened_indexes:
            index.close()
        if self._subjects is not None:
            self._subjects.close()
        if self._groups is not None:
            self._groups.close()

    def run(self) -> OpenedStore:
        copies = read_copies(self._disk, self._directory)
        numbers = list_checkpoints(self._disk, self._directory)
        checkpoints = [read_checkpoint(self._disk, self._directory, number) for number in numbers[:2]]
        facts = facts_of(self._disk, self._directory, copies, checkpoints, self._boot_id)
        plan = decide(facts)
        looked_at = [(file.state, file.reason) for file in copies] + [(file.state, file.reason) for file in checkpoints]
        if plan.action is Action.REFUSE_UNKNOWN:
            raise ForeignFile(next(reason for state, reason in looked_at if state is FileState.UNKNOWN))
        if plan.action is Action.REFUSE_LOST:
            reasons = "; ".join(copy.reason for copy in copies)
            raise BadBytes(f"{self._directory} has data but no identity: {reasons}; put one of them back from a backup")
        report = RecoveryReport(plan.action is Action.CREATE, facts.clean, False, plan.source)
        report.lost_checkpoint = facts.checkpoint is FileState.ROTTEN
        report.notes += [reason for state, reason in looked_at if state is FileState.ROTTEN]
        if plan.action is Action.CREATE:
            identity = make_identity(self._disk, self._directory, self._options, self._now_us, self._boot_id)
        else:
            identity = latest(*copies)
            self._is_copy_behind = copies[0].identity != copies[1].identity
            self._bad_copy = COPY_NAMES[copies[1].identity is None]
        good = next((file for file in checkpoints if file.claims is not None), None)
        claims = good.claims if good is not None else None
        if good is not None and good.reason:
            report.notes.append(f"{good.reason}; the logs are read in its place")
        if good is not None and claims is not None and claims.store_id != identity.store_id:
            raise ForeignFile(
                f"{checkpoint_path(self._directory, good.number)} belongs to store {claims.store_id.hex()}, this is "
                f"store {identity.store_id.hex()}; move it where it belongs"
            )
        return self._recover(facts, identity, claims, max(numbers, default=0), report)

    def _sync_directory(self, path: Path) -> None:
        try:
            self._disk.fsync_directory(path)
        except OSError as error:
            raise failure(error, "sync", path) from error

    # --- recovery ----------------------------------------------------------------------------------------------------

    def _recover(
        self, facts: Facts, before: Identity, claims: CheckpointClaims | None, number: int, report: RecoveryReport
    ) -> OpenedStore:
        if not facts.clean:
            self._sync_directory(self._directory)  # the identity that was read may not have its name on disk yet
        identity = with_partitions(self._disk, self._directory, self._options, before)
        subjects = self._open_subjects(identity, claims)
        replays = self._load(identity, claims, subjects)
        report.power_loss = not (report.created or facts.clean or facts.same_boot)
        identity, report.raised_by = self._past_tails(facts, identity, replays, len(before.partitions))
        state = dict(claims.state) if claims is not None else {}
        identity_file = IdentityFile(self._disk, self._directory, before, self._bad_copy)
        groups = self._open_groups(identity, state.pop(GROUP_STATE, None), report, identity_file.forget_boot)
        if identity != before or self._is_copy_behind:  # by a kill between the two, or rot
            identity_file.change(lambda _: identity)
        self._open_logs(identity_file.current, replays, sync=not facts.clean)
        self._replay_sequences(identity_file.current, claims, subjects, replays)
        report.partitions = [replay.report for replay in replays]
        report.notes += [note for replay in replays for note in replay.notes]
        self._remove_rotten_checkpoints(claims)
        indexes = [self._indexes(*opened) for opened in zip(self._logs, self._consumers, strict=True)]
        report.notes += self._notes + groups.notes
        stamps = [replay.last_stored_at_us for replay in replays]
        return OpenedStore(
            disk=self._disk,
            directory=self._directory,
            options=self._options,
            now_us=self._now_us,
            lock=self._lock,
            identity=identity_file,
            subjects=subjects,
            partitions=[
                OpenedPartition(log, consumer, index, replay.holes, replay.claim(), replay.left)
                for log, consumer, index, replay in zip(self._logs, self._consumers, indexes, replays, strict=True)
            ],
            unsealed=self._unsealed,
            groups=groups,
            checkpoint_number=number,
            state=state,
            state_path=checkpoint_path(self._directory, claims.number) if claims is not None else None,
            state_files=claims.state_files if claims is not None else (),
            last_stored_at_us=max(claims.last_stored_at_us if claims is not None else 0, *stamps, 0),
            report=report,
        )

    def _past_tails(
        self, facts: Facts, identity: Identity, replays: list[PartitionReplay], known: int
    ) -> tuple[Identity, int]:
        """Read the tails. Return the identity that follows from them, and by how much sequences are raised. The first
        *known* partitions are not new.
        """
        tails = [replay.read_tail(self._options.segment_bytes, rewrite=decide(facts).rewrite) for replay in replays]
        blocked = [r.blocked_until(p.reserve) for r, p in zip(replays, identity.partitions, strict=True)]
        tails = [tail | (Tail.SEVERED if until else Tail.WHOLE) for tail, until in zip(tails, blocked, strict=True)]
        plans = [decide(facts._replace(tail=tail)) for tail in tails]
        raised = sum(replay.blind_bytes for replay in replays) + max(self._lost_end - identity.sequence_base, 0)
        partitions = []
        for partition, replay, plan, until in zip(identity.partitions, replays, plans, blocked, strict=True):
            if plan.record_holes:
                replay.holes += replay.report.holes
            if plan.jump and replay.report.partition < known:
                floor = max(partition.reserve, replay.end, until)
                raised += floor - replay.end
                partition = PartitionIdentity(floor, floor + self._options.reserve_bytes, partition.directory)
                replay.report.jumped = True
            partitions.append(partition)
        past = replace(
            identity,
            boot_id=self._boot_id,
            clean=False,
            sequence_base=identity.sequence_base + raised,
            partitions=tuple(partitions),
            max_batch_bytes=max(identity.max_batch_bytes, self._options.max_frame_bytes),
        )
        return past, raised

    def _open_groups(
        self, identity: Identity, claim: bytes | None, report: RecoveryReport, forget_boot: ForgetBoot
    ) -> GroupFiles:
        """Open the files of groups. The pull log must act on a power loss before the identity forgets it."""
        self._groups = GroupFiles(
            self._disk, self._directory, identity.store_id, identity.secret, claim, clean=report.clean,
            lost=report.power_loss, now_us=self._now_us, file_bytes=min(FILE_BYTES, self._options.segment_bytes),
            forget_boot=forget_boot,
            keep=PullLogKeep(self._options.pull_log_keep_us, self._options.pull_log_keep_bytes),
        )  # fmt: skip
        return self._groups

    def _open_subjects(self, identity: Identity, claims: CheckpointClaims | None) -> SubjectTable:
        claim = claims.subjects if claims is not None else None
        path = self._directory / SUBJECTS_NAME
        length = claim.length_bytes if claim is not None else None
        self._subjects = table = SubjectTable.open(self._disk, path, identity.store_id, length)
        lost, readers = list[int](), list[NameLookupLog]()
        if table.damaged or (claim is not None and table.count < claim.count):
            readers = self._readers(identity, claims) if claims is not None else []
            lost, notes = restore_names(table, claim.count if claim is not None else 0, readers)
            self._notes += notes
        if claim is not None:
            table.ends[: claim.count], table.firsts[: claim.count] = claim.columns()
            table.gaps = Gaps.unpack(claim.gaps)
            table.restore_forgotten(claim.forgotten_numbers(), claim.forgotten_end)
            for number in lost:
                self._lost_end = max(self._lost_end, int(table.ends[number]))
                if not any(reader.has_rows(number) for reader in readers):
                    table.firsts[number] = table.ends[number]  # its messages have another number now
        return table

    def _readers(self, identity: Identity, claims: CheckpointClaims) -> list[NameLookupLog]:
        readers = []
        for number, (partition, claim) in enumerate(zip(identity.partitions, claims.partitions, strict=False)):
            consumer = self._open_consumer(identity, number)
            directory = self._directory / partition.directory
            if claim.segments:
                readers.append(NameLookupLog(self._disk, directory, consumer, identity.secret, claim))
        return readers

    def _open_consumer(self, identity: Identity, number: int) -> ConsumerLog:
        directory = self._directory / CONSUMER_LOG_NAME / str(number)
        consumer = ConsumerLog.open(self._disk, directory, number, identity.store_id)
        self._consumers.append(consumer)
        return consumer

    def _load(
        self, identity: Identity, claims: CheckpointClaims | None, subjects: SubjectTable
    ) -> list[PartitionReplay]:
        for consumer in self._consumers:
            consumer.close()
        self._consumers.clear()
        replays = []
        for number, partition in enumerate(identity.partitions):
            directory = self._directory / partition.directory
            if not self._disk.exists(directory):
                raise StorageError(f"{directory} of partition {number} is not there; is its disk mounted?")
            consumer = self._open_consumer(identity, number)
            claimed = claims is not None and number < len(claims.partitions)
            replay = PartitionReplay(
                self._disk,
                directory,
                SegmentOwner(identity.store_id, number),
                identity.secret,
                consumer,
                subjects,
                claims.partitions[number] if claims is not None and claimed else None,
                partition.floor,
            )
            replay.load()
            replays.append(replay)
        return replays

    def _open_logs(self, identity: Identity, replays: list[PartitionReplay], *, sync: bool) -> None:
        for partition, replay in zip(identity.partitions, replays, strict=True):
            log = replay.finish(
                floor=partition.floor,
                reserve=partition.reserve,
                segment_bytes=self._options.segment_bytes,
                now_us=self._now_us,
                sync=sync,
            )
            self._logs.append(log)
        for log, consumer in zip(self._logs, self._consumers, strict=True):
            consumer.publish(log.end)

    def _replay_sequences(
        self,
        identity: Identity,
        claims: CheckpointClaims | None,
        subjects: SubjectTable,
        replays: list[PartitionReplay],
    ) -> None:
        subjects.checkpointed = claims.subjects.count if claims is not None else 0
        sequences = SequenceReplay(subjects, subjects.checkpointed)
        raised = identity.sequence_base - (claims.sequence_base if claims is not None else 0)
        starts = [
            consumer.row_at_position(replay.claimed) for consumer, replay in zip(self._consumers, replays, strict=True)
        ]
        for rows in rows_in_order(self._consumers, starts):
            sequences.add(rows)
        for replay in replays:
            for lost in replay.damaged:
                sequences.add_lost(*lost)
        # Without a checkpoint, the sequences of subjects whose messages are all dropped are unknown.
        sequences.finish(raised + identity.dropped_end if claims is None else raised)
        subjects.sequence_base = identity.sequence_base
        if any(replay.report.damaged for replay in replays):  # the checkpoint counts messages that are gone
            # In a hole that is not recorded, runs may be good, and are delivered.
            holes = [[hole for hole in replay.report.damaged if hole in replay.holes] for replay in replays]
            gone = missing_sequences(subjects, self._consumers, holes)
            subjects.gaps.add(gone.subjects, gone.starts, gone.ends)
        subjects.settle_forgotten(raised)

    def _indexes(self, log: MessageLog, consumer: ConsumerLog) -> SegmentIndex:
        """Rebuild the indexes that are missing or do not fit, and always the current one; return the current one."""
        remove_drafts(self._disk, log.directory)
        for span in log.sealed:
            check = log.end - span.base <= CHECKED_LOG_BYTES
            if is_sealed_index(self._disk, log.directory, log.owner, span.base, span.end, check=check):
                continue
            index = self._derived(log, consumer, span.base, span.end, is_draft=True)
            try:
                index.seal(span.end)
            except StorageError:  # delivery does not need it; the next checkpoint tries again
                self._unsealed.append((index, span.end))
        return self._derived(log, consumer, log.current.base, log.end, is_draft=False)

    def _derived(self, log: MessageLog, consumer: ConsumerLog, base: int, end: int, *, is_draft: bool) -> SegmentIndex:
        index = SegmentIndex(self._disk, log.directory, log.owner, base, is_draft=is_draft)
        self._opened_indexes.append(index)
        last = -1
        for rows in consumer.rows_between(base, end):
            records = derive_index(rows)
            if int(records["position"][0]) == last:  # the batch's rows lie in two pieces
                records = records[1:]
            if len(records):
                last = int(records["position"][-1])
                index.extend(records)
        return index

    def _remove_rotten_checkpoints(self, claims: CheckpointClaims | None) -> None:
        """Remove rotten checkpoints: one must not replace a good one among the two that stay."""
        for number in list_checkpoints(self._disk, self._directory):
            if claims is None or number > claims.number:
                with suppress(OSError):
                    self._disk.unlink(checkpoint_path(self._directory, number))

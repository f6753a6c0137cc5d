"""The one door to the files: a data directory with its message logs, consumer logs, registry and checkpoints.

A ``Store`` hands out ``partitions`` (which write and read batches and rows), ``subjects`` (names, numbers, sequences),
``groups`` (files of the groups) and ``checkpoints``; its own methods concern all of these together.

All methods belong to one thread, but for ``Partition.sync``, ``check_there`` and ``Checkpoint.write``. Positions,
sequences, rows and subject numbers are plain ints; times are microseconds UTC. Every error is a StorageError.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import StorageError, SyncFailed, TooManySubjects
from qmq.format.batch import Header, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, DELAY_PARTITION, LANE_NORMAL
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.aio import AioSyncs
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.free_space import FreeSpace
from qmq.storage.error_log.item_file import ItemLog, ItemLogClaim
from qmq.storage.error_log.items import RETRY_ITEMS, pack_items, unpack_items
from qmq.storage.error_log.timer_queue import Schedule, ScheduleClaim
from qmq.storage.key_index.hashes import hash_of_id
from qmq.storage.key_index.search import KeySearch, SearchStep
from qmq.storage.message_log.bad_ranges import KnownBad
from qmq.storage.message_log.cold_reads import ColdRead, Fetch, NotInMemory
from qmq.storage.message_log.drop import OldSegment, SubjectRanges, subject_ranges_of
from qmq.storage.message_log.sparse_index import derive_index
from qmq.storage.meta.subjects import FORGOTTEN, SubjectTable
from qmq.storage.meta.take_checkpoint import Checkpoint, CheckpointTaker
from qmq.storage.partition import Partition, SharedState
from qmq.storage.pull_log.log import PullSync
from qmq.storage.pull_log.records import PullRecord
from qmq.storage.pull_log.scan import KIND_OFFSET, PullLogScan, PullPiece
from qmq.storage.recovery.decide import RecoveryReport
from qmq.storage.recovery.open import OpenedStore, open_directory
from qmq.storage.recovery.sequences import merge_by_sequence
from qmq.storage.types import DELAYED_NAME, Hole, StoreOptions
from qmq.storage.verify.scrub import PartitionDamage

__all__ = [
    "FORGOTTEN",
    "KIND_OFFSET",
    "MOST_LANES",
    "MOST_NUMBERS",
    "RETRY_ITEMS",
    "Checkpoint",
    "ColdRead",
    "Disk",
    "Fetch",
    "Hole",
    "IdleSubjects",
    "ItemLog",
    "ItemLogClaim",
    "KeySearch",
    "KnownBad",
    "NotInMemory",
    "OldSegment",
    "Partition",
    "PartitionDamage",
    "PullLogScan",
    "PullPiece",
    "PullRecord",
    "PullSync",
    "RecoveryReport",
    "Schedule",
    "ScheduleClaim",
    "SearchStep",
    "Store",
    "StoreOptions",
    "SubjectRanges",
    "SubjectTable",
    "hash_of_id",
    "pack_items",
    "subject_ranges_of",
    "unpack_items",
]

_CHUNK_ROWS: Final = 4_096
#: Lanes that all subjects may have beyond one each: as many as 1,024 subjects with all slots of order keys.
MOST_LANES: Final = 1 << 22
#: So many times max_subjects may be known; those beyond it have no messages any more.
KNOWN: Final = 4
#: The most numbers that a data directory ever gives: the forgotten ones take 1.8 GB of memory then.
MOST_NUMBERS: Final = 1 << 26


class IdleSubjects(NamedTuple):
    """The numbers of subjects without messages, ascending, and the next sequence of each."""

    numbers: npt.NDArray[np.int64]
    ends: npt.NDArray[np.uint64]


class Store:
    """An open data directory. Open it with ``open``; ``close`` it."""

    def __init__(self, opened: OpenedStore) -> None:
        options, disk = opened.options, opened.disk
        self._options = options
        self._disk = disk
        self._directory = opened.directory
        self._lock = opened.lock
        self._identity = opened.identity
        self._closed = False
        self._live: tuple[int, int] | None = None  # subjects with messages, and all, at the last count
        #: How many segments of the message log were dropped since the start.
        self.dropped_segments = 0
        self._settled = opened.subjects.count  # numbers below it have had their first message, or never will
        self._shared = shared = SharedState(
            disk,
            opened.directory,
            opened.identity,
            options.reserve_bytes,
            opened.unsealed,
            last_stored_at_us=opened.last_stored_at_us,
            created_at_us=opened.now_us,
        )
        for number, part in enumerate(opened.partitions):
            room = FreeSpace(disk, (part.message_log.directory, opened.directory), options.keep_free_bytes)
            shared.partitions.append(Partition(shared, number, part, room))
        self.partitions: list[Partition] = shared.partitions
        #: The registry of subjects, with the first and the next sequence of each.
        self.subjects: SubjectTable = opened.subjects
        #: The files of groups.
        self.groups = opened.groups
        self.checkpoints = CheckpointTaker(
            shared,
            lock=opened.lock,
            subjects=opened.subjects,
            groups=opened.groups,
            number=opened.checkpoint_number,
            state_files=opened.state_files,
        )
        self.store_id: bytes = opened.identity.current.store_id
        #: This id and those that the directory had before.
        self.store_ids = frozenset((self.store_id, *opened.identity.current.former_store_ids))
        self.secret: bytes = opened.identity.current.secret
        #: The report on the recovery at the start.
        self.recovery: RecoveryReport = opened.report
        #: The state that ``begin_checkpoint`` got for the checkpoint that was recovered.
        self.state: dict[str, bytes] = dict(opened.state)
        #: The path of that checkpoint; None when there was none.
        self.state_path: Path | None = opened.state_path
        #: The delay log: a data directory of its own within this one, created with the first delayed message.
        self.delay_log: Store | None = None
        self._delay_claimed = -1  # the position up to which the delay log's last checkpoint claims it

    @classmethod
    def open(
        cls, directory: Path, options: StoreOptions, disk: Disk, now_us: int, discarded: Iterable[Path] = ()
    ) -> Store:
        """Open or create a data directory: take the lock and recover. Files in *discarded* are removed first.

        Raises DirectoryInUse; ForeignFile for files of another store or a newer version; BadBytes when an essential
        file is rotten; StorageFull and StorageFailed; InvalidOption.
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
        """Open or create the delay log. Raises as ``open`` does."""
        options = replace(self._options, partitions=1, partition_dirs=(), store_id=self.store_id)
        log = self.delay_log = Store.open(self._directory / DELAYED_NAME, options, self._disk, now_us)
        for part in log.recovery.partitions:
            part.partition += DELAY_PARTITION
        self.recovery.partitions += log.recovery.partitions
        self.recovery.notes += log.recovery.notes
        return log

    def partition(self, number: int) -> Partition:
        """Return the partition with that number; from DELAY_PARTITION on it is the delay log's."""
        if number < DELAY_PARTITION:
            return self.partitions[number]
        assert self.delay_log is not None
        return self.delay_log.partitions[number - DELAY_PARTITION]

    def all_partitions(self) -> list[int]:
        """Return the numbers of all partitions, with the delay log's where there is one."""
        return [*range(len(self.partitions)), *([DELAY_PARTITION] if self.delay_log is not None else [])]

    @property
    def segment_bytes(self) -> int:
        """The size of a segment of the message log, its header included."""
        return self._options.segment_bytes

    @property
    def max_batch_bytes(self) -> int:
        """The largest size that clients could ever send a stored batch with; a copy may be a little larger."""
        return self._identity.current.max_batch_bytes

    @property
    def last_stored_at_us(self) -> int:
        """The highest stamp of any stored batch; the next must be above it."""
        return self._shared.last_stored_at_us

    def aside(self) -> AioSyncs | None:
        """Return a way to sync without a thread, if the system has one."""
        return self._disk.aside()

    # --- subjects ----------------------------------------------------------------------------------------------------

    def add_subject(self, name: str, lane: int = LANE_NORMAL, *, forced: bool = False) -> int:
        """Register a lane of a subject, whose name was checked; the lane is new. Return its number. It is on disk with
        the next checkpoint.

        Raises TooManySubjects, unless it is *forced*: there is a message for it already.
        """
        if not forced:
            self._check_room(name)
        return self.subjects.add(name, lane)

    def _check_room(self, name: str) -> None:
        """Raise TooManySubjects where there is no room for a new subject, or for a new lane of one.

        Subjects without messages do not count; but they stay known, so there is a bound for these, too.
        """
        subjects, most = self.subjects, self._options.max_subjects
        if subjects.count >= MOST_NUMBERS:
            raise TooManySubjects(
                f"{MOST_NUMBERS:,} subjects, priorities and slots of order keys were made in this data directory since "
                f"it began, as many as it may name, so there is none for {name!r}; let another broker take new ones, "
                "and use fewer subjects (a number belongs into the key)"
            )
        if subjects.has_name(name):
            if subjects.further_lane_count >= MOST_LANES:
                raise TooManySubjects(
                    f"all subjects together have {MOST_LANES:,} priorities and slots of order keys, the most that they "
                    f"may have, so {name!r} gets no further one; use order keys for fewer subjects"
                )
            return
        if subjects.name_count >= most and (self.live_subjects >= most or subjects.name_count >= KNOWN * most):
            raise TooManySubjects(
                f"there are {subjects.name_count} subjects, of which {self.live_subjects} have messages: as many as "
                f"max_subjects allows ({most} with messages, {KNOWN} times as many in all); raise it to add {name!r}, "
                "or wait: those without messages are forgotten after an hour or two"
            )

    @property
    def max_subjects(self) -> int:
        """The most subjects that may have messages."""
        return self._options.max_subjects

    @property
    def live_subjects(self) -> int:
        """About how many subjects have messages; exact up to ``max_subjects`` subjects in all, and after each removal
        of a segment.
        """
        subjects = self.subjects
        if subjects.name_count < self._options.max_subjects:
            return subjects.name_count
        if self._live is None:
            self._live = subjects.count_live(self._settled), subjects.name_count
        live, names = self._live
        return live + subjects.name_count - names  # new ones are there for a message

    def idle_subjects(self, start: int, end: int) -> IdleSubjects:
        """Return the numbers in [start, end) that have no messages: none while there are bytes that may be messages of
        them, since their sync has failed, or since they are bad.
        """
        subjects = self.subjects
        is_idle = subjects.ends[start:end] == subjects.firsts[start:end]
        is_idle &= ~subjects.is_forgotten[start:end]
        if any(part.given_up or part.has_holes for part in self.partitions):
            is_idle[:] = False
        numbers = np.flatnonzero(is_idle) + start
        return IdleSubjects(numbers, subjects.ends[numbers])

    def forget_subjects(self, numbers: Sequence[int]) -> None:
        """Forget numbers that have no messages: their names leave the registry with the next checkpoint."""
        self.subjects.forget(numbers)
        self._count_anew()

    def _count_anew(self) -> None:
        self._live, self._settled = None, self.subjects.count

    def subject_rows(self, number: int, sequence: int, limit: int) -> list[tuple[int, Rows]]:
        """Return the rows of one subject from the one that contains or follows *sequence* on, in sequence order: pieces
        of (partition, ENTRY_DTYPE[n]), about *limit* rows in all, none only where nothing is left to read.
        """
        found = [
            (part.number, rows)
            for part in self.partitions
            if len(rows := part.consumer_log.subject_rows(number, sequence, limit))
        ]
        return found if len(found) < 2 else merge_by_sequence(found, limit)

    def sequence_at_time(self, number: int, stored_at_us: int) -> int | None:
        """Return the first sequence of a subject stored at or after a time, None when there is none."""
        found = [part.consumer_log.sequence_at_time(number, stored_at_us) for part in self.partitions]
        return min((sequence for sequence in found if sequence is not None), default=None)

    # --- reading -----------------------------------------------------------------------------------------------------

    def may_wait(self, wait: bool) -> None:
        """Set whether reading may wait for the disk, as it may at first. If not, reads of bytes that are not in memory
        are refused: rows and lookups raise NotInMemory; ``view`` is called only for bytes that ``page_cache`` has.
        """
        for part in self.partitions:
            part.message_log.residence.may_wait = wait

    def finish_read(self, read: ColdRead) -> list[StorageError]:
        """Mark the bytes that the disk refused to a ColdRead as unreadable. Return the errors of new marks."""
        part = self.partitions[read.partition]
        found = []
        for one_range, error in read.unreadable:
            if one_range.position is None:
                part.consumer_log.distrust(one_range.path)
            elif not part.message_log.unreadable.add(one_range.position, one_range.size):
                continue
            found.append(error)
        return found

    def marked(self) -> list[int]:
        """Return the partitions that have bytes marked as unreadable."""
        return [part.number for part in self.partitions if len(part.message_log.unreadable)]

    def headers_since(self, positions: list[int]) -> Iterator[tuple[int, Header]]:
        """Yield the headers of the batches from *positions* on, one a partition (left out: all), as (partition,
        header), in the order in which they were stored. Batches that are no longer readable are left out.
        """
        streams = [
            _headers_since(part, positions[part.number] if part.number < len(positions) else 0)
            for part in self.partitions
        ]
        return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda found: found[1].stored_at_us)

    # --- retention ---------------------------------------------------------------------------------------------------

    @property
    def leaving(self) -> object:
        """The segment that is about to be removed; None without one."""
        return self._shared.leaving

    def offered_sequence(self, number: int) -> int:
        """Return the first sequence of a subject for a new reader; 0: the first that there is."""
        leaving = self._shared.leaving
        return 0 if leaving is None else leaving.sequence_behind(number)

    def stay(self) -> None:
        """Offer all messages to new readers again."""
        self._shared.leaving = None

    def drop_segment(self, partition: int, base: int, had: SubjectRanges) -> None:
        """Remove a segment, as ``Partition.remove_segment``, with the messages *had*, which are gone then."""
        self.partitions[partition].remove_segment(base)
        self.dropped_segments += 1
        self.stay()
        self._count_anew()
        self.checkpoints.note_dropped(had)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unsynced_bytes(self) -> int:
        """The bytes written since the last checkpoint began, with the delay log's."""
        delayed = self.delay_log.unsynced_bytes if self.delay_log is not None else 0
        return self.checkpoints.unsynced_bytes + delayed

    def check_there(self) -> None:
        """[thread] Check that the files are those that were opened, of the delay log, too: if that one is lost, the
        rest goes on. Raises as ``CheckpointTaker.check_there`` does.
        """
        self.checkpoints.check_there()
        if self.delay_log is not None:
            with suppress(SyncFailed):
                self.delay_log.check_there()

    def begin_checkpoint(self, state: dict[str, bytes], now_us: int | None = None) -> Checkpoint:
        """Begin a checkpoint, with one of the delay log where that has news: it is written first. Run its ``write`` in
        a thread, and pass it to ``finish_checkpoint`` or ``fail_checkpoint``. Raises as ``CheckpointTaker.begin`` does.
        """
        log, before = self.delay_log, None
        if log is not None and not log.checkpoints.is_lost:
            part = log.partitions[0]
            if part.claimable != self._delay_claimed or part.removals.are_pending:
                before = log.begin_checkpoint({}, now_us)
        try:
            checkpoint = self.checkpoints.begin(state, now_us)
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
        self.checkpoints.finish(checkpoint)

    def fail_checkpoint(self, checkpoint: Checkpoint, error: BaseException) -> None:
        """Note that ``checkpoint.write`` has failed."""
        if self.delay_log is not None and checkpoint.before is not None:
            self.delay_log.fail_checkpoint(checkpoint.before, error)
        self.checkpoints.fail(checkpoint, error)

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self, clean: bool = True) -> None:
        """Close all files and release the directory; no sync and no checkpoint may be running. Views stay usable.

        With *clean* the stop is marked as such when all is on disk, so finish the last checkpoint first. A second call
        does nothing. Raises StorageFull or StorageFailed when the mark cannot be written; all is closed even so.
        """
        if self._closed:
            return
        self._closed = True
        if self.delay_log is not None:
            self.delay_log.close(clean)
        logs = [part.message_log for part in self.partitions]
        whole = all(log.broken is None and log.synced == log.end for log in logs)
        try:
            if clean and whole and self.groups.is_claimed:
                self._identity.mark_clean()
        finally:
            for part in self.partitions:
                part.close()
            for index, _ in self._shared.unsealed:
                index.close()
            self.subjects.close()
            self.groups.close()
            self._lock.release()


def _headers_since(part: Partition, position: int) -> Iterator[tuple[int, Header]]:
    rows_of, view = part.consumer_log.rows, part.message_log.view
    row, last = part.consumer_log.row_at_position(position), -1
    while len(rows := rows_of(row, _CHUNK_ROWS)):
        row += len(rows)
        for found in derive_index(rows)["position"].tolist():
            if found == last:  # the batch's rows lie in two pieces
                continue
            last = found
            try:
                header = parse_header(view(found, BATCH_HEADER_SIZE))
            except StorageError:
                continue
            if header.magic == BATCH_MAGIC and header.position == found:  # else it has gone bad since
                yield part.number, header

"""The one door to the files: a data directory with its message logs, consumer logs, registry and checkpoints.

All methods belong to one thread, but for ``sync`` and ``Checkpoint.write``. Positions, sequences, rows and subject
numbers are plain ints; times are microseconds UTC. Every error is a StorageError.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import InvalidOption, StorageError, SyncFailed, TooManySubjects
from qmq.format.batch import EntryRow, Header, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, ENTRY, SEGMENT_HEADER_SIZE
from qmq.storage.at_hand import AtHand, Places
from qmq.storage.checkpoint import Claims, Hole, PartitionClaim, SegmentSpan
from qmq.storage.checkpointing import Checkpoint, claim_subjects
from qmq.storage.consumer_log import ConsumerLog
from qmq.storage.disk import Buffer, Disk
from qmq.storage.gaps import Gaps
from qmq.storage.identity import IdentityFile
from qmq.storage.index import SegmentIndex, derive_index
from qmq.storage.lock import DirectoryLock
from qmq.storage.message_log import MessageLog
from qmq.storage.opened import Opened, StoreOptions
from qmq.storage.opening import CONSUMER_LOG_NAME, open_directory
from qmq.storage.order import Rows
from qmq.storage.reading import NotAtHand, Read
from qmq.storage.recovery import RecoveryReport
from qmq.storage.room import Room
from qmq.storage.scrub import Damage, SegmentReader
from qmq.storage.segment import Place
from qmq.storage.sequences import merge_by_sequence
from qmq.storage.subjects import SubjectTable
from qmq.storage.unreadable import KnownBad

__all__ = [
    "Checkpoint",
    "Damage",
    "Disk",
    "KnownBad",
    "NotAtHand",
    "Read",
    "RecoveryReport",
    "Store",
    "StoreOptions",
]

_CHUNK_ROWS: Final = 4_096

Sequences = npt.NDArray[np.uint64]


class _Partition:
    """What the store keeps of one partition. ``rows`` are staged: of one batch each, or the base of a new segment."""

    __slots__ = (
        "at_hand", "claim", "consumer", "given_up", "holes", "index", "listed", "log", "number", "room", "rows",
        "written_rows",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        number: int,
        log: MessageLog,
        consumer: ConsumerLog,
        index: SegmentIndex,
        holes: list[Hole],
        claim: PartitionClaim,
        room: Room,
    ) -> None:
        self.at_hand = AtHand(disk, log)
        self.number = number
        self.log = log
        self.consumer = consumer
        self.index = index
        self.holes = holes
        self.room = room
        self.rows: list[EntryRow | Rows | int] = []
        self.written_rows = consumer.buffer_row
        #: The segment up to which the names of all files are known to be on disk.
        self.listed = -1
        #: What the last checkpoint said.
        self.claim = claim
        #: Its last claim stands until the directory is opened again.
        self.given_up = False


class Store:
    """An open data directory. Made by ``open``; ``close`` it."""

    def __init__(self, opened: Opened) -> None:
        self._disk: Disk = opened.disk
        self._directory: Path = opened.directory
        self._options = opened.options
        self._lock: DirectoryLock = opened.lock
        self._identity: IdentityFile = opened.identity
        self._subjects: SubjectTable = opened.subjects
        self._partitions = [
            _Partition(
                opened.disk,
                number,
                part.log,
                part.consumer,
                part.index,
                part.holes,
                part.claim,
                Room(opened.disk, (part.log.directory, opened.directory), opened.options.keep_free_bytes),
            )
            for number, part in enumerate(opened.partitions)
        ]
        self._checkpoint_number = opened.checkpoint_number
        self._checkpointed_bytes = sum(part.log.end for part in self._partitions)
        self._unsealed: list[tuple[SegmentIndex, int]] = opened.unsealed
        for part in self._partitions:
            part.consumer.attend(part.log.residence)
        self._closed = False
        self._claimed_gaps: tuple[list[tuple[int, int]], Gaps] = ([], self._subjects.gaps)
        self._created_at_us = opened.now_us
        self.store_id: bytes = opened.identity.current.store_id
        self.secret: bytes = opened.identity.current.secret
        self.partitions: int = len(self._partitions)
        #: What opening found and did.
        self.recovery: RecoveryReport = opened.report
        #: What ``begin_checkpoint`` was given for the checkpoint that was recovered.
        self.state: dict[str, bytes] = opened.state
        #: The highest stamp of any batch that is stored; the next must be above it.
        self.last_stored_at_us: int = opened.last_stored_at_us

    @classmethod
    def open(cls, directory: Path, options: StoreOptions, disk: Disk, now_us: int) -> Store:
        """Open a data directory, or make one: take the lock, recover, be ready.

        Raises DirectoryInUse; ForeignFile for files of another store or a newer version; BadBytes when what cannot be
        done without is rotten; StorageFull and StorageFailed; InvalidOption.
        """
        opened = open_directory(directory, options, disk, now_us)
        try:
            return cls(opened)
        except BaseException:
            opened.close()
            raise

    # --- subjects ----------------------------------------------------------------------------------------------------

    @property
    def subject_count(self) -> int:
        """How many subjects there are; their numbers are below it."""
        return self._subjects.count

    @property
    def ends(self) -> Sequences:
        """The next sequence by subject number, u64; use [:subject_count], and take it anew after ``add_subject``."""
        return self._subjects.ends

    @property
    def firsts(self) -> Sequences:
        """The first sequence that is kept, as ``ends``."""
        return self._subjects.firsts

    def subject_number(self, name: str) -> int | None:
        """The number of a subject, None when it does not exist."""
        return self._subjects.number(name)

    def subject_numbers(self, names: Iterable[str]) -> list[int | None]:
        """The number of each of many subjects, None for those that do not exist."""
        return self._subjects.numbers(names)

    def subject_name(self, number: int) -> str:
        """The name of a subject. Raises BadBytes when its record is damaged."""
        return self._subjects.name(number)

    def add_subject(self, name: str) -> int:
        """Register a subject, whose name was checked and is new; on disk with the next checkpoint.

        Raises TooManySubjects.
        """
        if self._subjects.count >= self._options.max_subjects:
            raise TooManySubjects(
                f"there are {self._subjects.count} subjects, as many as max_subjects allows; raise it to add {name!r}"
            )
        return self._subjects.add(name)

    def skip_sequences(self, numbers: npt.ArrayLike, firsts: npt.ArrayLike, counts: npt.ArrayLike) -> None:
        """Note that no message has these sequences of some subjects, unless the next start finds one: columns, or ints
        of one subject.
        """
        self._subjects.gaps.add(numbers, firsts, np.asarray(firsts, np.uint64) + np.asarray(counts, np.uint64))

    def message_count(self, number: int, first: int, end: int) -> int:
        """How many messages the sequences [first, end) of a subject are, gaps left out."""
        return self._subjects.message_count(number, first, end)

    # --- storing -----------------------------------------------------------------------------------------------------

    def place(self, partition: int, size: int) -> int:
        """The position of the next batch, of *size* bytes; nothing is stored by this.

        Raises StorageFull, StorageFailed, SyncFailed: all that is staged in the partition has been taken back then.
        Raises InvalidOption when it is larger than a segment.
        """
        log = self._partitions[partition].log
        position = log.staged_end
        return position if position + size <= log.limit else self._make_room(self._partitions[partition], size)

    def _make_room(self, part: _Partition, size: int) -> int:
        log = part.log
        if SEGMENT_HEADER_SIZE + size > self._options.segment_bytes:
            raise InvalidOption(
                f"a batch of {size} bytes does not fit a segment of segment_bytes = {self._options.segment_bytes}"
            )
        try:
            log.check()
            roll = not log.fits_segment(size)
            end = log.staged_end + size + (SEGMENT_HEADER_SIZE if roll else 0)
            if end > log.reserve:
                self._renew_reserve(part, end)
            if roll:
                part.rows.append(log.roll(self.last_stored_at_us or self._created_at_us))
        except StorageError:
            self._unstage(part)
            raise
        return log.staged_end

    def _renew_reserve(self, part: _Partition, end: int) -> None:
        ends = [other.log.staged_end for other in self._partitions]
        ends[part.number] = end
        self._identity.renew(ends, self._options.reserve_bytes)
        self._take_reserves()

    def _take_reserves(self) -> None:
        for part, identity in zip(self._partitions, self._identity.current.partitions, strict=True):
            part.log.set_reserve(identity.reserve)

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
                _, position, stored_at_us, *_ = ENTRY.unpack_from(rows)  # type: ignore[arg-type]
                consumer.append(rows)  # type: ignore[arg-type]
            index.append(position, stored_at_us)
            if stored_at_us > self.last_stored_at_us:  # partitions are not written in the order of their stamps
                self.last_stored_at_us = stored_at_us
        part.rows.clear()

    def unstage(self, partition: int) -> None:
        """Forget all that is staged."""
        self._unstage(self._partitions[partition])

    def _write_rows(self, part: _Partition) -> None:
        """Keep memory from growing while the disk takes no rows: then it shall take no batches either."""
        if part.consumer.waiting_blocks:
            part.consumer.flush()
        part.written_rows = part.consumer.buffer_row

    def _unstage(self, part: _Partition) -> None:
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
        self._sync_log(self._partitions[partition].log)

    def _sync_log(self, log: MessageLog) -> None:
        """[thread] Sync a log; that it failed is kept, as pages of a failed sync read well until they leave memory."""
        try:
            log.sync()
        except SyncFailed:
            with suppress(StorageError):  # the next checkpoint tries again
                self._identity.forget_boot()
            raise

    def broken(self, partition: int) -> SyncFailed | None:
        """Why a partition takes nothing more until the directory is opened again; None while it does."""
        reason = self._partitions[partition].log.broken
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

    # --- reading -----------------------------------------------------------------------------------------------------

    def first_row(self, partition: int) -> int:
        """The number of the first row that can be read."""
        return self._partitions[partition].consumer.first_row

    def visible_row(self, partition: int) -> int:
        """The number of the row after the last that can be read."""
        return self._partitions[partition].consumer.visible_row

    def hidden_since(self, partition: int) -> int | None:
        """When the first batch was stored that cannot be read yet; None when there is none."""
        return self._partitions[partition].consumer.hidden_since()

    def rows(self, partition: int, row: int, limit: int) -> Rows:
        """At most *limit* rows, ENTRY_DTYPE, from *row* on: a view, shorter at borders, empty only at the end."""
        return self._partitions[partition].consumer.rows(row, limit)

    def read_entry(self, partition: int, row: int) -> EntryRow:
        """One row that can be read, in the order of layout.ENTRY."""
        return self._partitions[partition].consumer.read_entry(row)

    def row_at_position(self, partition: int, position: int) -> int:
        """The first row at or after *position*; ``visible_row`` when there is none."""
        return self._partitions[partition].consumer.row_at_position(position)

    def row_at_time(self, partition: int, stored_at_us: int) -> int:
        """The first row stored at or after a time; ``visible_row`` when there is none."""
        return self._partitions[partition].consumer.row_at_time(stored_at_us)

    def subject_rows(self, number: int, sequence: int, limit: int) -> list[tuple[int, Rows]]:
        """The rows of one subject from the one that contains or follows *sequence* on, in sequence order: pieces of
        (partition, ENTRY_DTYPE[n]), about *limit* rows in all, none only where nothing is left to read.
        """
        found = [
            (part.number, rows)
            for part in self._partitions
            if len(rows := part.consumer.subject_rows(number, sequence, limit))
        ]
        return found if len(found) < 2 else merge_by_sequence(found, limit)

    def sequence_at_time(self, number: int, stored_at_us: int) -> int | None:
        """The first sequence of a subject stored at or after a time, None when there is none."""
        found = [part.consumer.sequence_at_time(number, stored_at_us) for part in self._partitions]
        return min((sequence for sequence in found if sequence is not None), default=None)

    def view(self, partition: int, position: int, size: int) -> memoryview:
        """*size* mapped bytes of the message log; the view pins its map. Raises BadBytes when they are not there, and
        KnownBad when some were marked as unreadable.
        """
        return self._partitions[partition].log.view(position, size)

    def peek(self, partition: int, position: int, size: int) -> memoryview:
        """As ``view``, also of what is not at hand: a few bytes, which are then read at once. Raises StorageFailed."""
        return self._partitions[partition].at_hand.peek(position, size)

    def may_wait(self, wait: bool) -> None:
        """Whether reading may wait for the disk, as it may from the start on. Else what is not in memory is refused:
        rows and lookups raise NotAtHand; ``view`` is asked only for what is at hand.
        """
        for part in self._partitions:
            part.log.residence.may_wait = wait

    def is_at_hand(self, partition: int, position: int, size: int) -> bool:
        """Whether ``view`` of these bytes waits for no disk."""
        return self._partitions[partition].at_hand.has(position, size)

    def count_at_hand(self, partition: int, positions: Places, sizes: Places) -> int:
        """How many of these batches, ascending, come before the first of which ``view`` would wait for the disk."""
        return self._partitions[partition].at_hand.count(positions, sizes)

    def read_of(self, partition: int, positions: Places, sizes: Places, *, onward: bool) -> Read:
        """What brings the first of these batches into memory, and some of those behind it. *onward*: what lies behind
        them will be wanted too. Run its ``step`` in a thread, then hand it to ``finish_read``.
        """
        return self._partitions[partition].at_hand.read(positions, sizes, onward=onward)

    def finish_read(self, read: Read) -> list[StorageError]:
        """Take what a Read came upon: what the disk does not give is marked as unreadable. What is new of it."""
        part = self._partitions[read.partition]
        found = []
        for stretch, error in read.unreadable:
            if stretch.position is None:
                part.consumer.distrust(stretch.path)
            elif not part.log.unreadable.add(stretch.position, stretch.size):
                continue
            found.append(error)
        return found

    def mark_unreadable(self, partition: int, position: int, size: int) -> bool:
        """Let ``view`` refuse these bytes while the store is open: somebody found them bad, and tells of it. False
        when they all were marked before. A bounded number is remembered, the ones marked last.
        """
        return self._partitions[partition].log.unreadable.add(position, size)

    def unreadable(self, partition: int, start: int, end: int) -> list[tuple[int, int]]:
        """What of positions [start, end) is marked as unreadable, as (start, end), ascending; they may overlap."""
        return self._partitions[partition].log.unreadable.within(start, end)

    def view_marked(self, partition: int, position: int, size: int) -> memoryview:
        """As ``view``, also where bytes are marked: for who has asked which, and does not touch them."""
        return self._partitions[partition].log.view_marked(position, size)

    def place_of(self, partition: int, position: int) -> Place:
        """In which file a position lies, and where."""
        return self._partitions[partition].log.place_of(position)

    # --- reading again -----------------------------------------------------------------------------------------------

    def sealed(self, partition: int) -> list[SegmentSpan]:
        """The segments that are not written any more, ascending."""
        return list(self._partitions[partition].log.sealed)

    def reader(self, partition: int, position: int) -> SegmentReader:
        """Who reads the segment around *position* from the disk again, in a thread, as far as it is written by now."""
        part = self._partitions[partition]
        span = next(span for span in reversed(part.log.spans()) if span.base <= position)
        holes = [hole for hole in part.holes if span.base <= hole.start < span.end]
        return SegmentReader(self._disk, part.log.directory, span, part.log.owner, self.secret, holes)

    def headers_since(self, positions: list[int]) -> Iterator[tuple[int, Header]]:
        """The headers of the batches from *positions* on, one a partition (left out: all), as (partition, header), in
        the order in which they were stored. Batches that cannot be read any more are left out.
        """
        streams = [
            self._headers(part, positions[part.number] if part.number < len(positions) else 0)
            for part in self._partitions
        ]
        return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda found: found[1].stored_at_us)

    def _headers(self, part: _Partition, position: int) -> Iterator[tuple[int, Header]]:
        row, last = part.consumer.row_at_position(position), -1
        while len(rows := part.consumer.rows(row, _CHUNK_ROWS)):
            row += len(rows)
            for place in derive_index(rows)["position"].tolist():
                if place == last:  # its rows lie in two pieces
                    continue
                last = place
                try:
                    header = parse_header(part.log.view(place, BATCH_HEADER_SIZE))
                except StorageError:
                    continue
                if header.magic == BATCH_MAGIC and header.position == place:  # else it has gone bad since
                    yield part.number, header

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def unsynced_bytes(self) -> int:
        """What was written since the last checkpoint began."""
        return sum(part.log.end for part in self._partitions) - self._checkpointed_bytes

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
        self._checkpoint_number += 1
        self._checkpointed_bytes = sum(part.log.end for part in self._partitions)
        content = Claims(
            number=self._checkpoint_number,
            created_at_us=self.last_stored_at_us if now_us is None else now_us,
            store_id=self.store_id,
            sequence_base=identity.sequence_base,
            last_stored_at_us=self.last_stored_at_us,
            partitions=tuple(claims),
            subjects=claim_subjects(table, self._gaps_to_claim()),
            state=dict(state),
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
        )

    def give_up(self, partition: int) -> None:
        """Leave a partition whose sync has failed out of all further checkpoints: the next start sees what is there."""
        self._partitions[partition].given_up = True

    def claimable(self, partition: int) -> int:
        """The position up to which a checkpoint that begins now claims a partition."""
        part = self._partitions[partition]
        return part.claim.position if part.given_up else part.log.end

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
        self._identity.renew(ends, self._options.reserve_bytes)

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

    def _unlisted(self, parts: list[_Partition]) -> list[Path]:
        """The directories that have got files since they were last synced."""
        consumers = self._directory / CONSUMER_LOG_NAME
        changed = [part for part in parts if part.listed != part.log.current.base]
        directories = [self._directory, consumers] if any(part.listed < 0 for part in changed) else []
        for part in changed:
            directories += [consumers / str(part.number), part.log.directory]
        return directories

    def _claim(self, part: _Partition) -> PartitionClaim:
        log = part.log
        return PartitionClaim(log.end, tuple(log.spans()), tuple(part.holes), part.consumer.journal_state())

    def finish_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Note that ``checkpoint.write`` has succeeded."""
        for part, claim in zip(self._partitions, checkpoint.claims.partitions, strict=True):
            if part.log in checkpoint.logs:
                part.log.mark_synced(claim.position)
                part.listed = claim.segments[-1].base
            part.claim = claim
        self._take_reserves()

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
        whole = all(part.log.broken is None and part.log.synced == part.log.end for part in self._partitions)
        try:
            if clean and whole:
                self._identity.mark_clean()
        finally:
            for part in self._partitions:
                part.log.close()
                part.consumer.close()
                part.index.close()
            for index, _ in self._unsealed:
                index.close()
            self._subjects.close()
            self._lock.release()

"""One partition of an open store: its message log and its consumer log, written as one.

A batch is placed (``position_for``), staged and written with its rows; the rows are readable after
``consumer_log.publish``. Reading goes to the logs directly: ``message_log`` has the bytes, ``consumer_log`` the rows.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qmq.errors import StorageError, StorageFull, SyncFailed
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY, SEGMENT_HEADER_SIZE
from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Buffer, Disk
from qmq.storage.disk.free_space import FreeSpace
from qmq.storage.key_index.index import KeyIndex
from qmq.storage.message_log.cold_reads import Fetch
from qmq.storage.message_log.drop import OldSegment, Removals, SegmentToDrop, SubjectRanges
from qmq.storage.message_log.page_cache import PageCache
from qmq.storage.message_log.partition_log import MessageLog
from qmq.storage.message_log.segment import segment_path
from qmq.storage.message_log.sparse_index import Records, SegmentIndex, derive_index
from qmq.storage.meta.checkpoint import PartitionClaim
from qmq.storage.meta.identity import IdentityFile
from qmq.storage.types import Hole, SegmentSpan
from qmq.storage.verify.scrub import SegmentReader


@dataclass(slots=True)
class OpenedPartition:
    """One partition as recovery hands it over."""

    message_log: MessageLog
    consumer_log: ConsumerLog
    index: SegmentIndex
    holes: list[Hole]
    #: The claim for checkpoints as long as they cannot claim newer batches.
    claim: PartitionClaim
    #: The bases of removed segments that still have files.
    left: list[int]


class SharedState:
    """State that the partitions of one store share: the identity with its reserves, and the highest stamp."""

    __slots__ = (
        "created_at_us", "directory", "disk", "identity", "last_stored_at_us", "leaving", "partitions", "reserve_bytes",
        "unsealed",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        identity: IdentityFile,
        reserve_bytes: int,
        unsealed: list[tuple[SegmentIndex, int]],
        *,
        last_stored_at_us: int,
        created_at_us: int,
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.identity = identity
        self.reserve_bytes = reserve_bytes
        #: Indexes of sealed segments that are not written yet, and the positions where those segments end.
        self.unsealed = unsealed
        #: The highest stamp of any stored batch; the next batch must have a higher one.
        self.last_stored_at_us = last_stored_at_us
        self.created_at_us = created_at_us
        #: The segment that retention is about to drop.
        self.leaving: SegmentToDrop | None = None
        self.partitions: list[Partition] = []

    def renew_reserves(self, part: Partition, end: int) -> None:
        """Reserve positions for *part* up to *end* and beyond, and for the others as far as they need it."""
        ends = [other.message_log.staged_end for other in self.partitions]
        ends[part.number] = end
        self.identity.renew(ends, self.reserve_bytes)
        self.take_reserves()

    def take_reserves(self) -> None:
        """Let each partition give out the positions that the identity reserves for it."""
        for part, identity in zip(self.partitions, self.identity.current.partitions, strict=True):
            part.message_log.set_reserve(identity.reserve)


class Partition:
    """Write batches with their rows, sync them, and remove segments. One thread calls it, but for ``sync``."""

    __slots__ = (
        "claim", "consumer_log", "given_up", "holes", "index", "key_index", "listed", "message_log", "number",
        "page_cache", "removals", "room", "shared", "staged_rows", "written_rows",
    )  # fmt: skip

    def __init__(self, shared: SharedState, number: int, opened: OpenedPartition, room: FreeSpace) -> None:
        self.shared = shared
        self.number = number
        self.message_log = log = opened.message_log
        self.consumer_log = opened.consumer_log
        #: The sparse index of the current segment.
        self.index = opened.index
        self.holes = opened.holes
        self.room = room
        #: Tells which batches are in memory, and reads the others.
        self.page_cache = PageCache(shared.disk, log)
        #: The rows of each staged batch, or the base of a new segment.
        self.staged_rows: list[EntryRow | Rows | int] = []
        self.written_rows = self.consumer_log.buffer_row
        #: The segment up to which the names of all files are known to be on disk.
        self.listed = -1
        #: The claim of the last checkpoint.
        self.claim = opened.claim
        #: The last claim stands until the directory is opened again.
        self.given_up = False
        #: Removed segments whose files still exist.
        self.removals = Removals(
            shared.disk, log.directory, self.consumer_log.directory, opened.claim.removed, opened.left
        )
        self.consumer_log.attend(log.residence)
        #: Finds the batches that have a key, or an origin id, by its hash.
        self.key_index = KeyIndex(shared.disk, log, shared.identity.current.secret, room)
        self.key_index.load(opened.left)

    # --- writing -----------------------------------------------------------------------------------------------------

    def position_for(self, size: int) -> int:
        """Return the position of the next batch, of *size* bytes; store nothing. A batch larger than a segment (it was
        stored when segments were larger, and is copied now) gets a segment of its own size.

        Raises StorageFull, StorageFailed, SyncFailed; all that is staged in the partition is forgotten then.
        """
        log = self.message_log
        position = log.staged_end
        return position if position + size <= log.limit else self._make_room(size)

    def seal(self) -> int:
        """Close the current segment if it has a batch; nothing may be staged. Return the position before which all lies
        in closed segments. Raises as ``position_for`` and ``write`` do.
        """
        assert not self.staged_rows, "write staged batches first"
        log = self.message_log
        if log.end > log.current.base + SEGMENT_HEADER_SIZE:
            self._make_room(0, seal=True)
            self.write()
        return log.current.base

    def _make_room(self, size: int, *, seal: bool = False) -> int:
        log, shared = self.message_log, self.shared
        try:
            log.check()
            roll = seal or not log.fits_segment(size)
            end = log.staged_end + size + (SEGMENT_HEADER_SIZE if roll else 0)
            if end > log.reserve:
                shared.renew_reserves(self, end)
            if roll:
                self.staged_rows.append(log.roll(shared.last_stored_at_us or shared.created_at_us, size))
        except StorageError as error:
            self._refuse(error, log.staged_end + size - log.end)
            raise
        return log.staged_end

    def stage(self, position: int, buffer: Buffer, rows: EntryRow | Rows) -> None:
        """Add a stamped batch to the next ``write``. *position* is from ``position_for`` with its size; the buffer must
        not change until then. *rows* are its consumer-log rows: a tuple for one run, else ENTRY_DTYPE[runs].
        """
        log = self.message_log
        assert position == log.staged_end, "batches are staged where they were placed"
        log.stage(buffer, len(buffer))
        self.staged_rows.append(rows)

    def write(self) -> None:
        """Store all that is staged, with one system call for each MiB. It is readable after ``publish``.

        Raises StorageFull, StorageFailed: nothing of it is stored then, and nothing stays staged; a later write may
        work again. Raises SyncFailed when the next start may find a part of it; the partition takes no batches until
        then.
        """
        if not self.staged_rows:
            return
        log, consumer, shared = self.message_log, self.consumer_log, self.shared
        try:
            if consumer.buffer_row != self.written_rows:
                self._write_rows()
            self.room.take(log.staged_end - log.end)
            log.write()
        except StorageError as error:
            self._refuse(error, log.staged_end - log.end)
            raise
        for rows in self.staged_rows:
            if type(rows) is tuple:
                self._add(rows, rows[1], rows[2])
            elif type(rows) is int:
                consumer.roll(rows)
                shared.unsealed.append((self.index, rows))
                self.index = SegmentIndex(shared.disk, log.directory, log.owner, rows)
            else:
                _, position, stored_at_us, *_ = ENTRY.unpack_from(rows)  # type: ignore[arg-type]  # an array is a buffer
                self._add(rows, position, stored_at_us)  # type: ignore[arg-type]  # type() does not narrow it
        self.staged_rows.clear()

    def write_one(self, batch: Buffer, row: EntryRow) -> bool:
        """Store a stamped batch of one run at the end of the log, at once, while nothing is staged. It is readable
        after ``publish``.

        Return False, with nothing changed, where that is not simple: the batch does not fit the segment, rows or space
        have to be looked after, or the write fails. ``stage`` and ``write`` do it then.
        """
        log, size = self.message_log, row[10]
        if (
            log.end + size > log.limit
            or self.consumer_log.buffer_row != self.written_rows
            or self.room.left < size
            or not log.write_one(batch, size)
        ):
            return False
        self.room.left -= size
        self._add(row, row[1], row[2])
        return True

    def _add(self, rows: EntryRow | Rows, position: int, stored_at_us: int) -> None:
        """Note that a batch is written: its rows, its place in the sparse index, its stamp."""
        self.consumer_log.append(rows)
        self.index.append(position, stored_at_us)
        shared = self.shared
        if stored_at_us > shared.last_stored_at_us:  # partitions are not written in the order of their stamps
            shared.last_stored_at_us = stored_at_us

    def _write_rows(self) -> None:
        """Write waiting rows: memory would grow if batches were taken while the disk refuses rows."""
        if self.consumer_log.waiting_blocks:
            self.consumer_log.flush()
        self.written_rows = self.consumer_log.buffer_row

    def _refuse(self, error: StorageError, size: int) -> None:
        """Forget all that is staged, *size* bytes that cannot be written."""
        if isinstance(error, StorageFull):
            self.room.refuse(error, size)
        self.unstage()

    def unstage(self) -> None:
        """Forget all that is staged."""
        self.message_log.unstage()
        self.staged_rows.clear()

    def sync(self) -> None:
        """[thread] Bring everything written before the call to the disk. Take ``message_log.end`` before it, for
        ``message_log.mark_synced``.

        Raises SyncFailed; the partition takes no batches then until the directory is opened again. Raises
        StorageFailed when it could not begin; it can be tried again.
        """
        try:
            self.message_log.sync()
        except SyncFailed:
            # Pages of a failed sync read well until they leave memory, so the next start must not trust them.
            with suppress(StorageError):  # the next checkpoint tries again
                self.shared.identity.forget_boot()
            raise

    def broken(self) -> SyncFailed | None:
        """Return why the partition takes no batches until the directory is opened again; None while it does."""
        reason = self.message_log.broken
        return None if reason is None else SyncFailed(reason)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def offered_row(self) -> int:
        """The first row for a new reader: the rows before it are about to be removed."""
        leaving = self.shared.leaving
        if leaving is None or leaving.partition != self.number:
            return self.consumer_log.first_row
        return leaving.end_row

    def newest_entries(self, row: int, most: int) -> list[EntryRow]:
        """Return all rows from *row* on if they are between 1 and *most*, in memory with their batches, and no bytes
        of the partition are marked as unreadable; else none.
        """
        log = self.message_log
        entries = self.consumer_log.newest_entries(row, most)
        if not entries or log.unreadable or entries[0][1] < log.hot_from():
            return []
        return entries

    def batches_from(self, position: int, limit: int) -> Records:
        """Return the readable batches from *position* on, INDEX_DTYPE[n], of at most *limit* rows: fewer at borders,
        none only at the end. Raises BadBytes, StorageFailed, NotInMemory.
        """
        consumer = self.consumer_log
        return derive_index(consumer.rows(consumer.row_at_position(position), limit))

    def segments_from(self, position: int, limit: int) -> list[SegmentSpan]:
        """Return at most *limit* segments, ascending, from the first that ends behind *position*; the current one,
        last, ends at the end of the log.
        """
        log = self.message_log
        first = bisect_right(log.sealed, position, key=lambda span: span.end)
        found = log.sealed[first : first + limit]
        return found if len(found) == limit else [*found, SegmentSpan(log.current.base, log.end)]

    def log_bytes(self) -> int:
        """Return the size of the message log: its sealed segments and the current one."""
        log = self.message_log
        return sum(span.end - span.base for span in log.sealed) + log.end - log.current.base

    def fetch(self, position: int, size: int, end: int) -> Fetch | None:
        """Return a reader of the raw bytes from *position* on: at most *size*, up to *end* and the segment's end. None
        where there are none.
        """
        log = self.message_log
        span = log.segment_at(position)
        size = 0 if span is None else min(size, span.end - position, end - position)
        if span is None or size <= 0:
            return None
        path = segment_path(log.directory, span.base)
        return Fetch(self.shared.disk, self.number, path, position - span.base, size, position)

    def reader(self, position: int) -> SegmentReader:
        """Return a reader, for a thread, of the segment around *position* from the disk, as far as it is written."""
        log = self.message_log
        span = next(span for span in reversed(log.spans()) if span.base <= position)
        holes = [hole for hole in self.holes if span.base <= hole.start < span.end]
        secret = self.shared.identity.current.secret
        return SegmentReader(self.shared.disk, log.directory, span, log.owner, secret, holes)

    # --- retention ---------------------------------------------------------------------------------------------------

    def leave(self, base: int, had: SubjectRanges) -> int:
        """Hide the first segment from new readers until it is removed; readers that know its messages still read them.
        Return the row behind its rows.
        """
        row = self.consumer_log.row_behind(base)
        self.shared.leaving = SegmentToDrop(self.number, row, had)
        return row

    def removable(self) -> list[SegmentSpan]:
        """Return the segments that ``remove_segment`` takes: sealed, and known to the last checkpoint with all that
        belongs to them.
        """
        if self.given_up:
            return []
        unsealed = {end for index, end in self.shared.unsealed if index.owner.partition == self.number}
        claimed = self.claim.position
        known = [span for span in self.message_log.sealed if span.end <= claimed and span.end not in unsealed]
        unfinished = self.consumer_log.unfinished() if known else ()
        return [span for span in known if span.base not in unfinished]

    def is_settled(self, position: int) -> bool:
        """Return whether all segments before *position* are closed, with all that belongs to them on disk."""
        unsealed = [end for index, end in self.shared.unsealed if index.owner.partition == self.number]
        return position <= min(self.claim.position, self.message_log.current.base, *unsealed)

    def old_segment(self, base: int) -> OldSegment:
        """Return a reader, for a thread, of a segment that is ``removable``."""
        log = self.message_log
        span = next(span for span in log.sealed if span.base == base)
        return OldSegment(self.shared.disk, log.directory, log.owner, span, *self.consumer_log.sealed_at(base))

    def remove_segment(self, base: int) -> None:
        """Remove a segment that is ``removable`` from the logs, while no checkpoint is being written. Its files go once
        the last two checkpoints do not name it; a start at a checkpoint that names it brings it back.
        """
        self.removals.add(*self.message_log.remove(base))
        self.consumer_log.remove(base)
        self.key_index.forget(base)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Leave the partition, whose sync has failed, out of all further checkpoints: the next start reads its tail."""
        self.given_up = True

    @property
    def has_holes(self) -> bool:
        """Whether bytes of a segment that is still there are bad or gone."""
        spans = self.message_log.spans()
        return any(hole.end > spans[0].base for hole in self.holes)

    @property
    def claimable(self) -> int:
        """The position up to which a checkpoint that begins now claims the partition."""
        return self.claim.position if self.given_up else self.message_log.end

    @property
    def claimed(self) -> int:
        """The position up to which the last checkpoint claims the partition."""
        return self.claim.position

    def current_claim(self) -> PartitionClaim:
        """Return the claim for a checkpoint that begins now; rows have been flushed."""
        if self.given_up:
            return self.claim
        log = self.message_log
        journal, removed = self.consumer_log.journal_state(), self.removals.removed
        return PartitionClaim(log.end, tuple(log.spans()), tuple(self.holes), journal, removed)

    def close(self) -> None:
        """Close all files. Views stay usable."""
        self.message_log.close()
        self.consumer_log.close()
        self.index.close()
        self.key_index.close()

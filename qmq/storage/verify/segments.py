"""One partition of a message log, read from end to end: every batch, and the derived files compared with them.

Verify has a reader of its own, so that it does not repeat a mistake of recovery's. It reads 8 MiB at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import BadBatch, BadBytes, ForeignFile, MessageTooLarge
from qmq.format.batch import (
    ANY_MESSAGE_BYTES,
    BatchLimits,
    Header,
    UnknownBatchVersion,
    check_batch,
    entries_of,
    mark_of,
    numbers_by_run,
    parse_header,
    runs_of,
    validate_stored_header,
)
from qmq.format.layout import (
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    DERIVED_HEADER_SIZE,
    INDEX_MAGIC,
    KNOWN_FLAGS,
    MARK_SIZE,
    RUN_REPLAYED,
    SEGMENT_HEADER_SIZE,
)
from qmq.storage.consumer_log.header import DerivedHeader, entries_path, order_path, parse_derived
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.disk.disk import Disk, read_fully
from qmq.storage.key_index.check import KeyCheck
from qmq.storage.key_index.key_file import owner_of
from qmq.storage.message_log.reader import candidates
from qmq.storage.message_log.segment import ForeignSegment, SegmentOwner, check_header, is_of, list_bases, segment_path
from qmq.storage.message_log.sparse_index import derive_index, index_path
from qmq.storage.meta.checkpoint import PartitionClaim
from qmq.storage.types import Hole
from qmq.storage.verify.batches import BatchColumns
from qmq.storage.verify.derived import DerivedCheck, check_order
from qmq.storage.verify.report import VerifyReport

_READ_BYTES: Final = 8 << 20
_SEARCH_OVERLAP: Final = 32
#: The header bears the store's mark, so any size in it is allowed.
_NO_LIMITS: Final = BatchLimits(ANY_MESSAGE_BYTES, KNOWN_FLAGS, RUN_REPLAYED, is_stored=True)
_LOST: Final = "put back a good copy of the file; without one the messages in them are lost, and all others are served"
_PUT_BACK: Final = "put it back before the next start, which gives up its messages"
_RECORDED: Final = "nothing: recovery has recorded it, and what follows is served"
_NEXT_START: Final = "nothing: the next start takes care of it"


class StoredBatches(NamedTuple):
    """Good batches one after another in one segment: their consumer-log rows, ENTRY_DTYPE[n]."""

    rows: Rows
    file: Path
    #: The position of the file's first byte.
    base: int
    #: Whether they lie before the checkpoint's position.
    claimed: bool


class _File:
    """Bytes of one segment by position, read in large pieces."""

    def __init__(self, disk: Disk, path: Path, base: int, buffer: bytearray) -> None:
        self._disk = disk
        self._fd = disk.open(path, os.O_RDONLY)
        self._view = memoryview(b"")
        self._start = base
        self.base = base
        self.size = disk.size(self._fd)
        #: Behind the last data, as far as the file system can say; zeros follow.
        self.data_end = base + disk.data_end(self._fd)
        self.buffer = buffer

    def at(self, position: int, size: int) -> memoryview:
        """Return the bytes from *position* on: at least *size*, fewer only where the file ends. Good until the next
        call.
        """
        offset = position - self._start
        if offset < 0 or offset + size > len(self._view):
            wanted = max(size, min(_READ_BYTES, self.base + self.size - position))
            if wanted > len(self.buffer):
                self.buffer = bytearray(wanted)
            self._load(position)
            offset = 0
        return self._view[offset:]

    def _load(self, position: int) -> None:
        whole, done = memoryview(self.buffer), 0
        while done < len(whole):
            read = self._disk.preadv(self._fd, [whole[done:]], position - self.base + done)
            if read <= 0:
                break
            done += read
        self._view, self._start = whole[:done], position
        with suppress(OSError):  # the system reads ahead while this is checked
            self._disk.will_need(self._fd, position - self.base + done, _READ_BYTES)

    def close(self) -> None:
        self._disk.close(self._fd)


class PartitionCheck:
    """Checks the files of one partition; ``batches`` yields the good ones, so that the caller can compare
    partitions.
    """

    def __init__(
        self,
        disk: Disk,
        report: VerifyReport,
        *,
        directory: Path,
        consumer_directory: Path,
        owner: SegmentOwner,
        secret: bytes,
        claim: PartitionClaim | None,
        number_of: Callable[[str, int], int],
        progress: Callable[[int], None],
        shared: bool = False,
    ) -> None:
        """*shared*: other partitions have their segments in *directory* too, which is a fault."""
        self._disk = disk
        self._report = report
        self._directory = directory
        self._consumer_directory = consumer_directory
        self._owner = owner
        self._secret = secret
        self._claim = claim
        self._position = claim.position if claim is not None else 0
        self._spans = {span.base: span for span in claim.segments} if claim is not None else {}
        self._number_of = number_of
        self._progress = progress
        self._shared = shared
        self._row: int | None = None
        self._columns = BatchColumns(owner, secret, number_of)
        self._buffer = bytearray()
        #: Recorded holes, and bad bytes: batches may be missing there.
        self.holes: list[Hole] = [*claim.holes, *claim.removed] if claim is not None else []
        self.bases: list[int] = []

    # --- segments ----------------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[StoredBatches]:
        """Yield all good batches, by position. Raises OSError or StorageFailed when the system refuses to read."""
        there = list_bases(self._disk, self._directory)
        if self._shared:
            there = [base for base in there if base in self._spans or self._is_own(base)]
        known = [base for base in there if base in self._spans or base >= self._position]
        for base in there:
            if base not in known:
                path = segment_path(self._directory, base)
                if self._claim is not None and self._claim.is_removed(base):
                    self._report.note(path, None, "is a removed segment", "nothing: it is deleted")
                else:
                    what = "is a segment that the checkpoint does not know"
                    self._report.note(path, None, what, "move it away: it is not read")
        for base, span in self._spans.items():
            if base not in there and not self._is_recorded(base, span.end):
                path = segment_path(self._directory, base)
                what = f"is missing; it held positions {base} to {span.end}"
                self._report.fault(path, None, what, _PUT_BACK)
                self._report.absent.append(path)
                self.holes.append(Hole(base, span.end))
        self.bases = known
        self._row = None  # there may have been segments before the first
        end = None
        for number, base in enumerate(known):
            following = known[number + 1] if number + 1 < len(known) else None
            end = yield from self._segment(base, following, end)

    def _is_own(self, base: int) -> bool:
        return is_of(self._disk, self._directory, self._owner, base)

    def _segment(self, base: int, following: int | None, previous: int | None) -> Generator[StoredBatches, None, int]:
        path = segment_path(self._directory, base)
        file = _File(self._disk, path, base, self._buffer)
        try:
            self._report.count("messages", file.size)
            if not self._check_header(file, path, previous):
                self._progress(file.size)
                return base
            stop = min(base + file.size, following if following is not None else base + file.size)
            span = self._spans.get(base)
            claimed_end = span.end if span is not None else min(self._position, stop)
            end = yield from self._walk(file, path, min(stop, file.data_end), claimed_end, following is not None)
            return end
        finally:
            self._buffer = file.buffer
            file.close()

    def _check_header(self, file: _File, path: Path, previous: int | None) -> bool:
        """Return whether the segment can be read. Raises ForeignFile when a newer QMQ has written it."""
        claimed = file.base in self._spans
        try:
            previous_end = check_header(bytes(file.at(file.base, SEGMENT_HEADER_SIZE)), path, self._owner, file.base)
        except ForeignSegment as error:
            self._report.add(claimed, path, 0, str(error), "put the right file in its place")
            if claimed:
                self._report.absent.append(path)
                self.holes.append(Hole(*self._spans[file.base]))
            return False
        if previous_end is None:
            self._report.add(claimed, path, 0, "the segment's header does not fit its checksum", _NEXT_START)
        elif previous is not None and previous_end > previous and not self._is_recorded(previous, previous_end):
            what = f"the segment before should end at position {previous_end}, its last batch ends at {previous}"
            self._report.add(previous_end <= self._position, path, 0, what, _LOST)
            self.holes.append(Hole(previous, previous_end))
        return True

    def _is_recorded(self, start: int, end: int) -> bool:
        """Return whether all of [start, end) is in known holes."""
        for hole in sorted(self.holes):
            if hole.start <= start < hole.end:
                start = hole.end
        return start >= end

    # --- batches -----------------------------------------------------------------------------------------------------

    def _walk(
        self, file: _File, path: Path, stop: int, claimed_end: int, is_sealed: bool
    ) -> Generator[StoredBatches, None, int]:
        derived = self._open_derived(file.base, is_sealed)
        keys = self._open_keys(file.base, is_sealed)
        position = end = file.base + SEGMENT_HEADER_SIZE
        counted_to = file.base
        batches = rows_seen = 0
        while position < stop:
            rows, size = self._columns.good_prefix(file.at(position, BATCH_HEADER_SIZE)[: stop - position], position)
            if not size:
                try:
                    rows, size = self._batch(file, position, stop)
                except UnknownBatchVersion as error:
                    raise ForeignFile(f"{path}: {error}") from error
                except (BadBatch, MessageTooLarge) as error:
                    position = self._skip(file, path, position, stop, claimed_end, str(error))
                    continue
            position = end = position + size
            claimed = len(rows) if end <= claimed_end else int(rows["position"].searchsorted(np.uint64(claimed_end)))
            if derived is not None and claimed:
                derived.expect(rows[:claimed], self.holes)
            if keys is not None:
                keys.expect(file.at(position - size, size)[:size], position - size)
            batches, rows_seen = batches + int((rows["run"] == 0).sum()), rows_seen + len(rows)
            for part, is_claimed in ((rows[:claimed], True), (rows[claimed:], False)):
                if len(part):
                    yield StoredBatches(part, path, file.base, is_claimed)
            self._progress(position - counted_to)
            counted_to = position
        self._progress(max(0, file.base + file.size - counted_to))
        if end < claimed_end and not self._is_recorded(end, claimed_end):
            what = f"its last batch ends at position {end}, the checkpoint knows it up to {claimed_end}"
            self._report.fault(path, end - file.base, what, _PUT_BACK)
            self._report.absent.append(path)
            self.holes.append(Hole(end, claimed_end))
        self._report.counts["messages"].records += batches
        if derived is not None:
            derived.finish(self.holes, min(end, claimed_end))
        if keys is not None:
            self._check_keys(keys)
        self._count_rows(derived, rows_seen)
        return end

    def _batch(self, file: _File, position: int, stop: int) -> tuple[Rows, int]:
        """Return the rows of the batch at *position* and its size. Raises BadBatch or MessageTooLarge."""
        header = self._header(file, position, stop)
        view = file.at(position, header.size)[: header.size]
        if header.version != BATCH_VERSION:
            validate_stored_header(view, position, self._secret, self._owner.store_id)
        if header.store_id != self._owner.store_id:
            raise BadBatch(f"the batch says that it is of store {header.store_id.hex()}")
        if header.partition != self._owner.partition:
            raise BadBatch(f"the batch says that it is of partition {header.partition}")
        mark = view[BATCH_HEADER_SIZE - MARK_SIZE : BATCH_HEADER_SIZE]
        mark[:] = bytes(MARK_SIZE)  # as the client sent it
        try:
            batch = check_batch(view, _NO_LIMITS)
        finally:
            mark[:] = header.mark
        runs = runs_of(view, header)
        subjects = numbers_by_run(batch.names, runs, self._number_of)
        return entries_of(runs, header, position, header.stored_at_us, subjects), header.size

    def _header(self, file: _File, position: int, stop: int) -> Header:
        """Return the header at *position*, whose sizes are right since it bears the store's mark. Raises BadBatch."""
        head = file.at(position, BATCH_HEADER_SIZE)
        if len(head) < BATCH_HEADER_SIZE:
            raise BadBatch("the file ends within a header")
        header = parse_header(head)
        if header.magic != BATCH_MAGIC or header.position != position:
            raise BadBatch("no batch begins here")
        if mark_of(self._secret, position, header.header_crc) != header.mark:
            raise BadBatch("the header's mark is not this store's")
        if position + header.size > stop:
            raise BadBatch(f"of a batch of {header.size} bytes only {stop - position} are there")
        return header

    def _skip(self, file: _File, path: Path, start: int, stop: int, claimed_end: int, reason: str) -> int:
        """Report bad bytes at *start*; return the position of what follows them."""
        end = self._next_batch(file, start, stop)
        if end == stop and start >= claimed_end:
            return self._report_tail(file, path, start, stop)
        if self._is_recorded(start, min(end, claimed_end) if start < claimed_end else end):
            self._report.note(path, start - file.base, f"a hole of {end - start} bytes that is known", _RECORDED)
            return end
        what = f"{end - start} bytes from position {start} on are bad: {reason}"
        if start < claimed_end:
            self._report.fault(path, start - file.base, what, _LOST)
        else:
            self._report.note(path, start - file.base, f"behind the checkpoint, {what}", _NEXT_START)
        self.holes.append(Hole(start, end))
        return end

    def _report_tail(self, file: _File, path: Path, start: int, stop: int) -> int:
        """Report non-zero bytes behind the last batch and the checkpoint; return *stop*."""
        position = last = start
        while position < stop:
            part = bytes(file.at(position, 1)[: stop - position])
            used = len(part.rstrip(b"\0"))
            last = position + used if used else last
            position += len(part)
        if last > start and not self._is_recorded(start, last):
            what = f"an unfinished tail of {last - start} bytes behind the checkpoint"
            self._report.note(path, start - file.base, what, "nothing: the next start cuts it")
        return stop

    def _next_batch(self, file: _File, position: int, stop: int) -> int:
        """Return the first position behind *position* that has a good header; *stop* when there is none."""
        try:
            header = self._header(file, position, stop)
            view = file.at(position, header.size)[: header.size]
            validate_stored_header(view, position, self._secret, self._owner.store_id)
            return position + header.size
        except BadBatch:
            position += 1
        while position + BATCH_HEADER_SIZE <= stop:
            view = file.at(position, min(BATCH_HEADER_SIZE, stop - position))[: stop - position]
            searched = len(view)
            for candidate in candidates(view, position):
                try:
                    self._header(file, candidate, stop)
                except BadBatch:
                    continue
                return candidate
            position += max(1, searched - _SEARCH_OVERLAP + 1)
        return stop

    # --- derived files -----------------------------------------------------------------------------------------------

    def _open_derived(self, base: int, is_sealed: bool) -> _Derived | None:
        """Return the derived files of a segment, as far as a checkpoint vouches for them; None when it does not."""
        derived = self._claimed_derived(base, is_sealed)
        if derived is None or not derived.has_index:
            self._check_unfinished_index(base)
        return derived

    def _check_unfinished_index(self, base: int) -> None:
        """Check the header of an index that no checkpoint vouches for. A bad one is no fault: a stop may leave it so,
        and the next start makes it again.
        """
        path = index_path(self._directory, base)
        try:
            fd = self._disk.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            header = parse_derived(read_fully(self._disk, fd, DERIVED_HEADER_SIZE, 0), INDEX_MAGIC, path)
        except BadBytes as error:
            self._report.note(path, 0, str(error), _NEXT_START)
        else:
            if header.unsealed() != self._derived_owner(base):
                self._report.note(path, 0, "is of another store, partition or segment", _NEXT_START)
        finally:
            self._disk.close(fd)

    def _derived_owner(self, base: int) -> DerivedHeader:
        return DerivedHeader(self._owner.partition, self._owner.store_id, False, base, 0, 0, 0, 0)

    def _claimed_derived(self, base: int, is_sealed: bool) -> _Derived | None:
        if self._claim is None or base not in self._spans:
            return None
        owner = self._derived_owner(base)
        path, journal = entries_path(self._consumer_directory, base), self._claim.journal
        if journal is not None and journal[0] == base:
            if not journal[1]:
                return None  # no row of the file counts yet
            entries = DerivedCheck(self._disk, path, self._report, owner, first_row=self._row, journal=journal)
            return _Derived(entries)
        if not is_sealed or base == self._claim.segments[-1].base:
            return None
        entries = DerivedCheck(self._disk, path, self._report, owner, first_row=self._row)
        index = DerivedCheck(self._disk, index_path(self._directory, base), self._report, owner, first_row=0)
        order = order_path(self._consumer_directory, base)
        return _Derived(entries, index, lambda: check_order(self._disk, order, self._report, entries))

    def _open_keys(self, base: int, is_sealed: bool) -> KeyCheck | None:
        """Return a check of the key index of a segment that a checkpoint knows to be sealed. A missing one is no fault:
        a broker makes it a while after the segment is sealed.
        """
        if self._claim is None or base not in self._spans or not is_sealed or base == self._claim.segments[-1].base:
            return None
        owner = owner_of(self._owner.partition, self._owner.store_id, *self._spans[base])
        keys = KeyCheck(self._disk, self._directory, owner)
        return keys if keys.exists() else None

    def _check_keys(self, keys: KeyCheck) -> None:
        problem = keys.finish(self.holes)
        self._report.count("keys", keys.size, keys.entries)
        if problem is not None:
            self._report.fault(keys.path, None, problem, "delete it: a broker makes it again")

    def _count_rows(self, derived: _Derived | None, rows_seen: int) -> None:
        """Note the number of the first row of the next segment, as long as it is known."""
        header = None if derived is None else derived.entries.header
        if self._claim is not None and self._claim.removed:
            self._row = None  # rows behind removed ones have new numbers
        elif header is not None:
            self._row = header.first_row + header.rows
        elif self.holes or self._row is None:
            self._row = None
        else:
            self._row += rows_seen


class _Derived:
    """The derived files of one segment."""

    def __init__(
        self, entries: DerivedCheck, index: DerivedCheck | None = None, check_order: Callable[[], None] | None = None
    ) -> None:
        self.entries = entries
        self._index = index
        self._check_order = check_order

    @property
    def has_index(self) -> bool:
        """Whether the index is checked too."""
        return self._index is not None

    def expect(self, rows: Rows, holes: list[Hole]) -> None:
        """Compare the rows of the next batches."""
        self.entries.expect(rows, holes)
        if self._index is not None:
            self._index.expect(derive_index(rows), holes)

    def finish(self, holes: list[Hole], covered: int) -> None:
        """End the comparison; the last batch ends at position *covered*."""
        self.entries.finish(holes, covered)
        if self._index is not None:
            self._index.finish(holes, covered)
        if self._check_order is not None:
            self._check_order()

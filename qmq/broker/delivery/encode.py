"""The lookup of ranges in the message log, and the buffers of an answer: batches as they lie, and pieces of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group
from qmq.broker.groups.message_ranges import PARTITIONS, MessageParts, Rows, RunPart, WholeRuns, parts_of
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.effects import Buffer
from qmq.errors import BadBatch, BadBytes, QmqError, StorageFailed
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY_HAS_SOURCE, PIECE_HEADER_SIZE, PRODUCER_ID_SIZE
from qmq.format.pieces import StoredBatch
from qmq.format.salvage import sound_pieces
from qmq.format.source import MAX_SENT_BYTES, MOST_SOURCE_BYTES
from qmq.names import MAX_NAME_BYTES
from qmq.storage.store import KnownBad, NotInMemory, Store

#: Up to this many runs are handled one by one, more as columns.
FEW_ROWS: Final = 4
#: The most that a piece adds to its data: its header, a subject, and a table with one source.
PIECE_BYTES: Final = PIECE_HEADER_SIZE + MAX_NAME_BYTES + MAX_SENT_BYTES + PRODUCER_ID_SIZE + 1
_SOURCE_SHIFT: Final = ENTRY_HAS_SOURCE.bit_length() - 1


def piece_bytes(entry: EntryRow) -> int:
    """Return the most that a piece of a run adds to its data: more for copies that came from several batches."""
    return PIECE_BYTES + MOST_SOURCE_BYTES if entry[8] & ENTRY_HAS_SOURCE else PIECE_BYTES


def answer_bytes(rows: Rows) -> npt.NDArray[np.int64]:
    """Return how many bytes each of these whole runs adds to an answer at most: i64[n].

    A run goes as a piece, or with all runs of its batch. Where the whole batch is larger than its pieces, the
    difference is counted with its first run.
    """
    sizes = rows["run_size"].astype(np.int64) + PIECE_BYTES
    sizes += (rows["flags"] >> _SOURCE_SHIFT) * np.int64(MOST_SOURCE_BYTES)
    batches = rows["batch_size"].astype(np.int64)
    if (rows["runs"] == 1).all():
        return np.maximum(sizes, batches)
    positions = rows["position"]
    heads = np.concatenate(([0], np.flatnonzero(positions[1:] != positions[:-1]) + 1))
    whole = np.diff(np.concatenate((heads, [len(rows)]))) == rows["runs"][heads]
    sizes[heads] += np.maximum(batches[heads] - np.add.reduceat(sizes, heads), 0) * whole
    return sizes


def entry_bytes(entry: EntryRow) -> int:
    """Return how many bytes one run that goes alone adds to an answer at most."""
    size = entry[9] + PIECE_BYTES
    if entry[8] & ENTRY_HAS_SOURCE:
        size += MOST_SOURCE_BYTES
    return max(size, entry[10]) if entry[7] == 1 else size


def parts_of_rows(
    partitions: npt.NDArray[np.int64], rows: Rows, starts: npt.NDArray[np.int64] | None
) -> Iterator[RunPart | WholeRuns]:
    """Yield the runs of *rows* in order, each from message *starts* on (None: whole), as few parts.

    *partitions* has one entry for each run, or one for all. Runs in one partition go together, so that a batch that is
    wanted whole is sent as it lies, and the header of any other is read once.
    """
    partitions = np.broadcast_to(partitions, len(rows))
    lone = rows["runs"] == 1
    breaks = partitions[1:] != partitions[:-1]
    if starts is not None:
        begun = starts > 0
        breaks |= begun[1:] | begun[:-1]
        lone |= begun
    heads = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    few = np.logical_and.reduceat(lone, heads) & (np.diff(heads, append=len(rows)) <= FEW_ROWS)
    bounds = zip(heads.tolist(), [*heads[1:].tolist(), len(rows)], few.tolist(), strict=True)
    for head, tail, goes_by_run in bounds:
        partition = int(partitions[head])
        if not goes_by_run:
            yield WholeRuns(partition, rows[head:tail])
            continue
        start = 0 if starts is None else int(starts[head])  # not 0 only for a run alone
        for entry in rows[head:tail].tolist():
            yield RunPart(partition, entry, start, entry[4])


class AnswerEncoder:
    """Makes the buffers of one answer.

    It leaves out unreadable messages, and adds an error to ``damaged`` for each place that was not known to be bad.
    """

    def __init__(
        self,
        store: Store,
        damaged: list[QmqError],
        batches: dict[tuple[int, int], StoredBatch] | None = None,
        checks: bool = False,
        reports_reads: bool = True,
    ) -> None:
        """*batches* are those whose header was checked for the same answer, by (partition, position). With *checks* no
        batch is sent as it lies, so that each header is checked. Without *reports_reads* only bad headers are added to
        *damaged*, since the reads that the disk refuses were reported before.
        """
        self._store = store
        self._checks = checks
        self._reports_reads = reports_reads
        self._batches = batches
        self._damaged = damaged
        self._buffers: list[Buffer] = []
        #: The error of the disk, where it refused a read that may succeed later.
        self.failed: StorageFailed | None = None
        #: Whether the buffers lack a message.
        self.left_out = False

    def encode(self, parts: list[RunPart | WholeRuns]) -> list[Buffer]:
        """Return the buffers of *parts*, in order."""
        together, end = list[RunPart](), -1  # whole batches that lie side by side
        for part in parts:
            if (
                isinstance(part, RunPart)
                and (entry := part.entry)[7] == 1
                and part.stop - part.start == entry[4]
                and not self._checks
            ):  # a whole batch of one run
                if together and (entry[1] != end or part.partition != together[0].partition):
                    self._add_together(together, end)
                    together = []
                together.append(part)
                end = entry[1] + entry[10]
                continue
            if together:
                self._add_together(together, end)
                together = []
            try:
                if isinstance(part, RunPart):
                    self._add_some(part)
                else:
                    self._add_many(part)
            except QmqError as error:
                self._note(error)
        if together:
            self._add_together(together, end)
        return self._buffers

    def _add_together(self, parts: list[RunPart], end: int) -> None:
        """Add whole batches that lie side by side up to *end*, as one slice."""
        start = parts[0].entry[1]
        try:
            self._buffers.append(self._store.partitions[parts[0].partition].message_log.view(start, end - start))
        except QmqError:
            batches = ((part.entry[1], part.entry[10], 1) for part in parts)
            self._add_each(parts[0].partition, batches)

    def _add_some(self, part: RunPart) -> None:
        entry = part.entry
        try:
            pieces, _ = self._batch(part.partition, entry[1], entry[10]).piece(entry[5], part.start, part.stop)
        except KnownBad:
            self._add_around(part.partition, entry[1], entry[10], [(entry[5], part.start, part.stop)])
            return
        self._buffers.extend(pieces)

    def _add_many(self, part: WholeRuns) -> None:
        """Add whole batches as they lie, neighbours as one slice, and the wanted runs of any other batch as a piece."""
        rows = part.rows
        positions = rows["position"].astype(np.int64)
        edges = np.flatnonzero(positions[1:] != positions[:-1]) + 1
        firsts = np.concatenate(([0], edges))
        chosen = np.diff(np.concatenate((firsts, [len(rows)])))
        starts, sizes = positions[firsts], rows["batch_size"][firsts].astype(np.int64)
        whole = (chosen == rows["runs"][firsts]) & (not self._checks)
        joined = (starts[1:] == starts[:-1] + sizes[:-1]) & whole[1:] & whole[:-1]
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1)).tolist()
        for head, tail in zip(heads, [*heads[1:], len(firsts)], strict=True):
            first = int(firsts[head])
            try:
                if whole[head]:
                    start = int(starts[head])
                    size = int(starts[tail - 1] + sizes[tail - 1]) - start
                    self._buffers.append(self._store.partitions[part.partition].message_log.view(start, size))
                else:
                    self._add_pieces(part.partition, rows[first : first + int(chosen[head])])
            except QmqError as error:
                if not whole[head]:
                    self._note(error)
                    continue
                runs = rows["runs"][firsts[head:tail]]
                batches = (starts[head:tail].tolist(), sizes[head:tail].tolist(), runs.tolist())
                self._add_each(part.partition, zip(*batches, strict=True))

    def _add_each(self, partition: int, batches: Iterable[tuple[int, int, int]]) -> None:
        """Add whole batches (position, size, runs) one by one, where some cannot be read."""
        for position, size, runs in batches:
            try:
                try:
                    self._buffers.append(self._store.partitions[partition].message_log.view(position, size))
                except KnownBad:
                    self._add_around(partition, position, size, [(run, 0, None) for run in range(runs)])
            except QmqError as error:
                self._note(error)

    def _add_pieces(self, partition: int, rows: Rows) -> None:
        entry = rows[0].item()
        try:
            batch = self._batch(partition, entry[1], entry[10])
        except KnownBad:
            self._add_around(partition, entry[1], entry[10], [(run, 0, None) for run in rows["run"].tolist()])
            return
        if len(rows) == 1:
            self._buffers.extend(batch.piece(entry[5], 0, None)[0])
        else:
            self._buffers.extend(batch.runs_piece(rows["run"].astype(np.int64)))

    def _add_around(self, partition: int, position: int, size: int, wanted: list[tuple[int, int, int | None]]) -> None:
        """Add the sound messages of the *wanted* runs (run, start, stop) of a batch with known bad bytes."""
        self.left_out = True
        part = self._store.partitions[partition]
        bad = part.message_log.unreadable.within(position, position + size)
        marks = [(start - position, end - position) for start, end in bad]
        try:
            self._buffers += sound_pieces(part.message_log.view_marked(position, size), marks, wanted)
        except BadBatch as error:
            raise self._bad_header(partition, position, size, error) from None

    def _batch(self, partition: int, position: int, size: int) -> StoredBatch:
        key = partition, position
        if self._batches is not None and key in self._batches:
            return self._batches[key]
        try:
            batch = StoredBatch(self._store.partitions[partition].message_log.view(position, size))
        except BadBatch as error:
            raise self._bad_header(partition, position, size, error) from None
        if self._batches is not None:
            self._batches[key] = batch
        return batch

    def _bad_header(self, partition: int, position: int, size: int, error: BadBatch) -> BadBytes:
        """Mark a batch with a bad header as unreadable, so that it is reported once, and return the error."""
        part = self._store.partitions[partition]
        part.message_log.unreadable.add(position, size)
        return BadBytes(f"{part.message_log.file_offset_of(position)}, {size} bytes: {error}")

    def _note(self, error: QmqError) -> None:
        self.left_out = True
        if isinstance(error, StorageFailed):
            self.failed = error
            if not self._reports_reads:
                return
        if not isinstance(error, KnownBad):
            self._damaged.append(error)


#: What the messages of a range are counted from: the subject; or in a partition, the log, first batch and run.
_Base = tuple[int, int, int]


class RangeLookup:
    """Finds the messages of a group's ranges for one answer, during which neither rows nor bytes change.

    Messages that fail one by one often lie in one run: the lookup of one serves the others too.
    """

    def __init__(self, store: Store, group: Group) -> None:
        self._store = store
        self._group = group
        self._known: dict[MessageRange, MessageParts] = {}
        self._last: RunPart | None = None  # the whole run that the last lookup found
        self._base: _Base = (-1, 0, 0)
        self._start = 0  # the number of that run's first message, counted from the base
        #: How many ranges had to be looked up.
        self.looks = 0
        #: Batches whose header was checked, by (partition, position), for the encoder.
        self.batches: dict[tuple[int, int], StoredBatch] = {}

    def parts(self, messages: MessageRange) -> MessageParts:
        """Return the parts of a range that still exist, all of them in memory. Raises NotInMemory."""
        found = self._known.get(messages)
        if found is None:
            found = self._known[messages] = self._in_last(messages) or self._look(messages)
        return found

    def _in_last(self, messages: MessageRange) -> MessageParts:
        base, number = _numbered(messages)
        if self._last is None or base != self._base:
            return []
        start = number - self._start
        if start < 0 or start + messages.total > self._last.stop:
            return []
        return [RunPart(self._last.partition, self._last.entry, start, start + messages.total)]

    def _look(self, messages: MessageRange) -> MessageParts:
        self.looks += 1
        store, parts = self._store, parts_of(self._store, self._group, messages)
        for part in parts:
            if isinstance(part, RunPart):
                positions, sizes = np.array([part.entry[1]]), np.array([part.entry[10]])
            else:
                positions, sizes = part.rows["position"].astype(np.int64), part.rows["batch_size"].astype(np.int64)
            stored_part = store.partitions[part.partition]
            if stored_part.page_cache.count(positions, sizes) < len(positions):
                raise NotInMemory(stored_part.page_cache.read(positions, sizes, onward=False))
        if len(parts) == 1 and isinstance(part := parts[0], RunPart) and part.stop - part.start == messages.total:
            self._last = part._replace(start=0, stop=part.entry[4])
            self._base, number = _numbered(messages)
            self._start = number - part.start
        return parts


def _numbered(messages: MessageRange) -> tuple[_Base, int]:
    """Return the base that a range's messages are counted from, and the number of its first."""
    if messages.log < PARTITIONS:
        return (messages.log, 0, 0), messages.first + messages.skip
    return (messages.log, messages.first, messages.run), messages.skip

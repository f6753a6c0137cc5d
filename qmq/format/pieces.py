"""The answer to a pull: whole batches as stored, pieces of one run, and pieces of several whole runs.

The broker cuts pieces (`StoredBatch`); a client reads an answer back into verified runs (`read_answer`).
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import (
    COLUMN_BYTES,
    Header,
    Runs,
    clock_us_of,
    gather_lengths,
    header_crc_of,
    parse_header,
    runs_of,
    stored_table,
)
from qmq.format.hashing import checks_of
from qmq.format.layout import (
    BATCH_HEADER,
    BATCH_HEADER_SIZE,
    BATCH_MAGIC,
    BATCH_VERSION,
    ORDINAL_SIZE,
    PIECE_CRC_OFFSET,
    PIECE_HEADER,
    PIECE_HEADER_SIZE,
    PIECE_MAGIC,
    RUN,
    RUN_DTYPE,
    RUN_SIZE,
    RUNS_CRC_OFFSET,
    RUNS_HEADER,
    RUNS_HEADER_SIZE,
    RUNS_MAGIC,
    STAMP_POSITION_OFFSET,
)
from qmq.format.run import KEPT_BYTES, PieceHeader, RunsHeader, are_decodable, column_offsets, folds_of
from qmq.format.run import Run as Run
from qmq.format.source import front_size, source_in, with_producer
from qmq.format.table import names_of, source_table, table_of

Buffer = bytes | memoryview


class AnswerDamage(NamedTuple):
    """Messages of an answer that could not be verified and are left out: ``messages`` of the batch at ``position``,
    from ordinal ``first`` on (0: all of them). They belong before run number ``run_index`` of the runs that were read.

    Where not even a header could be read, ``size`` is the number of bytes that are left out, and the other numbers are
    0.
    """

    reason: str
    partition: int
    position: int
    first: int
    messages: int
    run_index: int
    size: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# The broker's side

#: A piece with up to so many bytes of data is one buffer: many small buffers cost more than the copy.
_SMALL_BYTES: Final = 4_096


class _Cut:
    """A run of which pieces are made: (count, lane, flags, crc, first sequence), its subject, columns and payload."""

    __slots__ = ("_columns", "_ends", "_payload", "data", "ordinal", "record", "subject")

    def __init__(
        self, record: tuple[int, int, int, int, int], subject: bytes, data: memoryview, ordinal: int, flags: int
    ) -> None:
        self.record = record
        self.subject = subject
        self.data = data
        self.ordinal = ordinal  # of its first message in the batch
        self._columns = column_offsets(flags, record[0])
        self._payload = COLUMN_BYTES[flags] * record[0]
        self._ends: npt.NDArray[np.int64] | None = None  # in ``data``

    def slices(self, start: int, stop: int) -> list[memoryview]:
        """Return the slices of columns and payload for messages [start, stop)."""
        data, count = self.data, self.record[0]
        if self._ends is None:
            self._ends = np.cumsum(np.frombuffer(data, "<u4", count), dtype=np.int64) + self._payload
        first = self._ends.item(start - 1) if start else self._payload
        found = [data[offset + size * start : offset + size * stop] for offset, size in self._columns]
        found.append(data[first : self._ends.item(stop - 1)])
        return found


class StoredBatch:
    """A stored batch from which pieces are cut; *view* begins with it. Its header is checked once."""

    __slots__ = ("_cuts", "_data", "_firsts", "_names", "_source", "_view", "header")

    def __init__(self, view: memoryview) -> None:
        """Raises BadBatch when the header does not fit its checksum, so that its sizes cannot be trusted."""
        self.header = header = parse_header(view)
        start = header.data_start
        if header.magic != BATCH_MAGIC or start > len(view) or header_crc_of(view, start) != header.header_crc:
            raise BadBatch(f"the header of the batch at position {header.position} does not fit its checksum")
        self._view = view
        self._data = view[start : header.size]
        table = stored_table(view, header)
        self._names = names_of(table)
        self._source = with_producer(source_in(table), header.producer_id)
        self._firsts: npt.NDArray[np.int64] | None = None
        self._cuts: dict[int, _Cut] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The subjects of the batch."""
        return self._names

    def piece(self, run_number: int, start: int, stop: int | None) -> tuple[list[Buffer], int]:
        """Return the buffers of a piece with messages [start, stop) of a run (None: to its end), and their size in
        bytes.

        A small part of a run is one buffer.
        """
        header, cut = self.header, self._cuts.get(run_number) or self._begin(run_number)
        count, lane, run_flags, crc, first_sequence = cut.record
        stop = count if stop is None else stop
        whole = start == 0 and stop == count
        slices: list[memoryview] = [cut.data] if whole else cut.slices(start, stop)
        data_size = sum(map(len, slices))
        names = cut.subject + source_table(self._source)
        draft = PIECE_HEADER.pack(
            PIECE_MAGIC, BATCH_VERSION, whole, header.flags, PIECE_HEADER_SIZE + len(names) + data_size,
            stop - start, cut.ordinal + start, len(cut.subject), lane, header.position, header.stored_at_us,
            header.created_at_us, first_sequence + start, header.partition, header.store_id, run_flags, run_number,
            crc if whole else 0, len(names) - len(cut.subject), 0,
        )[:PIECE_CRC_OFFSET]  # fmt: skip
        head = draft + crc32c(names, crc32c(draft)).to_bytes(4, "little") + names
        if not whole and data_size <= _SMALL_BYTES:
            return [b"".join((head, *slices))], len(head) + data_size
        return [head, *slices], len(head) + data_size

    def runs_piece(self, run_numbers: npt.NDArray[np.int64]) -> list[Buffer]:
        """Return the buffers of a piece with these whole runs, in ascending order."""
        header = self.header
        words = runs_of(self._view, header).view(np.uint64).reshape(header.runs, -1)
        records = words.take(run_numbers, axis=0).view(RUN_DTYPE).reshape(-1)  # numpy is slower by fields
        names: Sequence[str] = self._names[:1]
        if (subjects := records["subject"]).any():
            used, records["subject"] = np.unique(subjects, return_inverse=True)
            names = [self._names[subject] for subject in used.tolist()]
        starts, sizes = records["offset"].astype(np.int64), records["size"].astype(np.int64)
        ends, placed = starts + sizes, np.cumsum(sizes)
        records["offset"] = placed - sizes
        ordinals = self._ordinals()[run_numbers].astype("<u4").tobytes()
        table = table_of(names, self._source)
        size = RUNS_HEADER_SIZE + (RUN_SIZE + ORDINAL_SIZE) * len(records) + len(table) + int(placed[-1])
        draft = RUNS_HEADER.pack(
            RUNS_MAGIC, BATCH_VERSION, 0, header.flags, size, len(table), int(records["count"].sum(dtype=np.int64)),
            len(records), header.position, header.stored_at_us, header.created_at_us, header.partition,
            header.store_id, 0, 0,
        )[:RUNS_CRC_OFFSET]  # fmt: skip
        described = b"".join((records.tobytes(), ordinals, table))
        head = draft + crc32c(described, crc32c(draft)).to_bytes(4, "little") + described
        firsts = np.concatenate(([0], np.flatnonzero(starts[1:] != ends[:-1]) + 1))
        lasts = np.append(firsts[1:], len(records)) - 1
        slices = list(map(slice, starts[firsts].tolist(), ends[lasts].tolist()))
        parts = map(self._data.__getitem__, slices)
        if int(placed[-1]) <= _SMALL_BYTES * len(slices):
            return [b"".join((head, *parts))]
        return [head, *parts]

    def _begin(self, run_number: int) -> _Cut:
        """Return the data that all pieces of a run share."""
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        subject_index, lane, run_flags, _, count, offset, size, crc, first_sequence = record
        fields = count, lane, run_flags, crc, first_sequence
        subject, data = self._names[subject_index].encode(), self._data[offset : offset + size]
        found = self._cuts[run_number] = _Cut(fields, subject, data, self._ordinal(run_number), self.header.flags)
        return found

    def run(self, run_number: int) -> Run:
        """Return a run, not verified."""
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        subject_index, lane, run_flags, _, count, offset, size, _, first_sequence = record
        return Run(
            self.header, self._names[subject_index], count, lane, run_flags, first_sequence, self._ordinal(run_number),
            self._data, offset, offset + size,
        )  # fmt: skip

    @property
    def clock_us(self) -> int:
        """The time at which the batch was stored, by the broker's wall clock."""
        return clock_us_of(self._view, self.header)

    def lengths(self, run_number: int) -> npt.NDArray[np.uint32]:
        """Return header and body sizes of the messages of a run, in bytes: u32[its count]."""
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        return np.frombuffer(self._data, "<u4", record[4], record[5])

    def column(self, run_number: int, flag: int) -> npt.NDArray[Any]:
        """Return an optional column of a run, which the batch has: tags u32, origin ids 16 bytes, others u64."""
        record = RUN.unpack_from(self._view, BATCH_HEADER_SIZE + RUN_SIZE * run_number)
        count, offset = record[4], record[5] + COLUMN_BYTES[self.header.flags & (flag - 1)] * record[4]
        size = COLUMN_BYTES[flag] - COLUMN_BYTES[0]
        return np.frombuffer(self._data, f"<u{size}" if size <= 8 else f"V{size}", count, offset)

    def _ordinal(self, run_number: int) -> int:
        """Return the number of messages before a run in the batch."""
        if not run_number:
            return 0
        return int(self._ordinals()[run_number])

    def _ordinals(self) -> npt.NDArray[np.int64]:
        """Return the number of messages before each run in the batch."""
        if self._firsts is None:
            counts = runs_of(self._view, self.header)["count"]
            self._firsts = np.cumsum(counts, dtype=np.int64) - counts
        return self._firsts


def piece_of_run(batch: memoryview, run_number: int, start: int, stop: int | None) -> tuple[list[Buffer], int]:
    """Return one piece of the batch at the start of *batch*: see StoredBatch."""
    return StoredBatch(batch).piece(run_number, start, stop)


# ---------------------------------------------------------------------------------------------------------------------
# The client's side

#: Where the table of a batch of one run begins.
_SINGLE_START: Final = BATCH_HEADER_SIZE + RUN_SIZE
_MAGICS: Final = tuple(struct.pack("<I", magic) for magic in (BATCH_MAGIC, PIECE_MAGIC, RUNS_MAGIC))
_SIZE: Final = struct.Struct("<I")
SIZE_OFFSET: Final = 8  # in batches and pieces
_POSITION: Final = struct.Struct("<Q")


def read_answer(answer: memoryview) -> tuple[list[Run], list[AnswerDamage]]:
    """Return the verified runs of a pull's answer, and what could not be verified."""
    runs: list[Run] = []
    damaged: list[AnswerDamage] = []
    read_from(answer, 0, runs, damaged)
    return runs, damaged


def read_single(answer: memoryview) -> Run | None:
    """Return the only message of an answer that is one sound batch of it, without a header; None: `read_answer` has to
    look.
    """
    size = len(answer)
    if size < _SINGLE_START:
        return None
    fields = BATCH_HEADER.unpack_from(answer)
    magic, version, _, flags, batch_size, table_size, messages, runs, _, _, _, _, _, _, _, data_crc, crc, _ = fields
    subject, lane, run_flags, _, count, offset, run_size, _, first_sequence = RUN.unpack_from(answer, BATCH_HEADER_SIZE)
    start = _SINGLE_START + table_size
    if (
        not messages == runs == count == 1
        or not batch_size == size == start + run_size
        or magic != BATCH_MAGIC
        or version != BATCH_VERSION
        or flags >= len(COLUMN_BYTES)
        or COLUMN_BYTES[flags] > run_size
        or subject
        or offset
        or header_crc_of(answer, start) != crc
        or crc32c(answer[start:]) != data_crc
    ):
        return None
    try:
        names = names_of(table := bytes(answer[_SINGLE_START:start]))
    except BadBatch:
        return None
    header = tuple.__new__(Header, fields)
    run = Run(header, names[0], 1, lane, run_flags, first_sequence, 0, answer, start, size, table)
    return None if run.first_header_size() else run


def read_from(answer: memoryview, offset: int, runs: list[Run], damaged: list[AnswerDamage]) -> None:
    """As read_answer, from *offset* on, where a batch or piece begins: add to *runs* and *damaged*."""
    end = len(answer)
    owned = end > _LARGE_BYTES
    while offset < end:
        try:
            offset += read_one(answer[offset:], runs, damaged, owned)
        except BadBatch as error:
            size = _resume(answer, offset) - offset
            damaged.append(
                AnswerDamage(f"{error}; {size} bytes of the answer are left out", 0, 0, 0, 0, len(runs), size)
            )
            offset += size


def read_one(rest: memoryview, runs: list[Run], damaged: list[AnswerDamage], owned: bool) -> int:
    """Read the batch or piece at the start of *rest*, and return its size. *owned*: small runs own their bytes.

    Raises BadBatch when not even its size can be trusted; then nothing was added to *runs* and *damaged*.
    """
    magic = bytes(rest[:4])
    if magic == _MAGICS[0] and len(rest) >= BATCH_HEADER_SIZE + RUN_SIZE:
        return _read_batch(rest, runs, damaged, owned)
    if magic == _MAGICS[1] and len(rest) >= PIECE_HEADER_SIZE:
        return _read_piece(rest, runs, damaged, owned)
    if magic == _MAGICS[2] and len(rest) >= RUNS_HEADER_SIZE:
        return _read_runs_piece(rest, runs, damaged, owned)
    raise BadBatch("neither a batch nor a piece begins here")


class PartialAnswer:
    """An answer that is still being received into *answer*; its batches and pieces are verified as soon as they are
    whole.

    So the verification takes place while the broker still sends, and while the bytes are in the processor's cache.
    """

    __slots__ = ("_answer", "_damaged", "_offset", "_runs", "_stuck")

    def __init__(self, answer: memoryview) -> None:
        self._answer = answer
        self._offset = 0  # everything before is read
        self._runs: list[Run] = []
        self._damaged: list[AnswerDamage] = []
        self._stuck = False  # a bad header: read on only when the whole answer is there

    def more(self, filled: int) -> None:
        """Read the batches and pieces that are whole in the first *filled* bytes."""
        while not self._stuck and self._is_whole(filled - self._offset):
            try:
                self._offset += read_one(self._answer[self._offset : filled], self._runs, self._damaged, True)
            except BadBatch:
                self._stuck = True

    def _is_whole(self, there: int) -> bool:
        """Return whether the next batch or piece lies within *there* bytes, by its own size."""
        if there < PIECE_HEADER_SIZE:
            return False
        size: int = _SIZE.unpack_from(self._answer, self._offset + SIZE_OFFSET)[0]
        return 0 < size <= there

    def all(self) -> tuple[list[Run], list[AnswerDamage]]:
        """Read the rest of the complete answer, and return what `read_answer` returns."""
        read_from(self._answer, self._offset, self._runs, self._damaged)
        self._offset = len(self._answer)
        return self._runs, self._damaged


def _resume(answer: memoryview, offset: int) -> int:
    """Return where reading goes on after a bad header at *offset*; the answer's end when that is unknown.

    A magic alone is not enough, since a body may hold a whole forged batch. So either the bad header's size leads to
    the next header, or a batch follows whose position is as far from the bad header's as their offsets are.
    """
    end = len(answer)
    if end - offset < BATCH_HEADER_SIZE:
        return end
    after = offset + _SIZE.unpack_from(answer, offset + SIZE_OFFSET)[0]
    if offset < after < end and bytes(answer[after : after + 4]) in _MAGICS:
        return int(after)
    (position,) = _POSITION.unpack_from(answer, offset + STAMP_POSITION_OFFSET)
    rest = bytes(answer[offset:])
    distance = rest.find(_MAGICS[0], 4)
    while 0 < distance <= len(rest) - BATCH_HEADER_SIZE:
        if _POSITION.unpack_from(rest, distance + STAMP_POSITION_OFFSET)[0] - position == distance:
            return offset + distance
        distance = rest.find(_MAGICS[0], distance + 4)
    return end


def _read_batch(rest: memoryview, runs: list[Run], damaged: list[AnswerDamage], owned: bool) -> int:
    header = parse_header(rest)
    start, size = header.data_start, header.size
    if start > size or size > len(rest) or header_crc_of(rest, start) != header.header_crc:
        raise BadBatch("the header of a batch does not fit its checksum")
    if header.version != BATCH_VERSION or header.flags >= len(COLUMN_BYTES):
        raise BadBatch(f"a batch of version {header.version} with flags {header.flags:#x} is not known here")
    data = rest[start:size]
    is_sound = crc32c(data) == header.data_crc
    found = _runs_in(rest, header, memoryview(bytes(data)) if owned and size <= KEPT_BYTES else data, owned)
    if is_sound:
        runs += found
        return size
    for run, crc in zip(found, runs_of(rest, header)["crc"].tolist(), strict=True):
        if header.runs > 1 and crc32c(run.data) == crc:
            runs.append(run)
        else:
            _read_by_message(run, runs, damaged)
    return size


def stored_runs(batch: memoryview, header: Header) -> list[Run]:
    """Return the runs of the batch at the start of *batch*, unverified; its header must be right.

    Raises BadBatch when a run points outside of the batch.
    """
    return _runs_in(batch, header, batch[header.data_start : header.size], False)


def stored_runs_between(batch: memoryview, header: Header, start: int, stop: int) -> list[Run]:
    """Return the runs that have some of the messages [start, stop), by ordinal; the cost of others is small.

    Raises BadBatch when one of them points outside of the batch.
    """
    if header.runs == 1:
        return stored_runs(batch, header)
    table, records = stored_table(batch, header), runs_of(batch, header)
    ends = np.cumsum(records["count"], dtype=np.int64)
    first, last = np.searchsorted(ends, (start, stop - 1), side="right").tolist()
    records, ends = records[first : last + 1], ends[first : last + 1]
    if not len(records):
        return []
    data, ordinals = batch[header.data_start : header.size], ends - records["count"]
    return _runs_of_batch(header, names_of(table), records, data, table, ordinals, owned=False)


def _runs_in(batch: memoryview, header: Header, data: memoryview, owned: bool) -> list[Run]:
    """Do as ``stored_runs``, with the *data* of the batch."""
    table = stored_table(batch, header)
    names = names_of(table)
    if header.runs > 1:
        return _runs_of_batch(header, names, runs_of(batch, header), data, table, owned=owned)
    subject, lane, run_flags, _, count, offset, size, _, first_sequence = RUN.unpack_from(batch, BATCH_HEADER_SIZE)
    if subject or offset or size != len(data) or not 0 < count * COLUMN_BYTES[header.flags] <= size:
        raise BadBatch(_OUTSIDE)
    return [Run(header, names[0], count, lane, run_flags, first_sequence, 0, data, 0, size, table)]


_OUTSIDE: Final = "a run of a batch points outside of it"


def _runs_of_batch(
    header: Header | RunsHeader,
    names: tuple[str, ...],
    records: Runs,
    data: memoryview,
    table: bytes,
    ordinals: npt.NDArray[Any] | None = None,
    *,
    owned: bool,
) -> list[Run]:
    """Return the unverified runs of a batch or piece of several. *ordinals* has the ordinal of each run's first message
    (None: they follow one another). *owned*: small ones own their bytes. Raises BadBatch when a run points outside of
    the batch.
    """
    counts = records["count"].astype(np.int64)
    starts = records["offset"].astype(np.int64)
    ends = starts + records["size"]
    column_ends = starts + counts * COLUMN_BYTES[header.flags]
    subjects = records["subject"]
    if int(subjects.max()) >= len(names) or (ends > len(data)).any() or (column_ends > ends).any() or not counts.all():
        raise BadBatch(_OUTSIDE)
    if ordinals is None:
        ordinals = np.cumsum(counts)
        ordinals -= counts
    decodable = are_decodable(data, column_ends, counts, *gather_lengths(data, starts, counts))
    columns = (counts, records["lane"], records["flags"], records["first_sequence"], ordinals)
    views: Iterable[memoryview] = repeat(data)
    if owned and len(data) > KEPT_BYTES:
        views = _owned_parts(data, starts, ends)
    source = table[: front_size(table)]
    fields = (
        repeat(header), map(names.__getitem__, subjects.tolist()), *(column.tolist() for column in columns),
        views, starts.tolist(), ends.tolist(), repeat(source), decodable.tolist(),
    )  # fmt: skip
    # All runs stay alive, so the collector would find nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(map(Run, *fields))
    finally:
        if collects:
            gc.enable()


#: Of an answer with more bytes, small runs own theirs: a message that a program keeps must not keep the answer.
_LARGE_BYTES: Final = 2 * KEPT_BYTES


def _owned_parts(data: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Iterable[memoryview]:
    """Return what holds the bytes of each run: for small ones a copy of a part of *data*, which several share. The
    places of the runs are changed to those in it.
    """
    if (ends - starts > KEPT_BYTES).any() or not np.array_equal(starts[1:], ends[:-1]):
        views = [
            memoryview(bytes(data[start:end])) if end - start <= KEPT_BYTES else data[start:end]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        ends -= starts
        starts[:] = 0
        return views
    firsts = np.flatnonzero(np.diff(starts // KEPT_BYTES, prepend=-1))
    bounds, counts = starts[firsts], np.diff(firsts, append=len(starts))
    copies = [memoryview(bytes(data[a:b])) for a, b in pairwise([*bounds.tolist(), len(data)])]
    moved = np.repeat(bounds, counts)
    starts -= moved
    ends -= moved
    return chain.from_iterable(map(repeat, copies, counts.tolist()))


def _read_runs_piece(rest: memoryview, runs: list[Run], damaged: list[AnswerDamage], owned: bool) -> int:
    header = RunsHeader._make(RUNS_HEADER.unpack_from(rest))
    table_start = RUNS_HEADER_SIZE + (RUN_SIZE + ORDINAL_SIZE) * header.runs
    start, size = table_start + header.table_size, header.size
    if not header.runs or start > size or size > len(rest):
        raise BadBatch("the sizes of a piece do not add up")
    if crc32c(rest[RUNS_HEADER_SIZE:start], crc32c(rest[:RUNS_CRC_OFFSET])) != header.header_crc:
        raise BadBatch("the header of a piece does not fit its checksum")
    if header.version != BATCH_VERSION or header.flags >= len(COLUMN_BYTES):
        raise BadBatch(f"a piece of version {header.version} with flags {header.flags:#x} is not known here")
    records = np.frombuffer(rest, RUN_DTYPE, header.runs, RUNS_HEADER_SIZE)
    ordinals = np.frombuffer(rest, "<u4", header.runs, RUNS_HEADER_SIZE + RUN_SIZE * header.runs)
    data = rest[start:size]
    table = bytes(rest[table_start:start])
    found = _runs_of_batch(header, names_of(table), records, data, table, ordinals, owned=owned)
    starts = records["offset"].astype(np.int64)
    slices = map(slice, starts.tolist(), (starts + records["size"]).tolist())
    crcs, wanted = list(map(crc32c, map(data.__getitem__, slices))), records["crc"].tolist()
    if crcs == wanted:
        runs += found
        return size
    for run, crc, expected in zip(found, crcs, wanted, strict=True):
        if crc == expected:
            runs.append(run)
        else:
            _read_by_message(run, runs, damaged)
    return size


def _read_piece(rest: memoryview, runs: list[Run], damaged: list[AnswerDamage], owned: bool) -> int:
    header = PieceHeader._make(PIECE_HEADER.unpack_from(rest))
    table_start = PIECE_HEADER_SIZE + header.subject_size
    start, size = table_start + header.table_size, header.size
    if start > size or size > len(rest):
        raise BadBatch("the sizes of a piece do not add up")
    if crc32c(rest[PIECE_HEADER_SIZE:start], crc32c(rest[:PIECE_CRC_OFFSET])) != header.header_crc:
        raise BadBatch("the header of a piece does not fit its checksum")
    if header.version != BATCH_VERSION or header.flags >= len(COLUMN_BYTES):
        raise BadBatch(f"a piece of version {header.version} with flags {header.flags:#x} is not known here")
    if not 0 < header.messages * COLUMN_BYTES[header.flags] <= size - start:
        raise BadBatch("a piece is shorter than its columns")
    try:
        subject = str(rest[PIECE_HEADER_SIZE:table_start], "utf-8")
    except UnicodeDecodeError:
        raise BadBatch("the subject of a piece is not text") from None
    view, first, end = rest, start, size
    if owned and size - start <= KEPT_BYTES:
        view, first, end = memoryview(bytes(rest[start:size])), 0, size - start
    run = Run(
        header, subject, header.messages, header.lane, header.run_flags, header.first_sequence, header.ordinal,
        view, first, end, bytes(rest[table_start:start]),
    )  # fmt: skip
    if (header.whole and crc32c(run.data) == header.data_crc) or (header.messages == 1 and run.is_sound_alone()):
        runs.append(run)
    else:
        _read_by_message(run, runs, damaged, is_cut=not header.whole)
    return size


def _read_by_message(run: Run, runs: list[Run], damaged: list[AnswerDamage], is_cut: bool = False) -> None:
    """Check message by message a run that is cut or fails its checksum, and add its sound messages to *runs*."""
    bad = bad_messages(run)
    if is_cut and bad == []:
        runs.append(run)
        return
    if not bad:  # its lengths are wrong, or the bad bytes are in none of its messages
        reason = f"a run of {run.subject!r} does not fit its checksum"
        damaged.append(AnswerDamage(reason, run.partition, run.position, run.ordinal, run.count, len(runs)))
        return
    reason = f"a message of {run.subject!r} does not fit its checksum"
    last = 0
    for first, end in _ranges(bad):
        if first > last:
            runs.append(run.slice(last, first))
        damaged.append(AnswerDamage(reason, run.partition, run.position, run.ordinal + first, end - first, len(runs)))
        last = end
    if last < run.count:
        runs.append(run.slice(last, run.count))


def _ranges(indexes: list[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges [first, end)."""
    starts = [index for before, index in pairwise([-2, *indexes]) if index != before + 1]
    ends = [index + 1 for index, after in pairwise([*indexes, -2]) if after != index + 1]
    return list(zip(starts, ends, strict=True))


def bad_messages(run: Run) -> list[int] | None:
    """Return the messages of a run that fail their own checksums, ascending; None when its lengths are wrong."""
    payload = run.payload
    lengths = run.lengths()
    if int(lengths.sum(dtype=np.uint64)) != len(payload) or (run.header_sizes() > lengths).any():
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    messages = map(payload.__getitem__, map(slice, (ends - lengths).tolist(), ends.tolist()))
    checks = checks_of(messages, folds_of(run), run.count)
    bad: list[int] = np.flatnonzero(checks != run.checks()).tolist()
    return bad

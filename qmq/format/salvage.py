"""Find the bad messages in a stored batch with bad bytes, and cut pieces of the sound ones.

**Marks** name bad bytes: (start, end) in bytes of the batch. A bad message is marked by the 4 bytes of its checksum in
its run's columns; a mark anywhere else in a run means the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from crc32c import crc32c

from qmq.errors import BadBatch
from qmq.format.batch import Header, parse_header, runs_of
from qmq.format.layout import BATCH_HEADER_SIZE, BEFORE_CHECK_COLUMN_BYTES, CHECK_COLUMN_BYTES, RUN, RUN_SIZE
from qmq.format.pieces import Buffer, StoredBatch, bad_messages, stored_runs
from qmq.format.run import undecodable, why_undecodable

Marks = Sequence[tuple[int, int]]


def marks_of(batch: memoryview, header: Header) -> list[tuple[int, int]]:
    """Return the marks of a batch with a right header whose data fails its checksum; at least one."""
    data = header.data_start, header.size
    try:
        found = stored_runs(batch, header)
    except BadBatch:
        return [data]
    marks = list[tuple[int, int]]()
    for run, record in zip(found, runs_of(batch, header).tolist(), strict=True):
        offset, size, crc = record[5:8]
        if crc32c(run.data) == crc:
            continue
        start = header.data_start + offset
        bad = bad_messages(run)
        if not bad:
            marks.append((start, start + size))
            continue
        column = start + BEFORE_CHECK_COLUMN_BYTES * run.count
        marks += _joined(
            (column + CHECK_COLUMN_BYTES * index, column + CHECK_COLUMN_BYTES * (index + 1)) for index in bad
        )
    return marks or [data]  # each run fits its checksum, but not the whole: mark all


def undecodable_in(
    batch: memoryview, header: Header, first: int, messages: int
) -> tuple[list[tuple[int, int]], str] | None:
    """Return the marks of the undecodable messages among *messages* from ordinal *first* on of a sound batch, and why
    the first of them is; None when all can be decoded.
    """
    marks, reason = list[tuple[int, int]](), ""
    for run, offset in zip(stored_runs(batch, header), runs_of(batch, header)["offset"].tolist(), strict=True):
        if run.ordinal >= first + messages or run.ordinal + run.count <= first:
            continue
        column = header.data_start + offset + BEFORE_CHECK_COLUMN_BYTES * run.count
        bad = [index for index in undecodable(run) if first <= run.ordinal + index < first + messages]
        marks += _joined(
            (column + CHECK_COLUMN_BYTES * index, column + CHECK_COLUMN_BYTES * (index + 1)) for index in bad
        )
        if bad and not reason:
            reason = why_undecodable(run, bad[0])
    return (marks, reason) if marks else None


def sound_ranges(batch: memoryview, header: Header, marks: Marks, run: int) -> list[tuple[int, int]]:
    """Return the sound messages of a run as ranges [start, stop) in the run; reads nothing but the run's record."""
    _, _, _, _, count, offset, size, *_ = RUN.unpack_from(batch, BATCH_HEADER_SIZE + RUN_SIZE * run)
    start = header.data_start + offset
    column = start + BEFORE_CHECK_COLUMN_BYTES * count
    column_end = column + CHECK_COLUMN_BYTES * count
    sound, last = list[tuple[int, int]](), 0
    for low, high in sorted(marks):
        if high <= start or start + size <= low:
            continue
        if low < column or column_end < high:
            return []
        sound.append((last, (low - column) // CHECK_COLUMN_BYTES))
        last = max(last, -(-(high - column) // CHECK_COLUMN_BYTES))
    return [(first, stop) for first, stop in [*sound, (last, count)] if first < stop]


def sound_pieces(batch: memoryview, marks: Marks, wanted: Iterable[tuple[int, int, int | None]]) -> list[Buffer]:
    """Return pieces of the sound messages among *wanted*: (run, start, stop) each, with stop None for the run's end.

    Reads no marked byte except those that name messages. Raises BadBatch when the header fails its checksum.
    """
    first_bad = min((low for low, _ in marks), default=len(batch))
    if first_bad < BATCH_HEADER_SIZE or first_bad < parse_header(batch).data_start:
        return []
    stored = StoredBatch(batch)
    buffers = list[Buffer]()
    for run, start, stop in wanted:
        for first, end in sound_ranges(batch, stored.header, marks, run):
            first, end = max(first, start), end if stop is None else min(end, stop)
            if first < end:
                buffers += stored.piece(run, first, end)[0]
    return buffers


def _joined(marks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the marks with adjacent ones joined."""
    joined = list[tuple[int, int]]()
    for start, end in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined

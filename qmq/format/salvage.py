"""What is left of a stored batch with bad bytes in it: which messages are bad, and pieces of those that are sound.

Bad bytes are named by **marks**: (start, end) in bytes of the batch. A bad message is named by the 4 bytes of its
checksum in its run's columns; a mark anywhere else in a run is the whole run's.
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
    """The marks of a batch whose header is right and whose data does not fit its checksum; at least one."""
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
    return marks or [data]  # where each part holds and the whole does not, nobody can say what is bad


def undecodable_in(
    batch: memoryview, header: Header, first: int, messages: int
) -> tuple[list[tuple[int, int]], str] | None:
    """The marks of those of *messages* from ordinal *first* on that nobody can decode, and why; of a sound batch."""
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
    """Which messages of a run are sound, as [start, stop) in the run. Looks at nothing but the run's record."""
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
    """Pieces of the sound ones of the messages that are wanted, (run, start, stop) each; stop None: to the run's end.

    Touches no marked byte but those that name messages. Raises BadBatch when the header does not fit its checksum.
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
    """The same bytes, neighbours as one."""
    joined = list[tuple[int, int]]()
    for start, end in marks:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined

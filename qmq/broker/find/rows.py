"""The rows of all partitions between two boundaries, a chunk at a time, in the order of the store or backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY_DTYPE
from qmq.net.protocol.selection import Boundary
from qmq.storage.store import Partition, Store

Rows = npt.NDArray[np.void]

#: The most numbers of a subject, one for each lane, that are looked up one by one in each partition: 30 to 120 us each.
#: A subject with order keys may have thousands.
MOST_LOOKUPS: Final = 64


class RowChunk(NamedTuple):
    """Rows of the consumer logs in the order of the store, each with its partition and its number there.

    Of each row the messages [start, stop) lie between the boundaries. Behind the chunk the search goes on at ``after``;
    it is done where that is None.
    """

    partitions: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    rows: Rows
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    after: Boundary | None
    #: The rows between the boundaries, with those that were not read.
    total: int = 0


class _Span(NamedTuple):
    """Rows [row, end) of a partition: of the first one without *skip* messages, of the last one *stop* (0: all)."""

    part: Partition
    row: int
    end: int
    skip: int
    stop: int


def read_chunk(store: Store, lower: Boundary, upper: Boundary, newest: bool, limit: int) -> RowChunk:
    """Return the first rows, or with *newest* the last ones, between two boundaries: at most *limit*, the same share of
    each partition.

    Raises StorageError, NotInMemory.
    """
    spans = [span for part in store.partitions if (span := _span_between(part, lower, upper)) is not None]
    taken = [_read_part(span, newest, max(1, limit // len(spans))) for span in spans]
    is_cut = [len(chunk.rows) < span.end - span.row for span, chunk in zip(spans, taken, strict=True)]
    if len(taken) == 1:
        found = taken[0]
    elif not taken:
        return _EMPTY
    else:
        found = _merged(taken, is_cut, newest)
    after = None
    if any(is_cut):
        at = 0 if newest else -1
        part, number = store.partitions[int(found.partitions[at])], int(found.numbers[at])
        after = boundary_at(part, number, 0 if newest else int(found.rows["count"][at]))
    return found._replace(after=after, total=sum(span.end - span.row for span in spans))


def read_subject(
    store: Store, numbers: list[int], lower: Boundary, upper: Boundary, newest: bool, limit: int
) -> RowChunk | None:
    """As ``read_chunk``, for the rows of one subject, with these numbers, through the order of rows by subject. None
    where reading all rows is no slower: there are few, or many numbers, or the last ones of many are wanted.

    Raises StorageError, NotInMemory.
    """
    if not numbers:
        return _EMPTY
    spans = [span for part in store.partitions if (span := _span_between(part, lower, upper)) is not None]
    lookups = len(spans) * len(numbers)
    if lookups > MOST_LOOKUPS or sum(span.end - span.row for span in spans) <= limit:
        return None
    found = [_rows_of_subject(span, numbers, max(1, limit // lookups)) for span in spans]
    taken, is_cut = [chunk for chunk, _ in found], [cut for _, cut in found]
    if newest and any(is_cut):
        return None
    merged = _merged(taken, is_cut, newest)
    if not any(is_cut):
        return merged._replace(total=len(merged.rows))
    last = store.partitions[int(merged.partitions[-1])]
    after = boundary_at(last, int(merged.numbers[-1]), int(merged.rows["count"][-1]))
    return merged._replace(after=after, total=sum(span.end - span.row for span in spans))


def _rows_of_subject(span: _Span, numbers: list[int], each: int) -> tuple[RowChunk, bool]:
    """Return the first rows of a span with these numbers, at most *each* of a number, and whether there may be more."""
    log = span.part.consumer_log
    found = [log.subject_rows_between(number, span.row, span.end, each) for number in numbers]
    places, rows = np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])
    order = np.argsort(places, kind="stable")
    ends = [int(one[-1]) for one, _ in found if len(one) == each]  # behind its end a number may have more
    if ends:
        order = order[: int(np.searchsorted(places[order], min(ends), side="right"))]
    return _chunk_of(span, places[order], rows[order]), bool(ends)


def chunk_of_batches(
    store: Store, positions: dict[int, npt.NDArray[np.int64]], lower: Boundary, upper: Boundary
) -> RowChunk:
    """Return the rows between two boundaries of batches at some positions of each partition. Raises StorageError,
    NotInMemory.
    """
    chunks = [
        _read_part(_Span(part, max(span.row, row), end, skip, stop), newest=False, limit=end - row)
        for number, wanted in positions.items()
        if (span := _span_between(part := store.partitions[number], lower, upper)) is not None
        for row, end, skip, stop in _batches_in(span, wanted)
    ]
    return _merged(chunks, [False] * len(chunks), newest=False) if chunks else _EMPTY


def _batches_in(span: _Span, positions: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rows [row, end) of each batch at some positions that lie in a span, with the skip and stop of these."""
    log = span.part.consumer_log
    for position in positions.tolist():
        row = log.row_at_position(position)
        if row >= log.visible_row:
            break
        entry = log.read_entry(row)
        row, end = max(row, span.row), min(row + entry[7], span.end)
        if entry[1] == position and row < end:
            yield row, end, span.skip if row == span.row else 0, span.stop if end == span.end else 0


def first_position(part: Partition, boundary: Boundary, *, is_end: bool = False) -> int:
    """Return the position of the batch in which a boundary lies, or which follows it: with *is_end* the one behind it.
    Raises StorageError, NotInMemory.
    """
    log = part.consumer_log
    if boundary.stored_at_us <= 0:
        return 0  # before all batches; the oldest one need not be looked at
    row, index = _row_of(part, boundary)
    if row >= log.visible_row:
        return part.message_log.end
    entry = log.read_entry(row)
    is_within = index > 0 or entry[5] > 0
    return entry[1] + (entry[10] if is_end and is_within else 0)


def rows_between(store: Store, lower: Boundary, upper: Boundary) -> int:
    """Return how many rows lie between two boundaries. Raises StorageError, NotInMemory."""
    spans = [_span_between(part, lower, upper) for part in store.partitions]
    return sum(span.end - span.row for span in spans if span is not None)


def boundary_at(part: Partition, number: int, index: int) -> Boundary:
    """Return the boundary before message *index* of a row. Raises StorageError, NotInMemory."""
    entry = part.consumer_log.read_entry(number)
    run = entry[5]
    before = int(_rows(part, number - run, number)["count"].sum(dtype=np.int64)) if run else 0
    return Boundary(entry[2], before + index)


def row_in_batch(part: Partition, row: int, entry: EntryRow, ordinal: int) -> tuple[int, int]:
    """Return the row that has message *ordinal* of a batch, and the message's index in it: the row behind the batch
    where it has fewer messages. *row* is the first one of the batch, *entry* what it says. Raises StorageError,
    NotInMemory.
    """
    if ordinal < entry[4]:
        return row, ordinal
    behind = min(row + entry[7], part.consumer_log.visible_row)
    ends = np.cumsum(_rows(part, row, behind)["count"], dtype=np.int64)
    run = int(np.searchsorted(ends, ordinal, side="right"))
    return row + run, ordinal - int(ends[run - 1]) if run < len(ends) else 0


def _span_between(part: Partition, lower: Boundary, upper: Boundary) -> _Span | None:
    """Return the readable rows between two boundaries; None where there are none."""
    row, skip = _row_of(part, lower)
    end, stop = _row_of(part, upper)
    end += stop > 0
    return _Span(part, row, end, skip, stop) if row < end else None


def _row_of(part: Partition, boundary: Boundary) -> tuple[int, int]:
    """Return the first row behind a boundary, and how many of its messages lie before that."""
    log = part.consumer_log
    row = log.row_at_time(boundary.stored_at_us)
    if not boundary.ordinal or row >= log.visible_row:
        return row, 0
    entry = log.read_entry(row)
    if entry[2] != boundary.stored_at_us:  # another partition has that batch, or it is gone
        return row, 0
    return row_in_batch(part, row, entry, boundary.ordinal)


def _read_part(span: _Span, newest: bool, limit: int) -> RowChunk:
    """Return the first or last rows of a span."""
    part = span.part
    first = max(span.row, span.end - limit) if newest else span.row
    last = span.end if newest else min(span.end, span.row + limit)
    return _chunk_of(span, np.arange(first, last), _rows(part, first, last))


def _chunk_of(span: _Span, numbers: npt.NDArray[np.int64], rows: Rows) -> RowChunk:
    """Return some rows of a span with their numbers, ascending."""
    count = len(rows)
    starts, stops = np.zeros(count, np.int64), rows["count"].astype(np.int64)
    if span.skip and count and numbers[0] == span.row:
        starts[0] = span.skip
    if span.stop and count and numbers[-1] == span.end - 1:
        stops[-1] = span.stop
    return RowChunk(np.full(count, span.part.number), numbers, rows, starts, stops, None)


def _rows(part: Partition, start: int, stop: int) -> Rows:
    """Return rows [start, stop) of a partition."""
    pieces = [part.consumer_log.rows(start, stop - start)]
    start += len(pieces[0])
    while start < stop:
        pieces.append(part.consumer_log.rows(start, stop - start))
        start += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _merged(chunks: list[RowChunk], is_cut: list[bool], newest: bool) -> RowChunk:
    """Return the rows of several partitions in the order of the store, as far as no partition lacks one between."""
    partitions, numbers, rows, starts, stops = (
        np.concatenate([chunk[column] for chunk in chunks]) for column in range(5)
    )
    stamps = rows["stored_at_us"]
    order = np.lexsort((rows["run"], stamps))
    edges = [chunk.rows["stored_at_us"][0 if newest else -1] for chunk, cut in zip(chunks, is_cut, strict=True) if cut]
    if edges:
        edge = max(edges) if newest else min(edges)
        order = order[stamps[order] >= edge] if newest else order[stamps[order] <= edge]
    return RowChunk(partitions[order], numbers[order], rows[order], starts[order], stops[order], None)


_NONE: Final = np.zeros(0, np.int64)
_EMPTY: Final = RowChunk(_NONE, _NONE, np.zeros(0, ENTRY_DTYPE), _NONE, _NONE, None)

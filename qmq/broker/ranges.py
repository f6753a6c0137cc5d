"""From what a pull got to ranges that name it for good, and back to rows of the consumer log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.carrying import Many, Rows, Some
from qmq.broker.held import MessageRange
from qmq.format.batch import EntryRow
from qmq.storage.store import Store

#: ``MessageRange.log`` from here on: a partition, and below a subject's number.
PARTITIONS: Final = 1 << 31
_FIRST_ROWS: Final = 8
_CHUNK_ROWS: Final = 8_192

Parts = list[Some | Many]


def ranges_of(parts: Parts, subject: int | None) -> list[MessageRange]:
    """Ranges of what was chosen, in its order; *subject* when all of it is of that one, going by its sequences."""
    if subject is not None:
        return _by_sequences(parts, subject)
    found = list[MessageRange]()
    expected = (-1, -1, -1)  # partition, position, run of what goes on from the last range
    for part in parts:
        if isinstance(part, Some):
            entry, total = part.entry, part.stop - part.start
            more = [MessageRange(PARTITIONS + part.partition, entry[1], entry[5], part.start, total, entry[1])]
            behind = _behind(part.partition, entry) if part.stop == entry[4] else (-1, -1, -1)
        else:
            more = list(_in_log(part.partition, part.rows))
            behind = _behind(part.partition, part.rows[-1].item())
        head = more[0]
        if expected == (head.log - PARTITIONS, head.first, head.run) and not head.skip:
            found[-1] = found[-1]._replace(total=found[-1].total + head.total, end=head.end)
            del more[0]
        found += more
        expected = behind
    return found


def _behind(partition: int, entry: EntryRow) -> tuple[int, int, int]:
    """Where the run behind that one lies."""
    position, run, runs, size = entry[1], entry[5], entry[7], entry[10]
    return (partition, position, run + 1) if run + 1 < runs else (partition, position + size, 0)


def _by_sequences(parts: Parts, subject: int) -> list[MessageRange]:
    found = list[MessageRange]()
    for part in parts:
        if isinstance(part, Some):
            _append(found, MessageRange(subject, part.entry[0] + part.start, 0, 0, part.stop - part.start))
            continue
        for messages in _in_subject(subject, part.rows):
            _append(found, messages)
    return found


def _append(found: list[MessageRange], messages: MessageRange) -> None:
    """Put it behind the others: in one with the last where its sequences go on from that."""
    if found and found[-1].first + found[-1].total == messages.first:
        found[-1] = found[-1]._replace(total=found[-1].total + messages.total)
    else:
        found.append(messages)


def _in_log(partition: int, rows: Rows) -> Iterator[MessageRange]:
    """Rows that follow each other in the log are one range."""
    heads = [0, *(np.flatnonzero(~_following(rows)) + 1).tolist(), len(rows)]
    counts = rows["count"].astype(np.int64)
    for head, tail in pairwise(heads):
        first, run, end = int(rows["position"][head]), int(rows["run"][head]), int(rows["position"][tail - 1])
        yield MessageRange(PARTITIONS + partition, first, run, 0, int(counts[head:tail].sum()), end)


def _following(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row but the first comes right behind the one before in the log: bool[n - 1]."""
    positions, runs = rows["position"], rows["run"].astype(np.int64)
    same: npt.NDArray[np.bool_] = (positions[1:] == positions[:-1]) & (runs[1:] == runs[:-1] + 1)
    last = runs[:-1] + 1 == rows["runs"][:-1]
    adjacent: npt.NDArray[np.bool_] = last & (runs[1:] == 0)
    adjacent &= positions[1:] == positions[:-1] + rows["batch_size"][:-1]
    return same | adjacent


def _in_subject(subject: int, rows: Rows) -> Iterator[MessageRange]:
    firsts, counts = rows["first_sequence"], rows["count"].astype(np.int64)
    heads = [0, *(np.flatnonzero(firsts[1:] != firsts[:-1] + rows["count"][:-1]) + 1).tolist(), len(rows)]
    for head, tail in pairwise(heads):
        yield MessageRange(subject, int(firsts[head]), 0, 0, int(counts[head:tail].sum()))


# ---------------------------------------------------------------------------------------------------------------------
# Back


def parts_of(store: Store, messages: MessageRange) -> Parts:
    """What the range names, as far as it is still there. Raises NotAtHand when rows have to be read first, and
    StorageError.
    """
    if messages.log < PARTITIONS:
        return list(_by_sequence(store, messages))
    return list(_by_place(store, messages))


def _by_sequence(store: Store, messages: MessageRange) -> Iterator[Some | Many]:
    start = messages.first + messages.skip
    end, chunk = start + messages.total, _FIRST_ROWS
    while start < end and (found := store.subject_rows(messages.log, start, chunk)):
        for partition, rows in found:
            firsts = rows["first_sequence"].astype(np.int64)
            inside = int(np.searchsorted(firsts, end, "left"))
            if not inside:
                return
            yield from _between(partition, rows[:inside], start - int(firsts[0]), end - int(firsts[inside - 1]))
            start = int(firsts[inside - 1]) + int(rows["count"][inside - 1])
        chunk = min(chunk * 16, _CHUNK_ROWS)


def _by_place(store: Store, messages: MessageRange) -> Iterator[Some | Many]:
    """Counted from the range's beginning; where rows are missing, what is there up to its end."""
    partition = messages.log - PARTITIONS
    row = store.row_at_position(partition, messages.first)
    skip, left, chunk = messages.skip, messages.total, _FIRST_ROWS
    begun = False
    while left and len(rows := store.rows(partition, row, chunk)):
        row += len(rows)
        chunk = min(chunk * 16, _CHUNK_ROWS)
        rows = rows[: int(np.searchsorted(rows["position"], messages.end, "right"))]
        if not begun and len(rows):
            begun = True
            if int(rows["position"][0]) == messages.first:
                rows = rows[messages.run :]
        if not len(rows):
            return
        ends = np.cumsum(rows["count"].astype(np.int64))
        first = int(np.searchsorted(ends, skip, "right"))
        if first == len(rows):
            skip -= int(ends[-1])
            continue
        stop = min(int(ends[-1]), skip + left)
        last = int(np.searchsorted(ends, stop, "left"))
        before = int(ends[first - 1]) if first else 0
        before_last = int(ends[last - 1]) if last else 0
        yield from _between(partition, rows[first : last + 1], skip - before, stop - before_last)
        left -= stop - skip
        skip = 0


def _between(partition: int, rows: Rows, start: int, stop: int) -> Iterator[Some | Many]:
    """From message *start* of the first row to *stop* of the last."""
    start, whole = max(start, 0), int(rows["count"][-1])
    stop = min(stop, whole)
    if len(rows) == 1:
        yield Some(partition, rows[0].item(), start, stop)
        return
    if start:
        yield Some(partition, rows[0].item(), start, int(rows["count"][0]))
        rows = rows[1:]
    tail = len(rows) - (stop < whole)
    if tail:
        yield Many(partition, rows[:tail])
    if stop < whole:
        yield Some(partition, rows[-1].item(), 0, stop)

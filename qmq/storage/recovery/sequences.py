"""Merge rows of several partitions in one order, and replay the sequences of subjects after a start, from the rows
that the checkpoint does not cover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.storage.consumer_log.partition_index import ConsumerLog
from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.meta.gaps import Gaps
from qmq.storage.meta.subjects import SubjectTable
from qmq.storage.types import Hole

_CHUNK_ROWS: Final = 65_536
_NO_LIMIT: Final = np.uint64(2**64 - 1)

Numbers = npt.NDArray[np.uint32]
Sequences = npt.NDArray[np.uint64]


def rows_in_order(logs: list[ConsumerLog], starts: list[int]) -> Iterator[Rows]:
    """Yield the rows of several partitions from row *starts* on, in the order in which they were stored, in pieces."""
    rows_of = [log.rows(row, _CHUNK_ROWS) for log, row in zip(logs, starts, strict=True)]
    if len(logs) == 1:
        while len(rows := logs[0].rows(starts[0], _CHUNK_ROWS)):
            yield rows
            starts = [starts[0] + len(rows)]
        return
    row_of = list(starts)
    while any(len(rows) for rows in rows_of):
        limit = _NO_LIMIT
        for log, row, rows in zip(logs, row_of, rows_of, strict=True):
            if len(rows) and row + len(rows) < log.visible_row:
                limit = min(limit, rows["stored_at_us"][-1])
        heads = [rows[: int(rows["stored_at_us"].searchsorted(limit, "right"))] for rows in rows_of]
        merged = np.concatenate(heads)
        yield merged[np.argsort(merged["stored_at_us"], kind="stable")]
        row_of = [row + len(head) for row, head in zip(row_of, heads, strict=True)]
        rows_of = [log.rows(row, _CHUNK_ROWS) for log, row in zip(logs, row_of, strict=True)]


@dataclass(slots=True)
class CountedSequences:
    """Sequences by subject number: the first, the next one, and the gaps between."""

    count: int
    firsts: Sequences
    ends: Sequences
    gaps: Gaps


class SequenceReplay:
    """Updates ends, firsts and gaps of a table from rows, which come in the order in which they were stored."""

    def __init__(self, table: SubjectTable | CountedSequences, known: int) -> None:
        """The table has the ends of the subjects up to number *known*; the others begin with their first row."""
        self._table = table
        self._seen = np.zeros(table.count, np.bool_)
        self._seen[:known] = True
        self._gaps: list[tuple[Numbers, Sequences, Sequences]] = []

    def add(self, rows: Rows) -> None:
        """Add rows, ENTRY_DTYPE[n]: sequences that none of them has, up to the last, become gaps.

        Rows before the ends are of a partition that the checkpoint could not claim: it claims gaps for them.
        """
        late = self._seen[rows["subject"]] & (rows["first_sequence"] < self._table.ends[rows["subject"]])
        if late.any():
            there = rows[late]
            firsts = there["first_sequence"]
            self._table.gaps.remove(there["subject"], firsts, firsts + there["count"])
            rows = rows[~late]
            if not len(rows):
                return
        order = np.argsort(rows["subject"], kind="stable")
        subjects, starts = rows["subject"][order], rows["first_sequence"][order]
        ends = starts + rows["count"][order]
        head = np.ones(len(rows), np.bool_)
        head[1:] = subjects[1:] != subjects[:-1]
        heads = np.flatnonzero(head)
        before = np.empty(len(rows), np.uint64)
        before[1:] = ends[:-1]
        first_rows = subjects[heads]
        before[heads] = self._table.ends[first_rows]
        new = heads[~self._seen[first_rows]]
        before[new] = starts[new]
        self._table.firsts[subjects[new]] = starts[new]
        self._seen[first_rows] = True
        behind = starts > before
        if behind.any():
            self._gaps.append((subjects[behind], before[behind], starts[behind]))
        tails = np.append(heads[1:], len(rows)) - 1
        self._table.ends[subjects[tails]] = np.maximum(ends[tails], before[heads])

    def add_lost(self, subject: int, start: int, end: int) -> None:
        """Add sequences that a damaged batch had, so that they are not used again. Call it after all of ``add``."""
        known = int(self._table.ends[subject]) if self._seen[subject] else start
        if not self._seen[subject]:
            self._table.firsts[subject] = end
            self._seen[subject] = True
        elif end > known:
            self._gaps.append(_one_gap(subject, known, end))
        self._table.ends[subject] = max(end, known)

    def finish(self, raise_by: int) -> None:
        """Put the gaps into the table, and raise the next sequence of every subject."""
        table, count = self._table, self._table.count
        if raise_by and count:
            ends = table.ends[:count].copy()
            table.ends[:count] += np.uint64(raise_by)
            self._gaps.append((np.arange(count, dtype=np.uint32), ends, table.ends[:count].copy()))
        if self._gaps:
            subjects, starts, ends = (np.concatenate(column) for column in zip(*self._gaps, strict=True))
            table.gaps.add(subjects, starts, ends)


def missing_sequences(table: SubjectTable, logs: list[ConsumerLog], holes: list[list[Hole]]) -> Gaps:
    """Return the sequences, from the first to the last, that no row of any partition has, or only one in a hole."""
    count = table.count
    firsts = table.firsts[:count]
    found = CountedSequences(count, firsts, firsts.copy(), Gaps())
    replay = SequenceReplay(found, count)
    for rows in rows_in_order(logs, [log.first_row for log in logs]):
        replay.add(rows)
    replay.finish(0)
    missing = found.gaps
    missing.add(np.arange(count), found.ends, table.ends[:count])
    for log, lost in zip(logs, holes, strict=True):
        for hole in lost:
            for rows in log.rows_between(hole.start, hole.end):
                missing.add(rows["subject"], rows["first_sequence"], rows["first_sequence"] + rows["count"])
    return missing


def _one_gap(subject: int, start: int, end: int) -> tuple[Numbers, Sequences, Sequences]:
    return np.array([subject], np.uint32), np.array([start], np.uint64), np.array([end], np.uint64)


def merge_by_sequence(found: list[tuple[int, Rows]], limit: int) -> list[tuple[int, Rows]]:
    """Merge rows of several partitions by sequence; consecutive rows of one partition make a piece."""
    whole = [rows["first_sequence"][-1] for _, rows in found if len(rows) >= limit]
    merged = np.concatenate([rows for _, rows in found])
    partitions = np.repeat([number for number, _ in found], [len(rows) for _, rows in found])
    order = np.argsort(merged["first_sequence"], kind="stable")
    if whole:  # beyond the last row of a part that was cut short, rows of it may be missing
        order = order[merged["first_sequence"][order] <= min(whole)]
    merged, partitions = merged[order[:limit]], partitions[order[:limit]]
    borders = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(merged)]
    return [(int(partitions[start]), merged[start:end]) for start, end in pairwise(borders)]

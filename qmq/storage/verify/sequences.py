"""Whether the batches of all partitions agree: stamps and sequences, in the order in which they were stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.storage.consumer_log.subject_order import Rows
from qmq.storage.meta.gaps import Gaps
from qmq.storage.verify.report import VerifyReport
from qmq.storage.verify.segments import StoredBatches

_KEEP: Final = "keep a copy of the directory and report it: this must not happen"
_GAP: Final = "nothing: the power was lost since the last checkpoint; the next one has the gap"
_ZERO: Final = np.uint64(0)
_NONE: Final = np.uint64(2**64 - 1)

Sequences = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.intp]


class SequenceCheck:
    """Takes every batch of the store by stamp; 24 bytes a subject."""

    def __init__(self, report: VerifyReport, names: list[str], gaps: Gaps, is_whole: Callable[[], bool]) -> None:
        """*names* are the subjects by number; the list grows with new ones. When *is_whole* returns False, batches may
        be missing, and so may sequences.
        """
        self._report = report
        self._names = names
        self._gaps = gaps
        self._last_us = 0
        self._sources: list[StoredBatches] = []
        self._is_whole = is_whole
        self.last_claimed_us = 0
        #: By subject: the next sequence, the next in claimed batches alone, and the first one (none: all bits set).
        self.ends: Sequences = np.zeros(1_024, np.uint64)
        self.claimed_ends: Sequences = np.zeros(1_024, np.uint64)
        self.firsts: Sequences = np.full(1_024, _NONE)

    def add(self, stored: list[StoredBatches]) -> None:
        """Check the next batches: pieces of partitions that were stored before all that follows."""
        rows = stored[0].rows if len(stored) == 1 else np.concatenate([piece.rows for piece in stored])
        lengths = [len(piece.rows) for piece in stored]
        self._sources = stored
        source = np.repeat(np.arange(len(stored)), lengths)
        claimed = np.repeat([piece.claimed for piece in stored], lengths)
        if len(stored) > 1:
            keys = np.concatenate([np.maximum.accumulate(piece.rows["stored_at_us"]) for piece in stored])
            order = np.argsort(keys, kind="stable")
            rows, source, claimed = rows[order], source[order], claimed[order]
        while len(self._names) > len(self.ends):
            self.ends = np.concatenate((self.ends, np.zeros_like(self.ends)))
            self.claimed_ends = np.concatenate((self.claimed_ends, np.zeros_like(self.claimed_ends)))
            self.firsts = np.concatenate((self.firsts, np.full_like(self.firsts, _NONE)))
        self._check_stamps(rows, source)
        self._check_sequences(rows, source)
        self._take_claimed(rows[claimed])

    def _check_stamps(self, rows: Rows, source: Indexes) -> None:
        heads = np.flatnonzero(rows["run"] == 0)
        stamps = rows["stored_at_us"][heads]
        highest = np.maximum.accumulate(np.concatenate((np.array([self._last_us], np.uint64), stamps)))
        for index in np.flatnonzero(stamps <= highest[:-1]).tolist():
            what = (
                f"the batch's stamp {stamps[index]} is not above {highest[index]}, that of the batch stored before it"
            )
            self._report_row(rows, source, int(heads[index]), what)
        self._last_us = int(highest[-1])

    def _check_sequences(self, rows: Rows, source: Indexes) -> None:
        order = np.argsort(rows["subject"], kind="stable")
        subjects, starts = rows["subject"][order], rows["first_sequence"][order]
        ends = starts + rows["count"][order]
        head = np.ones(len(rows), np.bool_)
        head[1:] = subjects[1:] != subjects[:-1]
        heads = np.flatnonzero(head)
        before = np.empty(len(rows), np.uint64)
        before[1:] = ends[:-1]
        before[heads] = self.ends[subjects[heads]]
        new = heads[self.firsts[subjects[heads]] == _NONE]
        before[new] = self.firsts[subjects[new]] = starts[new]
        for index in np.flatnonzero(before != starts).tolist():
            jump = int(subjects[index]), int(before[index]), int(starts[index])
            self._check_jump(rows, source, int(order[index]), *jump)
        tails = np.append(heads[1:], len(rows)) - 1
        self.ends[subjects[tails]] = ends[tails]

    def _take_claimed(self, rows: Rows) -> None:
        if len(rows):
            order = np.argsort(rows["subject"], kind="stable")
            subjects = rows["subject"][order]
            tails = np.append(np.flatnonzero(subjects[1:] != subjects[:-1]), len(rows) - 1)
            last = rows[order[tails]]
            self.claimed_ends[subjects[tails]] = last["first_sequence"] + last["count"]
            self.last_claimed_us = max(self.last_claimed_us, int(rows["stored_at_us"].max()))

    def _check_jump(self, rows: Rows, source: Indexes, row: int, subject: int, expected: int, first: int) -> None:
        name = self._names[subject]
        if first < expected:
            self._report_row(rows, source, row, f"gives sequence {first} of {name} twice: its next one is {expected}")
        elif self._gaps.missing(subject, expected, first) != first - expected and self._is_whole():
            what = f"sequences {expected} to {first} of {name} are missing, and no gap is known"
            self._report_row(rows, source, row, what, _GAP)

    def _report_row(self, rows: Rows, source: Indexes, row: int, what: str, behind: str = _KEEP) -> None:
        """Report a row; *behind* is the advice for one behind the checkpoint."""
        piece = self._sources[int(source[row])]
        advice = _KEEP if piece.claimed else behind
        self._report.add(piece.claimed, piece.file, int(rows["position"][row]) - piece.base, what, advice)

    def check_claims(self, file: Path, ends: Sequences, firsts: Sequences) -> None:
        """Compare the checkpoint's sequences of every subject with those in batches that it claims."""
        count = len(ends)
        claimed, first_met = _padded(self.claimed_ends, count, _ZERO), _padded(self.firsts, count, _NONE)
        behind = np.flatnonzero(claimed > ends)
        self._report_subjects(file, behind, "the checkpoint's next sequence is already in its log", ends)
        late = np.flatnonzero((claimed > 0) & (firsts > first_met))
        self._report_subjects(
            file, late, "the checkpoint's first sequence is behind the first that its log has", firsts
        )
        if self._is_whole():
            start = np.maximum(claimed, firsts)
            ahead = [n for n in np.flatnonzero(ends > start).tolist() if not self._is_gap(n, int(start[n]), ends)]
            self._report_subjects(
                file, ahead, "the checkpoint's next sequence is ahead of its log, and no gap is known", ends
            )

    def _is_gap(self, subject: int, start: int, ends: Sequences) -> bool:
        return self._gaps.missing(subject, start, int(ends[subject])) == int(ends[subject]) - start

    def _report_subjects(self, file: Path, subjects: Iterable[int], what: str, values: Sequences) -> None:
        for subject in subjects:
            self._report.fault(file, None, f"{what}: {int(values[subject])} of {self._names[int(subject)]}", _KEEP)


def in_stored_order(partitions: list[Iterator[StoredBatches]]) -> Iterator[list[StoredBatches]]:
    """Yield the batches of several partitions in the order of their stamps; within one list they are unsorted."""
    heads = [next(partition, None) for partition in partitions]
    while any(head is not None for head in heads):
        limit = min(int(head.rows["stored_at_us"].max()) for head in heads if head is not None)
        found = []
        for number, head in enumerate(heads):
            if head is None:
                continue
            highest = np.maximum.accumulate(head.rows["stored_at_us"])
            count = int(highest.searchsorted(np.uint64(limit), "right"))
            if count:
                found.append(head._replace(rows=head.rows[:count]))
            rest = head._replace(rows=head.rows[count:])
            heads[number] = rest if len(rest.rows) else next(partitions[number], None)
        yield found


def _padded(values: Sequences, count: int, value: np.uint64) -> Sequences:
    return np.concatenate((values[:count], np.full(max(0, count - len(values)), value)))

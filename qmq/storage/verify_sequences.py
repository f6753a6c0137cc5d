"""Whether the batches of all partitions fit each other: stamps and sequences, in the order they were stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.storage.findings import Report
from qmq.storage.gaps import Gaps
from qmq.storage.order import Rows
from qmq.storage.verify_log import Stored

_KEEP: Final = "keep a copy of the directory and report it: this must not happen"
_ZERO: Final = np.uint64(0)
_NONE: Final = np.uint64(2**64 - 1)

Sequences = npt.NDArray[np.uint64]


class SequenceCheck:
    """Takes every batch of the store by stamp; 24 bytes a subject."""

    def __init__(self, report: Report, names: list[str], gaps: Gaps, is_whole: Callable[[], bool]) -> None:
        """*names* are the subjects by number, and grow as new ones are met. Once *is_whole* says that batches may be
        missing, so may sequences.
        """
        self._report = report
        self._names = names
        self._gaps = gaps
        self._last_us = 0
        self._is_whole = is_whole
        self.last_claimed_us = 0
        #: By subject: the next sequence, that in claimed batches alone, and the first one met (none: all bits set).
        self.ends: Sequences = np.zeros(1_024, np.uint64)
        self.claimed_ends: Sequences = np.zeros(1_024, np.uint64)
        self.firsts: Sequences = np.full(1_024, _NONE)

    def add(self, batch: Stored) -> None:
        """The next batch."""
        self._check_stamp(batch)
        while len(self._names) > len(self.ends):
            self.ends = np.concatenate((self.ends, np.zeros_like(self.ends)))
            self.claimed_ends = np.concatenate((self.claimed_ends, np.zeros_like(self.claimed_ends)))
            self.firsts = np.concatenate((self.firsts, np.full_like(self.firsts, _NONE)))
        if isinstance(batch.rows, tuple):
            first, _, _, subject, count, *_ = batch.rows
            if self.firsts[subject] == _NONE:
                self.firsts[subject] = first
            elif first != self.ends[subject]:
                self._check_jump(batch, subject, int(self.ends[subject]), first)
            self.ends[subject] = first + count
            if batch.claimed:
                self.claimed_ends[subject] = first + count
        else:
            self._add_rows(batch, batch.rows)

    def _check_stamp(self, batch: Stored) -> None:
        stamp = batch.header.stored_at_us
        if stamp <= self._last_us:
            what = f"the batch's stamp {stamp} is not above {self._last_us}, that of the batch stored before it"
            self._report.tell(batch.claimed, batch.file, batch.offset, what, _KEEP)
        self._last_us = max(self._last_us, stamp)
        if batch.claimed:
            self.last_claimed_us = self._last_us

    def _add_rows(self, batch: Stored, rows: Rows) -> None:
        subjects, firsts = rows["subject"], rows["first_sequence"]
        ends = firsts + rows["count"]
        new = self.firsts[subjects] == _NONE
        self.firsts[subjects[new]] = firsts[new]
        jumps = ~new & (self.ends[subjects] != firsts)
        for index in np.flatnonzero(jumps).tolist():
            subject = int(subjects[index])
            self._check_jump(batch, subject, int(self.ends[subject]), int(firsts[index]))
        self.ends[subjects] = ends
        if batch.claimed:
            self.claimed_ends[subjects] = ends

    def _check_jump(self, batch: Stored, subject: int, expected: int, first: int) -> None:
        name = self._names[subject]
        if first < expected:
            what = f"gives sequence {first} of {name} again, which stood at {expected}"
            self._report.tell(batch.claimed, batch.file, batch.offset, what, _KEEP)
        elif self._gaps.missing(subject, expected, first) != first - expected and self._is_whole():
            what = f"sequences {expected} to {first} of {name} are missing, and no gap is known"
            self._report.tell(batch.claimed, batch.file, batch.offset, what, _KEEP)

    def check_claims(self, file: Path, ends: Sequences, firsts: Sequences) -> None:
        """Hold what the checkpoint says of every subject against what was met in batches that it claims."""
        count = len(ends)
        claimed, first_met = _padded(self.claimed_ends, count, _ZERO), _padded(self.firsts, count, _NONE)
        behind = np.flatnonzero(claimed > ends)
        self._tell(file, behind, "the checkpoint's next sequence is one that its log has given already", ends)
        late = np.flatnonzero((claimed > 0) & (firsts > first_met))
        self._tell(file, late, "the checkpoint's first sequence is behind the first that its log has", firsts)
        if self._is_whole():
            start = np.maximum(claimed, firsts)
            ahead = [n for n in np.flatnonzero(ends > start).tolist() if not self._is_gap(n, int(start[n]), ends)]
            self._tell(file, ahead, "the checkpoint's next sequence is ahead of its log, and no gap is known", ends)

    def _is_gap(self, subject: int, start: int, ends: Sequences) -> bool:
        return self._gaps.missing(subject, start, int(ends[subject])) == int(ends[subject]) - start

    def _tell(self, file: Path, subjects: Iterable[int], what: str, values: Sequences) -> None:
        for subject in subjects:
            self._report.fault(file, None, f"{what}: {int(values[subject])} of {self._names[int(subject)]}", _KEEP)


def _padded(values: Sequences, count: int, value: np.uint64) -> Sequences:
    return np.concatenate((values[:count], np.full(max(0, count - len(values)), value)))

"""Gaps: sequences that no message has, because of jumps after power loss or holes of the message log.

A gap is (subject, start, end): the sequences from start up to, not including, end. Three columns sorted by subject and
start store the gaps, 20 bytes each; gaps of a subject that touch are one gap, so there are no more gaps than messages.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes

_COUNT: Final = struct.Struct("<I")
_GAP_BYTES: Final = 20


class Gaps:
    """The gaps of all subjects. ``add`` sorts (often only after a power loss); ``missing`` is a binary search."""

    __slots__ = ("subjects", "starts", "ends")

    def __init__(self) -> None:
        self.subjects: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self.starts: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self.ends: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self.subjects)

    def add(self, subjects: npt.ArrayLike, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Add gaps: three columns of one length, or three ints. Known or empty gaps change nothing."""
        new = [np.atleast_1d(np.asarray(column, np.uint64)) for column in (subjects, starts, ends)]
        kept = new[2] > new[1]
        self.subjects = np.concatenate((self.subjects, new[0][kept].astype(np.uint32)))
        self.starts = np.concatenate((self.starts, new[1][kept]))
        self.ends = np.concatenate((self.ends, new[2][kept]))
        order = np.lexsort((self.starts, self.subjects))
        self.subjects, self.starts, self.ends = self.subjects[order], self.starts[order], self.ends[order]
        self._merge()

    def remove(self, subjects: npt.ArrayLike, starts: npt.ArrayLike, ends: npt.ArrayLike) -> None:
        """Remove these sequences from the gaps: intervals as in ``add``, which may lie in a gap, partly, or in none."""
        gone = [np.atleast_1d(np.asarray(column, np.uint64)) for column in (subjects, starts, ends)]
        of = np.concatenate((self.subjects, self.subjects, gone[0], gone[0])).astype(np.uint32)
        borders = np.concatenate((self.starts, self.ends, gone[1], gone[2]))
        missing = np.repeat(np.array([1, -1, 0, 0]), [len(self), len(self), len(gone[1]), len(gone[2])])
        there = np.repeat(np.array([0, 0, 1, -1]), [len(self), len(self), len(gone[1]), len(gone[2])])
        order = np.lexsort((borders, of))
        of, borders = of[order], borders[order]
        # All intervals of a subject have ended at its last border, so none reaches into the next subject.
        kept = np.flatnonzero((np.cumsum(missing[order]) > 0) & (np.cumsum(there[order]) == 0))
        self.subjects, self.starts, self.ends = self.subjects[:0], self.starts[:0], self.ends[:0]
        self.add(of[kept], borders[kept], borders[kept + 1])

    def advance(self, firsts: npt.NDArray[np.uint64]) -> None:
        """Move the first sequence of each subject (by number) behind a gap that contains it; remove the gaps before
        the first sequences.
        """
        kept = firsts[self.subjects]
        inside = (self.starts <= kept) & (kept < self.ends)
        firsts[self.subjects[inside]] = self.ends[inside]
        left = self.ends > firsts[self.subjects]
        self.subjects, self.starts, self.ends = self.subjects[left], self.starts[left], self.ends[left]

    def _merge(self) -> None:
        """Join gaps that overlap or touch; a gap within an earlier, longer one takes another round."""
        while True:
            touches = (self.subjects[1:] == self.subjects[:-1]) & (self.starts[1:] <= self.ends[:-1])
            if not touches.any():
                return
            heads = np.flatnonzero(np.concatenate(([True], ~touches)))
            self.ends = np.maximum.reduceat(self.ends, heads)
            self.subjects, self.starts = self.subjects[heads], self.starts[heads]

    def missing(self, subject: int, first: int, end: int) -> int:
        """Return how many of the sequences [first, end) of a subject lie in gaps."""
        if not len(self.subjects):
            return 0
        key: Any = np.uint32(subject)  # a plain int would make numpy copy the column
        low, high = int(self.subjects.searchsorted(key)), int(self.subjects.searchsorted(key, "right"))
        return sum(
            max(0, min(gap_end, end) - max(start, first))
            for start, gap_end in zip(self.starts[low:high].tolist(), self.ends[low:high].tolist(), strict=True)
        )

    def between(self, subject: int, first: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of the sequences [first, end) of a subject that lie in no gap."""
        found, key = list[tuple[int, int]](), np.uint32(subject)
        low, high = int(self.subjects.searchsorted(key)), int(self.subjects.searchsorted(key, "right"))
        for start, gap_end in zip(self.starts[low:high].tolist(), self.ends[low:high].tolist(), strict=True):
            if first < min(start, end):
                found.append((first, min(start, end)))
            first = max(first, gap_end)
        if first < end:
            found.append((first, end))
        return found

    def pack(self) -> bytes:
        """Return the bytes for a checkpoint: count u32 | subjects u32[n] | starts u64[n] | ends u64[n]."""
        columns = (self.subjects.astype("<u4"), self.starts.astype("<u8"), self.ends.astype("<u8"))
        return b"".join((_COUNT.pack(len(self)), *(column.tobytes() for column in columns)))

    @classmethod
    def unpack(cls, data: bytes) -> Gaps:
        """Return the gaps that ``pack`` packed. Raises BadBytes when the sizes do not fit."""
        count = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else -1
        if len(data) != _COUNT.size + _GAP_BYTES * count:
            raise BadBytes(f"{len(data)} bytes cannot hold {count} gaps; take the checkpoint before this one")
        gaps = cls()
        gaps.subjects = np.frombuffer(data, "<u4", count, 4).astype(np.uint32)
        gaps.starts = np.frombuffer(data, "<u8", count, 4 + 4 * count).astype(np.uint64)
        gaps.ends = np.frombuffer(data, "<u8", count, 4 + 12 * count).astype(np.uint64)
        return gaps

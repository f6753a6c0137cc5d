"""The bytes of an open message log that are known to be bad: they are served no more."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.errors import BadBytes

#: Ranges that one partition remembers; beyond that it forgets the oldest, which is then found again.
RANGES_KEPT: Final = 4_096


Positions = npt.NDArray[np.int64]


class KnownBad(BadBytes):
    """The bytes were found to be bad before, and reported then."""

    code = "known_bad"


class UnreadableRanges:
    """Ranges of positions; they may overlap."""

    __slots__ = ("_columns", "_by_age", "_ranges", "_size")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (start, end), ascending
        self._by_age: deque[tuple[int, int]] = deque()  # the same, oldest first
        self._size = 0  # of the largest range
        self._columns: tuple[Positions, Positions] | None = None  # starts and ends, each ascending

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, position: int, size: int) -> bool:
        """Add *size* bytes from *position* on; return False when all of them are known already."""
        new = (position, position + size)
        if size <= 0 or any(start <= position and new[1] <= end for start, end in self._near(*new)):
            return False
        self._ranges.insert(bisect_left(self._ranges, new), new)
        self._by_age.append(new)
        self._columns = None
        self._size = max(self._size, size)
        if len(self._ranges) > RANGES_KEPT:
            oldest = self._by_age.popleft()
            del self._ranges[bisect_left(self._ranges, oldest)]
        return True

    def first_in(self, position: int, size: int) -> tuple[int, int] | None:
        """Return the first range, as (start, end), with a byte in the *size* bytes from *position* on."""
        near = self._near(position, position + size)
        return next(((start, end) for start, end in near if position < end), None)

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges, as (start, end), with bytes in [start, end), ascending."""
        return [bad for bad in self._near(start, end) if start < bad[1] and bad[0] < end]

    def count_in(self, starts: Positions, ends: Positions) -> Positions:
        """Return how many of the ranges have bytes in each [start, end): i64[n]."""
        if self._columns is None:
            columns = np.array(self._ranges, np.int64).reshape(-1, 2)
            self._columns = columns[:, 0], np.sort(columns[:, 1])
        firsts, lasts = self._columns
        return np.searchsorted(firsts, ends, "left") - np.searchsorted(lasts, starts, "right")

    def _near(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges that may have a byte in [start, end)."""
        low = bisect_left(self._ranges, (start - self._size, 0))
        return self._ranges[low : bisect_right(self._ranges, (end, 0))]

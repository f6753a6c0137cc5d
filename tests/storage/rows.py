"""Made-up rows: what the runs of random batches would be in a consumer log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qmq.format.layout import ENTRY_DTYPE, SEGMENT_HEADER_SIZE

STORE = b"store1"
Row = tuple[int, int, int, int, int, int, int, int, int, int, int]


class Feed:
    """Makes the rows of one batch after another, as a partition that is sent to would."""

    def __init__(self, base: int = 1_000) -> None:
        self.position = base + SEGMENT_HEADER_SIZE
        self.bases = [base]
        self.time_us = 5_000_000
        self.ends: dict[int, int] = {}
        self.batches: list[list[Row]] = []
        self.segment_of: list[int] = []

    def batch(self, runs: Sequence[tuple[int, int]], stride: int = 1) -> list[Row]:
        """A batch with (subject, messages) runs. Of odd subjects, *stride* sequences between go to other partitions."""
        size = 96 + sum(32 + 40 * count for _, count in runs)
        self.time_us += 7
        rows: list[Row] = []
        for number, (subject, count) in enumerate(runs):
            first = self.ends.get(subject, 0) + stride * (subject % 2)
            self.ends[subject] = first + count
            rows.append((first, self.position, self.time_us, subject, count, number, 0, len(runs), 0, 40 * count, size))
        self.position += size
        self.batches.append(rows)
        self.segment_of.append(len(self.bases) - 1)
        return rows

    def roll(self, gap: int = 0) -> int:
        """Begin the next segment; returns its base."""
        self.position += gap
        self.bases.append(self.position)
        self.position += SEGMENT_HEADER_SIZE
        return self.bases[-1]

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        return [row for batch in self.batches for row in batch]

    def segments(self) -> list[tuple[int, int, bool]]:
        """(base, end, sealed) as the message log would say."""
        result = []
        for number, base in enumerate(self.bases):
            mine = [b for b, s in zip(self.batches, self.segment_of, strict=True) if s == number]
            end = mine[-1][0][1] + mine[-1][0][10] if mine else base + SEGMENT_HEADER_SIZE
            result.append((base, end, number < len(self.bases) - 1))
        return result


def as_array(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """ENTRY_DTYPE[n]."""
    return np.array(list(rows), ENTRY_DTYPE)

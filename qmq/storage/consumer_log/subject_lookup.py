"""Finding the rows of one subject in many ranges of rows.

Ranges (sealed segments, and blocks of segments that are being written) stand on shelves of 64, in row order. A shelf
keeps one u64 a subject, with a bit for each of its ranges that has rows of it. So a lookup costs one look a shelf, and
a binary search over the ranges that have the subject; ranges without the subject and other subjects cost nothing. The
words of a shelf are made in its first lookups, a range at a time: 0.5 ms a range of 100,000 subjects, and 8 bytes of
memory a subject and shelf. Ranges that are not marked yet are asked one by one, 3 to 15 us each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.format.layout import ENTRY_SIZE
from qmq.storage.consumer_log.sealed_segment import SEQUENCES
from qmq.storage.consumer_log.subject_order import RowRange, Rows

SHELF_RANGES: Final = 64
#: After so many questions to ranges that are not marked one of them is, which takes about as long: 1 or 2 ms.
ASKED_A_MARK: Final = 32
#: Subjects of a range that are marked at once.
_MARKED_AT_ONCE: Final = 16_384
#: Microseconds that the question to a range takes which is not marked: most of it is whether its rows are in memory.
_ASK_US: Final = 60
#: Rows closer than this are asked about together.
_NEAR_ROWS: Final = 4_096

#: Called with a range before its rows are used, so that its owner can bound what is mapped.
Touch = Callable[[RowRange], None]


def no_touch(row_range: RowRange) -> None:
    """Do nothing: the range is in memory."""


class SubjectRows(NamedTuple):
    """Rows of one subject in one range: the indexes of ``span`` from ``start`` on."""

    row_range: RowRange
    span: Sequence[int]
    start: int


class RangeBlock:
    """Up to 64 ranges."""

    __slots__ = ("_asked", "_removed", "_left", "_marked", "_marked_subjects", "_words", "row_ranges")

    def __init__(self) -> None:
        self.row_ranges: list[RowRange] = []
        self._left = self.row_ranges  # the ranges that were not removed
        self._removed = 0  # a bit for each range that was removed
        self._marked = self._marked_subjects = 0  # and so many subjects of the next range
        self._asked = 0
        self._words: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def add(self, row_range: RowRange) -> None:
        """Append a range."""
        if self._left is not self.row_ranges:
            self._left.append(row_range)
        self.row_ranges.append(row_range)

    def with_subject(self, subject: int, touch: Touch) -> list[RowRange]:
        """Return the ranges that have rows of a subject, in order.

        Some calls mark a range, so that nobody waits for the marks of all; each asks those that are not marked.
        """
        if self._marked < len(self.row_ranges):
            self._skip_removed()
            self._asked += len(self.row_ranges) - self._marked
            if self._asked >= ASKED_A_MARK and self._marked < len(self.row_ranges):
                self._asked = 0
                touch(self.row_ranges[self._marked])
                self._mark_piece(self.row_ranges[self._marked].subjects())
                self._skip_removed()
        there = (1 << self._marked) - 1 & ~self._removed  # the next range may be marked for some of its subjects
        word = int(self._words[subject]) & there if subject < len(self._words) else 0
        if word == (1 << len(self.row_ranges)) - 1 & ~self._removed:
            return self._left
        with_rows = []
        while word:
            lowest = word & -word
            with_rows.append(self.row_ranges[lowest.bit_length() - 1])
            word ^= lowest
        for index in range(self._marked, len(self.row_ranges)):
            row_range = self.row_ranges[index]
            if self._removed >> index & 1:
                continue
            touch(row_range)
            if len(row_range.span(subject)):
                with_rows.append(row_range)
        return with_rows

    def _skip_removed(self) -> None:
        while self._marked < len(self.row_ranges) and self._removed >> self._marked & 1:
            self._marked += 1
            self._marked_subjects = 0

    @property
    def unmarked(self) -> int:
        """How many ranges are not marked yet."""
        return len(self.row_ranges) - self._marked

    def remove(self, row_range: RowRange) -> None:
        """Leave a range out from now on."""
        self._removed |= 1 << self.row_ranges.index(row_range)
        self._left = [one for index, one in enumerate(self.row_ranges) if not self._removed >> index & 1]

    @property
    def is_over(self) -> bool:
        """Whether the shelf is full and all its ranges were removed."""
        return len(self.row_ranges) == SHELF_RANGES and not self._left

    def _mark_piece(self, subjects: npt.NDArray[np.uint32]) -> None:
        """Mark the next range for some of its *subjects*; it counts as marked once all are."""
        start = self._marked_subjects
        piece = subjects[start : start + _MARKED_AT_ONCE]
        top = int(subjects.max()) + 1
        if top > len(self._words):
            words = np.zeros(max(top, 2 * len(self._words)), np.uint64)
            words[: len(self._words)] = self._words
            self._words = words
        self._words[piece] |= np.uint64(1 << self._marked)
        self._marked_subjects += len(piece)
        if self._marked_subjects >= len(subjects):
            self._marked += 1
            self._marked_subjects = 0


class RangeBlocks:
    """Any number of ranges; none is empty."""

    __slots__ = ("_shelves", "_touch")

    def __init__(self, touch: Touch) -> None:
        self._touch = touch
        self._shelves: list[RangeBlock] = []

    def add(self, row_range: RowRange) -> None:
        """Append a range."""
        if not self._shelves or len(self._shelves[-1].row_ranges) == SHELF_RANGES:
            self._shelves.append(RangeBlock())
        self._shelves[-1].add(row_range)

    def remove(self, row_range: RowRange) -> None:
        """Leave a range out from now on."""
        shelf = next(shelf for shelf in self._shelves if row_range in shelf.row_ranges)
        shelf.remove(row_range)
        if shelf.is_over:
            self._shelves.remove(shelf)

    @property
    def question_us(self) -> int:
        """How many microseconds a question takes beside those to the ranges that have the subject, at most."""
        return _ASK_US * sum(shelf.unmarked for shelf in self._shelves)

    def starts_by(self, subject: int, sequence: int) -> bool:
        """Return whether the first row of a subject here begins at or before *sequence*."""
        for shelf in self._shelves:
            with_subject = shelf.with_subject(subject, self._touch)
            if with_subject:
                return first_sequence(with_subject[0], subject, self._touch) <= sequence
        return False

    def from_sequence(self, subject: int, sequence: int) -> Iterator[SubjectRows]:
        """Yield the rows of a subject from the one that contains or follows *sequence*, range by range.

        Looks at shelves from the last one back to the one that has *sequence*, then forward.
        """
        start = len(self._shelves)
        while start > 0:
            start -= 1
            with_subject = self._shelves[start].with_subject(subject, self._touch)
            if with_subject and first_sequence(with_subject[0], subject, self._touch) <= sequence:
                break
        for number in range(start, len(self._shelves)):
            with_subject = self._shelves[number].with_subject(subject, self._touch)
            skip = 0
            if number == start and len(with_subject) > 1:
                skip = bisect_right(with_subject, sequence, key=lambda s: first_sequence(s, subject, self._touch))
            for row_range in with_subject[max(0, skip - 1) :]:
                found = in_row_range(row_range, subject, sequence, self._touch)
                if found is not None:
                    yield found

    def from_row(self, subject: int, row: int) -> Iterator[SubjectRows]:
        """Yield the rows of a subject from row number *row* on, range by range."""
        for shelf in self._shelves:
            last = shelf.row_ranges[-1]
            if last.first_row + last.count <= row:
                continue
            for row_range in shelf.with_subject(subject, self._touch):
                if row_range.first_row + row_range.count > row:
                    self._touch(row_range)
                    span = row_range.span(subject)
                    start = bisect_left(span, row - row_range.first_row)
                    if start < len(span):
                        yield SubjectRows(row_range, span, start)


def first_sequence(row_range: RowRange, subject: int, touch: Touch) -> int:
    """Return the first sequence of a subject in a range that has rows of it."""
    touch(row_range)
    index = row_range.span(subject)[0]
    row_range.need(index, index + 1)
    return int(SEQUENCES.unpack_from(row_range.data(), index * ENTRY_SIZE)[0])


def in_row_range(row_range: RowRange, subject: int, sequence: int, touch: Touch) -> SubjectRows | None:
    """Return the rows of a subject in one range from the one that contains or follows *sequence* on."""
    touch(row_range)
    span, data, unpack = row_range.span(subject), row_range.data(), SEQUENCES.unpack_from

    def end_of(index: int) -> int:
        row_range.need(index, index + 1)
        first, count = unpack(data, index * ENTRY_SIZE)
        return int(first + count)

    start = bisect_right(span, sequence, key=end_of)
    return SubjectRows(row_range, span, start) if start < len(span) else None


def take(found: SubjectRows, stop_row: int, limit: int) -> Rows | None:
    """Return at most *limit* of the rows of *found*, those before row number *stop_row*: a view when they are
    adjacent.
    """
    row_range, span, start = found
    stop = min(len(span), start + limit)
    if row_range.first_row + span[stop - 1] >= stop_row:
        stop = bisect_left(span, stop_row - row_range.first_row, start, stop)
    if stop <= start:
        return None
    first, last = span[start], span[stop - 1]
    rows = row_range.rows()
    if last - first == stop - 1 - start:
        row_range.need(first, last + 1)
        return rows[first : last + 1]
    indexes = np.asarray(span[start:stop], np.intp)
    heads = [0, *(np.flatnonzero(indexes[1:] - indexes[:-1] > _NEAR_ROWS) + 1).tolist(), len(indexes)]
    for head, tail in pairwise(heads):
        row_range.need(int(indexes[head]), int(indexes[tail - 1]) + 1)
    return rows.take(indexes)

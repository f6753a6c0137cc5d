"""Where the rows of one subject are, over many stretches of rows.

Stretches (sealed segments, and blocks of segments that are being written) stand on shelves of 64, in row order. A
shelf keeps one u64 a subject: which of its stretches have rows of it. So a question costs one look a shelf, and a
binary search over the stretches that have the subject; never a look at a stretch without it, and nothing for each
subject that there is. The words of a shelf are made when it is first asked: 0.5 ms a stretch of 100,000 subjects, and 8
bytes of memory a subject and shelf.
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
from qmq.storage.consumer_log.subject_order import Rows, Stretch

SHELF_STRETCHES: Final = 64
#: Rows that lie closer than this are asked about together.
_NEAR_ROWS: Final = 4_096

#: Called with a stretch before its rows are used, so that its owner can bound what is mapped.
Touch = Callable[[Stretch], None]


def no_touch(stretch: Stretch) -> None:
    """For stretches that are always at hand."""


class Found(NamedTuple):
    """Rows of one subject in one stretch: the indexes of ``span`` from ``start`` on."""

    stretch: Stretch
    span: Sequence[int]
    start: int


class Shelf:
    """Up to 64 stretches."""

    __slots__ = ("_gone", "_left", "_marked", "_words", "stretches")

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self._left = self.stretches  # those that are not gone
        self._gone = 0  # a bit each
        self._marked = 0
        self._words: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def add(self, stretch: Stretch) -> None:
        """Put a stretch behind the others."""
        if self._left is not self.stretches:
            self._left.append(stretch)
        self.stretches.append(stretch)

    def holding(self, subject: int, touch: Touch) -> list[Stretch]:
        """The stretches that have rows of a subject, in order."""
        while self._marked < len(self.stretches):
            if self._gone >> self._marked & 1:
                self._marked += 1
                continue
            touch(self.stretches[self._marked])
            self._mark(self.stretches[self._marked].subjects())
        if subject >= len(self._words):
            return []
        word = int(self._words[subject]) & ~self._gone
        if word == (1 << len(self.stretches)) - 1 & ~self._gone:
            return self._left
        found = []
        while word:
            lowest = word & -word
            found.append(self.stretches[lowest.bit_length() - 1])
            word ^= lowest
        return found

    def remove(self, stretch: Stretch) -> None:
        """Leave that one out from now on."""
        self._gone |= 1 << self.stretches.index(stretch)
        self._left = [one for place, one in enumerate(self.stretches) if not self._gone >> place & 1]

    @property
    def is_over(self) -> bool:
        """It had all that it takes, and all are gone."""
        return len(self.stretches) == SHELF_STRETCHES and not self._left

    def _mark(self, subjects: npt.NDArray[np.uint32]) -> None:
        top = int(subjects.max()) + 1
        if top > len(self._words):
            words = np.zeros(max(top, 2 * len(self._words)), np.uint64)
            words[: len(self._words)] = self._words
            self._words = words
        self._words[subjects] |= np.uint64(1 << self._marked)
        self._marked += 1


class Shelves:
    """Any number of stretches; none is empty."""

    __slots__ = ("_shelves", "_touch")

    def __init__(self, touch: Touch) -> None:
        self._touch = touch
        self._shelves: list[Shelf] = []

    def add(self, stretch: Stretch) -> None:
        """Put a stretch behind the others."""
        if not self._shelves or len(self._shelves[-1].stretches) == SHELF_STRETCHES:
            self._shelves.append(Shelf())
        self._shelves[-1].add(stretch)

    def remove(self, stretch: Stretch) -> None:
        """Leave that one out from now on."""
        shelf = next(shelf for shelf in self._shelves if stretch in shelf.stretches)
        shelf.remove(stretch)
        if shelf.is_over:
            self._shelves.remove(shelf)

    def starts_by(self, subject: int, sequence: int) -> bool:
        """Whether the first row of a subject here begins at or before *sequence*."""
        for shelf in self._shelves:
            holding = shelf.holding(subject, self._touch)
            if holding:
                return first_sequence(holding[0], subject, self._touch) <= sequence
        return False

    def from_sequence(self, subject: int, sequence: int) -> Iterator[Found]:
        """The rows of a subject from the one that contains or follows *sequence*, stretch by stretch.

        Looks at shelves from the last one back to the one where *sequence* lies, then forward.
        """
        place = len(self._shelves)
        while place > 0:
            place -= 1
            holding = self._shelves[place].holding(subject, self._touch)
            if holding and first_sequence(holding[0], subject, self._touch) <= sequence:
                break
        for number in range(place, len(self._shelves)):
            holding = self._shelves[number].holding(subject, self._touch)
            skip = 0
            if number == place and len(holding) > 1:
                skip = bisect_right(holding, sequence, key=lambda s: first_sequence(s, subject, self._touch))
            for stretch in holding[max(0, skip - 1) :]:
                found = in_stretch(stretch, subject, sequence, self._touch)
                if found is not None:
                    yield found

    def from_row(self, subject: int, row: int) -> Iterator[Found]:
        """The rows of a subject from row number *row* on, stretch by stretch."""
        for shelf in self._shelves:
            last = shelf.stretches[-1]
            if last.first_row + last.count <= row:
                continue
            for stretch in shelf.holding(subject, self._touch):
                if stretch.first_row + stretch.count > row:
                    self._touch(stretch)
                    span = stretch.span(subject)
                    start = bisect_left(span, row - stretch.first_row)
                    if start < len(span):
                        yield Found(stretch, span, start)


def first_sequence(stretch: Stretch, subject: int, touch: Touch) -> int:
    """The first sequence of a subject in a stretch that has rows of it."""
    touch(stretch)
    index = stretch.span(subject)[0]
    stretch.need(index, index + 1)
    return int(SEQUENCES.unpack_from(stretch.data(), index * ENTRY_SIZE)[0])


def in_stretch(stretch: Stretch, subject: int, sequence: int, touch: Touch) -> Found | None:
    """The rows of a subject in one stretch from the one that contains or follows *sequence* on."""
    touch(stretch)
    span, data, unpack = stretch.span(subject), stretch.data(), SEQUENCES.unpack_from

    def end_of(index: int) -> int:
        stretch.need(index, index + 1)
        first, count = unpack(data, index * ENTRY_SIZE)
        return int(first + count)

    start = bisect_right(span, sequence, key=end_of)
    return Found(stretch, span, start) if start < len(span) else None


def take(found: Found, stop_row: int, limit: int) -> Rows | None:
    """At most *limit* of the rows found, those before row number *stop_row*: a view when they lie together."""
    stretch, span, start = found
    stop = min(len(span), start + limit)
    if stretch.first_row + span[stop - 1] >= stop_row:
        stop = bisect_left(span, stop_row - stretch.first_row, start, stop)
    if stop <= start:
        return None
    first, last = span[start], span[stop - 1]
    rows = stretch.rows()
    if last - first == stop - 1 - start:
        stretch.need(first, last + 1)
        return rows[first : last + 1]
    indexes = np.asarray(span[start:stop], np.intp)
    heads = [0, *(np.flatnonzero(indexes[1:] - indexes[:-1] > _NEAR_ROWS) + 1).tolist(), len(indexes)]
    for head, tail in pairwise(heads):
        stretch.need(int(indexes[head]), int(indexes[tail - 1]) + 1)
    return rows.take(indexes)

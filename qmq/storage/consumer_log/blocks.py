"""Rows that are not sealed yet, sorted by subject: blocks of a journal (journal.py), and the rows in its buffer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from qmq.format.layout import ENTRY_SIZE
from qmq.storage.consumer_log.subject_order import SUBJECT, Numbers, Order, RowRange, Rows, order_block, sort_block

#: Up to this many rows that a question finds not indexed go into the dict one by one, more are sorted at once.
FEW_ROWS: Final = 4_096


class Written(Protocol):
    """The rows of a segment that is being written: a journal."""

    #: The number of the first row in the partition, rows before the buffer, rows in it, and its bytes.
    first_row: int
    turned: int
    fill: int
    data: memoryview

    def rows_at(self, index: int) -> tuple[Rows, int]:
        """The array that holds a row, and the index of that array's first row."""

    def need(self, first: int, stop: int) -> None:
        """Return when rows [first, stop) of one array can be looked at without a wait."""


class Block:
    """65,536 rows of a journal, sorted: 2 bytes a row in memory. ``span`` costs two binary searches, about 10 us."""

    __slots__ = ("_answer", "_asked", "_journal", "_order", "_start", "count", "first_row")

    def __init__(self, journal: Written, start: int, rows: Rows) -> None:
        self._journal = journal
        self._start = start
        self._order = sort_block(rows).data
        self._asked, self._answer = -1, self._order[:0]  # a lookup asks for the same subject a few times
        self.first_row = journal.first_row + start
        self.count = len(rows)

    def rows(self) -> Rows:
        """ENTRY_DTYPE[count]."""
        rows, start = self._journal.rows_at(self._start)
        return rows[self._start - start : self._start - start + self.count]

    def data(self) -> memoryview:
        """The bytes of rows()."""
        return self.rows().data.cast("B")

    def span(self, subject: int) -> Sequence[int]:
        """The indexes of a subject's rows, ascending."""
        if subject != self._asked:
            self._asked, self._answer = subject, sorted_span(self._order, self.data(), subject)
        return self._answer

    def subjects(self) -> Numbers:
        """The subject of every row."""
        return np.asarray(self.rows()["subject"])

    def need(self, first: int, stop: int) -> None:
        """All rows are, once the block has been touched."""

    def touch(self) -> None:
        """Return when all of it can be looked at without a wait. Raises as need_rows() does."""
        self._journal.need(self._start, self._start + self.count)


def sorted_span(order: memoryview, data: memoryview, subject: int) -> memoryview:
    """The part of *order*, indexes of the rows in *data* sorted by subject, that belongs to one subject."""
    unpack = SUBJECT.unpack_from

    def subject_of(index: int) -> int:
        return unpack(data, index * ENTRY_SIZE)[0]  # type: ignore[no-any-return]  # an int, by its layout

    low = bisect_left(order, subject, key=subject_of)
    return order[low : bisect_right(order, subject, low, key=subject_of)]


def touch(block: RowRange) -> None:
    """As Block.touch, for shelves (lookup.py)."""
    assert isinstance(block, Block)
    block.touch()


class RecentIndex:
    """The rows in the buffer of a journal, by subject: the last ones in a dict, those before sorted.

    It is brought up to date by questions, so that rows nobody asks for by subject cost nothing.
    """

    __slots__ = ("_indexed", "_journal", "_late", "_order")

    def __init__(self, journal: Written) -> None:
        self._journal = journal
        self._order: Order | None = None
        self._late: dict[int, list[int]] = {}
        self._indexed = 0

    @property
    def first_row(self) -> int:
        """The row number of the buffer's first row."""
        return self._journal.first_row + self._journal.turned

    @property
    def count(self) -> int:
        """Rows in the buffer."""
        return self._journal.fill

    def rows(self) -> Rows:
        """ENTRY_DTYPE[count]."""
        return self._journal.rows_at(self._journal.turned)[0]

    def data(self) -> memoryview:
        """The bytes of the buffer."""
        return self._journal.data

    def subjects(self) -> Numbers:
        """The subject of every row."""
        return np.asarray(self.rows()["subject"])

    def need(self, first: int, stop: int) -> None:
        """They are at hand."""

    def span(self, subject: int) -> Sequence[int]:
        """The indexes of a subject's rows, ascending: 0.1 us a row added since the last call, at most 2 ms."""
        if self._indexed < self._journal.fill:
            self._catch_up()
        late: Sequence[int] = self._late.get(subject, ())
        if self._order is None:
            return late
        early = self._order.span(subject)
        return [*early, *late] if late else early

    def _catch_up(self) -> None:
        start, fill = self._indexed, self._journal.fill
        self._indexed = fill
        if fill - start > FEW_ROWS:
            self._order = Order(order_block(self.rows()))
            self._late.clear()
            return
        late = self._late
        for index, number in enumerate(self.subjects()[start:].tolist(), start):
            if number in late:
                late[number].append(index)
            else:
                late[number] = [index]

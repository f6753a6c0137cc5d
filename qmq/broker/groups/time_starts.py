"""Where a group that starts at a time begins in each subject, for many subjects at once.

The rows since that time are read once for all groups that start then, such as the members of a broadcast after a seek;
later calls read only what has come since.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.work import PIECE, Work
from qmq.errors import StorageError
from qmq.storage.store import NotInMemory, Store

#: The most rows that are read for one call: 60 ns each.
MOST_ROWS: Final = 1 << 20
#: Times whose starts are kept, with 8 bytes for each subject.
KEPT: Final = 4
#: In place of a sequence: nothing was stored since.
NOTHING: Final = np.iinfo(np.int64).max
#: Rows that are read for one unit of work.
_ROWS_A_UNIT: Final = 16


class Starts:
    """The starts at one time, and the next row to read of each partition."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        # By subject number: NOTHING less the first sequence, or 0. Pages of zeros come when they are used.
        self._below: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def add(self, rows: npt.NDArray[np.void], count: int) -> None:
        """Add rows of *count* subjects: ENTRY_DTYPE[n]."""
        known = self._below
        if len(known) < count:
            self._below = np.zeros(max(count, 2 * len(known)), np.int64)
            self._below[: len(known)] = known
        np.maximum.at(self._below, rows["subject"], NOTHING - rows["first_sequence"].astype(np.int64))

    def of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the first sequences of these subjects, NOTHING for none: i64[n]."""
        found = np.full(len(numbers), NOTHING, np.int64)
        inside = np.flatnonzero(numbers < len(self._below))
        found[inside] -= self._below[numbers[inside]]
        return found


class TimeStarts:
    """The first sequence of each subject that was stored at or after a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known = OrderedDict[int, Starts]()

    def at(self, stored_at_us: int) -> Work[Starts | None]:
        """Return the first sequences since a time; they change with the next call.

        None where that would take too many rows, or a read.
        """
        parts = self._store.partitions
        try:
            known = self._known.get(stored_at_us)
            if known is None:
                known = Starts([part.consumer_log.row_at_time(stored_at_us) for part in parts])
            for number, part in enumerate(parts):
                known.rows[number] = max(known.rows[number], part.consumer_log.first_row)
            left = sum(part.consumer_log.visible_row - row for part, row in zip(parts, known.rows, strict=True))
            if left > MOST_ROWS:
                self._known.pop(stored_at_us, None)
                return None
            self._known[stored_at_us] = known
            self._known.move_to_end(stored_at_us)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
            for number, part in enumerate(parts):
                while len(rows := part.consumer_log.rows(known.rows[number], PIECE)):
                    known.add(rows, self._store.subjects.count)
                    known.rows[number] += len(rows)
                    yield 1 + len(rows) // _ROWS_A_UNIT
        except (NotInMemory, StorageError):
            return None
        return known

"""Items of the schedule of delayed messages, and compact sets of message positions.

An item is a range of a batch whose messages fall due together. A position set has 8 bytes for each message; it says
which delayed messages are cancelled or already delivered.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.work import Work
from qmq.format.layout import DELAY_DTYPE

Numbers = npt.NDArray[np.uint64]

#: At most so many numbers lie beside the sorted array before it is made anew.
_LOOSE: Final = 1_024
#: Subjects whose counts are summed by prefix at once.
_SUBJECTS: Final = 512


class PositionSet:
    """A set of numbers below 2^64; it is sorted when it is read."""

    def __init__(self) -> None:
        self._sorted: Numbers = np.empty(0, np.uint64)
        self._loose: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._loose)

    def __contains__(self, number: int) -> bool:
        return number in self._loose or bool(len(self.within(number, number + 1, settle=False)))

    def add(self, number: int) -> bool:
        """Add a number; return False when it was in the set."""
        if number in self:
            return False
        self._loose.add(number)
        if len(self._loose) > max(_LOOSE, len(self._sorted) // 8):
            self._settle()
        return True

    def extend(self, numbers: Numbers) -> None:
        """Add many numbers."""
        self._settle()
        self._sorted = np.union1d(self._sorted, numbers)

    def within(self, start: int, stop: int, *, settle: bool = True) -> Numbers:
        """Return the numbers in [start, stop), ascending."""
        if settle:
            self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        return self._sorted[low:high]

    def discard(self, start: int, stop: int) -> None:
        """Remove the numbers in [start, stop)."""
        if not len(self):
            return
        self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        if low < high:
            self._sorted = np.delete(self._sorted, np.s_[low:high])

    def pack(self) -> bytes:
        """Return the set as bytes for a checkpoint."""
        self._settle()
        return zlib.compress(np.diff(self._sorted, prepend=np.uint64(0)).astype("<u8").tobytes(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> PositionSet:
        """Return the set that ``pack`` made into bytes."""
        made = cls()
        made._sorted = np.cumsum(np.frombuffer(zlib.decompress(packed), "<u8"), dtype=np.uint64)
        return made

    def _settle(self) -> None:
        if self._loose:
            loose = np.array(sorted(self._loose), np.uint64)
            self._loose.clear()
            self._sorted = np.union1d(self._sorted, loose)


Items = npt.NDArray[np.void]


class DelayedRange(NamedTuple):
    """Messages [start, stop), by ordinal, of the batch at *position* of the delay log; *due_us* is when the first falls
    due.
    """

    position: int
    start: int
    stop: int
    due_us: int

    def item(self) -> Items:
        """Return the range as an item to schedule: DELAY_DTYPE[1]."""
        first, count = self.position + self.start, self.stop - self.start
        return np.array([(self.due_us, first, self.position, count, 0)], DELAY_DTYPE)


def items_of(position: int, due: npt.NDArray[np.uint64]) -> Items:
    """Return the items of the batch at *position* whose messages fall due at these times: DELAY_DTYPE[n]."""
    if len(due) == 1:
        return np.array([(int(due[0]), position, position, 1, 0)], DELAY_DTYPE)
    starts = np.flatnonzero(np.concatenate([[True], due[1:] != due[:-1]]))
    items = np.zeros(len(starts), DELAY_DTYPE)
    items["due_us"] = due[starts]
    items["number"] = position + starts.astype(np.uint64)
    items["position"] = position
    items["count"] = np.diff(starts, append=len(due))
    return items


def delayed_ranges_of(items: Items) -> list[DelayedRange]:
    """Return items as ranges, in the order given; neighbours in a batch become one range."""
    found = list[DelayedRange]()
    rows: list[tuple[Any, ...]] = items.tolist()
    for due_us, number, position, count, _ in rows:
        start = number - position
        last = found[-1] if found else None
        if last is not None and last.position == position and last.stop == start:
            found[-1] = last._replace(stop=start + count)
        else:
            found.append(DelayedRange(position, start, start + count, due_us))
    return found


def without(delayed: DelayedRange, gone: PositionSet) -> list[DelayedRange]:
    """Return what is left of a range without the messages in *gone*."""
    position = delayed.position
    if not len(gone):
        return [delayed]
    bad = gone.within(position + delayed.start, position + delayed.stop)
    if not len(bad):
        return [delayed]
    left, start = list[DelayedRange](), delayed.start
    for number in [*bad.tolist(), position + delayed.stop]:
        if number - position > start:
            left.append(delayed._replace(start=start, stop=number - position))
        start = number - position + 1
    return left


def by_prefix(counts: Mapping[str, int]) -> Work[Counter[str]]:
    """Return the sums of counts by subject, for each subject and each prefix of one."""
    sums, subjects = Counter[str](), list(counts.items())
    for start in range(0, len(subjects), _SUBJECTS):
        piece = subjects[start : start + _SUBJECTS]
        for subject, count in piece:
            sums[subject] += count
            sums[""] += count
            end = subject.find(".")
            while end >= 0:
                sums[subject[: end + 1]] += count
                end = subject.find(".", end + 1)
        yield len(piece)
    return sums

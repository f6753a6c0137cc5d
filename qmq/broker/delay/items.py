"""What is scheduled of delayed messages: ranges of a batch that fall due together.

A set of numbers below 2^64, 8 bytes each: which delayed messages are cancelled, or delivered already.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.group import Group
from qmq.format.layout import DELAY_DTYPE

Numbers = npt.NDArray[np.uint64]

#: So many are kept beside the sorted array before it is made anew.
_LOOSE: Final = 1_024


class PositionSet:
    """Sorted when it is looked at."""

    def __init__(self) -> None:
        self._sorted: Numbers = np.empty(0, np.uint64)
        self._loose: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._loose)

    def __contains__(self, number: int) -> bool:
        return number in self._loose or bool(len(self.within(number, number + 1, settle=False)))

    def add(self, number: int) -> bool:
        """Add one; False when it was there."""
        if number in self:
            return False
        self._loose.add(number)
        if len(self._loose) > max(_LOOSE, len(self._sorted) // 8):
            self._settle()
        return True

    def extend(self, numbers: Numbers) -> None:
        """Add many."""
        self._settle()
        self._sorted = np.union1d(self._sorted, numbers)

    def within(self, start: int, stop: int, *, settle: bool = True) -> Numbers:
        """Those in [start, stop), ascending."""
        if settle:
            self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        return self._sorted[low:high]

    def discard(self, start: int, stop: int) -> None:
        """Take those in [start, stop) away."""
        if not len(self):
            return
        self._settle()
        low, high = np.searchsorted(self._sorted, np.array([start, stop], np.uint64)).tolist()
        if low < high:
            self._sorted = np.delete(self._sorted, np.s_[low:high])

    def pack(self) -> bytes:
        """For a checkpoint."""
        self._settle()
        return zlib.compress(np.diff(self._sorted, prepend=np.uint64(0)).astype("<u8").tobytes(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> PositionSet:
        """What ``pack`` gave."""
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
    """Messages [start, stop) of the batch at *position* of the delay log, by ordinal; *due_us* of the first."""

    position: int
    start: int
    stop: int
    due_us: int

    def item(self) -> Items:
        """To be scheduled again: DELAY_DTYPE[1]."""
        first, count = self.position + self.start, self.stop - self.start
        return np.array([(self.due_us, first, self.position, count, 0)], DELAY_DTYPE)


def items_of(position: int, due: npt.NDArray[np.uint64]) -> Items:
    """The items of the batch at *position* whose messages fall due at these times: DELAY_DTYPE[n]."""
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
    """Items in the order given, neighbours in a batch made one."""
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
    """What is left of a range without those messages."""
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


def delayed_for(group: Group, counts: Mapping[str, int]) -> int:
    """How many of the messages that wait, by subject, a group is going to get."""
    filters = group.filters.values()
    return sum(
        count
        for subject, count in counts.items()
        if any(subject == one.prefix if one.exact else subject.startswith(one.prefix) for one in filters)
    )

"""Sets of whole numbers, stored as half-open intervals: for example the acknowledged delivery sequences."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Intervals:
    """A set of whole numbers: disjoint intervals [start, end) in ascending order. Intervals that touch are joined."""

    __slots__ = ("_ends", "_starts", "size")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        #: The count of numbers in the set.
        self.size = 0

    def __len__(self) -> int:
        """Return the count of intervals."""
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def add(self, start: int, end: int) -> int:
        """Add [start, end); return how many of these numbers are new."""
        if start >= end:
            return 0
        if not self._ends or start > self._ends[-1]:
            self._starts.append(start)
            self._ends.append(end)
            self.size += end - start
            return end - start
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        known = sum(self._ends[first:last]) - sum(self._starts[first:last])
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        new = end - start - known
        self.size += new
        return new

    def remove_only(self, start: int, end: int) -> bool:
        """Remove [start, end) if the set is exactly that; return whether it was."""
        if self._starts != [start] or self._ends != [end]:
            return False
        self._starts.clear()
        self._ends.clear()
        self.size = 0
        return True

    def missing(self, start: int, end: int, most: int | None = None) -> list[tuple[int, int]]:
        """Return the intervals of [start, end) that are not in the set; with *most* the first *most*, or one more."""
        found: list[tuple[int, int]] = []
        at = bisect_right(self._ends, start)
        while at < len(self._starts) and self._starts[at] < end:
            if most is not None and len(found) >= most:
                return found
            if start < self._starts[at]:
                found.append((start, self._starts[at]))
            start = self._ends[at]
            at += 1
        if start < end:
            found.append((start, end))
        return found

    def covers(self, start: int, end: int) -> bool:
        """Return whether all of [start, end), which must not be empty, is in the set."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._ends[at]

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether any of [start, end) is in the set."""
        at = bisect_right(self._ends, start)
        return start < end and at < len(self._starts) and self._starts[at] < end

    def drop_below(self, number: int) -> None:
        """Remove all numbers below *number*."""
        at = bisect_right(self._ends, number)
        self.size -= sum(self._ends[:at]) - sum(self._starts[:at])
        del self._starts[:at], self._ends[:at]
        if self._starts and self._starts[0] < number:
            self.size -= number - self._starts[0]
            self._starts[0] = number

    def end_from(self, number: int) -> int:
        """Return the first number from *number* on that is not in the set."""
        at = bisect_right(self._starts, number) - 1
        return self._ends[at] if at >= 0 and number < self._ends[at] else number

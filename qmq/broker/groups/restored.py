"""What restores have brought to a group: which messages of which run, so that none is brought twice.

A run numbers its messages; what it sends again, because nobody knows whether it came, has further numbers. So of each
run it takes one interval, and one more for each time that the broker ended in the middle.
"""

from __future__ import annotations

from typing import Any, Final

from qmq.intervals import Intervals

#: So many runs are remembered, those that came last; a run has ended when as many have come after it.
MOST_RUNS: Final = 1_000


class RestoredRuns:
    """Of one group."""

    def __init__(self) -> None:
        self._runs: dict[bytes, Intervals] = {}

    def add(self, run: bytes, start: int, end: int) -> None:
        """Messages [start, end) of a run are there."""
        intervals = self._runs.pop(run, None) or Intervals()
        intervals.add(start, end)
        self._runs[run] = intervals
        if len(self._runs) > MOST_RUNS:
            del self._runs[next(iter(self._runs))]

    def has(self, run: bytes, number: int) -> bool:
        """Whether that message of a run is there."""
        return number in self._runs.get(run, ())

    def end(self, run: bytes) -> int:
        """Above all numbers of the run that are there."""
        return max((end for _, end in self._runs.get(run, ())), default=0)

    def packed(self) -> list[Any]:
        """For the checkpoint: [run, [start, end, ...]] each."""
        return [[run, [one for pair in intervals for one in pair]] for run, intervals in self._runs.items()]

    def restore(self, packed: list[Any]) -> None:
        """Take over what ``packed`` gave."""
        for run, numbers in packed:
            for start, end in zip(numbers[::2], numbers[1::2], strict=True):
                self.add(run, start, end)

"""Messages that were received and not handed out yet. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qmq.format.run import Run
from qmq.net.client.consumer.in_flight import Holding


class Kept:
    """Runs in order, of which the first may be handed out in part."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._skip = 0  # messages of the first of them that were handed out
        #: How many messages there are.
        self.count = 0

    def add(self, runs: Sequence[Run]) -> int:
        """Put them behind the others; returns how many messages they have."""
        count = sum(run.count for run in runs)
        self._runs.extend(runs)
        self.count += count
        return count

    def put_back(self, runs: Sequence[Run]) -> None:
        """These were not handed out after all: they are first again."""
        if self._skip:
            self._runs[0] = self._runs[0].slice(self._skip, self._runs[0].count)
            self._skip = 0
        self._runs.extendleft(reversed(runs))
        self.count += sum(run.count for run in runs)

    def take(self, max_count: int) -> list[Run]:
        """Hand out up to so many messages."""
        kept, taken = self._runs, list[Run]()
        if self.count <= max_count and not self._skip:
            taken += kept
            self.clear()
            return taken
        left = min(max_count, self.count)
        self.count -= left
        while left:
            run, skip = kept[0], self._skip
            count = min(run.count - skip, left)
            if skip + count == run.count:
                kept.popleft()
                self._skip = 0
            else:
                self._skip += count
            taken.append(run if count == run.count else run.slice(skip, skip + count))
            left -= count
        return taken

    def clear(self) -> None:
        """They are of no use any more."""
        self._runs.clear()
        self.count = self._skip = 0


def release(runs: Sequence[Run]) -> None:
    """Hand messages of a group back, of which nobody has begun with any."""
    stretches = list[tuple[Holding, int, int]]()
    for run in runs:
        start, end = run.pull_sequence, run.pull_sequence + run.count
        if stretches and stretches[-1][0] is run.holder and stretches[-1][2] == start:
            start = stretches.pop()[1]
        stretches.append((run.holder, start, end))
    for holding, start, end in stretches:
        holding.owner.release(holding, start, end)

"""Which segments of the delay log are needed: those that hold messages that wait, or say that such are cancelled.

A segment goes once two checkpoints in a row have found it idle, so neither of the two that are kept knows a message in
it that waits. What waits is counted as it enters and leaves the schedule, so the cost does not depend on how much that
is; a count that were ever wrong the other way keeps a segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from qmq.broker.delay.items import PositionSet
from qmq.storage.store import Store

#: Checkpoints that have to find a segment idle.
_CHECKPOINTS: Final = 2


class DelaySegments:
    """Of one broker; *store* is that of the message log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Counter[int] = Counter()  # messages in the schedule, by the base of their segment
        #: Segments that say which messages are cancelled, and in which segments those are.
        self._cancelling: dict[int, set[int]] = {}
        self._idle: dict[int, int] = {}  # how many checkpoints had been taken when it was found so

    def base_of(self, position: int) -> int | None:
        """The segment that holds a position; None when it is gone."""
        log = self._store.delay_log
        span = None if log is None else log.segment_at(0, position)
        return None if span is None else span.base

    def entered(self, items: Any) -> None:
        """These are in the schedule now: DELAY_DTYPE[n]."""
        for base, count in self._by_segment(items):
            self._waiting[base] += count

    def left(self, items: Any) -> None:
        """These are in the schedule no more."""
        for base, count in self._by_segment(items):
            self._waiting[base] -= count

    def _by_segment(self, items: Any) -> Iterator[tuple[int, int]]:
        """How many messages in which segment that is there: most often all items are of one."""
        log = self._store.delay_log
        while log is not None and len(items):
            positions = items["position"]
            span = log.segment_at(0, int(positions[0]))
            if span is None:
                inside = positions == positions[0]
            else:
                inside = (positions >= span.base) & (positions < max(span.end, int(positions[0]) + 1))
                yield span.base, int(items["count"][inside].sum(dtype=np.int64))
            items = items[~inside]

    def cancelled(self, position: int, said_at: int) -> None:
        """The batch at *said_at* says that the message at *position* is cancelled."""
        held, told = self.base_of(position), self.base_of(said_at)
        if held is not None and told is not None and held != told:
            self._cancelling.setdefault(told, set()).add(held)

    def remove_idle(self, cancelled: PositionSet, visible: int, pinned: Iterable[int]) -> None:
        """A checkpoint is about to be taken: remove what two have found idle.

        *visible*: what lies before has entered the schedule. *pinned* are positions of what left it, and is not yet
        known for good to be delivered.
        """
        log = self._store.delay_log
        assert log is not None
        there = {span.base for span in log.sealed(0)}
        needed = {self.base_of(position) for position in pinned}
        taken, found = self._store.checkpoints_taken, self._idle
        self._idle = {}
        for base, end in log.removable(0):
            waiting = self._waiting[base] - len(cancelled.within(base, end))
            if waiting or end > visible or base in needed or self._cancelling.get(base, set()) & there:
                continue
            self._idle[base] = found.get(base, taken)
        for base in [base for base, since in self._idle.items() if taken >= since + _CHECKPOINTS]:
            log.remove_segment(0, base)
            del self._idle[base]
            self._waiting.pop(base, None)
            self._cancelling.pop(base, None)

    @property
    def are_pending(self) -> bool:
        """More checkpoints would remove something."""
        log = self._store.delay_log
        return bool(self._idle) or (log is not None and log.removes_files(0))

    def packed(self) -> list[Any]:
        """For a checkpoint."""
        return [dict(self._waiting), {base: sorted(held) for base, held in self._cancelling.items()}]

    def restore(self, packed: list[Any]) -> None:
        """Take over what ``packed`` gave."""
        waiting, cancelling = packed
        self._waiting.update(waiting)
        self._cancelling = {base: set(held) for base, held in cancelling.items()}

"""Decide which segments of the delay log are needed: those with waiting messages, and those that cancel such messages.

A segment is removed once two checkpoints in a row have found it idle; then neither of the two checkpoints on disk knows
a waiting message in it. Waiting messages are counted as they enter and leave the schedule, so the cost does not depend
on how many wait. Should a count ever be wrong, it keeps a segment too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from qmq.broker.delay.items import PositionSet
from qmq.storage.store import Store

#: So many checkpoints must find a segment idle.
_CHECKPOINTS: Final = 2


class DelaySegments:
    """The needed segments of one broker's delay log; *store* is the store of the message log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: Counter[int] = Counter()  # messages in the schedule, by the base of their segment
        #: Segments with cancellations, and the segments that hold the cancelled messages.
        self._cancelling: dict[int, set[int]] = {}
        self._idle: dict[int, int] = {}  # checkpoints taken when the segment was first found idle

    def base_of(self, position: int) -> int | None:
        """Return the base of the segment that holds *position*; None when it is gone."""
        log = self._store.delay_log
        span = None if log is None else log.partitions[0].message_log.segment_at(position)
        return None if span is None else span.base

    def entered(self, items: Any) -> None:
        """Count items that enter the schedule: DELAY_DTYPE[n]."""
        for base, count in self._by_segment(items):
            self._waiting[base] += count

    def left(self, items: Any) -> None:
        """Count off items that leave the schedule."""
        for base, count in self._by_segment(items):
            self._waiting[base] -= count

    def _by_segment(self, items: Any) -> Iterator[tuple[int, int]]:
        """Yield the base of each existing segment and its number of messages; most often all items are of one."""
        log = self._store.delay_log
        while log is not None and len(items):
            positions = items["position"]
            span = log.partitions[0].message_log.segment_at(int(positions[0]))
            if span is None:
                inside = positions == positions[0]
            else:
                inside = (positions >= span.base) & (positions < max(span.end, int(positions[0]) + 1))
                yield span.base, int(items["count"][inside].sum(dtype=np.int64))
            items = items[~inside]

    def cancelled(self, position: int, cancelled_at: int) -> None:
        """Note that the batch at *cancelled_at* cancels the message at *position*."""
        message_base, cancel_base = self.base_of(position), self.base_of(cancelled_at)
        if message_base is not None and cancel_base is not None and message_base != cancel_base:
            self._cancelling.setdefault(cancel_base, set()).add(message_base)

    def remove_idle(self, cancelled: PositionSet, visible: int, pinned: Iterable[int]) -> None:
        """Remove the segments that two checkpoints have found idle; called just before a checkpoint.

        All messages before *visible* have entered the schedule. *pinned* are positions of messages that left it and
        whose delivery no checkpoint has yet.
        """
        log = self._store.delay_log
        assert log is not None
        part = log.partitions[0]
        there = {span.base for span in part.message_log.sealed}
        needed = {self.base_of(position) for position in pinned}
        taken, found = self._store.checkpoints.taken, self._idle
        self._idle = {}
        for base, end in part.removable():
            waiting = self._waiting[base] - len(cancelled.within(base, end))
            if waiting or end > visible or base in needed or self._cancelling.get(base, set()) & there:
                continue
            self._idle[base] = found.get(base, taken)
        for base in [base for base, since in self._idle.items() if taken >= since + _CHECKPOINTS]:
            part.remove_segment(base)
            del self._idle[base]
            self._waiting.pop(base, None)
            self._cancelling.pop(base, None)

    @property
    def are_pending(self) -> bool:
        """Whether more checkpoints would remove something."""
        log = self._store.delay_log
        return bool(self._idle) or (log is not None and log.partitions[0].removals.are_pending)

    def packed(self) -> list[Any]:
        """Return the state for a checkpoint."""
        return [dict(self._waiting), {base: sorted(bases) for base, bases in self._cancelling.items()}]

    def restore(self, packed: list[Any]) -> None:
        """Restore the state that ``packed`` returned."""
        waiting, cancelling = packed
        self._waiting.update(waiting)
        self._cancelling = {base: set(bases) for base, bases in cancelling.items()}

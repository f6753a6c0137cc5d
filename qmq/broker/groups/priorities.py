"""Priorities: their ranks, and what lower ones have coming, so that none starves.

A group hands out what is ready of a higher priority first. While lower priorities wait, they have a share of what is
handed out coming (the setting ``priority_share``); once that is a whole message, the next pull begins with them.
"""

from __future__ import annotations

from typing import Final

from qmq.format.lanes import priority_lane_of
from qmq.format.layout import LANE_HIGH, LANE_LOW

HIGH: Final = 0
NORMAL: Final = 1
LOW: Final = 2
RANKS: Final = 3

#: Sums of shares such as ten times 0.1 are a little less than whole numbers.
_EPSILON: Final = 1e-6


def rank_of(lane: int) -> int:
    """Return the rank of a lane's messages: HIGH first."""
    priority = priority_lane_of(lane)
    if priority == LANE_HIGH:
        return HIGH
    return LOW if priority == LANE_LOW else NORMAL


class PriorityShare:
    """The messages that lower priorities have coming in one group: normal and low ones while higher ones are handed
    out, and of these the low ones while normal ones are.
    """

    __slots__ = ("_coming",)

    def __init__(self) -> None:
        self._coming = [0.0, 0.0]

    def coming(self, rank: int) -> int:
        """Return how many messages of ranks lower than *rank* (HIGH or NORMAL) come before others of that rank."""
        return int(self._coming[rank] + _EPSILON)

    def note_handed(self, counts: list[int], share: float, *, has_low: bool = True) -> None:
        """Count messages that were handed out, by rank. Nothing is saved up for low ones where there are none yet."""
        for rank in (HIGH, NORMAL) if has_low else (HIGH,):
            lower = sum(counts[rank + 1 :])
            self._coming[rank] = max(0.0, self._coming[rank] + share * (counts[rank] + lower) - lower)

    def none_wait(self, rank: int) -> None:
        """Note that no messages of ranks lower than *rank* wait: nothing is saved up for them."""
        self._coming[rank] = 0.0

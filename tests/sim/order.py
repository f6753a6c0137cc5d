"""The order of keys, held against what consumers are given: a message comes when all before it in its slot are settled,
or in the hands of the same consumer.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from qmq.format.layout import LANE_ORDERED

if TYPE_CHECKING:
    from tests.sim.tally import Holder, Tally


class OrderPlace(NamedTuple):
    """Where a message lies in its slot."""

    subject: str
    lane: int
    sequence: int


class OrderTally:
    """The messages of all slots in stored order, as far as senders and consumers know it."""

    def __init__(self) -> None:
        self._places: dict[int, OrderPlace] = {}
        self._slots: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._others: list[tuple[int, Holder]] = []
        #: Whether a message may have been skipped in a group that has not settled it.
        self.may_be_skipped: Callable[[str, int], bool] = lambda group, message: False
        #: How often a message came behind another of its slot, and of these behind one that its consumer had in hand.
        self.behind = self.with_others = 0

    def stored(self, message: int, subject: str, lane: int, sequence: int) -> None:
        """It lies there."""
        if lane >= LANE_ORDERED and message not in self._places:
            self._places[message] = OrderPlace(subject, lane, sequence)
            insort(self._slots.setdefault((subject, lane), []), (sequence, message))

    def check(self, message: int, holder: Holder, tally: Tally) -> None:
        """It came to a consumer of a group."""
        place = self._places.get(message)
        if place is None:
            return
        for sequence, other in self._slots[place.subject, place.lane]:
            letter = tally.letters.get(other)
            if sequence < place.sequence:
                self.behind += 1
                is_settled = letter is not None and letter.is_settled
                is_mine = letter is not None and letter.holder is not None and letter.holder.key[:2] == holder.key[:2]
                assert is_mine or is_settled or self.may_be_skipped(tally.group, other), (
                    f"{message} came to {holder.key[1]}, and {other} before it in {place} is not settled: {letter}"
                )
                self.with_others += is_mine and not is_settled
            if letter is not None and letter.holder is not None and letter.holder.key[:2] != holder.key[:2]:
                self._others.append((other, letter.holder))

    def take_others(self) -> list[tuple[int, Holder]]:
        """Return messages of slots that were given to a consumer while another had messages of them; and that one."""
        found, self._others = self._others, []
        return found

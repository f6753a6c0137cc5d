"""Counts of the events of one group's messages since the broker's start."""

from __future__ import annotations

from typing import Final

from qmq.broker.groups.totals import MessageTotals
from qmq.net.protocol.types import Disposition

#: The counts by name, in the order of ``GroupCounts.row``.
COUNT_NAMES: Final = (
    "delivered", "redelivered", "acked", "nacked", "rejected", "released", "expired", "session_expired", "died",
)  # fmt: skip


class GroupCounts:
    """The events of one group's messages since the broker's start, counted by message; the start itself counts none.

    ``delivered`` messages were handed out for the first time, ``redelivered`` ones again; ``rejected`` includes those
    that the broker rejects (unreadable, or of a subject no longer followed), but for the ``expired``; ``nacked``
    includes passed ack deadlines. ``session_expired`` ones were in flight at a consumer that fell silent; ``died``
    counts the dead letters that were made. Those of deliveries and acks are what the totals have gained.
    """

    __slots__ = (*COUNT_NAMES[1:2], *COUNT_NAMES[3:], "_acked_before", "_handed_before", "_totals")

    def __init__(self, totals: MessageTotals) -> None:
        self._totals = totals
        self.clear()

    @property
    def delivered(self) -> int:
        """How many messages were handed out for the first time."""
        return self._totals.handed - self._handed_before

    @property
    def acked(self) -> int:
        """How many messages were acked."""
        return self._totals.acked - self._acked_before

    def clear(self) -> None:
        """Begin at 0."""
        self._handed_before, self._acked_before = self._totals.handed, self._totals.acked
        self.redelivered = self.nacked = self.rejected = self.released = 0
        self.expired = self.session_expired = self.died = 0

    def handed_back(self, disposition: int, messages: int) -> None:
        """Count messages that came back with a disposition of their consumer, or of the broker in its place."""
        if disposition == Disposition.RELEASE:
            self.released += messages
        elif disposition == Disposition.REJECT:
            self.rejected += messages
        elif disposition == Disposition.NACK:
            self.nacked += messages

    def row(self) -> list[int]:
        """Return the counts, in the order of COUNT_NAMES."""
        return [
            self.delivered, self.redelivered, self.acked, self.nacked, self.rejected, self.released, self.expired,
            self.session_expired, self.died,
        ]  # fmt: skip

    def add(self, other: GroupCounts) -> None:
        """Add the counts of another group, also to the totals."""
        self._totals.handed += other.delivered
        self._totals.acked += other.acked
        for name in self.__slots__[: len(COUNT_NAMES) - 2]:
            setattr(self, name, getattr(self, name) + getattr(other, name))

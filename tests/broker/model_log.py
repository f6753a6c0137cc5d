"""The messages that the model of a group knows: their lanes and slots, and the log in which they lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL, LANE_ORDERED, LANE_ORDERED_HIGH, LANE_ORDERED_LOW

HIGH: Final = 0
NORMAL: Final = 1
LOW: Final = 2
_RANKS: Final = {LANE_HIGH: HIGH, LANE_LOW: LOW, LANE_ORDERED_HIGH: HIGH, LANE_ORDERED_LOW: LOW}

Slot = int


class Message(NamedTuple):
    """One message: its subject, its lane, and its sequence in that."""

    subject: str
    lane: int
    sequence: int

    @property
    def rank(self) -> int:
        """Its priority, the highest first."""
        return _RANKS.get(self.kind, NORMAL)

    @property
    def slot(self) -> Slot | None:
        """The slot of its order key; None without one."""
        return self.lane & 0xFFF if self.lane >= LANE_ORDERED else None

    @property
    def kind(self) -> int:
        """Its kind of lanes: one for each priority, and one for all slots of each priority."""
        return self.lane if self.lane < LANE_ORDERED else self.lane & 0xF000


class Log:
    """All stored messages, in order, with their batches and runs."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: dict[Message, int] = {}
        self.batches: dict[Message, int] = {}
        self.runs: dict[Message, int] = {}
        #: By id.
        self.named: dict[str, Message] = {}
        #: Some message has another lane than the normal one.
        self.has_lanes = False
        #: Some message has low priority.
        self.has_low = False
        #: What groups select by, of messages that have it: tags, when they expire, and when they were stored.
        self.tags: dict[Message, tuple[str, ...]] = {}
        self.expire_at_us: dict[Message, int] = {}
        self.stored_us: dict[Message, int] = {}
        self._batches = self._runs = 0

    def add(self, runs: Iterable[Iterable[Message]]) -> None:
        """Store one batch."""
        self._batches += 1
        for run in runs:
            self._runs += 1
            for message in run:
                self.places[message] = len(self.messages)
                self.batches[message], self.runs[message] = self._batches, self._runs
                self.messages.append(message)
                self.has_lanes = self.has_lanes or message.lane != LANE_NORMAL
                self.has_low = self.has_low or message.rank == LOW

"""Order keys at several brokers: which broker and which slot each has, by what docs/PROTOCOL.md and docs/FORMAT.md say;
and the order of each slot, held against what the consumers of a group are given.

The client library computes both by code of its own, which is not used here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from xxhash import xxh64_intdigest

ORDERED: Final = 0x1000
_SLOTS: Final = 4_096
_LANES: Final = {"normal": 0, "high": 1, "low": 2}


def broker_of(addresses: Sequence[str], order_key: str) -> int:
    """Return the number of the broker that has an order key, among the addresses as host:port."""

    def rank(number: int) -> tuple[int, str]:
        named = b"\0".join(part.encode() for part in (addresses[number], order_key))
        return -int.from_bytes(blake2b(named, digest_size=8).digest(), "big"), addresses[number]

    return min(range(len(addresses)), key=rank)


def lane_of(priority: str, order_key: str | None) -> int:
    """Return the lane of a message."""
    return _LANES[priority] if order_key is None else ORDERED | xxh64_intdigest(order_key.encode()) % _SLOTS


def _some_keys(count: int) -> list[str]:
    """Return so many order keys; the first two have one slot."""
    by_lane: dict[int, str] = {}
    for number in range(_SLOTS):
        key = f"order-{number}"
        other = by_lane.setdefault(lane_of("normal", key), key)
        if other != key:
            return [other, key, *(one for one in by_lane.values() if one != other)][:count]
    raise AssertionError("no two order keys have one slot")


ORDER_KEYS: Final = _some_keys(5)


class Copy(NamedTuple):
    """Where a message lies."""

    store: bytes
    partition: int
    position: int


class Hand(NamedTuple):
    """A consumer, from one time that it joined its group at a broker to the next."""

    consumer: str
    epoch: int
    generation: int


class Slot(NamedTuple):
    """A slot at one broker."""

    store: bytes
    subject: str
    lane: int


class Slots:
    """The messages of all slots in stored order, as far as their senders and all consumers know it."""

    def __init__(self) -> None:
        self._places: dict[Copy, tuple[Slot, int]] = {}
        self._slots: dict[Slot, list[tuple[int, Copy]]] = {}

    def stored(self, copy: Copy, slot: Slot, sequence: int) -> None:
        """It lies there."""
        if slot.lane < ORDERED:
            return
        if copy not in self._places:
            self._places[copy] = slot, sequence
            insort(self._slots.setdefault(slot, []), (sequence, copy))
        assert self._places[copy] == (slot, sequence), f"{copy} was at {self._places[copy]}, and is at {sequence}"

    def around(self, copy: Copy) -> tuple[list[Copy], list[Copy]]:
        """Return those before a message in its slot, and those behind it; none where it has no order key."""
        if copy not in self._places:
            return [], []
        slot, mine = self._places[copy]
        others = self._slots[slot]
        before = [other for sequence, other in others if sequence < mine]
        return before, [other for sequence, other in others if sequence > mine]

    def place(self, copy: Copy) -> tuple[str, int, int]:
        """Return subject, lane and sequence of a message with an order key."""
        slot, sequence = self._places[copy]
        return slot.subject, slot.lane, sequence


@dataclass(slots=True)
class Order:
    """What orders a message in its slot, as a group's consumers know it."""

    #: Who has been given it since it was known to be in flight last, and whether they have given it back.
    hands: dict[Hand, bool] = field(default_factory=dict)
    #: The deliveries that were acknowledged, which the broker may have heard: a hand each, and the delivery sequence.
    acks: set[tuple[str, int, int]] = field(default_factory=set)
    #: When it was given last, by a count of all deliveries and by the clock; to whom.
    given: int = 0
    given_at: float = 0.0
    given_to: Hand | None = None
    #: Somebody asked that it be handed out again though it is dead; it has not come since.
    is_redriven: bool = False

    def comes(self, hand: Hand, sequence: int, number: int, now: float) -> None:
        """It is in flight to somebody: nobody else has it, and it was not settled."""
        self.hands = {hand: False}
        self.acks &= {(hand.consumer, hand.generation, sequence)}
        self.given, self.given_at, self.given_to, self.is_redriven = number, now, hand, False

    def comes_late(self, hand: Hand) -> None:
        """Somebody has it, and its broker does not say so, or is not there."""
        self.hands[hand] = False

    def goes_back(self, hand: Hand) -> None:
        """Whoever had it gave it back, to be handed out again."""
        if hand in self.hands:
            self.hands[hand] = True

    def lets_through(self, hand: Hand) -> bool:
        """Return whether one behind it may come to somebody, as far as clients know."""
        return bool(self.acks) or self.is_redriven or self.hands.get(hand) is False

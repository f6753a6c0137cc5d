"""The slots of order keys that hold messages up: behind which, by whom, since when, and why."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.errors import StorageError
from qmq.format.layout import LANE_ORDERED
from qmq.storage.store import Store

#: The most slots of one list, the longest blocked first.
MOST_BLOCKED: Final = 20
#: Slots that are looked at for such a list.
_MOST_LOOKED: Final = 65_536

IN_FLIGHT: Final = "in_flight"
RETRYING: Final = "retrying"


class BlockingSlot(NamedTuple):
    """A slot with messages that wait for an earlier one of it, which is in flight or retrying."""

    subject: str
    slot: int
    #: Messages that no consumer had yet.
    waiting: int
    reason: str
    #: The consumer that has messages of the slot in flight, and since when; None where a retry holds it up.
    consumer: str | None
    since_us: int | None


def blocked_slots(store: Store, group: Group) -> list[BlockingSlot]:
    """Return the slots of a group that hold messages up, the longest blocked first, at most MOST_BLOCKED."""
    ledger = group.ledger
    order = None if ledger is None else ledger.order
    if ledger is None or order is None or order.is_stale:
        return []
    slots = order.taken()[:_MOST_LOOKED]
    ends = store.subjects.ends[slots].astype(np.int64)
    waiting = ends - group.cursors.upto(store.subjects.count)[slots].astype(np.int64)
    found, since = list[BlockingSlot](), _since(ledger)
    for slot, count in zip(slots.tolist(), waiting.tolist(), strict=True):
        if count > 0:
            member = ledger.members.get(order.owner(slot))
            is_retrying = order.first_retry(slot) is not None
            with suppress(StorageError):  # its name is damaged
                found.append(
                    BlockingSlot(
                        store.subjects.name(slot), store.subjects.lane(slot) - LANE_ORDERED, count,
                        RETRYING if is_retrying else IN_FLIGHT, None if member is None else member.name,
                        since.get(slot),
                    )
                )  # fmt: skip
    found.sort(key=lambda one: (one.since_us is not None, one.since_us or 0))
    return found[:MOST_BLOCKED]


def blocked_by(store: Store, group: Group, number: int) -> str:
    """Return why messages of a subject number are not handed out that no consumer had yet; "" where nothing holds them
    up.
    """
    ledger = group.ledger
    order = None if ledger is None else ledger.order
    if ledger is None or order is None or order.is_stale or store.subjects.lane(number) < LANE_ORDERED:
        return ""
    slot = store.subjects.lane(number) - LANE_ORDERED
    if order.first_retry(number) is not None:
        return f"an earlier message of its order key (slot {slot}) is to be delivered again first"
    member = ledger.members.get(order.owner(number))
    if member is None:
        return ""
    return f"consumer {member.name} has earlier messages of its order key (slot {slot}) in flight"


def _since(ledger: Ledger) -> dict[int, int]:
    """Return since when the first message in flight of each slot is so."""
    found = dict[int, int]()
    order = ledger.order
    assert order is not None
    for member in ledger.members.values():
        for pull in member.in_flight.pulls:
            for slot in order.slots_in_flight(member.number, pull.first, pull.first + pull.total):
                found.setdefault(slot, pull.taken_us)
    return found


def rows_of(found: list[BlockingSlot]) -> list[dict[str, Any]]:
    """Return slots for an answer."""
    return [one._asdict() for one in found]

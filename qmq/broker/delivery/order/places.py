"""The slots of messages: of subject numbers, of the parts of an answer, and of all that a group has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import MessageParts, RunPart, parts_of
from qmq.broker.groups.order_slots import OrderedRuns, OrderSlots, SlotMessages, SlotPlace
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.layout import LANE_ORDERED
from qmq.format.private import is_private, origin_subject
from qmq.storage.store import Store

#: Copies of messages come before all others of their slot.
_COPIES: Final = -(1 << 62)
_NO_NUMBERS: Final = np.zeros(0, np.int64)
NO_RUNS: Final = OrderedRuns(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


class SlotPlaces:
    """Finds the slots of the subject numbers of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copies: dict[int, SlotPlace] = {}

    def __call__(self, number: int) -> SlotPlace | None:
        """Return the slot of a subject number; None for one of other lanes."""
        subjects = self._store.subjects
        lane = subjects.lane(number)
        if lane < LANE_ORDERED:
            return None
        if not subjects.has_private:
            return SlotPlace(number, 0)
        known = self._copies.get(number)
        if known is None:
            try:
                name = subjects.name(number)
            except StorageError:
                return SlotPlace(number, 0)
            origin = subjects.number(origin_subject(name), lane) if is_private(name) else number
            if origin is None:  # its messages came from another broker
                return SlotPlace(number, 0)
            known = self._copies[number] = SlotPlace(origin, 0 if origin == number else _COPIES)
        return known


def ordered_runs(order: OrderSlots, parts: MessageParts, start: int, *, may_be_copies: bool = True) -> OrderedRuns:
    """Return the messages with order keys among *parts*, which have the delivery sequences from *start* on."""
    lanes, numbers, firsts, counts = list[Any](), list[Any](), list[Any](), list[Any]()
    for part in parts:
        if isinstance(part, RunPart):
            entry = part.entry
            lanes.append([entry[6]])
            numbers.append([entry[3]])
            firsts.append([entry[0] + part.start])
            counts.append([part.stop - part.start])
        else:
            lanes.append(part.rows["lane"])
            numbers.append(part.rows["subject"])
            firsts.append(part.rows["first_sequence"].astype(np.int64))
            counts.append(part.rows["count"])
    if not parts:
        return NO_RUNS
    totals = np.concatenate(counts).astype(np.int64)
    ends = start + np.cumsum(totals)
    of_slots = np.flatnonzero(np.concatenate(lanes) >= LANE_ORDERED)
    slots = np.concatenate(numbers)[of_slots].astype(np.int64)
    places = np.concatenate(firsts)[of_slots].astype(np.int64)
    if may_be_copies:
        for number in set(slots.tolist()):
            place = order.place_of(number)
            if place is not None and place != (number, 0):
                mine = slots == number
                slots[mine] = place.slot
                places[mine] += place.offset
    return OrderedRuns((ends - totals)[of_slots], ends[of_slots], slots, places)


def slots_of(order: OrderSlots, parts: MessageParts) -> list[tuple[int, int, int]]:
    """Return (slot, place of the first message, count) of each run; the slot of other messages is -1."""
    found = list[tuple[int, int, int]]()
    for part in parts:
        rows: list[tuple[int, int, int]]
        if isinstance(part, RunPart):
            rows = [(part.entry[3], part.entry[0] + part.start, part.stop - part.start)]
        else:
            columns = (part.rows[name].tolist() for name in ("subject", "first_sequence", "count"))
            rows = list(zip(*columns, strict=True))
        for number, first, count in rows:
            place = order.place_of(number)
            found.append((-1, 0, count) if place is None else (place.slot, first + place.offset, count))
    return found


def rebuild(store: Store, group: Group, order: OrderSlots) -> None:
    """Tell the slots of a group of its messages in flight and its retries."""
    ledger = group.ledger
    assert ledger is not None
    store.may_wait(True)  # rows of what is in hand: few, and seldom
    try:
        _tell(store, group, ledger, order)
    finally:
        store.may_wait(False)


def _tell(store: Store, group: Group, ledger: Ledger, order: OrderSlots) -> None:
    for member in ledger.members.values():
        for start, end in member.in_flight.unhandled():
            for in_flight in member.in_flight.between(start, end):
                behind = start + in_flight.messages.total
                parts = _parts(store, group, in_flight.messages)
                order.given(member.number, ordered_runs(order, parts, start))
                start = behind
    for retry in _retries(group):
        for slot, place, count in slots_of(order, _parts(store, group, retry.messages)):
            if slot >= 0:
                order.retried(SlotMessages(slot, place, place + count))


def _parts(store: Store, group: Group, messages: MessageRange) -> MessageParts:
    try:
        return parts_of(store, group, messages)
    except StorageError:  # whoever reads the messages finds out what is wrong with them
        return []


def _retries(group: Group) -> Iterator[RetryItem]:
    assert group.ledger is not None
    retries = group.ledger.retries
    yield from retries.waiting()
    for items in retries.scheduled():
        for retry in unpacked(items):
            yield from retries.left_of(retry)

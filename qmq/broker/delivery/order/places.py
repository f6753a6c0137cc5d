"""The slots of messages: of subject numbers, of the parts of an answer, and of all that a group has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import MessageParts, RunPart, parts_of
from qmq.broker.groups.order_slots import OrderedRuns, OrderSlots, SlotMessages, SlotOf
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.batch import parse_header
from qmq.format.copies.for_group import FOREIGN_PLACES, place_of_copy
from qmq.format.layout import BATCH_HEADER_SIZE, LANE_ORDERED
from qmq.format.private import is_private, origin_subject
from qmq.storage.store import Store

#: Messages from another broker or an archive come before all others of their slot.
_FOREIGN: Final = -(1 << 62)
_NO_NUMBERS: Final = np.zeros(0, np.int64)
NO_RUNS: Final = OrderedRuns(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


class StoreSlots:
    """The slots of the subject numbers of one store, and the places of copies in them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, SlotOf] = {}
        #: Subjects and lanes of which there are copies only, and how many subjects there were at the last look.
        self._copies_only = set[tuple[str, int]]()
        self._looked = 0

    def __call__(self, number: int) -> SlotOf | None:
        """Return the slot of a subject number; None for one of other lanes."""
        subjects = self._store.subjects
        lane = subjects.lane(number)
        if lane < LANE_ORDERED:
            return None
        if not subjects.has_private:
            return SlotOf(number, False)
        known = self._known.get(number)
        if known is None:
            try:
                name = subjects.name(number)
            except StorageError:
                return SlotOf(number, False)
            if not is_private(name):
                known = self._known[number] = SlotOf(number, False)
                return known
            origin = subjects.number(origin_subject(name), lane)
            if origin is None:
                self._looked = self._looked if self._copies_only else subjects.count
                self._copies_only.add((origin_subject(name), lane))
                return SlotOf(number, True)
            known = self._known[number] = SlotOf(origin, True)
        return known

    def changed(self) -> bool:
        """Return whether a slot that was asked for has become another one: of its subject there are messages now."""
        subjects = self._store.subjects
        if not self._copies_only or self._looked == subjects.count:
            return False
        self._looked = subjects.count
        if all(subjects.number(name, lane) is None for name, lane in self._copies_only):
            return False
        self._copies_only.clear()
        return True

    def foreign(self, sequence: int) -> int:
        """Return the place of a message that is a copy of one that was never here: it comes before all others."""
        return _FOREIGN + sequence

    def first_place(self, partition: int, position: int, sequence: int) -> int:
        """Return the place of the first message of a batch of copies, which has that sequence."""
        try:
            data = self._store.partitions[partition].page_cache.peek(position, BATCH_HEADER_SIZE)
            place = place_of_copy(parse_header(data), sequence)
        except StorageError:  # whoever reads the messages finds out what is wrong with them
            place = FOREIGN_PLACES | sequence
        return self.foreign(place - FOREIGN_PLACES) if place >= FOREIGN_PLACES else place


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
        known = {number: order.slots(number) for number in set(slots.tolist())}
        if any(slot is not None and slot.is_copy for slot in known.values()):
            found = slots_of(order, parts)
            slots = np.array([found[at][0] for at in of_slots.tolist()], np.int64)
            places = np.array([found[at][1] for at in of_slots.tolist()], np.int64)
    return OrderedRuns((ends - totals)[of_slots], ends[of_slots], slots, places)


def slots_of(order: OrderSlots, parts: MessageParts) -> list[tuple[int, int, int]]:
    """Return (slot, place of the first message, count) of each run; the slot of other messages is -1."""
    found = list[tuple[int, int, int]]()
    for part in parts:
        rows: list[tuple[int, int, int, int]]
        skip = 0
        if isinstance(part, RunPart):
            skip = part.start
            rows = [(part.entry[3], part.entry[0], part.stop - part.start, part.entry[1])]
        else:
            columns = (part.rows[name].tolist() for name in ("subject", "first_sequence", "count", "position"))
            rows = list(zip(*columns, strict=True))
        for number, first, count, position in rows:
            slot = order.slots(number)
            if slot is None:
                found.append((-1, 0, count))
                continue
            place = order.slots.first_place(part.partition, position, first) if slot.is_copy else first
            found.append((slot.slot, place + skip, count))
    return found


def use_order(store: Store, group: Group) -> None:
    """Have a group keep the order of its slots."""
    assert group.ledger is not None
    group.ledger.use_order(OrderSlots(StoreSlots(store), partial(rebuild, store, group)))


def current_order(store: Store, group: Group) -> OrderSlots | None:
    """Return the slots of a group as they are now, also where nobody has pulled since a start; None where it has no
    messages with order keys.
    """
    ledger = group.ledger
    if ledger is None or not group.heeds_priority:
        return None
    if ledger.order is None:
        for base in group.filters.values():
            base.find_lanes(store)
        if not any(LANE_ORDERED in base.lanes for base in group.filters.values()):
            return None
        use_order(store, group)
    assert ledger.order is not None
    ledger.order.renew()
    return ledger.order


def rebuild(store: Store, group: Group, order: OrderSlots) -> None:
    """Tell the slots of a group of its messages in flight and its retries."""
    ledger = group.ledger
    assert ledger is not None
    before = store.partitions[0].message_log.residence.may_wait
    store.may_wait(True)  # rows of what is in hand: few, and seldom
    try:
        _tell(store, group, ledger, order)
    finally:
        store.may_wait(before)


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

"""The slots of messages: of the parts of an answer, and of all that a group has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import (
    PARTITIONS,
    MessageParts,
    RunPart,
    WholeRuns,
    lane_kind_of,
    parts_of,
    prefix_of,
)
from qmq.broker.groups.order_slots import OrderedRuns, OrderSlots, SlotMessages, offset_of, place_of
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.batch import parse_header
from qmq.format.copies.for_group import origin_of
from qmq.format.lanes import SLOT_BITS, slot_of
from qmq.format.layout import BATCH_HEADER_SIZE, LANE_ORDERED
from qmq.format.private import is_private
from qmq.storage.store import NotInMemory, Store

#: What stamps of messages from another broker or an archive lie before their own: they come before all others.
_FOREIGN_US: Final = -(1 << 62)
_NO_NUMBERS: Final = np.zeros(0, np.int64)
NO_RUNS: Final = OrderedRuns(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)

#: The slot of a run (-1: it has no order keys), stamp and offset of its first message, and how many it has.
_SlotRow = tuple[int, int, int, int]


def ordered_runs(store: Store, parts: MessageParts, start: int, *, may_be_copies: bool = True) -> OrderedRuns:
    """Return the messages with order keys among *parts*, which have the delivery sequences from *start* on."""
    if not parts:
        return NO_RUNS
    if may_be_copies and store.subjects.has_private:
        rows = list(_slot_rows(store, parts))
        slots, stamps, offsets, totals = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        of_slots = np.flatnonzero(slots >= 0)
    else:
        lanes, stamps, offsets, totals = map(np.concatenate, zip(*map(_columns, parts), strict=True))
        of_slots = np.flatnonzero(lanes >= LANE_ORDERED)
        slots = lanes & SLOT_BITS
    ends = start + np.cumsum(totals)
    return OrderedRuns(
        (ends - totals)[of_slots], ends[of_slots], slots[of_slots], stamps[of_slots], offsets[of_slots]
    )  # fmt: skip


def _columns(part: RunPart | WholeRuns) -> tuple[Any, Any, Any, Any]:
    """Return lane, stamp and offset of the first message, and count of each run of a part: i64[n] each."""
    if isinstance(part, RunPart):
        entry = part.entry
        values = entry[6], entry[2], offset_of(entry[5], part.start), part.stop - part.start
        return tuple(np.array([value], np.int64) for value in values)  # type: ignore[return-value]  # four of them
    rows = part.rows
    columns = (rows[name].astype(np.int64) for name in ("lane", "stored_at_us", "run", "count"))
    lanes, stamps, runs, counts = columns
    return lanes, stamps, offset_of(runs, 0), counts


def slots_of(store: Store, parts: MessageParts) -> list[tuple[int, int, int]]:
    """Return (slot, place of the first message, count) of each run; the slot of other messages is -1."""
    return [
        (slot, place_of(stored_at_us, offset), count) for slot, stored_at_us, offset, count in _slot_rows(store, parts)
    ]


def _slot_rows(store: Store, parts: MessageParts) -> Iterator[_SlotRow]:
    has_private, known = store.subjects.has_private, dict[int, bool]()
    for part in parts:
        if isinstance(part, RunPart):
            entries, start, stop = [part.entry], part.start, part.stop
        else:
            entries, start, stop = part.rows.tolist(), 0, 0
        for entry in entries:
            number, lane, count = entry[3], entry[6], (stop or entry[4]) - start
            if lane < LANE_ORDERED:
                yield -1, 0, 0, count
                continue
            if has_private and number not in known:
                known[number] = _is_private(store, number)
            if has_private and known[number]:
                stamp, offset = _origin(store, part.partition, entry[1], entry[2])
                yield slot_of(lane), stamp, offset + start, count
            else:
                yield slot_of(lane), entry[2], offset_of(entry[5], start), count


def _is_private(store: Store, number: int) -> bool:
    try:
        return is_private(store.subjects.name(number))
    except StorageError:  # its name is damaged
        return False


def _origin(store: Store, partition: int, position: int, stored_at_us: int) -> tuple[int, int]:
    """Return stamp and offset of the first message of a private batch, of that which it is a copy of."""
    try:
        origin = origin_of(parse_header(store.partitions[partition].page_cache.peek(position, BATCH_HEADER_SIZE)))
    except StorageError:  # whoever reads the messages finds out what is wrong with them
        return _FOREIGN_US + stored_at_us, 0
    return origin.stored_at_us + (_FOREIGN_US if origin.is_foreign else 0), origin.offset


def _look_up(store: Store, group: Group, messages: MessageRange) -> list[tuple[int, int, int]] | None:
    """Return the slots of the messages of a range; None where some of its rows cannot be read now."""
    if lane_kind_of(store, messages) < LANE_ORDERED:
        is_mixed = messages.log >= PARTITIONS and not prefix_of(messages) and store.subjects.has_lanes
        if not is_mixed:
            return []
    try:
        runs = slots_of(store, parts_of(store, group, messages))
    except (NotInMemory, StorageError):
        return None
    return runs if sum(count for _, _, count in runs) == messages.total else None


def use_order(store: Store, group: Group) -> None:
    """Have a group keep the order of its slots."""
    assert group.ledger is not None
    group.ledger.use_order(OrderSlots(partial(_look_up, store, group), partial(rebuild, store, group)))


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
        if not any(base.has_slots for base in group.filters.values()):
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
                order.given(member.number, ordered_runs(store, parts, start))
                start = behind
    for retry in _retries(group):
        for slot, place, count in slots_of(store, _parts(store, group, retry.messages)):
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

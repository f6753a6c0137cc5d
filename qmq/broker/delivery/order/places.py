"""The slots of messages: of the parts of an answer, and of all that a group has in hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import (
    PARTITIONS,
    MessageParts,
    Rows,
    RunPart,
    WholeRuns,
    lane_kind_of,
    parts_of,
    prefix_of,
)
from qmq.broker.groups.order_slots import Numbers, OrderedRuns, OrderSlots, SlotMessages, offset_of, place_of
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import StorageError
from qmq.format.batch import parse_header
from qmq.format.copies.for_group import origin_of
from qmq.format.lanes import SLOT_BITS
from qmq.format.layout import BATCH_HEADER_SIZE, ENTRY_DTYPE, LANE_ORDERED
from qmq.format.private import is_private
from qmq.storage.store import NotInMemory, Store

#: What stamps of messages from another broker or an archive lie before their own: they come before all others.
_FOREIGN_US: Final = -(1 << 62)
_NO_NUMBERS: Final = np.zeros(0, np.int64)
NO_RUNS: Final = OrderedRuns(_NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)


def ordered_runs(store: Store, parts: MessageParts, start: int, *, may_be_copies: bool = True) -> OrderedRuns:
    """Return the messages with order keys among *parts*, which have the delivery sequences from *start* on."""
    if not parts:
        return NO_RUNS
    slots, stamps, offsets, counts = _columns(store, parts, may_be_copies=may_be_copies)
    ends = start + np.cumsum(counts)
    runs = OrderedRuns(ends - counts, ends, slots, stamps, offsets)
    are_ordered = slots >= 0
    return runs if are_ordered.all() else OrderedRuns(*(column[are_ordered] for column in runs))


def slots_of(store: Store, parts: MessageParts) -> list[tuple[int, int, int]]:
    """Return (slot, place of the first message, count) of each run; the slot of other messages is -1."""
    if not parts:
        return []
    rows = zip(*(column.tolist() for column in _columns(store, parts)), strict=True)
    return [(slot, place_of(stamp, offset), count) for slot, stamp, offset, count in rows]


def _columns(store: Store, parts: MessageParts, *, may_be_copies: bool = True) -> list[Numbers]:
    """Return the slot of each run (-1: it has no order keys), stamp and offset of its first message, and how many it
    has: i64[n] each.
    """
    columns = list[tuple[Numbers, Numbers, Numbers, Numbers]]()
    for partitions, rows, starts, counts in _rows_of(parts):
        lanes, stamps, runs = (rows[name].astype(np.int64) for name in ("lane", "stored_at_us", "run"))
        slots, offsets = np.where(lanes < LANE_ORDERED, -1, lanes & SLOT_BITS), offset_of(runs, 0)
        if may_be_copies and store.subjects.has_private:
            for at in _copies(store, rows["subject"], slots):
                position, stamp = int(rows["position"][at]), int(stamps[at])
                stamps[at], offsets[at] = _origin(store, int(partitions[at]), position, stamp)
        columns.append((slots, stamps, offsets + starts, counts))
    return list(map(np.concatenate, zip(*columns, strict=True)))


def _rows_of(parts: MessageParts) -> Iterator[tuple[Numbers, Rows, Numbers, Numbers]]:
    """Yield rows, their partitions, and the number of the first message and the count of each: runs alone as one."""
    for kind, several in groupby(parts, type):
        if kind is RunPart:
            partitions, entries, starts, stops = zip(*several, strict=True)
            rows = np.array(list(entries), ENTRY_DTYPE)
            yield np.array(partitions), rows, np.array(starts), np.subtract(stops, starts)
            continue
        for part in several:
            assert isinstance(part, WholeRuns)
            rows, counts = part.rows, part.rows["count"].astype(np.int64)
            yield np.full(len(rows), part.partition), rows, np.zeros(len(rows), np.int64), counts


def _copies(store: Store, subjects: npt.NDArray[Any], slots: Numbers) -> list[int]:
    """Return which messages with order keys are copies, by their subjects and slots."""
    private = [number for number in np.unique(subjects[slots >= 0]).tolist() if _is_private(store, number)]
    found: list[int] = np.flatnonzero(np.isin(subjects, private)).tolist()
    return found


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

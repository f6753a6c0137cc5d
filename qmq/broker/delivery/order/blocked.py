"""The slots of order keys that hold messages up: behind which message, who has it, since when, and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.order.places import current_order, ordered_runs
from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import PARTITIONS, RunPart, parts_of
from qmq.broker.groups.order_slots import OrderedRuns, OrderSlots, offset_of, run_and_index_of, stamp_of
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import BadBatch, StorageError
from qmq.format.lanes import SLOT_BITS, slot_of
from qmq.format.layout import LANE_ORDERED, MAX_KEY_BYTES, ORDER_SLOTS
from qmq.format.pieces import StoredBatch
from qmq.format.private import origin_subject
from qmq.storage.store import NotInMemory, Store

#: The most slots of one list, the longest blocked first.
MOST_BLOCKED: Final = 20
#: Subjects of which such a slot says that messages wait there.
_MOST_SUBJECTS: Final = 3
#: Retries in memory among which that of a slot is looked for, and ranges that are looked into for it.
_MOST_RETRIES: Final = 16_384
_MOST_RANGES: Final = 64
_PARTITION_BITS: Final = 0xFFFF

IN_FLIGHT: Final = "in_flight"
RETRYING: Final = "retrying"


class BlockingSlot(NamedTuple):
    """A slot with messages that wait for an earlier one of it, which is in flight or retrying.

    What is None is not known, or was not asked for: see ``with_details``.
    """

    #: The subject of the message that holds the others up; of one of these where that is not known.
    subject: str
    slot: int
    #: Messages that no consumer had yet, in all subjects that the group follows.
    waiting: int
    #: Some of these subjects.
    waiting_subjects: tuple[str, ...]
    reason: str
    #: The consumer that has messages of the slot in flight.
    consumer: str | None
    #: Since when the consumer has the message in flight, or when the attempt of the retry failed.
    since_us: int | None = None
    #: When the retry is due.
    due_us: int | None = None
    #: The attempt that is under way, or attempts that have failed; 0: not known.
    attempts: int = 0
    #: The reason why the last attempt failed.
    failure: str = ""
    message_id: str | None = None
    order_key: str | None = None


class BlockedCounts(NamedTuple):
    """Slots that hold messages up, how many of them by a retry, and the messages that no consumer had yet."""

    slots: int
    retrying: int
    messages: int


def counts(store: Store, group: Group) -> BlockedCounts:
    """Count the slots of a group that hold messages up, and these messages."""
    blocked = _blocked(store, group)
    if blocked is None:
        return BlockedCounts(0, 0, 0)
    slots, waiting = blocked.slots, blocked.waiting
    return BlockedCounts(len(slots), int(np.count_nonzero(blocked.order.are_retrying[slots])), int(waiting.sum()))


def blocked_slots(store: Store, group: Group) -> list[BlockingSlot]:
    """Return the slots of a group that hold messages up, those with a retry first, then the longest blocked, at most
    MOST_BLOCKED.
    """
    return _chosen(store, group, MOST_BLOCKED)


def with_details(store: Store, group: Group) -> list[BlockingSlot]:
    """Return the slots as ``blocked_slots`` does, with all that is known of the message that holds each up, the longest
    blocked first. Raises NotInMemory.
    """
    if current_order(store, group) is None:
        return []
    retries = _Retries(store, group)
    found = [_detailed(store, group, slot, retries) for slot in _chosen(store, group, MOST_BLOCKED)]
    return sorted(found, key=lambda one: (one.since_us is not None, one.since_us or 0))


def blocked_by(store: Store, group: Group, number: int) -> str:
    """Return why messages of a subject number are not handed out that no consumer had yet; "" where nothing holds them
    up. Raises NotInMemory.
    """
    lane = store.subjects.lane(number)
    ledger, order = group.ledger, current_order(store, group) if lane >= LANE_ORDERED else None
    if ledger is None or order is None or not order.are_held[slot_of(lane)]:
        return ""
    subject = origin_subject(store.subjects.name(number))
    known = _slot(store, ledger, order, slot_of(lane), 0, (subject,))
    slot = _detailed(store, group, known, _Retries(store, group))
    which = "of its order key" if slot.order_key is None else f"of order key {slot.order_key!r}"
    which += f" of {slot.subject}" if slot.subject != subject else ""
    name = f"an earlier message {which} (slot {slot.slot}{f', {slot.message_id}' if slot.message_id else ''})"
    if slot.reason == IN_FLIGHT:
        since = "" if slot.since_us is None else f" since {_time(slot.since_us)}"
        return f"consumer {slot.consumer} has {name} in flight{since}"
    due = "" if slot.due_us is None else f", due {_time(slot.due_us)}"
    why = f": {slot.failure}" if slot.failure else ""
    return f"{name} is to be delivered again first{due}{why}"


def rows_of(found: list[BlockingSlot]) -> list[dict[str, Any]]:
    """Return slots for an answer."""
    return [one._asdict() for one in found]


def _time(time_us: int) -> str:
    at = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{time_us // 1_000 % 1_000:03}Z"


class _Blocked(NamedTuple):
    """The slots of a group that hold messages up, how many each, and the numbers of the subjects of all of these, by
    slot.
    """

    order: OrderSlots
    slots: npt.NDArray[np.int64]
    waiting: npt.NDArray[np.int64]
    subjects: npt.NDArray[np.int64]
    slots_of_subjects: npt.NDArray[np.int64]

    def names(self, store: Store, slot: int) -> tuple[str, ...]:
        """Return the names of some subjects of which messages wait for that slot. Raises StorageError."""
        numbers = self.subjects[self.slots_of_subjects == slot][:_MOST_SUBJECTS].tolist()
        return tuple(sorted(map(store.subjects.name, numbers)))


def _blocked(store: Store, group: Group) -> _Blocked | None:
    """Return the slots of a group that hold messages up; None without any."""
    order = None if group.ledger is None else group.ledger.order
    if order is None or order.is_stale or not (are_held := order.are_held).any():
        return None
    subjects = store.subjects
    followed, may_be_before = np.zeros(subjects.count, np.bool_), np.zeros(subjects.count, np.bool_)
    for base in group.filters.values():
        for ordered in base.with_slots():
            matches = ordered.matches(store)
            assert matches is not None  # these are some lanes only
            followed |= matches[: subjects.count]
            if base.start.kind == "time":  # what is before the start does not wait
                may_be_before[: base.start.subjects] |= matches[: subjects.count][: base.start.subjects]
    numbers = np.flatnonzero(followed)
    slots = (subjects.lanes[numbers] & SLOT_BITS).astype(np.int64)
    numbers, slots = numbers[are_held[slots]], slots[are_held[slots]]
    cursors = group.started_in_slots(store, numbers, group.cursors.of(numbers)).astype(np.int64)
    waiting = subjects.ends[numbers].astype(np.int64) - cursors
    is_left = (waiting > 0) & ((cursors > 0) | ~may_be_before[numbers])
    numbers, slots, waiting = numbers[is_left], slots[is_left], waiting[is_left]
    by_slot = np.bincount(slots, waiting, ORDER_SLOTS).astype(np.int64)
    blocked = np.flatnonzero(by_slot)
    return _Blocked(order, blocked, by_slot[blocked], numbers, slots)


def _chosen(store: Store, group: Group, most: int) -> list[BlockingSlot]:
    """Return up to *most* slots that hold messages up, before what takes a read."""
    ledger, blocked = group.ledger, _blocked(store, group)
    if ledger is None or blocked is None:
        return []
    order, slots = blocked.order, blocked.slots
    is_retrying = order.are_retrying[slots]
    since = _since(ledger, order, slots[~is_retrying])
    chosen = [*slots[is_retrying][:most].tolist(), *sorted(since, key=since.__getitem__)]
    waiting = dict(zip(slots.tolist(), blocked.waiting.tolist(), strict=True))
    found = list[BlockingSlot]()
    for slot in chosen[:most]:
        with suppress(StorageError):  # a name is damaged
            known = _slot(store, ledger, order, slot, waiting[slot], blocked.names(store, slot))
            found.append(known._replace(since_us=since.get(slot)))
    return found


def _slot(
    store: Store, ledger: Ledger, order: OrderSlots, slot: int, waiting: int, subjects: tuple[str, ...]
) -> BlockingSlot:
    """Return a slot with what is known without a look at its messages."""
    member = ledger.members.get(int(order.owners[slot]))
    place, reason = order.first_retry(slot), RETRYING
    if place is None:
        reason = IN_FLIGHT
        if member is not None:
            for sequence in order.first_in_flight(member, {slot}).values():
                place = order.place_in_flight(member.number, slot, sequence)
    subject = subjects[0]
    with suppress(NotInMemory, StorageError):
        part = None if place is None else _part_at(store, place)
        subject = subject if part is None else origin_subject(store.subjects.name(part.entry[3]))
    return BlockingSlot(subject, slot, waiting, subjects, reason, None if member is None else member.name)


def _since(ledger: Ledger, order: OrderSlots, slots: npt.NDArray[np.int64]) -> dict[int, int]:
    """Return since when the first message in flight of each of these slots is so: for the MOST_BLOCKED slots of each
    consumer of which it has had one for longest.
    """
    found, wanted = dict[int, int](), set(slots.tolist())
    for member in ledger.members.values():
        for slot, sequence in order.first_in_flight(member, wanted, MOST_BLOCKED).items():
            found[slot] = member.in_flight.pull_of(sequence).taken_us
    return found


class _Retries:
    """The retries of one group that are in memory: finds the one that has a message of a slot."""

    def __init__(self, store: Store, group: Group) -> None:
        assert group.ledger is not None
        self._store = store
        self._group = group
        self._retries = group.ledger.retries
        #: The runs with order keys of the ranges of which retries are parts: by log, position and run of the first.
        self._runs: dict[int, OrderedRuns] = {}

    @cached_property
    def _items(self) -> npt.NDArray[np.void]:
        return self._retries.in_memory(_MOST_RETRIES)

    @cached_property
    def _ranges(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ranges of which retries are parts, i64[n, 3]; and for each retry the index of its range."""
        items = self._items
        columns = np.stack([items[name].astype(np.int64) for name in ("log", "first", "run")], axis=1)
        distinct, index = np.unique(columns, axis=0, return_inverse=True)
        return distinct, index.reshape(-1)

    def at(self, place: int) -> RetryItem | None:
        """Return the retry that has the message at a place; None where it is not in memory. Raises NotInMemory,
        StorageError.
        """
        part = _part_at(self._store, place)
        if part is None:
            return None
        items, sequence = self._items, part.entry[0] + part.start
        starts = items["first"].astype(np.int64) + items["skip"]
        is_there = (items["log"] == part.entry[3]) & (starts <= sequence) & (sequence < starts + items["count"])
        for retry in self._left(is_there):
            if retry.messages.first + retry.messages.skip <= sequence:
                return retry
        return self._by_position(part, place)

    def _by_position(self, part: RunPart, place: int) -> RetryItem | None:
        items, position = self._items, part.entry[1]
        logs, firsts = items["log"].astype(np.int64), items["first"].astype(np.int64)
        may_be = (logs >= PARTITIONS) & ((logs & _PARTITION_BITS) == part.partition)
        may_be &= (firsts <= position) & (position <= items["end"].astype(np.int64))
        of_ranges, wanted = self._ranges[1], offset_of(*run_and_index_of(place))
        for index in np.unique(of_ranges[may_be])[:_MOST_RANGES].tolist():
            runs = self._runs_of(index)
            has_it = (runs.stamps == stamp_of(place)) & (runs.offsets <= wanted)
            at = np.flatnonzero(has_it & (wanted < runs.offsets + runs.ends - runs.starts))
            if len(at):
                offset = int(runs.starts[at[0]]) + wanted - int(runs.offsets[at[0]])
                skips = items["skip"].astype(np.int64)
                is_there = (of_ranges == index) & (skips <= offset) & (offset < skips + items["count"])
                for retry in self._left(is_there):
                    if retry.messages.skip <= offset < retry.messages.skip + retry.messages.total:
                        return retry
        return None

    def _runs_of(self, index: int) -> OrderedRuns:
        """Return the runs of a range, with the places of their messages in it in the place of delivery sequences."""
        known = self._runs.get(index)
        if known is None:
            distinct, of_ranges = self._ranges
            mine = self._items[of_ranges == index]
            total = int((mine["skip"].astype(np.int64) + mine["count"]).max())
            log, first, run = distinct[index].tolist()
            whole = MessageRange(log, first, run, 0, total, int(mine["end"].max()))
            known = self._runs[index] = ordered_runs(self._store, parts_of(self._store, self._group, whole), 0)
        return known

    def _left(self, chosen: npt.NDArray[np.bool_]) -> Iterator[RetryItem]:
        """Yield what is left of some retries."""
        for retry in unpacked(self._items[np.flatnonzero(chosen)[:_MOST_RANGES]]):
            yield from self._retries.left_of(retry)


def _detailed(store: Store, group: Group, slot: BlockingSlot, retries: _Retries) -> BlockingSlot:
    """Return a slot with what is known of the message that holds it up, from *retries* if that is one. Raises
    NotInMemory.
    """
    ledger = group.ledger
    assert ledger is not None
    assert ledger.order is not None
    order = ledger.order
    with suppress(StorageError, BadBatch):  # who reads the message finds out what is wrong with it
        if slot.reason == RETRYING:
            place = order.first_retry(slot.slot)
            retry = None if place is None else retries.at(place)
            if retry is not None:
                slot = slot._replace(
                    since_us=retry.failed_at_us, due_us=retry.due_us, attempts=retry.attempt - 1, failure=retry.reason
                )
            return slot if place is None else _with_message(store, place, slot)
        member = ledger.members[int(order.owners[slot.slot])]
        for sequence in order.first_in_flight(member, {slot.slot}).values():
            attempts = [one.attempt for one in member.in_flight.between(sequence, sequence + 1)]
            taken_us = member.in_flight.pull_of(sequence).taken_us
            slot = slot._replace(since_us=taken_us, attempts=attempts[0])
            return _with_message(store, order.place_in_flight(member.number, slot.slot, sequence), slot)
    return slot


def _with_message(store: Store, place: int, slot: BlockingSlot) -> BlockingSlot:
    """Return a slot with subject, id and order key of the message at a place. Raises NotInMemory, StorageError,
    BadBatch.
    """
    part = _part_at(store, place)
    if part is None:
        return slot
    position, size = part.entry[1], part.entry[10]
    partition = store.partitions[part.partition]
    if not partition.page_cache.has(position, size):
        raise NotInMemory(partition.page_cache.read(np.array([position]), np.array([size]), onward=False))
    run = StoredBatch(partition.message_log.view(position, size)).run(part.entry[5])
    slot = slot._replace(message_id=str(run.id(part.start)), subject=run.subject)
    with suppress(BadBatch):  # its sender packed something else
        for order_key in run.header(part.start).get("o", ()):
            return slot._replace(order_key=order_key[:MAX_KEY_BYTES])
    return slot


def _part_at(store: Store, place: int) -> RunPart | None:
    """Return the message at a place; None for a copy, or one that is gone. Raises NotInMemory and StorageError."""
    stored_at_us, (run, index) = stamp_of(place), run_and_index_of(place)
    if stored_at_us < 0:
        return None
    for part in store.partitions:
        row = part.consumer_log.row_at_time(stored_at_us) + run
        for entry in part.consumer_log.rows(row, 1).tolist():
            if entry[2] == stored_at_us and entry[5] == run and index < entry[4]:
                return RunPart(part.number, entry, index, index + 1)
    return None

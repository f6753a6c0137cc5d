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
from qmq.broker.groups.order_slots import OrderedRuns, OrderSlots
from qmq.broker.journal.record_types import MessageRange
from qmq.errors import BadBatch, StorageError
from qmq.format.layout import LANE_ORDERED, MAX_KEY_BYTES
from qmq.format.pieces import StoredBatch
from qmq.format.private import origin_subject
from qmq.storage.store import NotInMemory, Store

#: The most slots of one list, the longest blocked first.
MOST_BLOCKED: Final = 20
#: Slots that are looked at for such a list.
_MOST_LOOKED: Final = 65_536
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

    subject: str
    slot: int
    #: Messages that no consumer had yet.
    waiting: int
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
    found = _blocked(store, group)
    if found is None:
        return BlockedCounts(0, 0, 0)
    order, numbers, waiting = found
    return BlockedCounts(len(numbers), int(np.count_nonzero(order.are_retrying(numbers))), int(waiting.sum()))


def blocked_slots(store: Store, group: Group) -> list[BlockingSlot]:
    """Return the slots of a group that hold messages up, those with a retry first, then the longest blocked, at most
    MOST_BLOCKED.
    """
    return [slot for _, slot in _chosen(store, group, MOST_BLOCKED)]


def with_details(store: Store, group: Group) -> list[BlockingSlot]:
    """Return the slots as ``blocked_slots`` does, with all that is known of the message that holds each up, the longest
    blocked first. Raises NotInMemory.
    """
    if current_order(store, group) is None:
        return []
    retries = _Retries(store, group)
    found = [_detailed(store, group, number, slot, retries) for number, slot in _chosen(store, group, MOST_BLOCKED)]
    return sorted(found, key=lambda one: (one.since_us is not None, one.since_us or 0))


def blocked_by(store: Store, group: Group, number: int) -> str:
    """Return why messages of a subject number are not handed out that no consumer had yet; "" where nothing holds them
    up. Raises NotInMemory.
    """
    ledger = group.ledger
    order = current_order(store, group) if store.subjects.lane(number) >= LANE_ORDERED else None
    if ledger is None or order is None:
        return ""
    if order.first_retry(number) is None and not order.owner(number):
        return ""
    slot = _detailed(store, group, number, _slot(store, ledger, order, number, 0), _Retries(store, group))
    which = "of its order key" if slot.order_key is None else f"of order key {slot.order_key!r}"
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


def _blocked(
    store: Store, group: Group
) -> tuple[OrderSlots, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:  # fmt: skip
    """Return the slots of a group that hold messages up, and how many each; None without any."""
    order = None if group.ledger is None else group.ledger.order
    if order is None or order.is_stale:
        return None
    slots = order.taken()[:_MOST_LOOKED]
    ends = store.subjects.ends[slots].astype(np.int64)
    waiting = ends - group.cursors.of(slots).astype(np.int64)
    is_blocked = waiting > 0
    return order, slots[is_blocked], waiting[is_blocked]


def _chosen(store: Store, group: Group, most: int) -> list[tuple[int, BlockingSlot]]:
    """Return up to *most* slots that hold messages up, each with its subject number, before what takes a read."""
    ledger, blocked = group.ledger, _blocked(store, group)
    if ledger is None or blocked is None:
        return []
    order, numbers, waiting = blocked
    is_retrying = order.are_retrying(numbers)
    since = _since(ledger, order, numbers[~is_retrying])
    chosen = [*numbers[is_retrying][:most].tolist(), *sorted(since, key=since.__getitem__)]
    counts = dict(zip(numbers.tolist(), waiting.tolist(), strict=True))
    found = list[tuple[int, BlockingSlot]]()
    for number in chosen[:most]:
        with suppress(StorageError):  # its name is damaged
            slot = _slot(store, ledger, order, number, counts[number])
            found.append((number, slot._replace(since_us=since.get(number))))
    return found


def _slot(store: Store, ledger: Ledger, order: OrderSlots, number: int, waiting: int) -> BlockingSlot:
    """Return a slot with what is known without a look at its messages. Raises StorageError."""
    member = ledger.members.get(order.owner(number))
    reason = IN_FLIGHT if order.first_retry(number) is None else RETRYING
    slot = store.subjects.lane(number) - LANE_ORDERED
    subject = origin_subject(store.subjects.name(number))
    return BlockingSlot(subject, slot, waiting, reason, None if member is None else member.name)


def _since(ledger: Ledger, order: OrderSlots, numbers: npt.NDArray[np.int64]) -> dict[int, int]:
    """Return since when the first message in flight of each of these slots is so: for the MOST_BLOCKED slots of each
    consumer of which it has had one for longest.
    """
    found, wanted = dict[int, int](), set(numbers.tolist())
    for member in ledger.members.values():
        for slot, sequence in order.first_in_flight(member, wanted, MOST_BLOCKED).items():
            found[slot] = member.in_flight.pull_of(sequence).taken_us
    return found


class _Retries:
    """The retries of one group that are in memory: finds the one that has a message of a slot."""

    def __init__(self, store: Store, group: Group) -> None:
        assert group.ledger is not None
        assert group.ledger.order is not None
        self._store = store
        self._group = group
        self._retries = group.ledger.retries
        self._order: OrderSlots = group.ledger.order
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

    def at(self, number: int, place: int) -> RetryItem | None:
        """Return the retry that has the message at a place of a slot; None where it is not in memory. Raises
        NotInMemory, StorageError.
        """
        items = self._items
        starts = items["first"].astype(np.int64) + items["skip"]
        is_there = (items["log"] == number) & (starts <= place) & (place < starts + items["count"])
        for retry in self._left(is_there):
            if retry.messages.first + retry.messages.skip <= place:
                return retry
        part = _part_at(self._store, number, place)
        return None if part is None else self._by_position(number, place, part)

    def _by_position(self, number: int, place: int, part: RunPart) -> RetryItem | None:
        items, position = self._items, part.entry[1]
        logs, firsts = items["log"].astype(np.int64), items["first"].astype(np.int64)
        may_be = (logs >= PARTITIONS) & ((logs & _PARTITION_BITS) == part.partition)
        may_be &= (firsts <= position) & (position <= items["end"].astype(np.int64))
        of_ranges = self._ranges[1]
        for index in np.unique(of_ranges[may_be])[:_MOST_RANGES].tolist():
            runs = self._runs_of(index)
            has_it = (runs.slots == number) & (runs.places <= place)
            at = np.flatnonzero(has_it & (place < runs.places + runs.ends - runs.starts))
            if len(at):
                offset = int(runs.starts[at[0]]) + place - int(runs.places[at[0]])
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
            parts, copies = parts_of(self._store, self._group, whole), self._store.subjects.has_private
            known = ordered_runs(self._order, parts, 0, may_be_copies=copies)
            self._runs[index] = known
        return known

    def _left(self, chosen: npt.NDArray[np.bool_]) -> Iterator[RetryItem]:
        """Yield what is left of some retries."""
        for retry in unpacked(self._items[np.flatnonzero(chosen)[:_MOST_RANGES]]):
            yield from self._retries.left_of(retry)


def _detailed(
    store: Store, group: Group, number: int, slot: BlockingSlot, retries: _Retries
) -> BlockingSlot:  # fmt: skip
    """Return a slot with what is known of the message that holds it up, from *retries* if that is one. Raises
    NotInMemory.
    """
    ledger = group.ledger
    assert ledger is not None
    assert ledger.order is not None
    order = ledger.order
    with suppress(StorageError, BadBatch):  # who reads the message finds out what is wrong with it
        if slot.reason == RETRYING:
            place = order.first_retry(number)
            retry = None if place is None else retries.at(number, place)
            if retry is not None:
                slot = slot._replace(
                    since_us=retry.failed_at_us, due_us=retry.due_us, attempts=retry.attempt - 1, failure=retry.reason
                )
            return slot if place is None else _with_message(store, number, place, slot)
        member = ledger.members[order.owner(number)]
        for sequence in order.first_in_flight(member, {number}).values():
            attempts = [one.attempt for one in member.in_flight.between(sequence, sequence + 1)]
            taken_us = member.in_flight.pull_of(sequence).taken_us
            slot = slot._replace(since_us=taken_us, attempts=attempts[0])
            return _with_message(store, number, order.place_in_flight(member.number, number, sequence), slot)
    return slot


def _with_message(store: Store, number: int, place: int, slot: BlockingSlot) -> BlockingSlot:
    """Return a slot with id and order key of the message at a place in it. Raises NotInMemory, StorageError,
    BadBatch.
    """
    part = _part_at(store, number, place)
    if part is None:
        return slot
    position, size = part.entry[1], part.entry[10]
    partition = store.partitions[part.partition]
    if not partition.page_cache.has(position, size):
        raise NotInMemory(partition.page_cache.read(np.array([position]), np.array([size]), onward=False))
    run = StoredBatch(partition.message_log.view(position, size)).run(part.entry[5])
    slot = slot._replace(message_id=str(run.id(part.start)))
    with suppress(BadBatch):  # its sender packed something else
        for order_key in run.header(part.start).get("o", ()):
            return slot._replace(order_key=order_key[:MAX_KEY_BYTES])
    return slot


def _part_at(store: Store, number: int, place: int) -> RunPart | None:
    """Return the message at a place of a slot; None for a copy, or one that is gone. Raises NotInMemory and
    StorageError.
    """
    if place < 0:
        return None
    for partition, rows in store.subject_rows(number, place, 1)[:1]:
        entry = rows[0].item()
        if entry[0] <= place < entry[0] + entry[4]:
            return RunPart(partition, entry, place - entry[0], place - entry[0] + 1)
    return None

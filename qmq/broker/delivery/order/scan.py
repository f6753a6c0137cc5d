"""Chooses new messages with order keys, in stored order, and leaves out slots that another consumer or a retry holds.

A scan reads each row once. It passes rows that the consumer of a pull may not have now, remembers up to MOST_PASSED of
them, and looks at these first in the pulls that follow. Beyond that it forgets the rows of blocked slots. When such a
slot is free again, the scan goes back to its first row and reads on from there, if that is near; if it is far back, it
finds the slot's rows by its subject. So a slot that is stuck costs a few bytes, however much waits behind it.

With several consumers one of them gets the messages of some of the slots only, so that the others find some too. Where
these have less than the pull waits for, it gets more slots.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.chosen_cursors import ChosenCursors
from qmq.broker.groups.group import SubjectFilter
from qmq.broker.groups.message_ranges import Rows, chosen_of
from qmq.broker.groups.order_slots import OrderSlots
from qmq.format.layout import ENTRY_DTYPE
from qmq.storage.store import Store

#: Rows that a scan has passed and remembers.
MOST_PASSED: Final = 32_768
#: Rows that are looked at in one go.
_FIRST_ROWS: Final = 64
_CHUNK_ROWS: Final = 8_192
#: Passed rows that are looked at in one go.
_PASSED_ROWS: Final = 2_048
#: Rows of one slot that are looked up in one go, and slots in one pull.
_SLOT_ROWS: Final = 1_024
_MOST_SLOTS: Final = 256
#: Forgotten rows are read again if they lie at most so many rows back, and so many for each slot that is free: to find
#: the rows of one slot by its subject takes about as long as to read this many.
AGAIN_ROWS: Final = 262_144
AGAIN_ROWS_A_SLOT: Final = 2_048
#: Slots up to which those with messages are counted; of more, all count.
_MOST_COUNTED: Final = 65_536

Numbers = npt.NDArray[np.int64]
_NO_ROWS: Final = np.zeros(0, ENTRY_DTYPE)
_NO_NUMBERS: Final = np.zeros(0, np.int64)


class Taker(Protocol):
    """The choice of one pull, as a scan sees it."""

    full: bool
    #: The cursors of the group, as they will be.
    cursors: ChosenCursors

    @property
    def lacks(self) -> bool:
        """Whether the pull has less than it waits for."""

    def leave_slots(self) -> None:
        """Note that slots that the consumer may have were left to others."""

    def take_rows(self, subject_filter: SubjectFilter, partitions: Numbers, rows: Rows) -> int:
        """Choose from rows in order; return how many have no messages left."""

    def pass_rows(self, count: int) -> None:
        """Count rows that were read."""


class _Forgotten(NamedTuple):
    """The rows of a slot that were passed and forgotten: the sequence of the first message, and by partition the first
    row that may be one of them.
    """

    sequence: int
    rows: tuple[int, ...]


class OrderedScan:
    """How far one filter of order keys is read, and what it has passed. A pull chooses from a copy."""

    def __init__(self, subject_filter: SubjectFilter, store: Store) -> None:
        self._filter = subject_filter
        self._store = store
        self._chooser: _SlotChooser | None = None
        self._cursors = list(subject_filter.row_cursors)  # as this set them last
        self._next_rows = list(subject_filter.row_cursors)
        # Rows that were passed, in the order in which they are to be handed out; where they lie; whether they wait.
        self._rows: Rows = _NO_ROWS
        self._partitions: Numbers = _NO_NUMBERS
        self._numbers: Numbers = _NO_NUMBERS
        self._waits: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: Slots whose passed rows were forgotten; and by partition the first such row.
        self._forgotten: dict[int, _Forgotten] = {}
        self._is_forgotten: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._forgotten_from: list[int | None] = [None] * len(self._next_rows)

    # --- state -------------------------------------------------------------------------------------------------------

    def has_more(self) -> bool:
        """Return whether there may be messages that were not handed out."""
        if self._forgotten or self._waits.any():
            return True
        return any(
            row < self._store.partitions[partition].consumer_log.visible_row
            for partition, row in enumerate(self._next_rows)
        )

    def copy(self) -> OrderedScan:
        """Return a copy for one pull, which takes this one's place once that is recorded."""
        copied = copy(self)
        copied._chooser = None
        copied._waits = self._waits.copy()
        copied._forgotten = dict(self._forgotten)
        copied._is_forgotten = self._is_forgotten.copy() if self._forgotten else np.zeros(0, np.bool_)
        copied._forgotten_from = list(self._forgotten_from)
        if self._filter.row_cursors != self._cursors:
            copied._moved()
        return copied

    @property
    def row_cursors(self) -> list[int]:
        """The first rows that have messages left, by partition."""
        return list(self._cursors)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def take(self, taker: Taker, order: OrderSlots, consumer: int, consumers: int) -> None:
        """Choose messages for a consumer, one of *consumers* that are there. Raises NotInMemory and StorageError."""
        order.upto(self._store.subjects.count)
        chooser = self._chooser
        if chooser is None:
            chooser = self._chooser = _SlotChooser(self._store, self._filter, taker.cursors, order, consumer, consumers)
        try:
            self._take_some(taker, order, chooser)
            while chooser.left_slots and taker.lacks and not taker.full:
                chooser.widen()
                self._take_some(taker, order, chooser)
            if chooser.left_slots:
                taker.leave_slots()
        finally:
            self._set_cursors()

    def _take_some(self, taker: Taker, order: OrderSlots, chooser: _SlotChooser) -> None:
        if self._forgotten:
            self._take_forgotten(taker, chooser)
        if not taker.full and len(self._waits):
            self._take_passed(taker, chooser)
        rows = _FIRST_ROWS
        while not taker.full and self._has_room(order) and self._read_on(taker, chooser, rows):
            rows = min(rows * 8, _CHUNK_ROWS)

    def _moved(self) -> None:
        """Go on where somebody has moved the row cursors to: what lies before is gone."""
        moved = self._filter.row_cursors
        self._next_rows = list(map(max, self._next_rows, moved))
        if len(self._waits):
            self._waits &= self._numbers >= np.array(moved)[self._partitions]
        self._forgotten_from = [
            None if first is None else max(first, row) for first, row in zip(self._forgotten_from, moved, strict=True)
        ]

    def _set_cursors(self) -> None:
        """Set the row cursors to the first rows that have messages left."""
        cursors = list(self._next_rows)
        left = np.flatnonzero(self._waits)
        if len(left):
            for partition in range(len(cursors)):
                mine = left[self._partitions[left] == partition]
                if len(mine):
                    cursors[partition] = min(cursors[partition], int(self._numbers[mine].min()))
        elif len(self._waits):
            self._rows, self._partitions, self._numbers = _NO_ROWS, _NO_NUMBERS, _NO_NUMBERS
            self._waits = np.zeros(0, np.bool_)
        for partition, first in enumerate(self._forgotten_from):
            if first is not None:
                cursors[partition] = min(cursors[partition], first)
        self._cursors = cursors

    def _take_forgotten(self, taker: Taker, chooser: _SlotChooser) -> None:
        """Choose from slots whose passed rows were forgotten, or have them read again."""
        slots = np.fromiter(self._forgotten, np.int64)
        is_done = chooser.cursors.of(slots) >= self._store.subjects.ends[slots]
        for slot in slots[is_done].tolist():
            self._remind(slot)
        slots = slots[~is_done]
        free = slots[chooser.may_have(slots)].tolist()
        if free and not self._read_again(free):
            for slot in free[:_MOST_SLOTS]:
                if not self._take_slot(taker, slot):
                    return
                self._remind(slot)
        if not self._forgotten:
            self._forgotten_from = [None] * len(self._forgotten_from)

    def _read_again(self, slots: list[int]) -> bool:
        """Go back to the first forgotten row of these slots; return False where that is not worth it.

        Rows that are read again come after those that stay remembered, so only rows stored before them may stay.
        """
        rows = map(min, zip(*(self._forgotten[slot].rows for slot in slots), strict=True))
        firsts = list(map(min, self._next_rows, map(max, rows, self._filter.row_cursors)))
        later = self._waits & (self._rows["stored_at_us"] >= self._first_stamp(firsts))
        for partition in set(self._partitions[later].tolist()):
            firsts[partition] = min(
                firsts[partition], int(self._numbers[later & (self._partitions == partition)].min())
            )
        if sum(self._next_rows) - sum(firsts) > min(AGAIN_ROWS, AGAIN_ROWS_A_SLOT * len(slots)):
            return False
        self._next_rows = firsts
        self._waits &= ~later
        for slot in slots:
            self._remind(slot)
        return True

    def _first_stamp(self, firsts: list[int]) -> int:
        """Return when the first of the rows from *firsts* on was stored that were read before."""
        logs = [part.consumer_log for part in self._store.partitions]
        again = [number for number, first in enumerate(firsts) if first < self._next_rows[number]]
        return min((int(logs[number].rows(firsts[number], 1)["stored_at_us"][0]) for number in again), default=1 << 63)

    def _remind(self, slot: int) -> None:
        del self._forgotten[slot]
        self._is_forgotten[slot] = False

    def _take_slot(self, taker: Taker, slot: int) -> bool:
        """Choose all messages of a slot that can be read; return whether none is left."""
        cursors = taker.cursors
        while parts := self._store.subject_rows(
            slot, max(cursors.get(slot), self._forgotten[slot].sequence), _SLOT_ROWS
        ):
            for partition, rows in parts:
                if taker.take_rows(self._filter, np.array([partition]), rows) < len(rows) or taker.full:
                    return False
            if cursors.get(slot) >= int(self._store.subjects.ends[slot]):
                return True
        return True

    def _take_passed(self, taker: Taker, chooser: _SlotChooser) -> None:
        """Choose from the rows that were passed."""
        waiting = np.flatnonzero(self._waits)
        for at in range(0, len(waiting), _PASSED_ROWS):
            index = waiting[at : at + _PASSED_ROWS]
            rows = chosen_of([self._rows], index)
            taken, done = _take(taker, self._filter, chooser, self._partitions[index], rows)
            self._waits[index[done]] = False
            self._waits[index[taken]] = False
            if taker.full:
                return

    def _read_on(self, taker: Taker, chooser: _SlotChooser, count: int) -> bool:
        """Choose from the next rows, and pass the others; return False where there are none."""
        rows, partitions, numbers = self._next(count)
        if not len(rows):
            return False
        taker.pass_rows(len(rows))
        matches = self._filter.matches(self._store)
        wanted = np.ones(len(rows), np.bool_) if matches is None else matches[rows["subject"]]
        self._is_forgotten = _upto(self._is_forgotten, self._store.subjects.count)
        wanted &= ~self._is_forgotten[rows["subject"]]
        index = np.flatnonzero(wanted)
        behind = np.bincount(partitions, minlength=len(self._next_rows)).tolist()
        if not len(index):
            self._pass_rows(behind)
            return True
        rows, partitions, numbers = chosen_of([rows], index), partitions[index], numbers[index]
        taken, done = _take(taker, self._filter, chooser, partitions, rows)
        left = np.ones(len(rows), np.bool_)
        left[done] = left[taken] = False
        self._pass_rows(behind)
        if left.any():
            self._remember(chosen_of([rows], np.flatnonzero(left)), partitions[left], numbers[left])
        return True

    def _pass_rows(self, counts: list[int]) -> None:
        self._next_rows = [row + count for row, count in zip(self._next_rows, counts, strict=True)]

    def _next(self, count: int) -> tuple[Rows, Numbers, Numbers]:
        """Return the next rows of all partitions, about *count* of each, in the order in which they were stored; their
        partitions and row numbers.
        """
        heads, partitions, numbers, limit = list[Rows](), list[Numbers](), list[Numbers](), np.uint64(2**64 - 1)
        for partition, row in enumerate(self._next_rows):
            log = self._store.partitions[partition].consumer_log
            rows = log.rows(row, count)
            if not len(rows):
                continue
            heads.append(rows)
            partitions.append(np.full(len(rows), partition, np.int64))
            numbers.append(np.arange(row, row + len(rows)))
            if row + len(rows) < log.visible_row:
                limit = min(limit, rows["stored_at_us"][-1])
        if len(heads) <= 1:
            return (heads[0], partitions[0], numbers[0]) if heads else (_NO_ROWS, _NO_NUMBERS, _NO_NUMBERS)
        stamps = np.concatenate([rows["stored_at_us"] for rows in heads])
        merged = np.argsort(stamps, kind="stable")
        merged = merged[: int(np.searchsorted(stamps[merged], limit, "right"))]
        return chosen_of(heads, merged), np.concatenate(partitions)[merged], np.concatenate(numbers)[merged]

    # --- rows that were passed ---------------------------------------------------------------------------------------

    def _remember(self, rows: Rows, partitions: Numbers, numbers: Numbers) -> None:
        left = np.flatnonzero(self._waits)
        before = chosen_of([self._rows], left) if len(left) else _NO_ROWS
        self._rows = np.concatenate([before, rows]) if len(left) else rows
        self._partitions = np.concatenate([self._partitions[left], partitions])
        self._numbers = np.concatenate([self._numbers[left], numbers])
        self._waits = np.ones(len(self._rows), np.bool_)

    def _has_room(self, order: OrderSlots) -> bool:
        """Return whether more rows may be passed; forget those of blocked slots where there are too many."""
        left = np.flatnonzero(self._waits)
        if len(left) < MOST_PASSED:
            return True
        rows = chosen_of([self._rows], left)
        blocked = order.blocked(rows["subject"])
        index = np.flatnonzero(blocked)
        if not len(index):
            return False
        slots, heads = np.unique(rows["subject"][index], return_index=True)
        first_rows = np.tile(np.array(self._next_rows), (len(slots), 1))
        partitions, numbers = self._partitions[left[index]], self._numbers[left[index]]
        np.minimum.at(first_rows, (np.searchsorted(slots, rows["subject"][index]), partitions), numbers)
        sequences = rows["first_sequence"][index[heads]].tolist()
        for slot, sequence, firsts in zip(slots.tolist(), sequences, first_rows.tolist(), strict=True):
            self._forgotten[slot] = _Forgotten(sequence, tuple(firsts))
        self._is_forgotten = _upto(self._is_forgotten, self._store.subjects.count)
        self._is_forgotten[slots] = True
        # Also of partitions without such rows: later ones of the slots are passed there, too.
        for partition, row in enumerate(first_rows.min(axis=0).tolist()):
            first = self._forgotten_from[partition]
            self._forgotten_from[partition] = row if first is None else min(first, row)
        self._waits[left[index]] = False
        return True


class _SlotChooser:
    """Decides in one pull which slots a consumer gets messages of."""

    def __init__(
        self, store: Store, subject_filter: SubjectFilter, cursors: ChosenCursors, order: OrderSlots, consumer: int,
        consumers: int,
    ) -> None:  # fmt: skip
        self.cursors = cursors
        self._order = order
        self._consumer = consumer
        self._room: int | None = None  # for so many slots that it does not hold
        self._more = 1  # for so many more the next time
        #: The consumer may have slots that it does not get, since there was no room for them.
        self.left_slots = False
        self._granted: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        if consumers > 1:
            self._room = self._room_among(store, subject_filter, consumers)
            self._granted = np.zeros(store.subjects.count, np.bool_)

    def _room_among(self, store: Store, subject_filter: SubjectFilter, consumers: int) -> int:
        matches = subject_filter.matches(store)
        slots = np.arange(store.subjects.count) if matches is None else np.flatnonzero(matches[: store.subjects.count])
        owners = self._order.owners_of(slots)
        mine, active = int(np.count_nonzero(owners == self._consumer)), len(slots)
        if len(slots) <= _MOST_COUNTED:
            ends = store.subjects.ends[slots]
            active = int(np.count_nonzero((owners != 0) | (ends > self.cursors.of(slots))))
        return max(1, -(-active // consumers) - mine)  # whoever asks gets what waits, if only of one slot

    def may_have(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return of which slots the consumer gets messages, asked in the order in which these were stored."""
        allowed = self._order.may_have(self._consumer, slots)
        if self._room is None:
            return allowed
        is_new = allowed & (self._order.owners_of(slots) == 0)
        wanted = slots[is_new & ~self._granted[slots]]
        if len(wanted) and self._room:
            distinct, firsts = np.unique(wanted, return_index=True)
            granted = distinct[np.argsort(firsts)][: self._room]
            self._granted[granted] = True
            self._room -= len(granted)
        is_left = is_new & ~self._granted[slots]
        self.left_slots = self.left_slots or bool(is_left.any())
        allowed &= ~is_left
        return allowed

    def widen(self) -> None:
        """Make room for more slots, twice as many each time."""
        self._room, self._more = (self._room or 0) + self._more, 2 * self._more
        self.left_slots = False


def _take(
    taker: Taker, subject_filter: SubjectFilter, chooser: _SlotChooser, partitions: Numbers, rows: Rows
) -> tuple[Numbers, Numbers]:
    """Choose from rows; return the indexes of rows that are taken whole now, and of those that the group had before."""
    subjects = rows["subject"]
    numbers = chooser.cursors.of(subjects)
    is_done = rows["first_sequence"] + rows["count"] <= numbers
    wanted = np.flatnonzero(~is_done)
    if len(wanted):  # a slot is granted for messages only
        wanted = wanted[chooser.may_have(subjects[wanted])]
    if len(wanted):
        some = rows if len(wanted) == len(rows) else chosen_of([rows], wanted)
        where = partitions[:1] if len(subject_filter.row_cursors) == 1 else partitions[wanted]
        wanted = wanted[: taker.take_rows(subject_filter, where, some)]
    return wanted, np.flatnonzero(is_done)


def _upto(column: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.bool_]:
    if len(column) >= count:
        return column
    grown = np.zeros(max(count, 2 * len(column)), np.bool_)
    grown[: len(column)] = column
    return grown

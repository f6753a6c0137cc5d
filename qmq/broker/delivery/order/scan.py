"""Chooses new messages with order keys, in stored order, and leaves out slots that another consumer or a retry holds.

A group has one scan for all that it follows, since a message waits for the earlier ones of its slot in other subjects
too. A consumer that follows only some of these gets nothing of a slot whose next message is for others.

A scan reads each row once. It passes rows that the consumer of a pull may not have now, remembers up to MOST_PASSED of
them, and looks at these first in the pulls that follow. Beyond that it forgets the rows of blocked slots. When such a
slot is free again, the scan goes back to its first row and reads on from there, if that is near; if it is far back, it
finds the slot's rows by their subjects. So a slot that is stuck costs a few bytes, however much waits behind it.

Within a slot the stored order holds, whatever the priorities. A pull for one priority chooses from slots whose next
message has it, as far as the scan has read and remembers: it looks ahead, but not beyond MOST_PASSED rows.

With several consumers one of them gets the messages of some of the slots only, so that the others find some too. Where
these have less than the pull waits for, it gets more slots.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.chosen_cursors import ChosenCursors
from qmq.broker.groups.group import Group, SubjectFilter, Subscription
from qmq.broker.groups.message_ranges import Rows, chosen_of
from qmq.broker.groups.order_slots import OrderSlots
from qmq.format.lanes import SLOT_BITS, kind_of, kinds_of
from qmq.format.layout import ENTRY_DTYPE, LANE_ORDERED, ORDER_SLOTS
from qmq.storage.store import Store

#: Rows that a scan has passed and remembers.
MOST_PASSED: Final = 32_768
#: Rows that are looked at in one go.
_FIRST_ROWS: Final = 64
_CHUNK_ROWS: Final = 8_192
#: Passed rows that are looked at in one go.
_PASSED_ROWS: Final = 2_048
#: Rows of one subject of a slot that are looked up in one go, and look-ups of one pull, which is about 50 us for each.
_SLOT_ROWS: Final = 1_024
_MOST_LOOKED_UP: Final = 256
#: Looks of one pull at all rows that wait, for slots in the place of those of which it gets nothing.
_MOST_LOOKS: Final = 8
#: Forgotten rows are read again if they lie at most so many rows back, and so many for each slot that is free: to find
#: the rows of one slot by its subjects takes at least as long as to read this many.
AGAIN_ROWS: Final = 262_144
AGAIN_ROWS_A_SLOT: Final = 2_048
#: Subjects and lanes up to which the slots with messages are counted; of more, all count.
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
    def most(self) -> int:
        """The most messages that the pull may get beside those that were chosen."""

    @property
    def lacks(self) -> bool:
        """Whether the pull has less than it waits for."""

    def leave_slots(self) -> None:
        """Note that slots that the consumer may have were left to others."""

    def take_ordered(self, partitions: Numbers, rows: Rows) -> int:
        """Choose from rows in order; return how many have no messages left."""

    def pass_rows(self, count: int) -> None:
        """Count rows that were read."""


class _Forgotten(NamedTuple):
    """The rows of a slot that were passed and forgotten: when the first was stored, its subject and kind of lanes, the
    sequence behind it, and by partition the first row that may be one of them.
    """

    stored_at_us: int
    subject: int
    kind: int
    end: int
    rows: tuple[int, ...]


class OrderedScan:
    """How far the order keys of one group are read, and what was passed. A pull chooses from a copy."""

    def __init__(self, group: Group, store: Store) -> None:
        self._group = group
        self._store = store
        self._filters = [ordered for base in group.filters.values() for ordered in base.with_slots()]
        self._kinds = {subject_filter.kind for subject_filter in self._filters}
        self._chooser: _SlotChooser | None = None
        self._cursors = self._lowest()  # as this set them last
        self._next_rows = list(self._cursors)
        # Rows that were passed, in the order in which they are to be handed out; where they lie; whether they wait.
        self._rows: Rows = _NO_ROWS
        self._partitions: Numbers = _NO_NUMBERS
        self._numbers: Numbers = _NO_NUMBERS
        self._waits: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        #: Slots whose passed rows were forgotten; and by partition the first such row.
        self._forgotten: dict[int, _Forgotten] = {}
        self._is_forgotten: npt.NDArray[np.bool_] = np.zeros(ORDER_SLOTS, np.bool_)
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
        copied._is_forgotten = self._is_forgotten.copy()
        copied._forgotten_from = list(self._forgotten_from)
        if (moved := self._lowest()) != self._cursors:
            copied._go_on_from(moved)
        return copied

    def apply(self) -> None:
        """Take the place of the scan that this is a copy of, and move the row cursors."""
        self._group.scan = self
        for subject_filter in self._filters:
            subject_filter.row_cursors[:] = map(max, subject_filter.row_cursors, self._cursors)
        self._cursors = self._lowest()
        self._chooser = None  # it is of this pull alone

    def _lowest(self) -> list[int]:
        return list(map(min, zip(*(subject_filter.row_cursors for subject_filter in self._filters), strict=True)))

    def _go_on_from(self, moved: list[int]) -> None:
        """Go on where somebody has moved the row cursors to: what lies before is gone."""
        self._next_rows = list(map(max, self._next_rows, moved))
        if len(self._waits):
            self._waits &= self._numbers >= np.array(moved)[self._partitions]
        self._forgotten_from = [
            None if first is None else max(first, row) for first, row in zip(self._forgotten_from, moved, strict=True)
        ]

    # --- choosing ----------------------------------------------------------------------------------------------------

    def take(self, taker: Taker, order: OrderSlots, kind: int, subscription: Subscription, consumers: int) -> None:
        """Choose messages of one priority, by the *kind* of lanes, for a consumer, one of *consumers* that are there.
        Raises NotInMemory and StorageError.
        """
        chooser = self._chooser
        if chooser is None:
            chooser = self._chooser = _SlotChooser(self._store, taker, order, subscription, consumers)
        is_one_of_several = len(self._kinds) > 1
        if is_one_of_several:
            of_kind = [subject_filter for subject_filter in self._filters if subject_filter.kind == kind]
            if not len(chooser.with_messages(of_kind, _MOST_COUNTED)):
                return
        chooser.begin(kind if is_one_of_several else None)
        try:
            self._take_some(taker, chooser)
            looks = 1
            while chooser.left_slots and not taker.full:
                if looks >= _MOST_LOOKS or not chooser.give_back():
                    if not taker.lacks:
                        break
                    chooser.widen()
                chooser.left_slots, looks = False, looks + 1
                self._take_some(taker, chooser)
            if chooser.left_slots:
                taker.leave_slots()
        finally:
            self._set_cursors()

    def _take_some(self, taker: Taker, chooser: _SlotChooser) -> None:
        chooser.look_again()
        if self._forgotten:
            self._take_forgotten(taker, chooser)
        if not taker.full and len(self._waits):
            self._take_passed(taker, chooser)
        rows = min(max(_FIRST_ROWS, 4 * taker.most), _CHUNK_ROWS)
        while not taker.full and self._has_room(chooser) and self._read_on(taker, chooser, rows):
            rows = min(rows * 8, _CHUNK_ROWS)

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
        subjects = chooser.with_messages(self._filters)
        slots_of_subjects = self._store.subjects.lanes[subjects] & SLOT_BITS
        slots, are_left = np.fromiter(self._forgotten, np.int64), np.zeros(ORDER_SLOTS, np.bool_)
        are_left[slots_of_subjects] = True
        for slot in slots[~are_left[slots]].tolist():
            self._remind(slot)
        slots = slots[are_left[slots]]
        slots = slots[chooser.are_open(slots)]
        free = self._free_of(slots[chooser.may_have(slots)], chooser)
        if free and not self._read_again(free):
            looked_up = 0
            for slot in free:
                numbers = subjects[slots_of_subjects == slot].tolist()
                if looked_up and looked_up + len(numbers) > _MOST_LOOKED_UP:
                    taker.full = True  # it goes on in the next turn
                    return
                looked_up += len(numbers)
                if self._take_slot(taker, chooser, slot, numbers):
                    self._remind(slot)
                if taker.full:
                    return
        if not self._forgotten:
            self._forgotten_from = [None] * len(self._forgotten_from)

    def _free_of(self, slots: Numbers, chooser: _SlotChooser) -> list[int]:
        """Return which of these slots have a message for the consumer as the next one, as far as that is known."""
        heads = [self._forgotten[slot] for slot in slots.tolist()]
        subjects = np.array([head.subject for head in heads], np.int64)
        is_done = chooser.cursors_of(subjects) >= np.array([head.end for head in heads], np.uint64)
        is_next = chooser.are_own(subjects)
        if chooser.kind is not None:
            is_next &= np.array([head.kind for head in heads], np.int64) == chooser.kind
        free: list[int] = slots[is_done | is_next].tolist()
        return free

    def _read_again(self, slots: list[int]) -> bool:
        """Go back to the first forgotten row of these slots; return False where that is not worth it.

        Rows that are read again come after those that stay remembered, so only rows stored before them may stay.
        """
        rows = map(min, zip(*(self._forgotten[slot].rows for slot in slots), strict=True))
        firsts = list(map(min, self._next_rows, map(max, rows, self._lowest())))
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

    def _take_slot(self, taker: Taker, chooser: _SlotChooser, slot: int, subjects: list[int]) -> bool:
        """Choose all messages of a slot that can be read, from the subjects that have some; return whether none is
        left.
        """
        forgotten = self._forgotten[slot]
        starts = dict(zip(subjects, chooser.cursors_of(np.array(subjects)).tolist(), strict=True))
        while True:
            rows, partitions, more = self._rows_of(starts, forgotten.stored_at_us)
            if not len(rows):
                return True
            is_left = np.ones(len(rows), np.bool_)
            is_left[_take(taker, chooser, rows, partitions, np.arange(len(rows)))] = False
            if is_left.any():
                head = rows[int(np.argmax(is_left))]
                end = int(head["first_sequence"]) + int(head["count"])
                kind = kind_of(int(head["lane"]))
                self._forgotten[slot] = forgotten._replace(subject=int(head["subject"]), kind=kind, end=end)
                return False
            if taker.full or not more:
                return not more
            starts.update(zip(rows["subject"].tolist(), (rows["first_sequence"] + rows["count"]).tolist(), strict=True))

    def _rows_of(self, starts: dict[int, int], first_us: int) -> tuple[Rows, Numbers, bool]:
        """Return the next rows of some subjects, in the order in which they were stored; their partitions; and whether
        there are more. *starts* has the next sequences, 0 for the first that was stored from *first_us* on.
        """
        heads, partitions, limit, more = [_NO_ROWS], [_NO_NUMBERS], np.uint64(2**64 - 1), False
        for number, sequence in starts.items():
            start = sequence or self._store.sequence_at_time(number, first_us)
            found = [] if start is None else self._store.subject_rows(number, start, _SLOT_ROWS)
            heads += [rows for _, rows in found]
            partitions += [np.full(len(rows), partition, np.int64) for partition, rows in found]
            if found and sum(len(rows) for _, rows in found) >= _SLOT_ROWS:
                limit, more = min(limit, found[-1][1]["stored_at_us"][-1]), True
        rows = np.concatenate(heads)
        if not len(rows):
            return rows, _NO_NUMBERS, False
        wanted = np.flatnonzero(rows["stored_at_us"] <= limit)
        order = wanted[np.lexsort((rows["run"][wanted], rows["stored_at_us"][wanted]))]
        return chosen_of([rows], order), np.concatenate(partitions)[order], more

    def _take_passed(self, taker: Taker, chooser: _SlotChooser) -> None:
        """Choose from the rows that were passed."""
        waiting = np.flatnonzero(self._waits)
        waiting = waiting[chooser.are_open(self._rows["lane"][waiting] & SLOT_BITS)]
        for at in range(0, len(waiting), _PASSED_ROWS):
            index = waiting[at : at + _PASSED_ROWS]
            self._waits[_take(taker, chooser, self._rows, self._partitions, index)] = False
            if taker.full:
                return

    def _read_on(self, taker: Taker, chooser: _SlotChooser, count: int) -> bool:
        """Choose from the next rows, and pass the others; return False where there are none."""
        rows, partitions, numbers = self._next(count)
        if not len(rows):
            return False
        taker.pass_rows(len(rows))
        lanes = rows["lane"]
        are_left = lanes >= LANE_ORDERED
        if are_left.any():
            are_left &= self._followed(rows["subject"], partitions, numbers)
            slots = lanes & SLOT_BITS
            if self._forgotten:
                are_left &= ~self._is_forgotten[slots]
            are_left &= chooser.have_messages(rows)  # some rows are read again
            index = np.flatnonzero(are_left & chooser.are_open(slots))
            are_left[_take(taker, chooser, rows, partitions, index)] = False
        counts = np.bincount(partitions, minlength=len(self._next_rows)).tolist()
        self._next_rows = [row + passed for row, passed in zip(self._next_rows, counts, strict=True)]
        left = np.flatnonzero(are_left)
        if len(left):
            self._remember(chosen_of([rows], left), partitions[left], numbers[left])
        return True

    def _followed(self, subjects: npt.NDArray[Any], partitions: Numbers, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return which rows are of subjects that the group follows, from where it follows them on."""
        followed = np.zeros(len(subjects), np.bool_)
        for subject_filter in self._filters:
            matches = subject_filter.matches(self._store)
            assert matches is not None  # these are some lanes only
            taken = matches[subjects]
            if any(row > lowest for row, lowest in zip(subject_filter.row_cursors, self._cursors, strict=True)):
                taken &= numbers >= np.array(subject_filter.row_cursors)[partitions]
            followed |= taken
        return followed

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

    def _has_room(self, chooser: _SlotChooser) -> bool:
        """Return whether more rows may be passed; forget those of blocked slots where there are too many."""
        left = np.flatnonzero(self._waits)
        if len(left) < MOST_PASSED:
            return True
        rows = chosen_of([self._rows], left)
        slots_of_rows = rows["lane"] & SLOT_BITS
        index = np.flatnonzero(chooser.are_blocked(slots_of_rows))
        if not len(index):
            return False
        slots, heads = np.unique(slots_of_rows[index], return_index=True)
        first_rows = np.tile(np.array(self._next_rows), (len(slots), 1))
        partitions, numbers = self._partitions[left[index]], self._numbers[left[index]]
        np.minimum.at(first_rows, (np.searchsorted(slots, slots_of_rows[index]), partitions), numbers)
        for slot, head, firsts in zip(slots.tolist(), index[heads].tolist(), first_rows.tolist(), strict=True):
            first = rows[head]
            end = int(first["first_sequence"]) + int(first["count"])
            subject, kind = int(first["subject"]), kind_of(int(first["lane"]))
            self._forgotten[slot] = _Forgotten(int(first["stored_at_us"]), subject, kind, end, tuple(firsts))
        self._is_forgotten[slots] = True
        # Also of partitions without such rows: later ones of the slots are passed there, too.
        for partition, row in enumerate(first_rows.min(axis=0).tolist()):
            known = self._forgotten_from[partition]
            self._forgotten_from[partition] = row if known is None else min(known, row)
        self._waits[left[index]] = False
        return True


class _SlotChooser:
    """Decides in one pull which slots a consumer gets messages of."""

    def __init__(
        self, store: Store, taker: Taker, order: OrderSlots, subscription: Subscription, consumers: int
    ) -> None:
        assert subscription.member is not None
        self.cursors = taker.cursors
        self.has_one_partition = len(store.partitions) == 1
        self._store = store
        self._group = subscription.group
        self._taker = taker
        self._order = order
        self._consumer = subscription.member.number
        self._consumers = consumers
        self._part: int | None = None  # so many slots may be granted; None: not known yet
        self._more = 1  # so many more the next time
        self._is_limited = False  # the pull may choose from more slots than there is room for
        #: The slots that it gets, among those that nobody holds, and those of which it gets messages.
        self._are_granted = np.zeros(ORDER_SLOTS, np.bool_)
        self._are_taken = np.zeros(ORDER_SLOTS, np.bool_)
        #: Those that were granted and had nothing of the kind for it: it does not get them again meanwhile.
        self._are_vain = np.zeros(ORDER_SLOTS, np.bool_)
        #: The consumer may have slots that it does not get, since there was no room for them.
        self.left_slots = False
        #: The kind of lanes that the pull chooses from now; None: all, since there is one.
        self.kind: int | None = None
        #: Slots whose next message is for consumers that follow other subjects, and those where it is of another kind.
        self._are_others = np.zeros(ORDER_SLOTS, np.bool_)
        self._are_later = np.zeros(ORDER_SLOTS, np.bool_)
        self._filters = [ordered for base in subscription.filters for ordered in base.with_slots()]
        self._follows_all = len(subscription.filters) == len(self._group.filters)

    def cursors_of(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the next sequences of subjects, those of the group's start where it has none yet."""
        return self._group.started_in_slots(self._store, numbers, self.cursors.of(numbers))

    def have_messages(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows have messages that the group did not have before."""
        have_messages: npt.NDArray[np.bool_] = rows["first_sequence"] + rows["count"] > self.cursors_of(rows["subject"])
        return have_messages

    def with_messages(self, filters: list[SubjectFilter], most: int | None = None) -> Numbers:
        """Return the subjects of filters that have messages left; of more than *most*, all."""
        numbers = np.flatnonzero(_matched(self._store, filters))
        if most is not None and len(numbers) > most:
            return numbers
        return numbers[self._store.subjects.ends[numbers] > self.cursors_of(numbers)]

    def are_blocked(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which slots somebody else holds, a retry, or a message for other consumers."""
        blocked: npt.NDArray[np.bool_] = self._order.are_held[slots] | self._are_others[slots]
        return blocked

    def are_open(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which slots neither another consumer nor a retry holds."""
        allowed: npt.NDArray[np.bool_] = self._order.may_have(self._consumer, slots)
        return allowed

    def begin(self, kind: int | None) -> None:
        """Begin to choose from one kind of lanes (None: all, since there is one)."""
        self.kind, most = kind, self._taker.most
        self._are_vain[:] = False
        # To find the room takes longer than to choose one message.
        may_find = self._consumers > 1 and (most > 1 or self._part is not None)
        self._is_limited = may_find and most > self._room()

    def look_again(self) -> None:
        """Begin to look at the rows that wait, from the first one on."""
        self._are_others[:] = self._are_later[:] = False

    def may_take(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows the consumer gets. All are of open slots and have messages left; ask in stored order."""
        slots = rows["lane"] & SLOT_BITS
        if self.kind is None and self._follows_all:
            return self.may_have(slots)
        allowed = self._are_next(rows, slots)
        next_rows = np.flatnonzero(allowed)
        allowed[next_rows] = self.may_have(slots[next_rows])
        return allowed

    def _are_next(self, rows: Rows, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which rows come before all of their slot that are for other consumers, or of another kind."""
        are_others = ~self.are_own(rows["subject"])
        are_later = np.zeros(len(rows), np.bool_) if self.kind is None else kinds_of(rows["lane"]) != self.kind
        stops = np.flatnonzero(are_others | are_later)
        first = np.full(ORDER_SLOTS, len(rows))
        first[slots[stops[::-1]]] = stops[::-1]  # numpy keeps the last of several assignments
        are_known = self._are_others[slots] | self._are_later[slots]
        are_next: npt.NDArray[np.bool_] = ~are_known & (np.arange(len(rows)) < first[slots])
        heads = stops[(first[slots[stops]] == stops) & ~are_known[stops]]
        self._are_others[slots[heads[are_others[heads]]]] = True
        self._are_later[slots[heads]] = True
        return are_next

    def are_own(self, subjects: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of the subjects, all of which its group follows, the consumer follows."""
        if self._follows_all:
            return np.ones(len(subjects), np.bool_)
        are_own: npt.NDArray[np.bool_] = _matched(self._store, self._filters)[subjects]
        return are_own

    def may_have(self, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return of which open slots the consumer gets messages, asked in the order in which these were stored."""
        if not self._is_limited:
            return np.ones(len(slots), np.bool_)
        is_left = (self._order.owners[slots] == 0) & ~self._are_granted[slots]
        if len(left := slots[is_left & ~self._are_vain[slots]]) and (room := self._room()) > 0:
            self._are_granted[self._stretches(left, room)] = True
            is_left &= ~self._are_granted[slots]
        self.left_slots = self.left_slots or bool((is_left & ~self._are_vain[slots]).any())
        allowed: npt.NDArray[np.bool_] = ~is_left
        return allowed

    def took(self, rows: Rows, taken: int) -> None:
        """Note that the pull has chosen the first *taken* rows, and maybe a part of the next one."""
        if self._consumers > 1:
            if taken < len(rows) and self.cursors.get(int(rows["subject"][taken])) > int(rows["first_sequence"][taken]):
                taken += 1
            slots = rows["lane"][:taken] & SLOT_BITS
            new = slots[self._order.owners[slots] == 0]
            self._are_granted[new] = self._are_taken[new] = True

    def give_back(self) -> bool:
        """Take back the slots that were granted and gave no message, so that others can be granted; return whether
        there were any.
        """
        unused = self._are_granted & ~self._are_taken
        self._are_granted[unused] = self._are_active[unused] = False
        self._are_vain |= unused
        return bool(unused.any())

    def _room(self) -> int:
        """Return how many more slots the consumer may be granted: its equal part of all active slots, less those that
        it holds or was granted.
        """
        if self._part is None:
            self._are_held = self._order.are_held
            self._are_active = self._are_held | self._are_granted
            numbers = self.with_messages(self._filters, _MOST_COUNTED)
            self._are_active[self._store.subjects.lanes[numbers] & SLOT_BITS] = True
            part = -(-int(np.count_nonzero(self._are_active)) // self._consumers)
            # Whoever asks gets what waits, if only of one slot.
            self._part = max(1, part - self._order.count_of(self._consumer))
        return self._part - int(np.count_nonzero(self._are_granted))

    def _stretches(self, slots: npt.NDArray[Any], room: int) -> Numbers:
        """Choose *room* free slots for the consumer: the first of *slots*, then the longest runs of free slots side by
        side.

        A batch has its runs by slot, so a consumer's messages lie side by side then, and few ranges name them.
        """
        self._are_active[slots] = True
        active = np.flatnonzero(self._are_active)
        are_free = ~(self._are_held | self._are_granted)[active]
        first = int(np.searchsorted(active, slots[0]))
        starts = np.concatenate(([0], np.flatnonzero(are_free[1:] != are_free[:-1]) + 1))
        counts = np.diff(starts, append=len(active)) * are_free[starts]
        own = int(np.searchsorted(starts, first, "right")) - 1
        skipped = min(first - int(starts[own]), max(int(counts[own]) - room, 0))
        starts[own] += skipped
        counts[own] -= skipped
        lengths = counts.copy()
        lengths[own] = ORDER_SLOTS
        order = np.argsort(-lengths, kind="stable")
        starts, ends = starts[order], np.minimum(np.cumsum(counts[order]), room)
        counts = np.diff(ends, prepend=0)
        found: Numbers = active[np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))]
        return found

    def widen(self) -> None:
        """Make room for more slots, twice as many each time."""
        self._part = int(np.count_nonzero(self._are_granted)) + max(self._room(), 0) + self._more
        self._more *= 2


def _take(taker: Taker, chooser: _SlotChooser, rows: Rows, partitions: Numbers, index: Numbers) -> Numbers:
    """Choose from the rows of *index*, all of open slots; return which of them have no messages left."""
    done = index[:0]
    some = rows if len(index) == len(rows) else chosen_of([rows], index)
    are_left = chooser.have_messages(some)
    if not are_left.all():  # a slot is granted for messages only
        done, index, some = index[~are_left], index[are_left], chosen_of([some], np.flatnonzero(are_left))
    are_taken = chooser.may_take(some)
    if not are_taken.all():
        index, some = index[are_taken], chosen_of([some], np.flatnonzero(are_taken))
    if len(index):
        where = partitions[:1] if chooser.has_one_partition else partitions[index]
        taken = taker.take_ordered(where, some)
        chooser.took(some, taken)
        index = index[:taken]
    return np.concatenate((done, index)) if len(done) else index


def _matched(store: Store, filters: list[SubjectFilter]) -> npt.NDArray[np.bool_]:
    """Return which subjects the filters take, by subject number."""
    matched = np.zeros(store.subjects.count, np.bool_)
    for subject_filter in filters:
        matches = subject_filter.matches(store)
        assert matches is not None  # these are some lanes only
        matched |= matches[: len(matched)]
    return matched

"""Order by key in one group: which consumer has the messages of a slot, and which of them are to come again.

The messages of a slot, in all subjects that the group follows, are handed out in stored order. While a consumer has one
of them in flight, it alone gets others. While one of them waits as a retry, nothing behind it is handed out, and of
several retries the first one comes first. An acked message and a dead one hold up nothing; but what its consumer has
behind one that it nacks comes again even if that one is dead.

All of it follows from the messages in flight and the retries, so nothing is stored: after a start, and where it is
``is_stale``, ``rebuild`` of broker/delivery/order/places.py, which can read the log, builds it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.broker.groups.member import Member
from qmq.broker.groups.settings import ResolvedSettings
from qmq.broker.journal.record_types import MessageRange
from qmq.broker.ports.commands import DispositionRange
from qmq.format.layout import ORDER_SLOTS
from qmq.intervals import Intervals
from qmq.net.protocol.types import Disposition

#: The reasons why a message comes back that its consumer has not handed back itself.
EARLIER_FAILED: Final = "an earlier message of its slot of order keys comes again first"
EARLIER_DIED: Final = "an earlier message of its slot of order keys was nacked, and is dead"
#: The place of a message in the order of its slot: when its batch was stored, its run, and its index in the run.
_STAMP_SHIFT: Final = 48
_RUN_SHIFT: Final = 32

Numbers = npt.NDArray[np.int64]


def place_of(stored_at_us: int, offset: int) -> int:
    """Return the place of a message; *offset*: see ``offset_of``."""
    return stored_at_us << _STAMP_SHIFT | offset


def offset_of(run: Any, index: Any) -> Any:
    """Return the part of places that says where in its batch a message lies: message *index* of that run."""
    return run << _RUN_SHIFT | index


def stamp_of(place: int) -> int:
    """Return when the batch of a message was stored, by its place; below 0 for one that was never stored here."""
    return place >> _STAMP_SHIFT


def run_and_index_of(place: int) -> tuple[int, int]:
    """Return the number of a message's run in its batch, and its index in that run, by its place."""
    offset = place & ((1 << _STAMP_SHIFT) - 1)
    return offset >> _RUN_SHIFT, offset & ((1 << _RUN_SHIFT) - 1)


class SlotLookup(Protocol):
    """Finds the slots of the messages of ranges."""

    def __call__(self, messages: MessageRange) -> list[tuple[int, int, int]] | None:
        """Return (slot, place of the first message, count) of each run, slot -1 for messages without an order key. None
        where that is not known now.
        """


class OrderedRuns(NamedTuple):
    """Messages of slots that one pull put in flight, by run: the delivery sequences, the slot, and of the first message
    when its batch was stored and its offset there.
    """

    starts: Numbers
    ends: Numbers
    slots: Numbers
    stamps: Numbers
    offsets: Numbers


class _HeldRuns:
    """The runs of one pull, and how many of their messages are in flight."""

    __slots__ = ("end", "left", "runs")

    def __init__(self, runs: OrderedRuns) -> None:
        self.runs = runs
        self.end = int(runs.ends[-1])
        self.left = int((runs.ends - runs.starts).sum())


class SlotParts(NamedTuple):
    """Parts of such runs: the first delivery sequence, the slot, stamp and offset of the first message, and the count
    of each.
    """

    begins: Numbers
    slots: Numbers
    stamps: Numbers
    offsets: Numbers
    counts: Numbers

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the first delivery sequence, the slot, the place and the count of each part."""
        columns = (column.tolist() for column in self)
        for begin, slot, stamp, offset, count in zip(*columns, strict=True):
            yield begin, slot, place_of(stamp, offset), count


class SlotMessages(NamedTuple):
    """Messages in a row of one slot: places [start, end)."""

    slot: int
    start: int
    end: int


class OrderSlots:
    """The slots of one group."""

    def __init__(self, lookup: SlotLookup, rebuild: Callable[[OrderSlots], None]) -> None:
        """*rebuild* tells everything anew, after a ``clear``."""
        self._lookup = lookup
        self._rebuild = rebuild
        #: By slot: the consumer that has messages in flight (0: none), and whether some are to come again.
        self.owners = np.zeros(ORDER_SLOTS, np.uint32)
        self.are_retrying = np.zeros(ORDER_SLOTS, np.bool_)
        #: By slot: how many messages are in flight, and the places of those that are to come again.
        self._in_flight = np.zeros(ORDER_SLOTS, np.int64)
        self._retrying: dict[int, Intervals] = {}
        #: Slots with several retries of one message: a seek back has handed it out beside an earlier retry of it.
        self._doubled: set[int] = set()
        self._runs: dict[int, deque[_HeldRuns]] = {}
        #: The state may be wrong: call ``renew`` before a question.
        self.is_stale = True
        #: A slot became free. The caller that wakes consumers for it sets this to False.
        self.is_freed = False
        #: The slots of retries that were looked up: by range, (slot, place, count) of each run, slot -1 for others.
        self.looked_up: dict[MessageRange, list[tuple[int, int, int]]] = {}

    def clear(self) -> None:
        """Forget everything, to be told again."""
        self.owners[:], self._in_flight[:], self.are_retrying[:] = 0, 0, False
        self._retrying.clear()
        self._doubled.clear()
        self._runs.clear()
        self.looked_up.clear()
        self.is_stale, self.is_freed = False, True

    def renew(self) -> None:
        """Build it again if it is stale."""
        if self.is_stale:
            self.clear()
            self._rebuild(self)

    # --- questions ---------------------------------------------------------------------------------------------------

    def may_have(self, consumer: int, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which of the slots' new messages a consumer may have."""
        owners = self.owners[slots]
        allowed: npt.NDArray[np.bool_] = (owners == 0) | (owners == consumer)
        allowed &= ~self.are_retrying[slots]
        return allowed

    @property
    def are_held(self) -> npt.NDArray[np.bool_]:
        """By slot: whether a consumer or a retry holds it."""
        are_held: npt.NDArray[np.bool_] = (self.owners != 0) | self.are_retrying
        return are_held

    def may_come_again(self, consumer: int, slot: int, start: int, before: Intervals | None) -> bool:
        """Return whether a consumer may have a slot's retries from place *start* on now: nobody else has messages of
        the slot in flight, and the answer has every earlier retry already. *before* are the places of those it has.
        """
        if self.owners[slot] not in (0, consumer):
            return False
        for low, high in self._retrying.get(slot, ()):
            if low >= start:
                break
            if before is None or not before.covers(low, min(high, start)):
                return False
        return True

    @property
    def has_retries(self) -> bool:
        """Whether any messages of slots are to come again."""
        return bool(self._retrying)

    def first_retry(self, slot: int) -> int | None:
        """Return the place of the first message of a slot that is to come again; None without one."""
        return next((start for start, _ in self._retrying.get(slot, ())), None)

    def count_of(self, consumer: int) -> int:
        """Return how many slots a consumer has messages of in flight."""
        return int(np.count_nonzero(self.owners == consumer))

    def pulls_of(self, consumer: int) -> int:
        """Return of how many pulls a consumer has messages of slots in flight."""
        return len(self._runs.get(consumer, ()))

    def first_in_flight(self, member: Member, slots: set[int], most: int = 1) -> dict[int, int]:
        """Return the delivery sequence of the first message in flight of each of these slots that a consumer has, for
        *most* slots at most: those that it has had for longest.
        """
        found = dict[int, int]()
        wanted = np.zeros(ORDER_SLOTS, np.bool_)
        numbers = np.fromiter(slots, np.int64, len(slots))
        wanted[numbers[self.owners[numbers] == member.number]] = True
        left = min(int(np.count_nonzero(wanted)), most)
        for held in self._runs.get(member.number, ()):
            if not left:
                break
            runs = held.runs
            for at in np.flatnonzero(wanted[runs.slots]).tolist():
                slot = int(runs.slots[at])
                unhandled = member.in_flight.unhandled(int(runs.starts[at]), int(runs.ends[at]))
                if unhandled and wanted[slot] and left:
                    found[slot], wanted[slot], left = unhandled[0][0], False, left - 1
        return found

    def place_in_flight(self, consumer: int, slot: int, sequence: int) -> int:
        """Return the place in its slot of the message that a consumer has in flight with a delivery sequence."""
        parts = self._between(consumer, sequence, sequence + 1)
        return next(place for part in parts for _, found, place, _ in part.rows() if found == slot)

    # --- messages in flight ------------------------------------------------------------------------------------------

    def given(self, consumer: int, runs: OrderedRuns) -> None:
        """Note messages that a consumer has in flight from now on."""
        if not len(runs.slots):
            return
        self.owners[runs.slots] = consumer
        np.add.at(self._in_flight, runs.slots, runs.ends - runs.starts)
        self._runs.setdefault(consumer, deque()).append(_HeldRuns(runs))

    def given_again(self, consumer: int, runs: OrderedRuns) -> None:
        """Note retries that a consumer has in flight from now on."""
        self.given(consumer, runs)
        for _, slot, place, count in _all_of(runs).rows():
            self.is_stale = self.is_stale or slot in self._doubled  # another retry of the message may be left
            retrying = self._retrying.get(slot)
            if retrying is None:
                continue
            left = _without(retrying, place, place + count)
            if left.size:
                self._retrying[slot] = left
            else:
                del self._retrying[slot]
                self.are_retrying[slot] = False

    def settled(self, consumer: int, start: int, end: int) -> None:
        """Note that the delivery sequences [start, end), all of them in flight, are acked, dead or dropped."""
        pulls = self._runs.get(consumer)
        at = self._first_behind(consumer, start)
        while pulls and at < len(pulls):
            held = pulls[at]
            found = _part(held.runs, start, end)
            if found is not None:
                slots, counts = found.slots, found.counts
                np.subtract.at(self._in_flight, slots, counts)
                free = slots[self._in_flight[slots] == 0]
                self.owners[free] = 0
                self.is_freed = self.is_freed or bool(len(free))
                held.left -= int(counts.sum())
            if not held.left:
                del pulls[at]
            elif held.end >= end:
                return
            else:
                at += 1

    def returned(self, consumer: int, start: int, end: int) -> None:
        """Note that the delivery sequences [start, end), all of them in flight, are retries from now on."""
        for part in list(self._between(consumer, start, end)):
            for _, slot, place, count in part.rows():
                self.retried(SlotMessages(slot, place, place + count))
        self.settled(consumer, start, end)

    def left(self, consumer: int) -> None:
        """Forget a consumer that has nothing in flight any more."""
        self._runs.pop(consumer, None)

    def _between(self, consumer: int, start: int, end: int) -> Iterator[SlotParts]:
        """Yield the parts of the runs with delivery sequences in [start, end)."""
        for held in islice(self._runs.get(consumer, ()), self._first_behind(consumer, start), None):
            found = _part(held.runs, start, end)
            if found is not None:
                yield found
            if held.end >= end:
                return

    def _first_behind(self, consumer: int, start: int) -> int:
        """Return the number of the first pull that has messages from delivery sequence *start* on."""
        return bisect_right(self._runs.get(consumer, ()), start, key=_end_of)

    # --- retries -----------------------------------------------------------------------------------------------------

    def retried(self, messages: SlotMessages) -> None:
        """Note messages that are to come again."""
        slot, start, end = messages
        if self._retrying.setdefault(slot, Intervals()).add(start, end) < end - start:
            self._doubled.add(slot)
        self.are_retrying[slot] = True

    def came(self, several: Sequence[MessageRange]) -> None:
        """Note ranges that became retries without having been in flight."""
        if self.is_stale:
            return
        for messages in several:
            runs = self._lookup(messages)
            if runs is None:
                self.is_stale = True  # the log says later what they are
                return
            for slot, place, count in runs:
                if slot >= 0:
                    self.retried(SlotMessages(slot, place, place + count))

    def with_followers(
        self, member: Member, backs: list[DispositionRange], settings: ResolvedSettings
    ) -> list[DispositionRange]:
        """Return *backs*, all of them in flight, and what must go back with them: the messages behind them in their
        slots, which nobody may have before them. These are released: they count as not taken. So are those behind a
        message that is dead by its nack: the client does not know for how many attempts, and gives none to the program.
        """
        self.renew()
        first = dict[int, list[tuple[int, int]]]()  # by slot: places and delivery sequences behind which all go back
        retries = dict[int, tuple[int, int]]()  # by slot: the place of the first message that comes again, its delay
        handed = Intervals()
        for back in backs:
            handed.add(back.start, back.end)
            for start, end, delay_us in _stopping(member, back, settings):
                for part in self._between(member.number, start, end):
                    for begin, slot, place, _ in part.rows():
                        first.setdefault(slot, []).append((place, begin))
                        if delay_us is not None and (slot not in retries or place < retries[slot][0]):
                            retries[slot] = place, delay_us
        if not first:
            return backs
        found = [one for back in backs for one in self._delayed(member, back, retries)]
        wanted = np.fromiter(first, np.int64)
        for runs in [held.runs for held in self._runs.get(member.number, ())]:
            for at in np.flatnonzero(np.isin(runs.slots, wanted)).tolist():
                slot, end = int(runs.slots[at]), int(runs.ends[at])
                start, place = int(runs.starts[at]), place_of(int(runs.stamps[at]), int(runs.offsets[at]))
                # What came before a message that failed stays, wherever it lies: the program may have handled it.
                start = min(max(start + before + 1 - place, sequence + 1, start) for before, sequence in first[slot])
                delay_us, reason = (retries[slot][1], EARLIER_FAILED) if slot in retries else (0, EARLIER_DIED)
                for low, high in member.in_flight.unhandled(min(start, end), end):
                    found += [
                        DispositionRange(begin, stop, Disposition.RELEASE, delay_us, reason)
                        for begin, stop in handed.missing(low, high)
                    ]
                    handed.add(low, high)
        return found

    def _delayed(
        self, member: Member, back: DispositionRange, retries: dict[int, tuple[int, int]]
    ) -> Iterator[DispositionRange]:
        """Yield the parts of a release, those with the delay of the retry that they come behind: a client may have
        released what follows a message that it has nacked.
        """
        start = back.start
        if back.disposition == Disposition.RELEASE and not back.delay_us:
            for part in self._between(member.number, back.start, back.end):
                for begin, slot, place, count in part.rows():
                    if slot not in retries or place <= retries[slot][0] or not retries[slot][1]:
                        continue
                    if start < begin:
                        yield back._replace(start=start, end=begin)
                    start = begin + count
                    yield back._replace(start=begin, end=start, delay_us=retries[slot][1], reason=EARLIER_FAILED)
        if start < back.end:
            yield back._replace(start=start)


def _part(runs: OrderedRuns, start: int, end: int) -> SlotParts | None:
    """Return the messages with delivery sequences in [start, end); None for none."""
    low, high = int(runs.ends.searchsorted(start, "right")), int(runs.starts.searchsorted(end, "left"))
    if low >= high:
        return None
    begins = np.maximum(runs.starts[low:high], start)
    stops = np.minimum(runs.ends[low:high], end)
    offsets = runs.offsets[low:high] + begins - runs.starts[low:high]
    return SlotParts(begins, runs.slots[low:high], runs.stamps[low:high], offsets, stops - begins)


def _all_of(runs: OrderedRuns) -> SlotParts:
    return SlotParts(runs.starts, runs.slots, runs.stamps, runs.offsets, runs.ends - runs.starts)


def _end_of(held: _HeldRuns) -> int:
    return held.end


def _stopping(
    member: Member, back: DispositionRange, settings: ResolvedSettings
) -> Iterator[tuple[int, int, int | None]]:  # fmt: skip
    """Yield (start, end, delay) of the messages of one disposition behind which others go back: those that come again,
    and (delay None) those that are dead by their nack.
    """
    if back.disposition in (Disposition.REJECT, Disposition.FILTER):
        return
    is_nack, start = back.disposition == Disposition.NACK, back.start
    for in_flight in member.in_flight.between(back.start, back.end):
        end = start + in_flight.messages.total
        if is_nack and in_flight.attempt >= settings.max_attempts:
            yield start, end, None
        else:
            is_own = is_nack and back.delay_us is None
            yield start, end, settings.delay_us(in_flight.attempt) if is_own else back.delay_us or 0
        start = end


def _without(intervals: Intervals, start: int, end: int) -> Intervals:
    left = Intervals()
    for low, high in intervals:
        left.add(low, min(high, start))
        left.add(max(low, end), high)
    return left

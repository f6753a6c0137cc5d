"""One answer to a pull of new messages or retries, held to the rules of priorities and order keys.

- The answer walks down the priorities. It has new messages of one after another, and ends at a priority of which
  retries are due for the consumer; where it has none until then, it has retries of that priority. Of one priority, new
  messages and retries come first in turn.
- What lower priorities have coming comes first, up to that many messages.
- A slot's messages come in stored order, to the consumer that has one in flight; nothing new of it comes while one is
  to come again, and no retry before an earlier one.
- Among several consumers one gets new messages of its part of the waiting slots, and of one at least, and nothing of
  low priority where it leaves some. Which these are is left to the broker. So is whether messages with order keys come
  before others of the normal priority.
- All that fits must come. Only a run that does not fit whole stays behind, or a batch, if at least half comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from qmq.broker.groups.message_life import MessageEvent
from tests.broker.model_log import HIGH, LOW, NORMAL, Message, Slot

if TYPE_CHECKING:
    from tests.broker.model import Consumer, Given, Group, Waiting


class Slots:
    """Which consumer has the slots of a group at a moment, and what is to come again."""

    def __init__(self, group: Group) -> None:
        self._places = group.log.places
        self.owners: dict[Slot, Consumer] = {}
        self.retrying: dict[Slot, set[Message]] = defaultdict(set)
        for consumer in group.consumers.values():
            for one in consumer.in_flight.values():
                if (slot := one.message.slot) is not None:
                    assert self.owners.setdefault(slot, consumer) is consumer, "a slot belongs to one consumer"
        for waiting in group.waiting:
            for message in waiting.messages:
                if (slot := message.slot) is not None:
                    self.retrying[slot].add(message)

    def may_have(self, consumer: Consumer, message: Message) -> bool:
        """Return whether a consumer may have a new message of a slot, as far as others do not hold it up."""
        slot = message.slot
        assert slot is not None
        return self.owners.get(slot, consumer) is consumer and not self.retrying[slot]

    def may_come_again(self, consumer: Consumer, message: Message, before: set[Message]) -> bool:
        """Return whether a consumer may have a retry behind those that it gets *before* it."""
        slot = message.slot
        if slot is None:
            return True
        earlier = {one for one in self.retrying[slot] if self._places[one] < self._places[message]}
        return self.owners.get(slot, consumer) is consumer and earlier <= before

    def runs_of(self, consumer: Consumer, waiting: Waiting, before: set[Message]) -> Iterator[tuple[int, int]]:
        """Yield the messages of a retry that a consumer may have, as intervals of neighbours."""
        before, start = set(before), None
        for at, message in enumerate(waiting.messages):
            if self.may_come_again(consumer, message, before):
                before.add(message)
                start = at if start is None else start
            elif start is not None:
                yield start, at
                start = None
        if start is not None:
            yield start, len(waiting.messages)

    def is_any(self, consumer: Consumer, waiting: Waiting) -> bool:
        """Return whether a consumer may have any message of a retry."""
        return next(self.runs_of(consumer, waiting, set()), None) is not None


class PullCheck:
    """Checks one answer, and finds what it has."""

    def __init__(
        self, group: Group, one: Consumer, slots: Slots, given: Sequence[Given], limit: int, now_us: int,
        unwanted: Iterable[Message] = (),
    ) -> None:  # fmt: skip
        """*unwanted*: new messages that the pull has passed, and that are not in the answer."""
        self._group = group
        self._one = one
        self._slots = slots
        self._limit = limit
        self._now_us = now_us
        #: The new messages that are wanted: others are no answer.
        self._ready = [one for one in group.ready if group.fate(one, now_us) is MessageEvent.PULL]
        self._passed_slots = {slot for one in unwanted if (slot := one.slot) is not None}
        #: What is not accounted for yet.
        self._left = list(given)
        #: The new messages of the answer.
        self.fresh: list[Given] = []
        #: The retries of the answer: which messages of which retry, in order.
        self.again: list[tuple[Waiting, int, int]] = []
        self._has_ended = self._is_full = False
        self._consumers = sum(one.is_there for one in group.consumers.values())
        #: Of how many more slots it may have new messages, and those of which it has some.
        self._part: int | None = None
        self._granted: set[Slot] = set()
        self._has_left_slots = self._has_room = False
        self._due: dict[int, list[Waiting]] = defaultdict(list)
        for waiting in group.waiting:
            if waiting.due_us <= now_us and not waiting.quarantined and slots.is_any(one, waiting):
                self._due[waiting.messages[0].rank].append(waiting)

    def check(self) -> None:
        """Check the whole answer; fail unless it is one that the rules allow."""
        coming = min(self._group.coming(HIGH), self._limit)
        if coming and not self._lower(coming) and not self._is_over:
            self._group.none_wait(HIGH)
        self._has_left_slots = False
        self._take(HIGH, self._limit)
        if not self._leaves_slots:
            self._lower(self._limit)
        assert not self._left, f"{self._left} come before their turn, or must not come"

    @property
    def _is_over(self) -> bool:
        return self._has_ended or self._is_full or len(self.fresh) >= self._limit

    def _lower(self, most: int) -> int:
        low = sum(one.message.rank == LOW for one in self.fresh)
        coming, taken = min(self._group.coming(NORMAL) - low, most), 0
        if coming > 0:
            taken = self._take(LOW, coming)
            if not taken and not self._is_over:
                self._group.none_wait(NORMAL)
        taken += self._take(NORMAL, most - taken)
        return taken if self._leaves_slots else taken + self._take(LOW, most - taken)

    @property
    def _leaves_slots(self) -> bool:
        """Whether slots are left to other consumers; also, where the answer has ended, such that have nothing but
        messages that the group does not get: the broker has not looked at these.
        """
        if self._has_left_slots or self._left or self._consumers < 2:
            return self._has_left_slots
        unwanted = set(self._group.ready).difference(self._ready)
        return any(message.slot not in self._granted | {None} for message in unwanted)

    def _take(self, rank: int, most: int) -> int:
        if self._is_over or most <= 0:
            return 0
        taken = 0
        if rank not in self._due or self._group.was_again:
            taken = self._take_new(rank, most)
        if rank in self._due:
            self._has_ended = True
            if not self.fresh:
                self._take_again(rank, min(most, self._limit))
        self._note(rank, most, taken)
        return taken

    def _note(self, rank: int, most: int, taken: int) -> None:
        """Count what happened of the rules."""
        seen = self._group.seen
        has_some = bool(taken or self.again)
        if has_some and most < self._limit:
            seen["by credit"] += 1
        if has_some and rank < LOW and any(message.rank > rank for message in self._ready):
            seen["higher first"] += 1
        if taken and any(rank < due for due in self._due):
            seen["new before lower retries"] += 1
        if self.again and any(message.rank > rank for message in self._ready):
            seen["retries before lower new"] += 1

    # --- new messages ------------------------------------------------------------------------------------------------

    def _take_new(self, rank: int, most: int) -> int:
        """Account for up to *most* new messages of a rank; return how many."""
        before, got = len(self.fresh), {one.message for one in self.fresh}
        ready = [message for message in self._ready if message.rank == rank and message not in got]
        keyed = [message for message in self._ready if message.slot is not None and message not in got]
        plain = [message for message in ready if message.slot is None]
        keys_first = bool(self._left) and self._left[0].message.slot is not None
        if not self._left and plain:  # it has ended before either of them
            keys_first = self._why_not_before(plain, min(most, self._limit - before)) is not None
        for is_keyed in (keys_first, not keys_first):
            taken = len(self.fresh) - before
            if taken >= most or self._is_over:
                break
            if is_keyed and any(message.rank == rank for message in keyed):
                self._take_keyed(rank, keyed, most - taken)
            elif not is_keyed:
                self._take_plain(plain, most - taken)
        return len(self.fresh) - before

    def _take_plain(self, plain: list[Message], most: int) -> None:
        most = min(most, self._limit - len(self.fresh))
        count = 0
        while count < min(most, len(plain)) and self._left and self._left[0].message == plain[count]:
            self.fresh.append(self._left.pop(0))
            count += 1
        if count < min(most, len(plain)):
            self._end_before(plain[count:], most - count)

    def _take_keyed(self, rank: int, keyed: list[Message], most: int) -> None:
        """Account for messages of slots whose next message has that rank."""
        one, slots, group = self._one, self._slots, self._group
        most = min(most, self._limit - len(self.fresh))
        free = sorted((message for message in keyed if slots.may_have(one, message)), key=group.log.places.__getitem__)
        self._note_keyed(keyed)
        by_slot: dict[Slot, list[Message]] = defaultdict(list)
        for message in free:
            assert message.slot is not None
            by_slot[message.slot].append(message)
        mine = {slot for slot, owner in slots.owners.items() if owner is one}
        is_first = self._part is None
        if self._part is None:
            self._part = self._part_of(len(mine))
        # A pull that may have no more messages than there is room for slots needs no limit; for one message nobody
        # finds out how much room there is.
        self._has_room = self._has_room or most > 1
        is_limited = self._consumers > 1 and self._has_room and most > self._part - len(self._granted)
        if is_first:
            more = 1
            got = {one.message.slot for one in self._left}
            self._granted |= self._passed_slots - mine - got  # in vain: nothing of them was wanted
            while not self.fresh and not got & mine and self._part <= len(self._granted):
                self._part, more = self._part + more, 2 * more  # a consumer that got nothing may have more of them
        room, granted, taken = self._part, self._granted, list[Message]()
        while (
            self._left
            and len(taken) < most
            and (slot := self._left[0].message.slot) in by_slot
            and self._left[0].message.rank == rank
        ):
            assert slot is not None
            message = self._left[0].message
            assert by_slot[slot][:1] == [message], f"{message} comes before others of its slot"
            if slot not in mine | granted:
                assert len(granted) < room or not is_limited, f"{message} is of one more slot than the consumer's part"
                granted.add(slot)
            if taken and not group.forgets and not is_limited:  # else it may look for other slots again
                assert group.log.places[taken[-1]] < group.log.places[message], "slots come in stored order"
            taken.append(by_slot[slot].pop(0))
            self.fresh.append(self._left.pop(0))
        following = {
            slot: list(takewhile(lambda message: message.rank == rank, several)) for slot, several in by_slot.items()
        }
        if any(several and not following[slot] for slot, several in by_slot.items()):
            group.seen["a slot goes on with another priority"] += 1
        allowed = mine | granted if is_limited and len(granted) >= room else set(by_slot)
        rest = [message for message in free if message.slot in allowed and message in following[message.slot]]  # type: ignore[index]
        if any(following[slot] for slot in by_slot.keys() - allowed):
            self._has_left_slots = True
            group.seen["left to others"] += 1
        if len(taken) < most and rest:
            if group.forgets and self.fresh:
                self._end_before_any(rest, most - len(taken), has_some=bool(taken))
            elif is_limited and len(granted) < room:
                self._end_before_one_of(rest, mine | granted, most - len(taken))
            else:
                self._end_before(rest, most - len(taken))

    def _note_keyed(self, keyed: list[Message]) -> None:
        for message in keyed:
            assert message.slot is not None
            if self._slots.owners.get(message.slot, self._one) is not self._one:
                self._group.seen["kept for the owner"] += 1
            elif self._slots.retrying[message.slot]:
                self._group.seen["held by a retry"] += 1

    def _part_of(self, mine: int) -> int:
        """Return of how many more slots the consumer may get new messages."""
        group = self._group
        if self._consumers < 2:
            return len(group.log.messages)
        slots = self._slots.owners.keys() | {message.slot for message in group.ready if message.slot is not None}
        slots |= {slot for slot, retrying in self._slots.retrying.items() if retrying}
        # Nobody knows where the group has begun in a subject of which nothing was handed out since it was sought.
        slots |= {
            slot
            for message in group.log.messages
            if (slot := message.slot) is not None and (message.subject, slot) not in group.begun
        }
        return max(1, -(-len(slots) // self._consumers) - mine)

    def _end_before_any(self, rest: list[Message], room: int, *, has_some: bool) -> None:
        """Check the end of an answer as below, where any of *rest* may be the next one. The answer may also go on where
        there are other consumers and it *has_some* messages with order keys.
        """
        self._is_full = not self._left and any(self._why_not_before(rest[at:], room) is None for at in range(len(rest)))
        assert self._is_full or (has_some and self._consumers > 1), f"{rest[0]} is ready, and did not come"

    def _end_before_one_of(self, rest: list[Message], having: set[Slot], room: int) -> None:
        """Check the end of an answer as below, where the consumer may have one more slot, whichever, beside those that
        it has.
        """
        assert not self._left, f"{rest[0]} was passed over"
        following = [
            [message for message in rest if message.slot in having | {slot}]
            for slot in dict.fromkeys(message.slot for message in rest)
        ]
        why_not = [self._why_not_before(several, room) for several in following]
        self._is_full = None in why_not
        assert self._is_full, why_not[0]

    def _end_before(self, rest: list[Message], room: int) -> None:
        """Check that the answer may end although *rest* is ready, and there is room for so many messages of it."""
        assert not self._left, f"{rest[0]} was passed over"
        why_not = self._why_not_before(rest, room)
        assert why_not is None, why_not
        self._is_full = True

    def _why_not_before(self, rest: list[Message], room: int) -> str | None:
        """Return why the answer may not end before *rest*; None if it may."""
        if not self.fresh:
            return f"{rest[0]} is ready, and did not come"
        if len(self.fresh) + room < self._limit:
            return f"{rest[0]} has credit, and did not come"
        log, whole = self._group.log, 0
        runs = [log.runs[message] for message in rest]
        while whole < len(rest) and (count := runs.count(runs[whole])) <= room - whole:
            whole += count
        if whole and whole < len(rest):
            ends_batch = log.batches[rest[0]] == log.batches[rest[whole]] != log.batches[self.fresh[-1].message]
            if ends_batch and len(self.fresh) >= whole:
                return None
        return f"{rest[0]} fits, and did not come" if whole else None

    # --- retries -----------------------------------------------------------------------------------------------------

    def _take_again(self, rank: int, most: int) -> None:
        """Account for retries of a rank, of any in any order: whole ones, or what the consumer may have of them."""
        wanted = {
            (id(waiting), at)
            for waiting in self._due[rank]
            for start, end in self._slots.runs_of(self._one, waiting, set())
            for at in range(start, end)
        }
        assert len(self._left) >= min(most, len(wanted)), "retries are due, and did not come"
        assert len(self._left) <= most
        before, found = set[Message](), set[tuple[int, int]]()
        retries = [one for one in self._group.waiting if one.due_us <= self._now_us and not one.quarantined]
        while self._left:
            waiting, start, end = self._next_of(retries, rank, before, found)
            self.again.append((waiting, start, end))
            before.update(waiting.messages[start:end])
            found.update((id(waiting), at) for at in range(start, end))
            del self._left[: end - start]
        count = sum(end - start for _, start, end in self.again)
        assert count == most or wanted <= found, "a retry is due, and did not come"

    def _next_of(
        self, retries: list[Waiting], rank: int, before: set[Message], found: set[tuple[int, int]]
    ) -> tuple[Waiting, int, int]:
        """Return the retry, and the part of it, that the answer goes on with."""
        first = self._left[0]
        for waiting in retries:
            if waiting.messages[0].rank != rank or waiting[2:4] != first[2:4]:
                continue
            for start, end in self._slots.runs_of(self._one, waiting, before):
                count = min(end - start, len(self._left))
                is_new = (id(waiting), start) not in found
                if is_new and waiting.messages[start : start + count] == tuple(
                    one.message for one in self._left[:count]
                ):
                    return waiting, start, start + count
        raise AssertionError(f"nothing is due that {self._left} might be")

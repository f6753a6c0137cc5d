"""What of a group points at messages that are about to go: what waits to be handed out again, dead letters, what its
consumers hold.

A group is looked at in pieces, while it goes on. What has come in the meantime is looked at last, in one piece with all
that is in memory; nothing new points there by then, for nobody is given these messages any more but who had them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.groups.message_ranges import PARTITIONS, partition_of
from qmq.broker.journal.record_types import InFlightRange, MessageRange
from qmq.intervals import Intervals
from qmq.storage.store import SubjectRanges

#: So many that point there are told of at once.
MOST_FOUND: Final = 256

Items = np.ndarray[Any, np.dtype[np.void]]


class SegmentTarget(NamedTuple):
    """A segment: positions [base, end) of a partition, and the sequences that it has."""

    partition: int
    base: int
    end: int
    had: SubjectRanges

    def touches(self, messages: MessageRange) -> bool:
        """Whether a range begins in it, by place, or has one of its messages, by sequence."""
        if messages.log >= PARTITIONS:
            return partition_of(messages) == self.partition and self.base <= messages.first < self.end
        had, first = self.had, messages.first + messages.skip
        low = int(had.subjects.searchsorted(np.uint32(messages.log)))
        high = int(had.subjects.searchsorted(np.uint32(messages.log), "right"))
        ends = had.ends[low:high]
        place = int(ends.searchsorted(np.uint64(first), "right"))
        return place < high - low and int(had.starts[low + place]) < first + messages.total

    def touched(self, items: Items) -> list[Any]:
        """Those of the items of a schedule, or dead letters, of which that is so."""
        logs, firsts = items["log"], items["first"]
        by_position = logs >= PARTITIONS
        inside: npt.NDArray[np.bool_] = by_position & (firsts >= self.base) & (firsts < self.end)
        places = self.had.subjects.searchsorted(logs)
        places[places == len(self.had.subjects)] = 0
        if len(self.had.subjects):
            inside |= ~by_position & (self.had.subjects[places] == logs)
        return [item for item in unpacked(items[inside & (items["number"] > 0)]) if self.touches(item.messages)]


class FoundRetry(NamedTuple):
    """``whole``: it lay in the schedule, and nothing of it has been taken."""

    retry: RetryItem
    whole: bool

    @property
    def messages(self) -> MessageRange:
        """What points there."""
        return self.retry.messages


class FoundLetter(NamedTuple):
    """A dead letter."""

    letter: RetryItem

    @property
    def messages(self) -> MessageRange:
        """What points there."""
        return self.letter.messages


class FoundInFlight(NamedTuple):
    """What a consumer holds from a delivery sequence on, of one pull."""

    member: Member
    start: int
    in_flight: InFlightRange

    @property
    def messages(self) -> MessageRange:
        """What points there."""
        return self.in_flight.messages


Found = FoundRetry | FoundLetter | FoundInFlight


class GroupReferences:
    """Of one group, for one segment."""

    def __init__(self, ledger: Ledger, target: SegmentTarget) -> None:
        self._ledger = ledger
        self._target = target
        self._watch = ledger.retries.look()
        self._last_letter = 0
        #: What nobody can read, by consumer: it is left as it is.
        self._unreadable: dict[int, Intervals] = {}
        self._lost_letters = set[int]()

    def end(self) -> None:
        """Nobody looks any more."""
        if self._ledger.retries.watch is self._watch:
            self._ledger.retries.watch = None

    def pieces(self) -> Iterator[list[Found]]:
        """What points there, in pieces of which some are empty. Between two, copies are to take the place of what was
        found, and others have their turn; when it ends, nothing points there. Raises StorageError.
        """
        for items in self._ledger.retries.scheduled():
            yield from _portions(self._of_schedule(items))
        for items in self._ledger.dead.after(0):
            self._last_letter = max(self._last_letter, int(items["number"].max(initial=0)))
            yield from _portions(self._letters(items))
        while found := list(islice(memory := self._in_memory(), MOST_FOUND)):
            while found:
                yield found
                found = list(islice(memory, MOST_FOUND))

    def _of_schedule(self, items: Items) -> list[Found]:
        found = list[Found]()
        for retry in self._target.touched(items):
            left = self._ledger.retries.left_of(retry)
            found += [FoundRetry(one, whole=one == retry) for one in left if self._target.touches(one.messages)]
        return found

    def _letters(self, items: Items) -> list[Found]:
        letters = self._target.touched(items)
        return [FoundLetter(letter) for letter in letters if letter.number not in self._lost_letters]

    def _in_memory(self) -> Iterator[Found]:
        """What points there of all that has come since, and of what is in memory. Some of it may have changed before
        all is taken: who takes nothing has looked at all at once.
        """
        retries, touches = self._ledger.retries, self._target.touches
        waiting = [retry for retry in retries.waiting() if touches(retry.messages)]
        found: list[Found] = [FoundRetry(retry, whole=False) for retry in waiting]
        known = {retry.number for retry in waiting}
        since = (retry for retry in self._watch.added if retry.number not in known and touches(retry.messages))
        found += [FoundRetry(retry, whole=True) for retry in since if retries.has(retry, self._watch)]
        for items in self._ledger.dead.after(self._last_letter):
            found += self._letters(items)
        yield from found
        for member in list(self._ledger.members.values()):
            yield from self._in_flight(member)

    def _in_flight(self, member: Member) -> Iterator[Found]:
        unreadable = self._unreadable.get(member.number)
        for start, end in member.in_flight.unhandled():
            for in_flight in list(member.in_flight.between(start, end)):  # others may take their place meanwhile
                if self._target.touches(in_flight.messages) and (unreadable is None or start not in unreadable):
                    yield FoundInFlight(member, start, in_flight)
                start += in_flight.messages.total

    def is_there(self, found: Found) -> bool:
        """Whether it is still as it was found."""
        ledger = self._ledger
        match found:
            case FoundRetry(retry, _):
                return ledger.retries.has(retry, self._watch)
            case FoundLetter(letter):
                return ledger.dead.has(letter.number)
            case FoundInFlight(member, start, in_flight):
                end = start + in_flight.messages.total
                is_member = ledger.members.get(member.number) is member and not member.closed
                return (
                    is_member
                    and member.in_flight.holds(start, end)
                    and list(member.in_flight.between(start, end)) == [in_flight]
                )

    def cannot_read(self, found: FoundLetter | FoundInFlight, start: int, end: int) -> None:
        """Nobody can read that letter; or of what a consumer holds these delivery sequences."""
        if isinstance(found, FoundLetter):
            self._lost_letters.add(found.letter.number)
        else:
            self._unreadable.setdefault(found.member.number, Intervals()).add(start, end)


def _portions(found: list[Found]) -> Iterator[list[Found]]:
    yield found[:MOST_FOUND]
    for at in range(MOST_FOUND, len(found), MOST_FOUND):
        yield found[at : at + MOST_FOUND]

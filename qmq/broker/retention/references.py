"""Find what a group still refers to in a segment that goes: retries, dead letters, and messages in flight.

The search goes piece by piece, and the group goes on meanwhile. References that have come since are found last, in one
piece together with those in memory. No new references come by then: only consumers that had these messages before get
them again.
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

#: The most references in one piece.
MOST_FOUND: Final = 256

Items = np.ndarray[Any, np.dtype[np.void]]


class SegmentTarget(NamedTuple):
    """The segment that goes: positions [base, end) of a partition, and the sequences in it."""

    partition: int
    base: int
    end: int
    had: SubjectRanges

    def touches(self, messages: MessageRange) -> bool:
        """Return whether a range by position begins in the segment, or a range by sequence has one of its messages."""
        if messages.log >= PARTITIONS:
            return partition_of(messages) == self.partition and self.base <= messages.first < self.end
        had, first = self.had, messages.first + messages.skip
        low = int(had.subjects.searchsorted(np.uint32(messages.log)))
        high = int(had.subjects.searchsorted(np.uint32(messages.log), "right"))
        ends = had.ends[low:high]
        place = int(ends.searchsorted(np.uint64(first), "right"))
        return place < high - low and int(had.starts[low + place]) < first + messages.total

    def touched(self, items: Items) -> list[Any]:
        """Return the retries or dead letters among *items* that touch the segment."""
        logs, firsts = items["log"], items["first"]
        by_position = logs >= PARTITIONS
        inside: npt.NDArray[np.bool_] = by_position & (firsts >= self.base) & (firsts < self.end)
        places = self.had.subjects.searchsorted(logs)
        places[places == len(self.had.subjects)] = 0
        if len(self.had.subjects):
            inside |= ~by_position & (self.had.subjects[places] == logs)
        return [item for item in unpacked(items[inside & (items["number"] > 0)]) if self.touches(item.messages)]


class FoundRetry(NamedTuple):
    """A retry; with ``whole`` it is in the schedule, and nothing of it has been taken."""

    retry: RetryItem
    whole: bool

    @property
    def messages(self) -> MessageRange:
        """The range that refers to the segment."""
        return self.retry.messages


class FoundLetter(NamedTuple):
    """A dead letter."""

    letter: RetryItem

    @property
    def messages(self) -> MessageRange:
        """The range that refers to the segment."""
        return self.letter.messages


class FoundInFlight(NamedTuple):
    """Messages of one pull that a consumer has in flight, from a delivery sequence on."""

    member: Member
    start: int
    in_flight: InFlightRange

    @property
    def messages(self) -> MessageRange:
        """The range that refers to the segment."""
        return self.in_flight.messages


Found = FoundRetry | FoundLetter | FoundInFlight


class GroupReferences:
    """The references of one group into one segment."""

    def __init__(self, ledger: Ledger, target: SegmentTarget) -> None:
        self._ledger = ledger
        self._target = target
        self._watch = ledger.retries.look()
        self._last_letter = 0
        #: Messages in flight that cannot be read, by consumer: their references stay.
        self._unreadable: dict[int, Intervals] = {}
        self._lost_letters = set[int]()

    def end(self) -> None:
        """Stop watching the retries."""
        self._ledger.retries.end_look(self._watch)

    def pieces(self) -> Iterator[list[Found]]:
        """Yield the references in pieces, some of them empty; when it ends, nothing refers to the segment.

        Between two pieces, the caller replaces the references that it got by copies, and lets others run. Raises
        StorageError.
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
        """Yield the references that are in memory or have come since.

        Some may change while the caller takes them; a caller that gets nothing has seen all of them at one moment.
        """
        retries, touches = self._ledger.retries, self._target.touches
        waiting = [retry for retry in retries.waiting() if touches(retry.messages)]
        found: list[Found] = [FoundRetry(retry, whole=False) for retry in waiting]
        known = {retry.number for retry in waiting}
        since = (retry for retry in self._watch.added if retry.number not in known and touches(retry.messages))
        found += [FoundRetry(retry, whole=True) for retry in since if retries.has(retry, self._watch)]
        passed = (retry for retry in self._watch.passed if retry.number not in known and touches(retry.messages))
        found += [FoundRetry(retry, whole=False) for retry in passed if retries.has(retry, self._watch)]
        for items in self._ledger.dead.after(self._last_letter):
            found += self._letters(items)
        yield from found
        for member in list(self._ledger.members.values()):
            yield from self._in_flight(member)

    def _in_flight(self, member: Member) -> Iterator[Found]:
        unreadable = self._unreadable.get(member.number)
        for start, end in member.in_flight.unhandled():
            for in_flight in list(member.in_flight.between(start, end)):  # the caller may replace them meanwhile
                if self._target.touches(in_flight.messages) and (unreadable is None or start not in unreadable):
                    yield FoundInFlight(member, start, in_flight)
                start += in_flight.messages.total

    def is_there(self, found: Found) -> bool:
        """Return whether a reference is still as it was found."""
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
        """Leave a dead letter, or delivery sequences [start, end) in flight, as they are: they cannot be read."""
        if isinstance(found, FoundLetter):
            self._lost_letters.add(found.letter.number)
        else:
            self._unreadable.setdefault(found.member.number, Intervals()).add(start, end)


def _portions(found: list[Found]) -> Iterator[list[Found]]:
    yield found[:MOST_FOUND]
    for at in range(MOST_FOUND, len(found), MOST_FOUND):
        yield found[at : at + MOST_FOUND]

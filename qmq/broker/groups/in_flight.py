"""The messages in flight at one consumer: its pulls, and which of their messages are handled.

A delivery sequence counts the messages that a consumer has pulled. The ack floor is the delivery sequence below which
all are handled. A message is handled once it was acked or handed back. A pull is dropped once all its messages are
handled, also when an older message stays in flight for hours: else each checkpoint would write all later pulls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Final

from qmq.broker.journal.record_types import InFlightRange, MessageRange, whole
from qmq.broker.ports.commands import DispositionRange
from qmq.intervals import Intervals

#: Intervals of handed back messages to remember below the ack floor, so that a late ack of them is refused.
MOST_LATE: Final = 64

_new_pull: Final = object.__new__


class InFlightPull:
    """The messages of one pull: delivery sequences [first, first + total). ``InFlight.add`` makes it."""

    __slots__ = ("first", "quarantined", "ranges", "since_us", "size", "starts", "taken_us", "total")

    first: int
    ranges: list[InFlightRange]
    total: int
    size: int  # bytes
    taken_us: int
    quarantined: bool
    since_us: int  # monotonic, when the ack deadline's time began; 0: no deadline
    starts: list[int] | None  # the first delivery sequence of each range, once it is needed

    def between(self, start: int, end: int) -> Iterator[InFlightRange]:
        """Return the parts of its ranges with delivery sequences in [start, end)."""
        starts = self._starts_of()
        at = max(bisect_right(starts, start) - 1, 0)
        while at < len(self.ranges) and (first := starts[at]) < end:
            in_flight = self.ranges[at]
            low, high = max(start - first, 0), min(end - first, in_flight.messages.total)
            if low < high:
                yield in_flight.part(low, high)
            at += 1

    def replace(self, start: int, end: int, ranges: list[InFlightRange]) -> None:
        """Let the delivery sequences [start, end), at least one, be these ranges: copies of the same messages.

        The ranges around them are not touched: a pull may have many ranges, and a caller replaces one after another.
        """
        starts = self._starts_of()
        at, behind = bisect_right(starts, start) - 1, bisect_left(starts, end)
        first, last = starts[at], starts[behind - 1]
        whole = [*self._part(at, 0, start - first), *ranges, *self._part(behind - 1, end - last, None)]
        self.ranges[at:behind] = whole
        totals = (in_flight.messages.total for in_flight in whole)
        starts[at:behind] = list(accumulate(totals, initial=first))[:-1]

    def _starts_of(self) -> list[int]:
        if self.starts is None:
            totals = (in_flight.messages.total for in_flight in self.ranges)
            self.starts = list(accumulate(totals, initial=self.first))[:-1]
        return self.starts

    def _part(self, at: int, low: int, high: int | None) -> list[InFlightRange]:
        """Return messages *low* up to *high* (None: the end) of the range at *at*: one range, or none."""
        in_flight = self.ranges[at]
        high = in_flight.messages.total if high is None else high
        return [in_flight.part(low, high)] if low < high else []


class InFlight:
    """All messages in flight at one consumer."""

    __slots__ = (
        "acked", "ack_floor", "held_us", "next_sequence", "pulls", "returned", "size", "_late", "_handled", "_pulled",
    )  # fmt: skip

    def __init__(self, next_sequence: int = 0) -> None:
        self.next_sequence = next_sequence
        self.ack_floor = next_sequence
        self.pulls: deque[InFlightPull] = deque()
        self.acked = Intervals()
        #: Handed back messages above the ack floor.
        self.returned = Intervals()
        self._late: deque[tuple[int, int]] = deque(maxlen=MOST_LATE)
        self._handled = Intervals()  # above the ack floor, acked or handed back
        #: About the bytes of the pulls that are not wholly handled.
        self.size = 0
        self._pulled = 0  # messages of the pulls
        #: About how long a message is in flight: as long as the last pull, or, where it had several that may have been
        #: handled one after another or at once, as long as before within these bounds. 0: none was handled yet.
        self.held_us = 0

    @property
    def count(self) -> int:
        """The count of messages that are not handled."""
        return self.next_sequence - self.ack_floor - self._handled.size

    @property
    def span(self) -> int:
        """The messages of all kept pulls, without handled ones at the start of the first."""
        return min(self._pulled, self.next_sequence - self.ack_floor)

    def add(self, ranges: list[InFlightRange], size: int, now_us: int, quarantined: bool = False) -> InFlightPull:
        """Add a pull that the consumer gets."""
        pull = _new_pull(InFlightPull)  # each message may come alone: its class has no __init__ to call
        pull.ranges, pull.size, pull.taken_us, pull.quarantined = ranges, size, now_us, quarantined
        pull.since_us, pull.starts = 0, None
        pull.first = first = self.next_sequence
        total = ranges[0].messages.total if len(ranges) == 1 else sum(one.messages.total for one in ranges)
        pull.total = total
        self.pulls.append(pull)
        self.next_sequence = first + total
        self.size += size
        self._pulled += total
        return pull

    def is_next(self, start: int, end: int) -> bool:
        """Return whether [start, end) begins at the ack floor and is in flight, and nothing above the floor is handled:
        to ack it moves the floor, and no more.
        """
        return start == self.ack_floor and start < end <= self.next_sequence and not self._handled.size

    def ack(self, intervals: Sequence[int], now_us: int = 0) -> tuple[int, int]:
        """Ack messages [start, end), ...; return how many are newly acked, and how many are refused.

        Refused are messages that were handed back before, or never pulled. To ack twice is no error.
        """
        new = refused = 0
        for start, end in zip(intervals[::2], intervals[1::2], strict=True):
            if self.holds(start, end):
                new += self.acked.add(start, end)
                self._handled.add(start, end)
            else:
                more, not_in_flight = self._ack(start, end)
                new += more
                refused += not_in_flight
        self._move_ack_floor(now_us)
        for start, end in zip(intervals[::2], intervals[1::2], strict=True):
            self._forget_handled(start, end, now_us)
        return new, refused

    def _ack(self, start: int, end: int) -> tuple[int, int]:
        """Ack an interval of which some messages are not in flight."""
        refused = max(0, end - max(start, self.next_sequence))
        end = min(end, self.next_sequence)
        refused += sum(max(0, min(end, high) - max(start, low)) for low, high in self._late if low < self.ack_floor)
        new = 0
        start = max(start, self.ack_floor)
        for low, high in self.returned.missing(start, end):
            new += self.acked.add(low, high)
            self._handled.add(low, high)
        refused += max(0, end - start) - sum(high - low for low, high in self.returned.missing(start, end))
        return new, refused

    def give_back(self, start: int, end: int, now_us: int = 0) -> list[InFlightRange] | None:
        """Hand back messages [start, end); return their ranges. Return None, and change nothing, if one of them is not
        in flight.
        """
        if not self.holds(start, end):
            return None
        ranges = list(self.between(start, end))
        self.returned.add(start, end)
        self._handled.add(start, end)
        self._late.append((start, end))
        if start == self.ack_floor:
            self._move_ack_floor(now_us)
        else:
            self._forget_handled(start, end, now_us)
        return ranges

    def in_flight(self, backs: Sequence[DispositionRange], refused: list[int]) -> list[DispositionRange]:
        """Return those of *backs* whose messages are all in flight, none of them twice; add the numbers of the others
        to *refused*.
        """
        found, seen = list[DispositionRange](), Intervals()
        for number, back in enumerate(backs):
            start, end = back[:2]
            if self.holds(start, end) and not seen.overlaps(start, end):
                seen.add(start, end)
                found.append(back)
            else:
                refused.append(number)
        return found

    def between(self, start: int, end: int) -> Iterator[InFlightRange]:
        """Return the ranges of the delivery sequences [start, end), without pulls that are wholly handled."""
        at = bisect_right(self.pulls, start, key=_first) - 1
        for pull in islice(self.pulls, max(at, 0), None):
            if pull.first >= end:
                return
            yield from pull.between(start, end)

    def pull_of(self, sequence: int) -> InFlightPull:
        """Return the pull that got a delivery sequence, which is in flight."""
        return self.pulls[bisect_right(self.pulls, sequence, key=_first) - 1]

    def replace(self, start: int, ranges: list[InFlightRange]) -> None:
        """Let the messages from delivery sequence *start* on, of one pull, be these ranges: copies of the same
        messages.
        """
        pull = self.pulls[bisect_right(self.pulls, start, key=_first) - 1]
        pull.replace(start, start + sum(in_flight.messages.total for in_flight in ranges), ranges)

    def unhandled(self, start: int | None = None, end: int | None = None) -> list[tuple[int, int]]:
        """Return the intervals of delivery sequences in flight, from *start* on (None: all), before *end*."""
        return self._handled.missing(max(start or 0, self.ack_floor), self.next_sequence if end is None else end)

    def end_of_first(self, most: int) -> int:
        """Return the delivery sequence behind the first *most* ranges in flight."""
        for start, end in self._handled.missing(self.ack_floor, self.next_sequence, most):
            for in_flight in self.between(start, end):
                start += in_flight.messages.total
                most -= 1
                if not most:
                    return start
        return self.next_sequence

    def let_go(self, end: int) -> None:
        """Drop all messages before *end*; late acks of them are refused."""
        self._late.append((self.ack_floor, end))
        self._handled.add(self.ack_floor, end)
        self._move_ack_floor()

    def holds(self, start: int, end: int) -> bool:
        """Return whether all of [start, end) is in flight, and not empty."""
        return self.ack_floor <= start < end <= self.next_sequence and not self._handled.overlaps(start, end)

    def skip_to(self, sequence: int) -> None:
        """Begin the next pull at that delivery sequence: the record of an earlier pull is lost."""
        if sequence > self.next_sequence:
            self.returned.add(self.next_sequence, sequence)
            self._handled.add(self.next_sequence, sequence)
            self.next_sequence = sequence
            self._move_ack_floor()

    def packed(self) -> list[Any]:
        """Return the state for the checkpoint."""
        pulls = [
            [
                pull.first,
                pull.size,
                pull.taken_us,
                pull.quarantined,
                [[*in_flight.messages, *in_flight[1:]] for in_flight in pull.ranges],
            ]
            for pull in self.pulls
        ]
        return [self.ack_floor, self.next_sequence, list(self.acked), list(self.returned), list(self._late), pulls]

    @classmethod
    def restored(cls, fields: list[Any]) -> InFlight:
        """Return the messages in flight whose state ``packed`` returned. Raise ValueError."""
        ack_floor, next_sequence, acked, returned, late, pulls = fields
        in_flight = cls(whole(next_sequence))
        in_flight.ack_floor = whole(ack_floor)
        if ack_floor > next_sequence:
            raise ValueError(f"the ack floor {ack_floor} lies behind the next delivery sequence {next_sequence}")
        for start, end in acked:
            in_flight.acked.add(start, end)
            in_flight._handled.add(start, end)
        for start, end in returned:
            in_flight.returned.add(start, end)
            in_flight._handled.add(start, end)
        in_flight._late.extend(map(tuple, late))
        for first, size, taken_us, quarantined, ranges in pulls:
            parts = [InFlightRange(MessageRange(*map(whole, part[:6])), *map(whole, part[6:])) for part in ranges]
            in_flight.next_sequence = whole(first)
            in_flight.add(parts, whole(size), whole(taken_us), quarantined)
        in_flight.next_sequence = next_sequence
        return in_flight

    def _move_ack_floor(self, now_us: int = 0) -> None:
        ack_floor = self._handled.end_from(self.ack_floor)
        if ack_floor == self.ack_floor:
            return
        for intervals in (self.acked, self.returned, self._handled):
            intervals.drop_below(ack_floor)
        self.move_ack_floor(ack_floor, now_us)

    def move_ack_floor(self, ack_floor: int, now_us: int) -> None:
        """Move the ack floor, and forget pulls below it; nothing above it is handled, or ``is_next`` was true.

        *now_us* is 0 where nobody has handled the messages.
        """
        self.ack_floor = ack_floor
        pulls = self.pulls
        while pulls:
            pull = pulls[0]
            total = pull.total
            if pull.first + total > ack_floor:
                return
            del pulls[0]  # ``_forget`` by hand, as it is for each message that comes alone
            self.size -= pull.size
            self._pulled -= total
            if now_us:
                held_us = now_us - pull.taken_us
                self.held_us = held_us if total == 1 else min(max(self.held_us, held_us // total), held_us)

    def _forget_handled(self, start: int, end: int, now_us: int) -> None:
        """Drop the pulls above the ack floor that have messages of [start, end) and none in flight."""
        pulls = self.pulls
        at = max(bisect_right(pulls, max(start, self.ack_floor), key=_first) - 1, 0)
        while at < len(pulls) and (pull := pulls[at]).first < end:
            if self._handled.covers(pull.first, pull.first + pull.total):
                del pulls[at]
                self.size -= pull.size
                self._pulled -= pull.total
                if now_us:
                    held_us = now_us - pull.taken_us
                    self.held_us = min(max(self.held_us, held_us // pull.total), held_us)
            else:
                at += 1


def _first(pull: InFlightPull) -> int:
    return pull.first

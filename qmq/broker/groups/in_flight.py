"""What one consumer holds: the pulls it was given, and which of their messages it has handled.

A pull sequence counts the messages a consumer has pulled. The frontier is the pull sequence below which all is handled;
pulls that lie wholly below it are forgotten. A message is handled once it was acknowledged or handed back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Final, NamedTuple

from qmq.broker.ports.commands import Back
from qmq.broker.startup.checkpoint import whole
from qmq.intervals import Intervals

#: Intervals of what was handed back that are remembered below the frontier, so that a late ack of it is told.
RETURNED_KEPT: Final = 64


class MessageRange(NamedTuple):
    """Messages of one log in a row; the first ``skip`` of them are not meant, the ``total`` after them are.

    ``log`` below 2^31: a subject's number, and ``first`` a sequence of it. From there on: 2^31 + partition, ``first`` a
    batch's position, ``run`` the run in it, and ``end`` the position of the last batch.
    """

    log: int
    first: int
    run: int
    skip: int
    total: int
    end: int = 0

    def part(self, start: int, end: int) -> MessageRange:
        """Of its messages those from number *start* up to, not including, *end*."""
        if not start and end == self.total:
            return self
        log, first, run, skip, _, last = self
        return MessageRange(log, first, run, skip + start, end - start, last)

    def overlaps(self, other: MessageRange) -> bool:
        """Both are of one range, and have messages in common."""
        same = self[:3] == other[:3]
        return same and max(self.skip, other.skip) < min(self.skip + self.total, other.skip + other.total)


def flat(ranges: Sequence[MessageRange]) -> list[int]:
    """Their fields, six each, one after another."""
    if len(ranges) == 1:
        return list(ranges[0])
    return [field for messages in ranges for field in messages]


def unflat(fields: Sequence[int]) -> list[MessageRange]:
    """The ranges of what ``flat`` gave."""
    return [MessageRange(*fields[at : at + 6]) for at in range(0, len(fields), 6)]


class HeldRange(NamedTuple):
    """A range with what every message of it has in common."""

    messages: MessageRange
    attempt: int
    lapses: int

    @classmethod
    def of(cls, fields: Sequence[int]) -> HeldRange:
        """That of which ``flat`` gave the fields."""
        return cls(MessageRange(*fields[:6]), fields[6], fields[7])

    def flat(self) -> list[int]:
        """Its fields, eight."""
        return [*self.messages, self.attempt, self.lapses]

    def part(self, start: int, end: int) -> HeldRange:
        """Of its messages those from number *start* up to, not including, *end*."""
        if not start and end == self.messages.total:
            return self
        return HeldRange(self.messages.part(start, end), self.attempt, self.lapses)


class HeldPull:
    """One pull's messages: pull sequences [first, first + total)."""

    __slots__ = ("_starts", "first", "isolated", "ranges", "since_us", "size", "taken_us", "total")

    def __init__(self, first: int, ranges: list[HeldRange], size: int, taken_us: int, isolated: bool) -> None:
        self.first = first
        self.ranges = ranges
        self.total = ranges[0].messages.total if len(ranges) == 1 else sum(held.messages.total for held in ranges)
        self.size = size  # bytes
        self.taken_us = taken_us
        self.isolated = isolated
        self.since_us = 0  # monotonic: its messages' time began then; 0: nobody looks
        self._starts: list[int] | None = None  # the first pull sequence of each range

    def between(self, start: int, end: int) -> Iterator[HeldRange]:
        """The parts of its ranges with pull sequences in [start, end)."""
        starts = self._starts_of()
        at = max(bisect_right(starts, start) - 1, 0)
        while at < len(self.ranges) and (first := starts[at]) < end:
            held = self.ranges[at]
            low, high = max(start - first, 0), min(end - first, held.messages.total)
            if low < high:
                yield held.part(low, high)
            at += 1

    def replace(self, start: int, end: int, ranges: list[HeldRange]) -> None:
        """The pull sequences [start, end), not none, are the same messages, which lie elsewhere now. What lies
        around them is not touched: a pull may have many ranges, and all are replaced one after another.
        """
        starts = self._starts_of()
        at, behind = bisect_right(starts, start) - 1, bisect_left(starts, end)
        first, last = starts[at], starts[behind - 1]
        whole = [*self._part(at, 0, start - first), *ranges, *self._part(behind - 1, end - last, None)]
        self.ranges[at:behind] = whole
        totals = (held.messages.total for held in whole)
        starts[at:behind] = list(accumulate(totals, initial=first))[:-1]

    def _starts_of(self) -> list[int]:
        if self._starts is None:
            totals = (held.messages.total for held in self.ranges)
            self._starts = list(accumulate(totals, initial=self.first))[:-1]
        return self._starts

    def _part(self, at: int, low: int, high: int | None) -> list[HeldRange]:
        """Of the range there the messages from number *low* up to *high*, None: all behind; nothing, or one range."""
        held = self.ranges[at]
        high = held.messages.total if high is None else high
        return [held.part(low, high)] if low < high else []


class Held:
    """All that a consumer holds."""

    __slots__ = ("acked", "frontier", "next_sequence", "pulls", "returned", "_late", "_bytes", "_handled", "_pulled")

    def __init__(self, next_sequence: int = 0) -> None:
        self.next_sequence = next_sequence
        self.frontier = next_sequence
        self.pulls: deque[HeldPull] = deque()
        self.acked = Intervals()
        #: Nacked, released or rejected, above the frontier.
        self.returned = Intervals()
        self._late: deque[tuple[int, int]] = deque(maxlen=RETURNED_KEPT)
        self._handled = Intervals()  # above the frontier, in whichever way
        self._bytes = 0
        self._pulled = 0  # messages of the pulls

    @property
    def count(self) -> int:
        """How many messages it holds that are not handled."""
        return self.next_sequence - self.frontier - self._handled.size

    @property
    def span(self) -> int:
        """How far its last message lies above the frontier, or a little less: sequences that were passed over do not
        count, nor what else is handled of the first pull.
        """
        return min(self._pulled, self.next_sequence - self.frontier)

    @property
    def size(self) -> int:
        """About how many bytes the pulls have that are not wholly handled."""
        return self._bytes

    def add(self, ranges: list[HeldRange], size: int, now_us: int, isolated: bool = False) -> HeldPull:
        """A pull is given to it."""
        pull = HeldPull(self.next_sequence, ranges, size, now_us, isolated)
        self.pulls.append(pull)
        self.next_sequence += pull.total
        self._bytes += size
        self._pulled += pull.total
        return pull

    def ack(self, intervals: Sequence[int]) -> tuple[int, int]:
        """Messages [start, end), ... are acknowledged: how many are so now that were not, and how many must be refused,
        as they were handed back before or never pulled. Acknowledged twice is no harm.
        """
        if len(intervals) == 2 and not self._handled.size and intervals[0] == self.frontier:
            start, end = intervals  # one after another, as most are
            if start < end <= self.next_sequence:
                self._pass(end)
                return end - start, 0
        new = refused = 0
        for start, end in zip(intervals[::2], intervals[1::2], strict=True):
            if self.holds(start, end):
                new += self.acked.add(start, end)
                self._handled.add(start, end)
            else:
                more, not_held = self._ack(start, end)
                new += more
                refused += not_held
        self._move_frontier()
        return new, refused

    def _ack(self, start: int, end: int) -> tuple[int, int]:
        """Of what it does not hold all of."""
        refused = max(0, end - max(start, self.next_sequence))
        end = min(end, self.next_sequence)
        refused += sum(max(0, min(end, high) - max(start, low)) for low, high in self._late if low < self.frontier)
        new = 0
        start = max(start, self.frontier)
        for low, high in self.returned.missing(start, end):
            new += self.acked.add(low, high)
            self._handled.add(low, high)
        refused += max(0, end - start) - sum(high - low for low, high in self.returned.missing(start, end))
        return new, refused

    def give_back(self, start: int, end: int) -> list[HeldRange] | None:
        """Messages [start, end) are handed back: what they are. None when one of them is not held (any more): then
        nothing has changed.
        """
        if not self.holds(start, end):
            return None
        ranges = list(self.between(start, end))
        self.returned.add(start, end)
        self._handled.add(start, end)
        self._late.append((start, end))
        if start == self.frontier:
            self._move_frontier()
        return ranges

    def holding(self, backs: Sequence[Back], refused: list[int]) -> list[Back]:
        """Those whose messages it all holds, none of them twice; the numbers of the others are added to *refused*."""
        found, seen = list[Back](), Intervals()
        for number, back in enumerate(backs):
            start, end = back[:2]
            if self.holds(start, end) and not seen.overlaps(start, end):
                seen.add(start, end)
                found.append(back)
            else:
                refused.append(number)
        return found

    def between(self, start: int, end: int) -> Iterator[HeldRange]:
        """What the pull sequences [start, end) are, handled or not."""
        at = bisect_right(self.pulls, start, key=_first) - 1
        for pull in islice(self.pulls, max(at, 0), None):
            if pull.first >= end:
                return
            yield from pull.between(start, end)

    def replace(self, start: int, ranges: list[HeldRange]) -> None:
        """What it holds from the pull sequence *start* on, of one pull, lies elsewhere now."""
        pull = self.pulls[bisect_right(self.pulls, start, key=_first) - 1]
        pull.replace(start, start + sum(held.messages.total for held in ranges), ranges)

    def unhandled(self, start: int | None = None, end: int | None = None) -> list[tuple[int, int]]:
        """Intervals of pull sequences that it holds, from *start* on (None: all), before *end*."""
        return self._handled.missing(max(start or 0, self.frontier), self.next_sequence if end is None else end)

    def end_of_first(self, most: int) -> int:
        """The pull sequence before which it holds so many ranges, or all that it does."""
        for start, end in self._handled.missing(self.frontier, self.next_sequence, most):
            for held in self.between(start, end):
                start += held.messages.total
                most -= 1
                if not most:
                    return start
        return self.next_sequence

    def let_go(self, end: int) -> None:
        """It holds nothing any more before *end*; late acks of it are told."""
        self._late.append((self.frontier, end))
        self._handled.add(self.frontier, end)
        self._move_frontier()

    def holds(self, start: int, end: int) -> bool:
        """Whether it holds all of [start, end), which is not empty."""
        return self.frontier <= start < end <= self.next_sequence and not self._handled.overlaps(start, end)

    def skip_to(self, sequence: int) -> None:
        """The next pull begins at that pull sequence: a record of what was before it is lost."""
        if sequence > self.next_sequence:
            self.returned.add(self.next_sequence, sequence)
            self._handled.add(self.next_sequence, sequence)
            self.next_sequence = sequence
            self._move_frontier()

    def packed(self) -> list[Any]:
        """For a checkpoint."""
        pulls = [
            [pull.first, pull.size, pull.taken_us, pull.isolated, [[*held.messages, *held[1:]] for held in pull.ranges]]
            for pull in self.pulls
        ]
        return [self.frontier, self.next_sequence, list(self.acked), list(self.returned), list(self._late), pulls]

    @classmethod
    def restored(cls, fields: list[Any]) -> Held:
        """What ``packed`` gave. Raises ValueError."""
        frontier, next_sequence, acked, returned, late, pulls = fields
        held = cls(whole(next_sequence))
        held.frontier = whole(frontier)
        if frontier > next_sequence:
            raise ValueError(f"the frontier {frontier} lies behind the next pull sequence {next_sequence}")
        for start, end in acked:
            held.acked.add(start, end)
            held._handled.add(start, end)
        for start, end in returned:
            held.returned.add(start, end)
            held._handled.add(start, end)
        held._late.extend(map(tuple, late))
        for first, size, taken_us, isolated, ranges in pulls:
            parts = [HeldRange(MessageRange(*map(whole, part[:6])), *map(whole, part[6:])) for part in ranges]
            held.pulls.append(HeldPull(whole(first), parts, whole(size), whole(taken_us), isolated))
            held._bytes += size
            held._pulled += held.pulls[-1].total
        return held

    def _move_frontier(self) -> None:
        frontier = self._handled.end_from(self.frontier)
        if frontier == self.frontier:
            return
        for intervals in (self.acked, self.returned, self._handled):
            intervals.drop_below(frontier)
        self._pass(frontier)

    def _pass(self, frontier: int) -> None:
        """All before that is handled."""
        self.frontier = frontier
        while self.pulls and self.pulls[0].first + self.pulls[0].total <= frontier:
            pull = self.pulls.popleft()
            self._bytes -= pull.size
            self._pulled -= pull.total


def _first(pull: HeldPull) -> int:
    return pull.first

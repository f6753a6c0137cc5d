"""What a consumer of a group holds, as its client knows it: verdicts on the way to the broker. Without I/O.

Messages are named by their pull sequences. Each is open until it has a verdict; an acknowledgement waits until it is
sent, then until it is confirmed; if the connection is lost before, it is sent again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from qmq.errors import Fenced, InvalidOption, ProtocolError
from qmq.format.run import Run
from qmq.intervals import Intervals

#: So many stretches of acknowledgements go in one frame.
MOST_INTERVALS: Final = 2_048


class Verdict(enum.IntEnum):
    """How messages are handed back; as in HAND_BACK."""

    NACK = 1
    RELEASE = 2
    REJECT = 3


class Task(Protocol):
    """Work on a message, which can be stopped."""

    def cancel(self) -> object: ...
    def __hash__(self) -> int: ...


class Place(NamedTuple):
    """What the broker said that this consumer is."""

    consumer: int
    incarnation: int
    frontier: int
    next_sequence: int
    generation: int
    since_us: int


class Holding:
    """The verdicts of one consumer at one broker. *want_send* is called when there is something to send."""

    def __init__(self, want_send: Callable[[], None]) -> None:
        self._want_send = want_send
        self._pending = Intervals()  # acknowledged by the program, not sent
        self._sent = Intervals()  # sent, not confirmed
        self._done = Intervals()  # whatever has a verdict, above the floor
        self._floor = 0
        #: The pull sequence that the next pull expects.
        self.expected = 0
        #: A message with this pull sequence goes on where the last acknowledgement was: who acknowledges it may just
        #: count on.
        self.tail = -1
        self._streak = 0
        self._lost_below = 0
        #: Acknowledgements that the broker has refused, as what they were for is not held any more.
        self.refused = 0
        #: Why nothing is held any more: another has taken over, or it was silent for too long.
        self.fenced: Fenced | None = None
        self.place: Place | None = None
        #: Who is at work on a message of it, and who was stopped at that because it is not held any more.
        self.handling: set[Task] = set()
        self.stopped: set[Task] = set()

    # --- messages ----------------------------------------------------------------------------------------------------

    def number(self, runs: Sequence[Run], ranges: Sequence[int]) -> list[Run]:
        """Give runs their pull sequences: *ranges* are (first, count, attempt) flat, in the order of the messages.

        Raises ProtocolError when they do not fit.
        """
        if len(ranges) % 3 or sum(ranges[1::3]) != sum(run.count for run in runs):
            raise ProtocolError("the broker's answer has other messages than it says")
        numbered = list[Run]()
        left = iter(runs)
        run, at = None, 0
        for first, count, attempt in zip(ranges[::3], ranges[1::3], ranges[2::3], strict=True):
            sequence, end = first, first + count
            while sequence < end:
                if run is None:
                    run, at = next(left), 0
                size = min(run.count - at, end - sequence)
                part = run if size == run.count else run.slice(at, at + size)
                part.holder, part.pull_sequence, part.attempt = self, sequence, attempt
                numbered.append(part)
                sequence += size
                at += size
                if at == run.count:
                    run = None
            self.expected = max(self.expected, end)
        return numbered

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def ack(self, start: int, end: int) -> None:
        """These are handled. What has a verdict already keeps it."""
        self._settle()
        if start < self._lost_below:
            self.refused += min(end, self._lost_below) - start
            start = self._lost_below
        if end - start == 1 and start >= self._floor and start not in self._done:
            self._streak, self.tail = start, end
        else:
            self._add(start, end)
        self._want_send()

    def _settle(self) -> None:
        """The acknowledgements one after another that ended at ``tail`` are over."""
        start, end = self._streak, self.tail
        self.tail = -1
        if start < end:
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        for low, high in self._done.missing(max(start, self._floor), end):
            self._done.add(low, high)
            self._pending.add(low, high)

    def is_open(self, sequence: int) -> bool:
        """It has no verdict yet."""
        self._settle()
        return self.fenced is None and sequence >= self._floor and sequence not in self._done

    def take_back(self, start: int, end: int) -> None:
        """These are about to be handed back. Raises Fenced when one has a verdict, or is not held any more."""
        self._settle()
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        if start < self._floor or self._done.overlaps(start, end):
            raise Fenced("this message was acknowledged or handed back before")
        self._done.add(start, end)

    # --- to the broker -----------------------------------------------------------------------------------------------

    def take_acks(self) -> list[int]:
        """Acknowledgements to send now: start, end, start, end, ..."""
        self._settle()
        found = list[int]()
        for start, end in list(self._pending)[:MOST_INTERVALS]:
            found += (start, end)
        for start, end in zip(found[::2], found[1::2], strict=True):
            self._sent.add(start, end)
        if found:
            rest = list(self._pending)[MOST_INTERVALS:]
            self._pending = Intervals()
            for start, end in rest:
                self._pending.add(start, end)
        return found

    def confirm(self, intervals: Sequence[int], refused: int) -> None:
        """The broker has these."""
        self.refused += refused
        kept = Intervals()
        gone = Intervals()
        for start, end in zip(intervals[::2], intervals[1::2], strict=True):
            gone.add(start, end)
        for start, end in self._sent:
            for low, high in gone.missing(start, end):
                kept.add(low, high)
        self._sent = kept

    @property
    def unconfirmed(self) -> int:
        """Acknowledgements that the broker has not confirmed."""
        self._settle()
        return self._pending.size + self._sent.size

    def joined(self, place: Place) -> None:
        """The broker said who we are. As the same incarnation we go on; as another one we hold what it gives us."""
        before, self.place = self.place, place
        same = before is not None and before[:2] == place[:2] and before.generation == place.generation
        if same and self.fenced is None:
            for start, end in self._sent:
                self._pending.add(start, end)
            self._sent = Intervals()
            self._drop_below(place.frontier)
            if self._pending.size:
                self._want_send()
            return
        if before is not None and self.fenced is None:
            self.fence(Fenced("the broker has handed what this consumer held to others: it was silent for too long"))
        self.fenced = None
        self._lost_below = place.frontier if before is not None and not same else 0
        self._pending, self._sent, self._done = Intervals(), Intervals(), Intervals()
        self._floor = self.expected = place.frontier

    def fence(self, error: Fenced) -> None:
        """Nothing is held any more: acknowledgements on the way are refused."""
        self._settle()
        self.fenced = error
        for task in self.handling:
            self.stopped.add(task)
            task.cancel()
        self.handling.clear()
        self.refused += self._pending.size + self._sent.size
        self._pending, self._sent = Intervals(), Intervals()

    def _drop_below(self, frontier: int) -> None:
        if frontier > self._floor:
            self._floor = frontier
            self._done.drop_below(frontier)

    def compact(self) -> None:
        """Forget what lies below everything that is open or unconfirmed."""
        floor = self._done.end_from(self._floor)
        for intervals in (self._pending, self._sent):
            first: Any = next(iter(intervals), None)
            if first is not None:
                floor = min(floor, first[0])
        self._drop_below(floor)


def check_delay(delay: float | None) -> int | None:
    """Microseconds of a delay in seconds. Raises InvalidOption."""
    if delay is None:
        return None
    if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay <= 2 * 366 * 86_400:
        raise InvalidOption(f"delay must be a number of seconds from 0 to two years, not {delay!r}")
    return int(delay * 1_000_000)

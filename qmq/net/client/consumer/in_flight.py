"""What a consumer of a group holds, as its client knows it: dispositions on the way to the broker. Without I/O.

Messages are named by their delivery sequences. Each is open until it has a disposition; an acknowledgement waits until
it is sent, then until it is confirmed; if the connection is lost before, it is sent again. When the broker may have
handed what is held to others, it is held no more, for good: what comes after that is another InFlightWindow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from qmq.errors import Fenced, InvalidOption, ProtocolError
from qmq.format.private import PRIVATE, origin_subject
from qmq.format.run import Run
from qmq.intervals import Intervals
from qmq.net.client.options import microseconds_of
from qmq.net.protocol.types import ConsumerState, Disposition

#: So many ranges of acknowledgements go in one frame.
MAX_INTERVALS: Final = 2_000


class Task(Protocol):
    """Work on a message, which can be stopped."""

    def cancel(self) -> object: ...
    def __hash__(self) -> int: ...


class DispositionOwner(Protocol):
    """Who brings dispositions to the broker."""

    #: Where that is done.
    loop: Any
    #: Acknowledgements that were refused, as what they were for is not in flight any more.
    refused: int

    @property
    def has_left(self) -> bool:
        """The program has left the consumer's block."""

    def want_send(self) -> None:
        """There is something to send."""

    async def hand_back(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Hand messages back; returns once the broker has that durably, or another one has the message as a whole.
        Raises Fenced.
        """

    def release(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Hand messages back unstarted, in the background."""

    async def failed(
        self, in_flight: InFlightWindow, sequence: int, error: Exception, whole: WholeMessage | None = None
    ) -> None:
        """A handler has raised: its message comes again."""

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """[any thread] The program can't come to these messages any more."""

    def late(self, call: str, shown: object) -> None:
        """[any thread] Tell that *call* of *shown* came after the program had left the consumer's block."""


#: A run, and which of its messages.
WholeMessage = tuple[Run, int]


class PendingDisposition(NamedTuple):
    """The delivery sequences [start, end) are handed back. ``delay_us`` None: after the group's delay. ``whole``: the
    one message that it is, which another broker may have.
    """

    start: int
    end: int
    disposition: Disposition
    delay_us: int | None = None
    reason: str = ""
    whole: WholeMessage | None = None


class Lease:
    """What all messages of one answer share: when it is gone, they are."""

    __slots__ = ("_in_flight_window", "_ranges")

    def __init__(self, in_flight: InFlightWindow, ranges: Sequence[int]) -> None:
        self._in_flight_window = in_flight
        self._ranges = ranges

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._in_flight_window.answer_dropped(self._ranges)


class InFlightWindow:
    """What one epoch of a consumer holds at one broker, from a hello on that gave it *consumer_state*."""

    def __init__(self, owner: DispositionOwner, consumer_state: ConsumerState) -> None:
        self.owner = owner
        self.consumer_state = consumer_state
        self._pending = Intervals()  # acknowledged by the program, not sent
        self._sent = Intervals()  # sent, not confirmed
        self._done = Intervals()  # whatever has a disposition, above the floor
        self._floor = consumer_state.ack_floor
        #: The delivery sequence that the next pull expects.
        self.expected = consumer_state.ack_floor
        #: A message with this delivery sequence goes on where the last acknowledgement was: who acknowledges it may
        #: just count on.
        self.tail = -1
        self._streak = 0
        #: Why nothing is held any more: another has taken over, or it was silent for too long.
        self.fenced: Fenced | None = None
        self._handling: dict[Task, int] = {}  # who is at work on how many messages of it
        self._stopped: set[Task] = set()  # who was stopped at that, as it is not in flight any more

    # --- messages ----------------------------------------------------------------------------------------------------

    def number(self, runs: Sequence[Run], ranges: Sequence[int]) -> list[Run]:
        """Give runs their delivery sequences: *ranges* are (first, count, attempt) flat, in the order of the messages.

        Raises ProtocolError when they do not fit.
        """
        if len(ranges) % 3 or sum(ranges[1::3]) != sum(run.count for run in runs):
            raise ProtocolError("the broker's answer has other messages than it says")
        lease = Lease(self, ranges)
        if len(ranges) == 3 and len(runs) == 1 and ranges[0] >= self.expected:  # as mostly, where few come at a time
            if ranges[0] > self.expected:
                self._done.add(self.expected, ranges[0])
            self._assign(runs[0], ranges[0], ranges[2], lease)
            self.expected = ranges[0] + ranges[1]
            return [runs[0]]
        numbered = list[Run]()
        left = iter(runs)
        run, at = None, 0
        for first, count, attempt in zip(ranges[::3], ranges[1::3], ranges[2::3], strict=True):
            if first < self.expected:
                raise ProtocolError(
                    f"the broker gives delivery sequence {first} again, and {self.expected} was expected"
                )
            if first > self.expected:  # those between had a disposition before, and do not come any more
                self._done.add(self.expected, first)
            sequence, end = first, first + count
            while sequence < end:
                if run is None:
                    run, at = next(left), 0
                size = run.count - at
                if size > end - sequence:
                    size = end - sequence
                    part = run.slice(at, at + size)
                    at += size
                else:
                    part = run.slice(at, run.count) if at else run
                    run = None
                self._assign(part, sequence, attempt, lease)
                numbered.append(part)
                sequence += size
            self.expected = max(self.expected, end)
        return numbered

    def _assign(self, run: Run, sequence: int, attempt: int, lease: Lease) -> None:
        if run.subject[:1] == PRIVATE:
            run.subject = origin_subject(run.subject)
        run.in_flight, run.delivery_sequence, run.attempt, run.lease = self, sequence, attempt, lease

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, start: int, end: int) -> None:
        """These are handled. What has a disposition already keeps it."""
        self._end_streak()
        if self.fenced is not None:
            lost = sum(high - low for low, high in self._done.missing(max(start, self._floor), end))
            self.late("ack()", start, end, f"{lost} messages")
            self.owner.refused += lost
            self._done.add(start, end)
            return
        if end - start == 1 and start >= self._floor and start not in self._done:
            self._streak, self.tail = start, end
        else:
            self._add(start, end)
        self.owner.want_send()

    def _end_streak(self) -> None:
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
        """It has no disposition yet."""
        self._end_streak()
        return self.fenced is None and sequence >= self._floor and sequence not in self._done

    def open(self) -> list[tuple[int, int]]:
        """The ranges of messages that came and have no disposition yet."""
        self._end_streak()
        return [] if self.fenced is not None else self._done.missing(self._floor, self.expected)

    def begin_disposition(self, start: int, end: int) -> None:
        """These are about to be handed back. Raises Fenced when one has a disposition, or is not in flight any more."""
        self._end_streak()
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        if start < self._floor or self._done.overlaps(start, end):
            raise Fenced("this message was acknowledged or handed back before")
        self._done.add(start, end)

    def late(self, call: str, start: int, end: int, shown: object) -> None:
        """[any thread] Have *call* of these messages told of, where it comes after the consumer's block and one of them
        has no disposition.
        """
        if self.owner.has_left and self._done.missing(max(start, self._floor), end):
            self.owner.late(call, shown)

    def handed_over(self, start: int, end: int) -> None:
        """What was to be handed back is elsewhere: here it is handled."""
        if self.fenced is None:
            self._pending.add(start, end)
            self.owner.want_send()

    # --- to the broker -----------------------------------------------------------------------------------------------

    def take_acks(self) -> list[int]:
        """Acknowledgements to send now: start, end, start, end, ..."""
        self._end_streak()
        if not self._pending.size:
            return []
        taken, rest = list(self._pending)[:MAX_INTERVALS], list(self._pending)[MAX_INTERVALS:]
        self._pending = Intervals()
        for start, end in rest:
            self._pending.add(start, end)
        for start, end in taken:
            self._sent.add(start, end)
        return [number for pair in taken for number in pair]

    def confirm(self, intervals: Sequence[int], refused: int) -> None:
        """The broker has these."""
        self.owner.refused += refused
        if list(self._sent) == [tuple(intervals)]:  # as mostly
            self._sent = Intervals()
            return
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
        self._end_streak()
        return self._pending.size + self._sent.size

    @property
    def pending(self) -> int:
        """Acknowledgements that were not sent."""
        return self._pending.size + max(self.tail - self._streak, 0)

    def rejoined(self, consumer_state: ConsumerState) -> None:
        """The connection is another one: what was not confirmed is sent again."""
        self.consumer_state = consumer_state
        for start, end in self._sent:
            self._pending.add(start, end)
        self._sent = Intervals()
        self._drop_below(consumer_state.ack_floor)
        if self._pending.size:
            self.owner.want_send()

    def acknowledged(self, most: int) -> list[int]:
        """What is acknowledged and not confirmed, up to so many ranges: start, end, start, end, ..."""
        self._end_streak()
        both = Intervals()
        for start, end in (*self._sent, *self._pending):
            both.add(start, end)
        return [number for pair in list(both)[:most] for number in pair]

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self, error: Fenced) -> Intervals:
        """Nothing is held any more; who is at work on it may go on. Returns what is acknowledged and not confirmed."""
        self._end_streak()
        lost = Intervals()
        for start, end in (*self._sent, *self._pending):
            lost.add(start, end)
        self._pending, self._sent = Intervals(), Intervals()
        self.fenced = error
        return lost

    def fence(self, error: Fenced) -> Intervals:
        """As ``leave``, and who is at work on it is stopped."""
        lost = self.leave(error)
        handling, self._handling = self._handling, {}
        for task in handling:
            self._stopped.add(task)
            task.cancel()
        return lost

    def begin(self, task: Task) -> None:
        """That task goes to work on a message of it. It is stopped at once where nothing is held any more."""
        if self.fenced is None:
            self._handling[task] = self._handling.get(task, 0) + 1
        elif task not in self._stopped:
            self._stopped.add(task)
            task.cancel()

    def end(self, task: Task) -> bool:
        """It is through with it; whether it was stopped."""
        if task in self._stopped:
            self._stopped.remove(task)
            return True
        left = self._handling.get(task, 0) - 1
        if left > 0:
            self._handling[task] = left
        else:
            self._handling.pop(task, None)
        return False

    def answer_dropped(self, ranges: Sequence[int]) -> None:
        """[any thread] The program has let go of all messages of an answer."""
        if self.fenced is None and not self._has_dispositions(ranges):
            self.owner.dropped(
                self, [(first, first + count) for first, count in zip(ranges[::3], ranges[1::3], strict=True)]
            )

    def _has_dispositions(self, ranges: Sequence[int]) -> bool:
        """Whether all of them surely have one: nothing is changed, and what is just being changed may say no."""
        floor, tail = self._floor, self.tail
        for first, count in zip(ranges[::3], ranges[1::3], strict=True):
            end = first + count
            in_streak = self._streak <= first and end <= tail
            if not in_streak and end > floor and not self._done.covers(max(first, floor), end):
                return False
        return True

    def count_open(self, sequence_ranges: Sequence[tuple[int, int]]) -> int:
        """How many of these messages have no disposition and are held."""
        if self.fenced is not None:
            return 0
        self._end_streak()
        missing = [pair for low, high in sequence_ranges for pair in self._done.missing(max(low, self._floor), high)]
        return sum(high - low for low, high in missing)

    def _drop_below(self, ack_floor: int) -> None:
        if ack_floor > self._floor:
            self._floor = ack_floor
            self._done.drop_below(ack_floor)

    def compact(self) -> None:
        """Forget what lies below everything that is open or unconfirmed."""
        floor = self._done.end_from(self._floor)
        for intervals in (self._pending, self._sent):
            first: Any = next(iter(intervals), None)
            if first is not None:
                floor = min(floor, first[0])
        self._drop_below(floor)


def check_reason(reason: str) -> str:
    """A reason as it can be sent: what UTF-8 cannot hold, such as parts of some file names, is escaped.

    Raises InvalidOption.
    """
    if not isinstance(reason, str):
        raise InvalidOption(f"reason must be a str, not {reason!r:.100}")
    return reason if reason.isascii() else reason.encode("utf-8", "backslashreplace").decode()


def reason_of(error: Exception) -> str:
    """What a handler has raised, as a reason; of several errors the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    name = type(error).__name__
    try:
        return check_reason(f"{name}: {error}")
    except Exception as fault:
        return f"{name}: its text cannot be made: {type(fault).__name__}"


def check_delay(delay: float | None) -> int | None:
    """Microseconds of a delay in seconds. Raises InvalidOption."""
    return None if delay is None else microseconds_of("delay", delay)

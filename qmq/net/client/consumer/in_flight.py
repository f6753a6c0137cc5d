"""The messages of a consumer that are in flight, and their acks on the way to the broker. No I/O.

Delivery sequences name the messages. A message is open until it has a disposition. An ack is pending until it is sent,
and unconfirmed until the broker confirms it; if the connection is lost before, the ack is sent again. Once the broker
may have handed the messages to others, the window is fenced for good, and another InFlightWindow takes its place.
"""

from __future__ import annotations

import sys
from array import array
from asyncio import CancelledError
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from qmq.durations import Duration
from qmq.errors import Fenced, InvalidOption, ProtocolError, Retry
from qmq.format.lanes import SLOT_BITS, slot_of
from qmq.format.layout import LANE_ORDERED, RUN_REPLAYED
from qmq.format.private import PRIVATE, origin_subject
from qmq.format.run import Envelopes, Run, messages_in
from qmq.intervals import Intervals
from qmq.net.client.options import delay_us_of
from qmq.net.protocol.types import RESENT_BIT, ConsumerState, Disposition

#: The number of a slot of order keys, which is that of all subjects.
Slot = int

#: Ranges of messages that are not in flight any more, which a window remembers to say so.
MOST_REMEMBERED: Final = 10_000
#: How many ranges of acks go in one frame.
MAX_INTERVALS: Final = 2_000
#: Up to this many runs of messages with order keys, no search is made for those that have a disposition.
_MANY_ORDERED: Final = 1_024


class Task(Protocol):
    """A task that works on a message and can be cancelled."""

    def cancel(self) -> object: ...
    def __hash__(self) -> int: ...


class DispositionOwner(Protocol):
    """The object that sends the dispositions of a window."""

    #: The loop that sends them.
    loop: Any
    #: How many acks were refused because their messages are no longer in flight.
    refused: int
    #: Logs the failures of messages.
    failures: Any

    @property
    def hands_over(self) -> bool:
        """Whether another broker takes whole messages that are nacked while this one is gone."""

    @property
    def has_left(self) -> bool:
        """Whether the program has left the consumer's block."""

    def want_send(self) -> None:
        """Send pending acks soon."""

    def hand_back(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> Awaitable[object]:
        """Send nacks or rejects; the result is done once the broker has them on disk or another broker has the whole
        messages. Raises Fenced, now or when it is awaited.
        """

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Send a disposition in the background for those messages of its range that have none."""

    def release(self, run: Envelopes, start: int, end: int, delay_us: int | None) -> None:
        """Release, in the background, messages of *run* that the program does not want now."""

    def cancelled(
        self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition], fail: Callable[[], FailedAttempt]
    ) -> None:
        """Nack messages whose handler was cancelled, or release them because the consumer stops."""

    def call_from_thread(self, dispose: Callable[[], object]) -> bool:
        """[any thread] Have the loop give a disposition, after those before it; return False if it is closed."""

    def return_early(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Release messages of a slot of order keys that came while an earlier one was on its way back."""

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int, *, acked: bool = True) -> None:
        """Wait until the broker has the acks and releases of [start, end). Raises Fenced."""

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """[any thread] Log that the program dropped these messages, if any has no disposition."""

    def late(self, call: str, shown: object) -> None:
        """[any thread] Log that *call* of *shown* came after the program had left the consumer's block."""


#: Envelopes, the index of the message's own in them, and its body.
WholeMessage = tuple[Envelopes, int, bytes]


class FailedAttempt(NamedTuple):
    """The disposition of messages whose handler did not end well: a nack, or a release if no attempt counts."""

    disposition: Disposition
    delay_us: int | None
    reason: str


RELEASED: Final = FailedAttempt(Disposition.RELEASE, None, "")


class PendingDisposition(NamedTuple):
    """A nack, release or reject of the delivery sequences [start, end).

    ``delay_us`` None: the group's delay. ``whole``: the message itself, if it is one, for another broker.
    """

    start: int
    end: int
    disposition: Disposition
    delay_us: int | None = None
    reason: str = ""
    whole: WholeMessage | None = None

    def of(self, attempt: FailedAttempt) -> PendingDisposition:
        """Return the disposition that *attempt* asks for. Other brokers take no releases."""
        whole = None if attempt.disposition == Disposition.RELEASE else self.whole
        return PendingDisposition(self.start, self.end, *attempt, whole)


class Lease:
    """Referenced by all messages of one answer, so it notices when the program has dropped them all."""

    __slots__ = ("_in_flight_window", "_ranges")

    def __init__(self, in_flight: InFlightWindow, ranges: Sequence[int]) -> None:
        self._in_flight_window = in_flight
        self._ranges = ranges

    def __del__(self) -> None:
        first, count, _ = self._ranges[-3:]
        if first + count > self._in_flight_window.floor and not sys.is_finalizing():
            self._in_flight_window.answer_dropped(self._ranges)


def mark_replayed(runs: Sequence[Run]) -> None:
    """Mark messages that the broker hands out again on request: ``Message.replayed`` is True for them."""
    for run in runs:
        run.run_flags |= RUN_REPLAYED


class InFlightWindow:
    """The messages in flight of one epoch of a consumer at one broker. *consumer_state* is that of its subscription."""

    def __init__(self, owner: DispositionOwner, consumer_state: ConsumerState) -> None:
        self.owner = owner
        self.consumer_state = consumer_state
        self._pending = Intervals()  # acked by the program, not sent
        self._sent = Intervals()  # sent, not confirmed
        self._done = Intervals()  # messages above the floor with any disposition
        #: All messages below have a disposition. Other threads may read it.
        self.floor = consumer_state.ack_floor
        #: The delivery sequence that the next pull expects.
        self.expected = consumer_state.ack_floor
        #: The delivery sequence after the last ack: an ack of exactly this message may just increment it.
        self.tail = -1
        self._streak = 0
        #: What tells this window's delivery sequences from those of others, among the acks of threads.
        self.thread_base = 0
        #: The reason why no message is in flight any more: another subscriber took over, or the session expired.
        self.fenced: Fenced | None = None
        #: Acks that the broker has refused, or may have.
        self.lost = Intervals()
        #: Messages without a disposition that the broker has handed to others, as it said on a new connection; of very
        #: many such ranges the latest.
        self._given_up = Intervals()
        # Runs of messages with order keys: delivery sequences [start, end), and slot.
        self._starts, self._ends, self._slots = array("Q"), array("Q"), array("H")
        self._most_ordered = _MANY_ORDERED
        # Slots of which messages are on their way back, and how many dispositions of these the broker has not answered.
        self._failing: dict[Slot, int] = {}
        #: Messages that went back because an earlier one of their order key failed or was released; of very many such
        #: ranges the latest.
        self.taken_back = Intervals()
        #: Since somebody last set this to False, messages that wait for the program may have gone back, because of an
        #: earlier one of their order key.
        self.has_early_returns = False
        self._handling: dict[Task, int] = {}  # how many messages each task works on
        self._stopped: set[Task] = set()  # tasks that ``fence`` has cancelled

    # --- messages ----------------------------------------------------------------------------------------------------

    def number(self, runs: Sequence[Run], ranges: Sequence[int]) -> list[Run]:
        """Assign delivery sequences to *runs*: *ranges* is a flat list of (first, count, attempt), in message order.

        Raises ProtocolError when they do not fit.
        """
        if self.number_range(runs, ranges):
            return list(runs)
        if len(ranges) % 3 or sum(ranges[1::3]) != messages_in(runs):
            raise ProtocolError("the broker's answer has other messages than its ranges number")
        if not ranges:
            return []
        lease = Lease(self, ranges)
        numbered = list[Run]()
        left = iter(runs)
        run, at = None, 0
        for first, count, attempt in zip(ranges[::3], ranges[1::3], ranges[2::3], strict=True):
            if first < self.expected:
                raise ProtocolError(
                    f"the broker sent delivery sequence {first} instead of {self.expected} or a later one"
                )
            if first > self.expected:  # those in between have a disposition and do not come again
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

    def number_range(self, runs: Sequence[Run], ranges: Sequence[int]) -> bool:
        """Do as ``number`` in the common case that one range numbers all messages; return whether it does."""
        if len(ranges) != 3 or ranges[0] < self.expected or ranges[1] != messages_in(runs):
            return False
        sequence, _, attempt = ranges
        if sequence > self.expected:  # those in between have a disposition and do not come again
            self._done.add(self.expected, sequence)
        lease = Lease(self, ranges)
        if attempt >= RESENT_BIT:
            attempt -= RESENT_BIT
            mark_replayed(runs)
        ordered = list[Run]()
        for run in runs:
            if run.subject[:1] == PRIVATE:
                run.subject = origin_subject(run.subject)
            run.in_flight, run.delivery_sequence, run.attempt, run.lease = self, sequence, attempt, lease
            if run.lane >= LANE_ORDERED:
                ordered.append(run)
            sequence += run.count
        if ordered:
            self._note_ordered(ordered)
        self.expected = sequence
        return True

    def _assign(self, run: Run, sequence: int, attempt: int, lease: Lease) -> None:
        if attempt >= RESENT_BIT:
            attempt -= RESENT_BIT
            mark_replayed((run,))
        if run.subject[:1] == PRIVATE:
            run.subject = origin_subject(run.subject)
        run.in_flight, run.delivery_sequence, run.attempt, run.lease = self, sequence, attempt, lease
        if run.lane >= LANE_ORDERED:
            self._note_ordered((run,))

    def _note_ordered(self, runs: Sequence[Run]) -> None:
        """Remember the slots of runs that came."""
        if len(self._ends) >= self._most_ordered:
            self._forget_done()
        starts = [run.delivery_sequence for run in runs]
        self._starts.extend(starts)
        self._ends.extend([start + run.count for start, run in zip(starts, runs, strict=True)])
        self._slots.extend([run.lane & SLOT_BITS for run in runs])
        for run in runs if self._failing else ():
            if slot_of(run.lane) in self._failing:  # the broker sent it before it knew, and takes it back
                start = run.delivery_sequence
                self.owner.return_early(self, start, start + run.count)

    def _forget_done(self) -> None:
        """Forget the slots of runs whose messages all have a disposition."""
        self._end_streak()
        starts, ends, done = self._starts, self._ends, self._done
        left: Sequence[int] = range(bisect_right(ends, self.floor), len(ends))
        if done.size:
            left = [at for at in left if not done.covers(starts[at], ends[at])]
        self._starts, self._ends = array("Q", map(starts.__getitem__, left)), array("Q", map(ends.__getitem__, left))
        self._slots = array("H", map(self._slots.__getitem__, left))
        self._most_ordered = max(_MANY_ORDERED, 2 * len(left))

    @property
    def has_ordered(self) -> bool:
        """Whether messages with order keys may be in flight."""
        return bool(self._ends)

    def begin_failing(self, start: int, end: int) -> list[Slot]:
        """Note that messages of [start, end) are to come again. Messages of their slots that the broker sends now go
        back, until ``end_failing`` is called with the slots that this returns.
        """
        slots = list(self._slots_of(start, end))
        for slot in slots:
            self._failing[slot] = self._failing.get(slot, 0) + 1
        return slots

    def end_failing(self, slots: Iterable[Slot]) -> None:
        """Note that the broker has answered a disposition of messages of these slots."""
        for slot in slots:
            left = self._failing.pop(slot, 0) - 1
            if left > 0:
                self._failing[slot] = left

    def _slots_of(self, start: int, end: int) -> set[Slot]:
        first = bisect_right(self._ends, start)
        return set(self._slots[first : bisect_left(self._starts, end, first)])

    def behind(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of messages without a disposition that follow one of [start, end) in the same slot of order
        keys: they come again after it.
        """
        if not self._ends or self.fenced is not None:
            return []
        self._end_streak()
        found, slots = list[tuple[int, int]](), self._slots_of(start, end)
        for at in range(bisect_right(self._ends, start), len(self._ends)):
            if self._slots[at] in slots:
                low, high = self._starts[at], self._ends[at]
                found += self._done.missing(max(low, end, self.floor), max(high, end, self.floor))
        return found

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, start: int, end: int, *, each: bool = True) -> None:
        """Ack [start, end). Messages that have a disposition keep it. Where the program has named *each*, acks of
        messages that were taken back count as refused; those of the client itself, for other tags, do not.
        """
        if start == self.floor and self.tail < 0 and self.fenced is None and not self._done.size:
            self._streak, self.tail = start, end  # the first ack after others were sent, in order
            self.owner.want_send()
            return
        self._end_streak()
        if self.fenced is not None:
            lost = sum(high - low for low, high in self._done.missing(max(start, self.floor), end))
            self.late("ack()", start, end, f"{lost} messages")
            self.owner.refused += lost
            self._done.add(start, end)
            self.lost.add(start, end)
            return
        if end - start == 1 and start >= self.floor and start not in self._done:
            self._streak, self.tail = start, end
        else:
            for gone in (self.taken_back, self._given_up) if each else ():
                if gone.overlaps(start, end):
                    self.owner.refused += end - start - sum(high - low for low, high in gone.missing(start, end))
            self._add(start, end)
        self.owner.want_send()

    def _end_streak(self) -> None:
        """Add the streak of consecutive acks that ends at ``tail`` to the intervals."""
        start, end = self._streak, self.tail
        self.tail = -1
        if start < end:
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        done = self._done
        if start == self.floor and not done.size:
            self.floor = end
            self._pending.add(start, end)
            return
        for low, high in done.missing(max(start, self.floor), end):
            done.add(low, high)
            self._pending.add(low, high)
        floor = done.end_from(self.floor)
        if floor > self.floor:
            self.floor = floor  # first, for other threads that read
            done.drop_below(floor)

    def is_open(self, sequence: int) -> bool:
        """[any thread] Whether the message has no disposition. It only reads: acks that follow go on with the
        streak.
        """
        try:
            in_streak = self._streak <= sequence < self.tail
            return self.fenced is None and sequence >= self.floor and not in_streak and sequence not in self._done
        except IndexError:  # it changes meanwhile
            return True

    def goes_back(self, sequence: int) -> bool:
        """[any thread] Return whether a message that the program has not reached is not in flight, or has a
        disposition. Reads only.
        """
        try:
            return self.fenced is not None or sequence < self.floor or sequence in self._done
        except IndexError:  # it changes meanwhile
            return False

    def open(self) -> list[tuple[int, int]]:
        """Return the ranges of messages that were received and have no disposition."""
        self._end_streak()
        return [] if self.fenced is not None else self._done.missing(self.floor, self.expected)

    def open_within(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of [start, end) that have no disposition. Raises Fenced if they are no longer in flight."""
        self._end_streak()
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        return self._done.missing(max(start, self.floor), end)

    def begin_disposition(self, start: int, end: int) -> None:
        """Mark [start, end) as disposed of. Raises Fenced if one has a disposition or is no longer in flight."""
        self._end_streak()
        if self.fenced is not None:
            raise Fenced(str(self.fenced))
        if start < self.floor or self._done.overlaps(start, end):
            raise Fenced("this message has a disposition already")
        self._done.add(start, end)

    def take_back(self, start: int, end: int) -> None:
        """Mark messages as on their way back, because an earlier one of their slot of order keys is."""
        self.begin_disposition(start, end)
        self.has_early_returns = True
        _add_newest(self.taken_back, start, end)

    def is_given_up(self, start: int, end: int) -> bool:
        """Return whether the broker has handed some of these messages to others, or has refused their acks, or may
        have.
        """
        return self.lost.overlaps(start, end) or self._given_up.overlaps(start, end)

    def late(self, call: str, start: int, end: int, shown: object) -> None:
        """[any thread] Log *call* if it came after the consumer's block and a message has no disposition."""
        if self.owner.has_left and self._done.missing(max(start, self.floor), end):
            self.owner.late(call, shown)

    def handed_over(self, start: int, end: int) -> None:
        """Ack messages that another broker has taken over."""
        if self.fenced is None:
            self._pending.add(start, end)
            self.owner.want_send()

    # --- to the broker -----------------------------------------------------------------------------------------------

    def take_acks(self) -> list[int]:
        """Return the acks to send now, as start, end, start, end, ..."""
        start, end = self._streak, self.tail
        if start < end and start == self.floor and not (self._done.size or self._pending.size):  # all in order
            self.tail = -1
            self.floor = end
            self._sent.add(start, end)
            return [start, end]
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
        """Record that the broker has confirmed *intervals*."""
        self.owner.refused += refused
        if refused:
            for start, end in zip(intervals[::2], intervals[1::2], strict=True):
                self.lost.add(start, end)
        if len(intervals) == 2 and self._sent.remove_only(*intervals):  # the common case
            return
        unconfirmed = Intervals()
        confirmed = Intervals()
        for start, end in zip(intervals[::2], intervals[1::2], strict=True):
            confirmed.add(start, end)
        for start, end in self._sent:
            for low, high in confirmed.missing(start, end):
                unconfirmed.add(low, high)
        self._sent = unconfirmed

    @property
    def unconfirmed(self) -> int:
        """How many acks the broker has not confirmed."""
        self._end_streak()
        return self._pending.size + self._sent.size

    def is_unconfirmed(self, start: int, end: int) -> bool:
        """Whether the broker has not confirmed an ack of [start, end)."""
        self._end_streak()
        return self._pending.overlaps(start, end) or self._sent.overlaps(start, end)

    @property
    def pending(self) -> int:
        """How many acks were not sent."""
        return self._pending.size + max(self.tail - self._streak, 0)

    def rejoined(self, consumer_state: ConsumerState) -> None:
        """Continue on a new connection: acks that were not confirmed are pending again."""
        self.consumer_state = consumer_state
        for start, end in self._sent:
            self._pending.add(start, end)
        self._sent = Intervals()
        self._drop_below(consumer_state.ack_floor)
        if self._pending.size:
            self.owner.want_send()

    def acknowledged(self, most: int) -> list[int]:
        """Return the acks that are not confirmed, up to *most* ranges, as start, end, start, end, ..."""
        self._end_streak()
        both = Intervals()
        for start, end in (*self._sent, *self._pending):
            both.add(start, end)
        return [number for pair in list(both)[:most] for number in pair]

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self, error: Fenced) -> Intervals:
        """Fence the window without stopping handlers. Returns the acks that were not confirmed."""
        self._end_streak()
        lost = Intervals()
        for start, end in (*self._sent, *self._pending):
            lost.add(start, end)
        self._pending, self._sent = Intervals(), Intervals()
        self.fenced = error
        for start, end in lost:
            self.lost.add(start, end)
        return lost

    def fence(self, error: Fenced) -> Intervals:
        """Fence the window and cancel the tasks that work on its messages. Returns the acks that were not confirmed."""
        lost = self.leave(error)
        handling, self._handling = self._handling, {}
        for task in handling:
            self._stopped.add(task)
            task.cancel()
        return lost

    def begin(self, task: Task) -> None:
        """Record that *task* works on a message of the window. It is cancelled at once if the window is fenced."""
        if self.fenced is None:
            self._handling[task] = self._handling.get(task, 0) + 1
        elif task not in self._stopped:
            self._stopped.add(task)
            task.cancel()

    def end(self, task: Task) -> bool:
        """Record that *task* has finished a message; return whether ``fence`` has cancelled it."""
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
        """[any thread] Tell the owner when the program has dropped all messages of an answer, some without a
        disposition.
        """
        if self.fenced is None and not self._has_dispositions(ranges):
            self.owner.dropped(
                self, [(first, first + count) for first, count in zip(ranges[::3], ranges[1::3], strict=True)]
            )

    def _has_dispositions(self, ranges: Sequence[int]) -> bool:
        """Return whether all messages certainly have a disposition. It only reads, so it may return False during a
        change.
        """
        floor, tail = self.floor, self.tail
        for first, count in zip(ranges[::3], ranges[1::3], strict=True):
            end = first + count
            in_streak = self._streak <= first and end <= tail
            if not in_streak and end > floor and not self._done.covers(max(first, floor), end):
                return False
        return True

    def count_open(self, sequence_ranges: Sequence[tuple[int, int]]) -> int:
        """Return how many of these messages are in flight without a disposition."""
        if self.fenced is not None:
            return 0
        self._end_streak()
        missing = [pair for low, high in sequence_ranges for pair in self._done.missing(max(low, self.floor), high)]
        return sum(high - low for low, high in missing)

    def _drop_below(self, ack_floor: int) -> None:
        """Leave messages below the broker's ack floor to others: it has given up those without a disposition here."""
        self._end_streak()
        if ack_floor > self.floor:
            for start, end in self._done.missing(self.floor, min(ack_floor, self.expected)):
                _add_newest(self._given_up, start, end)
            self.floor = ack_floor
            self._done.drop_below(ack_floor)


def _add_newest(ranges: Intervals, start: int, end: int) -> None:
    """Add a range, and forget the older half of MOST_REMEMBERED of them."""
    if len(ranges) >= MOST_REMEMBERED:
        ranges.drop_below(list(ranges)[MOST_REMEMBERED // 2][0])
    ranges.add(start, end)


def check_reason(reason: str) -> str:
    """Return *reason* as it can be sent: characters that UTF-8 cannot encode, as in some file names, are escaped.

    Raises InvalidOption.
    """
    if not isinstance(reason, str):
        raise InvalidOption(f"reason must be a str, not {reason!r:.100}")
    return reason if reason.isascii() else reason.encode("utf-8", "backslashreplace").decode()


def reason_of(error: BaseException) -> str:
    """Return the text of a handler's error as a reason: for a group of errors that of the first one, for a Retry the
    reason that it gives.
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    name = type(error).__name__
    try:
        text = str(error) or ("its handler was cancelled" if isinstance(error, CancelledError) else "")
        if isinstance(error, Retry):
            return check_reason(text or "its handler asked for another attempt")
        return check_reason(f"{name}: {text}" if text else name)
    except Exception as fault:
        return f"{name}: its text is not available: {type(fault).__name__}"


def check_delay(delay: Duration | None) -> int | None:
    """Return a delay in microseconds, None as None. Raises InvalidOption."""
    return None if delay is None else delay_us_of("delay", delay)

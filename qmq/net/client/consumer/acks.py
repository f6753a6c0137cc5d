"""The acks of a consumer of a group: sent to the broker in the background, and collected from the program's threads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from qmq.errors import Fenced, QmqError, UnknownSubscription
from qmq.format.run import Envelopes
from qmq.intervals import Intervals
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.ack_file import WRITE_COUNT, AckFile
from qmq.net.client.consumer.in_flight import (
    MAX_INTERVALS,
    FailedAttempt,
    InFlightWindow,
    PendingDisposition,
)
from qmq.net.client.consumer.nacks import (
    FailureLog,
    NackSender,
    ReleaseDelays,
    attempt_of,
    delay_of,
    left_block_error,
)
from qmq.net.client.in_thread import going_on
from qmq.net.client.tasks import begin_task
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import ConsumerState, Disposition, KnownConsumer

if TYPE_CHECKING:
    from qmq.net.client.consumer.in_flight import InFlightWindow

log = logging.getLogger("qmq.client")

#: Seconds that acks wait for more acks, or for a pull to go with.
ACK_DELAY: Final = 0.05
#: This many acks are sent at once.
ACK_COUNT: Final = 1_000

#: A plain integer: reading a member of an enum looks it up by name.
_ACK: Final = int(FrameKind.ACK)
#: More than there are delivery sequences.
_SEQUENCES: Final = 1 << 64

Subscribed = tuple[BrokerConnection, int]


class AckSender:
    """Sends the acks of one consumer at one broker, and has its nacks sent."""

    def __init__(self, consumer: str, subscribed: Callable[[], Awaitable[Subscribed]]) -> None:
        #: The messages in flight; None until the first subscription.
        self.in_flight: InFlightWindow | None = None
        #: The loop that sends acks, once it runs.
        self.loop: asyncio.AbstractEventLoop | None = None
        #: How many acks were refused because their messages are no longer in flight.
        self.refused = 0
        #: Logs the failures of messages.
        self.failures = FailureLog(consumer)
        #: Functions to call when the messages in flight were dropped.
        self.on_dropped: list[Callable[[], None]] = []
        #: The file that keeps acks until they are confirmed, if there is one.
        self.ack_file: AckFile | None = None
        #: A function to call on a new connection, or None.
        self.on_connected: Callable[[], None] | None = None
        #: Brings the dispositions of other threads here; the ack senders of a consumer at several brokers share it.
        self.thread_dispositions = ThreadDispositions()
        self._consumer = consumer
        self._subscribed = subscribed
        # Acks of messages that were dropped while out of touch: the next subscription tells whether the broker takes
        # them.
        self._undecided = Intervals()
        self._timer: asyncio.Handle | None = None
        self._hurries = False
        self._sending: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._confirming: list[asyncio.Future[None]] = []  # woken by each answer to acks
        #: Sends the other dispositions.
        self.nack_sender = NackSender(consumer, subscribed, self.send)
        self._release_delays = ReleaseDelays()
        self._warned_of_dropped = False
        #: Warnings that were given once; the ack senders of a consumer at several brokers share it.
        self.warned_of: set[str] = set()
        self._closed = False
        self._stopped = False

    # --- consumer state -----------------------------------------------------------------------------------------------

    def known(self) -> KnownConsumer | None:
        """Return the state to announce when subscribing; None before the first subscription."""
        in_flight = self.in_flight
        if in_flight is None:
            return None
        consumer_state, handled = (
            in_flight.consumer_state,
            [number for pair in self._undecided for number in pair][: 2 * MAX_INTERVALS],
        )
        return KnownConsumer(
            consumer_state.since_us, consumer_state.generation, consumer_state.epoch, in_flight.expected, tuple(handled)
        )

    def snapshot(self) -> tuple[KnownConsumer | None, int]:
        """Return the state that the next process under this id needs, and how many acks are not confirmed."""
        in_flight, unconfirmed = self.in_flight, self.unconfirmed
        if in_flight is None:
            return None, 0
        handled = Intervals()
        flat = in_flight.acknowledged(MAX_INTERVALS)
        for start, end in (*self._undecided, *zip(flat[::2], flat[1::2], strict=True)):
            handled.add(start, end)
        numbers = [number for pair in handled for number in pair][: 2 * MAX_INTERVALS]
        consumer_state = in_flight.consumer_state
        return KnownConsumer(
            consumer_state.since_us, consumer_state.generation, 0, in_flight.expected, tuple(numbers)
        ), unconfirmed

    def joined(self, consumer_state: ConsumerState) -> None:
        """Take the consumer state of a new subscription: messages in flight still are, or are dropped."""
        self.loop = asyncio.get_running_loop()
        before = self.in_flight
        same = before is not None and before.consumer_state.is_that_of(consumer_state)
        if before is not None and same and before.fenced is None:
            before.rejoined(consumer_state)
            return
        if before is not None and before.fenced is None:
            forgot = before.consumer_state.generation != consumer_state.generation
            why = (
                "the broker has lost power, and may not know of them"
                if forgot
                else "the broker had not heard from this consumer"
            )
            self.fence(Fenced(f"the messages that this consumer had in flight are delivered again: {why}"))
        if not same:
            self.refused += self._undecided.size
        self._undecided = Intervals()
        self.in_flight = InFlightWindow(self, consumer_state)
        self.thread_dispositions.add(self.in_flight)
        if not self.unconfirmed:
            self._wake_waiters()

    @property
    def fenced(self) -> Fenced | None:
        """The reason why no message is in flight any more, or None."""
        return self.in_flight.fenced if self.in_flight is not None else None

    def resume(self) -> None:
        """Subscribe again, as there is a new connection."""
        if self.on_connected is not None:
            self.on_connected()

    def fence(self, error: Fenced, *, for_good: bool = True) -> None:
        """Drop the messages in flight. *for_good*: the broker has refused their acks; else it may still accept them."""
        if self.in_flight is None or self.in_flight.fenced is not None:
            return
        log.warning("consumer %s: %s", self._consumer, error)
        for start, end in self.in_flight.fence(error):
            if for_good:
                self.refused += end - start
            else:
                self._undecided.add(start, end)
        for call in self.on_dropped:
            call()
        self.nack_sender.fenced(self.in_flight)
        self._wake_confirming()
        if not self.unconfirmed:
            self._wake_waiters()
        elif self._waiters:
            self._due()  # only a subscription tells their outcome, and a program that waits for it does not pull

    # --- acknowledgements --------------------------------------------------------------------------------------------

    @property
    def unconfirmed(self) -> int:
        """How many acks the broker has neither confirmed nor refused."""
        return self._undecided.size + (self.in_flight.unconfirmed if self.in_flight is not None else 0)

    def want_send(self) -> None:
        """Send the acks soon; at once when there are many."""
        assert self.loop is not None
        if self.ack_file is not None:
            self.ack_file.want_write()
            if self.in_flight is not None and self.in_flight.pending >= WRITE_COUNT:
                self.ack_file.hurry()
        if self._timer is None:
            self._timer = self.loop.call_later(ACK_DELAY, self._due)
        elif not self._hurries and self.in_flight is not None and self.in_flight.pending >= ACK_COUNT:
            timer, self._timer = self._timer, self.loop.call_soon(self._due)
            self._hurries = True
            timer.cancel()

    def _due(self) -> None:
        self._hurries = False
        if self._timer is not None:
            self._timer.cancel()  # another event than the timer may call
            self._timer = None
        if self._sending is None or self._sending.done():
            self._sending = begin_task(
                going_on(self._send_soon, f"sending the acks of consumer {self._consumer}"),
                asyncio.get_running_loop(),
                "qmq-acks",
            )

    async def _send_soon(self) -> None:
        try:
            self.send(await self._subscribed())
        except QmqError as error:  # there will be no other subscription
            self.fence(error if isinstance(error, Fenced) else Fenced(f"acks cannot be sent: {error}"))
            self._wake_waiters()

    def send(self, subscribed: Subscribed, *, with_pull: bool = False) -> None:
        """Send the acks that were not sent. *with_pull*: a pull follows in the same write, and its answer may confirm
        them.
        """
        connection, subscription = subscribed
        in_flight, more = self.in_flight, True
        while more and in_flight is not None and in_flight.fenced is None and (intervals := in_flight.take_acks()):
            more = len(intervals) == 2 * MAX_INTERVALS
            packed, crc = frames.pack_numbers(intervals)
            payload = frames.ACK.pack(subscription, crc) + packed
            flags = frames.MAY_WAIT if with_pull else 0
            answered = partial(self._answered, in_flight, intervals)
            connection.ask(_ACK, answered, b"", payload, None, flags, with_pull)

    def _answered(self, in_flight: InFlightWindow, intervals: list[int], answer: Answer | QmqError) -> None:
        """Take the answer to acks."""
        if in_flight.fenced is not None:
            return  # ``fence`` has counted them already
        if isinstance(answer, Answer):
            (refused,) = frames.ACKED.unpack(answer.payload)
            in_flight.confirm(intervals, refused)
        elif isinstance(answer, Fenced):
            self.fence(answer)
        elif type(answer) is UnknownSubscription or answer.retryable:
            self._send_again()  # on the next connection, or when the disk has room
        else:
            in_flight.confirm(intervals, sum(intervals[1::2]) - sum(intervals[::2]))
            log.warning("consumer %s: acks were refused: %s", self._consumer, answer)
        if self._confirming:
            self._wake_confirming()
        if self._waiters and not self.unconfirmed:
            self._wake_waiters()

    def _send_again(self) -> None:
        assert self.in_flight is not None
        self.in_flight.rejoined(self.in_flight.consumer_state)

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int, *, acked: bool = True) -> None:
        """Wait until the broker has the acks and releases of [start, end). Raises Fenced if it may refuse one, or if a
        message was *acked* that was taken back before.
        """
        while in_flight.is_unconfirmed(start, end):
            waiter = asyncio.get_running_loop().create_future()
            self._confirming.append(waiter)
            self._due()
            await waiter
        if in_flight.is_given_up(start, end):
            raise Fenced(
                f"the ack was refused: {in_flight.fenced or 'the message was no longer in flight'}; "
                "the message is delivered again"
            )
        if acked and in_flight.taken_back.overlaps(start, end):
            raise Fenced(
                "the ack counts for nothing: the message was taken back when an earlier one of its order key failed, "
                "and is delivered again after that; handle it only while `message.in_flight`"
            )
        await self.nack_sender.confirm(in_flight, start, end)

    def _wake_confirming(self) -> None:
        waiters, self._confirming = self._confirming, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _wake_waiters(self) -> None:
        self._wake_confirming()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def flush(self) -> None:
        """Wait until every ack so far is confirmed or refused; ``refused`` says how many were."""
        while self.unconfirmed:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._due()
            await waiter
            if self.unconfirmed:
                await asyncio.sleep(ACK_DELAY)

    # --- other dispositions -------------------------------------------------------------------------------------------

    def hand_back(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> Awaitable[object]:
        """Send nacks or rejects; the result is done once the broker has them on disk or another broker has the whole
        messages. Raises Fenced, now or when it is awaited.
        """
        return self.nack_sender.hand_back(in_flight, backs)

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Send a disposition in the background for those messages of its range that have none."""
        self.nack_sender.hand_back_soon(in_flight, back)

    def release(self, run: Envelopes, start: int, end: int, delay_us: int | None) -> None:
        """Release, in the background, messages of *run* that the program does not want now. *delay_us* None: a delay
        that grows with each release of the same messages.
        """
        in_flight, first = run.in_flight, run.position + run.ordinal - run.delivery_sequence
        for low, high in in_flight.open_within(start, end) if in_flight.fenced is None else ():
            delay = self._release_delays.next_us(run.partition, first + low) if delay_us is None else delay_us
            self.hand_back_soon(in_flight, PendingDisposition(low, high, Disposition.RELEASE, delay))

    def cancelled(
        self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition], fail: Callable[[], FailedAttempt]
    ) -> None:
        """Nack messages whose handler was cancelled, or release them because the consumer stops."""
        self.nack_sender.hold(in_flight, backs, fail)
        if self._stopped or self._closed:
            self.nack_sender.stop()

    def call_from_thread(self, dispose: Callable[[], object]) -> bool:
        """[any thread] Have the loop give a disposition, after those before it; return False if it is closed."""
        assert self.loop is not None
        try:
            self.thread_dispositions.call(dispose, self.loop.call_soon_threadsafe)
        except RuntimeError:
            return False
        return True

    def stop(self) -> None:
        """Note that the consumer stops: handlers that are cancelled now have not failed."""
        self._stopped = True
        self.nack_sender.stop()

    def return_early(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Release messages of a slot of order keys that came while an earlier one was on its way back."""
        self.nack_sender.return_early(in_flight, start, end)

    def fail_open(self, error: Exception) -> None:
        """Nack all messages that the program got and gave no disposition, since its block ended with *error*."""
        in_flight = self.in_flight
        ranges = [] if in_flight is None else in_flight.open()
        if in_flight is None or not ranges:
            return
        delay_us, cause = delay_of(error)
        log.warning(
            "consumer %s: its block ended by %s: %d messages without a disposition have failed", self._consumer,
            type(error).__name__, sum(end - start for start, end in ranges),
        )  # fmt: skip
        attempt = attempt_of(self.failures, cause, delay_us, 1)
        for start, end in ranges:
            self.hand_back_soon(in_flight, PendingDisposition(start, end, *attempt))

    @property
    def hands_over(self) -> bool:
        """Whether another broker takes whole messages that are nacked while this one is gone."""
        return self.nack_sender.handover is not None

    @property
    def has_left(self) -> bool:
        """Whether the program has left the consumer's block, or the client is closed."""
        return self._closed or (self.loop is not None and self.loop.is_closed())

    def late(self, call: str, shown: object) -> None:
        """[any thread] Log the first disposition that came after the consumer's block."""
        if "late" not in self.warned_of:
            self.warned_of.add("late")
            log.warning(
                "consumer %s: %s of %s came after its block ended, and changes nothing: messages without a "
                "disposition were released then, and come again; call it inside the block of `client.subscribe(...)`",
                self._consumer, call, shown,
            )  # fmt: skip

    def dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        """[any thread] Log that the program dropped these messages, if any has no disposition."""
        if not self._warned_of_dropped and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._warn_of_dropped, in_flight, sequence_ranges)

    def _warn_of_dropped(self, in_flight: InFlightWindow, sequence_ranges: list[tuple[int, int]]) -> None:
        count = in_flight.count_open(sequence_ranges)
        if count and not self._warned_of_dropped and not self._closed:
            self._warned_of_dropped = True
            log.warning(
                "consumer %s: the program dropped %d messages without a disposition: they stay in flight until it "
                "leaves; ack(), nack() or release() each message, or use `async with message`", self._consumer, count,
            )  # fmt: skip

    # --- the end -----------------------------------------------------------------------------------------------------

    async def settle(self, timeout: float) -> None:
        """Wait until acks and nacks have arrived, for *timeout* seconds at most; ``close`` must follow."""
        self._closed = True
        try:
            async with asyncio.timeout(timeout):
                await self.nack_sender.wait()
                await self.flush()
        except (QmqError, TimeoutError) as error:
            log.debug("consumer %s: %s", self._consumer, error)
            await self._spool_acks()
        if self.ack_file is not None:
            await self.ack_file.save()

    def close(self) -> None:
        """End without waiting: later dispositions are refused, since no subscription would take them."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.ack_file is not None:
            self.ack_file.close()
        self.nack_sender.cancel()
        if self._sending is not None:
            self._sending.cancel()
        self.refused += self._undecided.size
        self._undecided = Intervals()
        if self.in_flight is not None and self.in_flight.fenced is None:
            self.refused += self.in_flight.leave(left_block_error(self._consumer)).size
        self._wake_waiters()

    async def _spool_acks(self) -> None:
        """Keep acks that did not reach the broker in the spool, until this machine reaches the broker again. Where
        there is a state file, that has them already.
        """
        known, unconfirmed = self.snapshot()
        may_not = self.ack_file is not None and self.ack_file.has_file
        if known is None or not unconfirmed or may_not or self.in_flight is None:
            return
        if await self.nack_sender.spool_acks(self.in_flight, list(known.handled)):
            log.warning(
                "consumer %s: %d acks did not reach its broker: this machine keeps them until a client on it "
                "reaches the broker again", self._consumer, unconfirmed,
            )  # fmt: skip


class ThreadDispositions:
    """Brings the dispositions of other threads to the loop in their order, many in one call: a call into a loop is
    expensive.
    """

    def __init__(self) -> None:
        #: Acks, and functions that give other dispositions. An ack is ``thread_base`` of its window plus the delivery
        #: sequence: one number, since a tuple for each has the garbage collector run all the time.
        self.waiting: deque[int | Callable[[], object]] = deque()
        #: The loop will take them. Whoever adds one while it is False calls ``want_take``.
        self.is_due = False
        self._windows = WeakValueDictionary[int, InFlightWindow]()
        self._next_base = 0

    def add(self, in_flight: InFlightWindow) -> None:
        """Give a window its ``thread_base``."""
        in_flight.thread_base = self._next_base
        self._windows[self._next_base] = in_flight
        self._next_base += _SEQUENCES

    def call(self, dispose: Callable[[], object], call_soon_threadsafe: Callable[[Callable[[], None]], object]) -> None:
        """[any thread] Call a function that gives any disposition. Raises RuntimeError if the loop is closed."""
        self.waiting.append(dispose)
        if not self.is_due:
            self.want_take(call_soon_threadsafe)

    def want_take(self, call_soon_threadsafe: Callable[[Callable[[], None]], object]) -> None:
        """[any thread] Have the loop take what waits. Raises RuntimeError if it is closed."""
        self.is_due = True
        try:
            call_soon_threadsafe(self._take)
        except RuntimeError:
            self.is_due = False
            raise

    def _take(self) -> None:
        """Give the waiting dispositions, consecutive acks as one range."""
        self.is_due = False  # cleared first: one that comes during the loop may be too late for it, and calls again
        take = self.waiting.popleft
        start = end = 0
        for _ in range(len(self.waiting)):
            disposition = take()
            if type(disposition) is int:
                if disposition != end:
                    self._ack(start, end)
                    start = disposition
                end = disposition + 1
                continue
            self._ack(start, end)
            start = end = 0
            try:
                disposition()  # type: ignore[operator]  # a function is all that is left
            except Exception:  # a bug of the client: those after it must not be left behind
                log.exception("a disposition of another thread failed")
        self._ack(start, end)

    def _ack(self, start: int, end: int) -> None:
        base = start - start % _SEQUENCES
        in_flight = self._windows.get(base) if start < end else None
        if in_flight is not None:  # else nobody has a message of it
            in_flight.ack(start - base, end - base)

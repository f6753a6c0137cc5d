"""Nacks, releases and rejects of a consumer, and the log of the failures behind them. Those of one turn of the loop go
to the broker together.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from crc32c import crc32c

from qmq.durations import duration_text
from qmq.errors import Fenced, InvalidOption, QmqError, Retry, UnknownSubscription
from qmq.format.layout import REASON_BYTES
from qmq.net.client.connection import BrokerConnection
from qmq.net.client.consumer.in_flight import (
    RELEASED,
    FailedAttempt,
    InFlightWindow,
    PendingDisposition,
    Slot,
    check_delay,
    reason_of,
)
from qmq.net.client.failover.handover import HandoverClient
from qmq.net.client.failover.spool import SpooledDispositions
from qmq.net.client.tasks import begin_task
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition, cut_reason

log = logging.getLogger("qmq.client")

#: Limits of one frame: how many dispositions, and bytes of all their reasons.
MAX_PER_FRAME: Final = 1_000
_REASONS_BYTES: Final = 60_000
#: Messages that a record about several names in its text; its fields name all.
_NAMED: Final = 3
#: Seconds after which messages have failed whose handler was cancelled: a consumer that stops has done so by then.
HELD_FOR: Final = 0.25
#: Microseconds after which a message comes again that does not count an attempt, where the group's delay is not known.
UNKNOWN_DELAY_US: Final = 1_000_000
#: Microseconds after which a message comes again that a consumer releases for the second time, and at most. It
#: remembers so many messages that it has released.
FIRST_RELEASE_US: Final = 100_000
LAST_RELEASE_US: Final = 5_000_000
MAX_RELEASED: Final = 10_000
#: Seconds after which a refusal that can pass is followed by another attempt.
AGAIN_AFTER: Final = 0.05

Subscribed = tuple[BrokerConnection, int]


class _Outcome:
    """The outcome of one disposition, which may be sent in pieces."""

    __slots__ = ("error", "left", "slots", "waiters")

    def __init__(self, slots: Sequence[Slot], waiter: asyncio.Future[None] | None) -> None:
        #: How many pieces the broker has not answered.
        self.left = 1
        #: Why a piece was refused.
        self.error: Exception | None = None
        #: Slots of order keys whose messages come again.
        self.slots = slots
        #: The futures to resolve when it is done.
        self.waiters = [] if waiter is None else [waiter]


def _failing(in_flight: InFlightWindow, back: PendingDisposition) -> Sequence[Slot]:
    """Return the slots whose messages come again by a disposition."""
    return () if back.disposition == Disposition.REJECT else in_flight.begin_failing(back.start, back.end)


def _is_taken_back(in_flight: InFlightWindow, back: PendingDisposition, consumer: str) -> bool:
    """Return whether a message went back before the program gave it this disposition, and log that."""
    if not in_flight.taken_back.size or not in_flight.taken_back.overlaps(back.start, back.end):
        return False
    is_reject = back.disposition == Disposition.REJECT
    log.log(
        logging.WARNING if is_reject else logging.INFO,
        "consumer %s: a %s changes nothing: its message was taken back when an earlier one of its order key failed, "
        "and comes again after that; ask `message.in_flight` before you begin a message",
        consumer,
        back.disposition.name.lower(),
    )
    return True


class _QueuedDisposition(NamedTuple):
    """A disposition to send, or a piece of one."""

    in_flight: InFlightWindow
    back: PendingDisposition
    outcome: _Outcome


class _Held(NamedTuple):
    """Messages whose handler was cancelled: they have failed, unless the consumer stops because of it."""

    in_flight: InFlightWindow
    #: Their nacks, without delay and reason.
    backs: Sequence[PendingDisposition]
    #: Logs the failure; returns disposition, delay and reason.
    fail: Callable[[], FailedAttempt]
    slots: Sequence[Slot]
    timer: asyncio.TimerHandle


class NackSender:
    """Sends the nacks, releases and rejects of one consumer at one broker."""

    def __init__(
        self, consumer: str, subscribed: Callable[[], Awaitable[Subscribed]], send_acks: Callable[[Subscribed], None]
    ) -> None:  # fmt: skip
        """*send_acks* sends the acks that wait."""
        #: The store of the last subscription.
        self.store_id = b""
        #: The other brokers, which take whole messages when this broker is gone, and the group's name there.
        self.handover: tuple[HandoverClient, str] | None = None
        self._consumer = consumer
        self._subscribed = subscribed
        self._send_acks = send_acks
        self._queued: list[_QueuedDisposition] = []
        self._unanswered: dict[_Outcome, _QueuedDisposition] = {}
        self._held: dict[int, _Held] = {}
        self._next_held = 0
        self._sender: asyncio.Task[None] | None = None  # the task that sends the queue, in the next turn
        self._tasks: set[asyncio.Task[None]] = set()
        #: What no pull may overtake: the tasks that send dispositions once more, since their connection was lost, and
        #: releases of messages that came too early for their slots of order keys. Messages of these slots that the
        #: broker sends meanwhile may come after what it has taken back, or be part of that.
        self.unsure: set[asyncio.Future[None]] = set()
        #: The waits for a subscription, each for dispositions of one window.
        self._waits: dict[asyncio.Timeout, InFlightWindow] = {}

    def hand_back(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> Awaitable[object]:
        """Send nacks, releases or rejects; the result is done once the broker has them on disk or another broker has
        the whole messages. Of messages that were taken back it changes nothing, and logs that. Raises Fenced, now or
        when it is awaited.

        Cancelling the wait does not stop the sending: no consumer would get the messages otherwise.
        """
        loop, waiters = asyncio.get_running_loop(), list[asyncio.Future[None]]()
        backs = [back for back in backs if not _is_taken_back(in_flight, back, self._consumer)]
        for back in backs:
            in_flight.begin_disposition(back.start, back.end)
            waiters.append(loop.create_future())
            self._queue(in_flight, back, _failing(in_flight, back), waiters[-1])
        for back in backs:
            self._release_behind(in_flight, back)
        return waiters[0] if len(waiters) == 1 else asyncio.gather(*waiters)

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Send a disposition in the background for those messages of its range that have none and are in flight."""
        parts = self._begin(in_flight, [back])
        for part in parts:
            self._queue(in_flight, part, _failing(in_flight, part))
        for part in parts:
            self._release_behind(in_flight, part)

    def _begin(self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition]) -> list[PendingDisposition]:
        """Mark those messages as disposed of that have no disposition; return their parts of *backs*."""
        parts = list[PendingDisposition]()
        for back in backs if in_flight.fenced is None else ():
            for start, end in in_flight.open_within(back.start, back.end):
                in_flight.begin_disposition(start, end)
                parts.append(back._replace(start=start, end=end))
        return parts

    def hold(
        self, in_flight: InFlightWindow, backs: Sequence[PendingDisposition], fail: Callable[[], FailedAttempt]
    ) -> None:
        """Nack messages whose handler was cancelled, unless the consumer stops within HELD_FOR: then release them.

        A timeout of the program and the end of the program both cancel a task, and only what follows tells which it
        was. *fail* logs the failure and returns disposition, delay and reason.
        """
        parts = self._begin(in_flight, backs)
        if not parts:
            return
        slots = [slot for part in parts for slot in in_flight.begin_failing(part.start, part.end)]
        number = self._next_held = self._next_held + 1
        timer = asyncio.get_running_loop().call_later(HELD_FOR, self._decide, number)
        self._held[number] = _Held(in_flight, parts, fail, slots, timer)
        for part in parts:
            self._release_behind(in_flight, part, int(HELD_FOR * 1e6))

    def _decide(self, number: int, *, has_stopped: bool = False) -> None:
        """Queue the dispositions of messages that were held."""
        held = self._held.pop(number)
        held.timer.cancel()
        if held.in_flight.fenced is not None:
            held.in_flight.end_failing(held.slots)
            return
        attempt = RELEASED if has_stopped else held.fail()
        slots = held.slots
        for back in held.backs:
            self._queue(held.in_flight, back.of(attempt), slots)
            slots = ()

    def stop(self) -> None:
        """Release the messages that are held: the consumer stops."""
        for number in tuple(self._held):
            self._decide(number, has_stopped=True)

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Wait until the broker has the releases of [start, end). Raises Fenced."""
        waiters = list[asyncio.Future[None]]()
        for outcome, (window, back, _) in self._unanswered.items():
            is_release = back.disposition == Disposition.RELEASE
            if is_release and window is in_flight and start <= back.start and back.end <= end:
                waiters.append(asyncio.get_running_loop().create_future())
                outcome.waiters.append(waiters[-1])
        if waiters:
            await asyncio.gather(*waiters)

    def _release_behind(
        self, in_flight: InFlightWindow, back: PendingDisposition, delay_us: int | None = None
    ) -> None:  # fmt: skip
        """Release the messages behind a message in its slot of order keys: they must come after it again. The broker
        knows whether it is dead, and gives them its delay if it is not.
        """
        if back.disposition == Disposition.REJECT:
            return
        for start, end in in_flight.behind(back.start, back.end):
            in_flight.take_back(start, end)
            self._queue(in_flight, PendingDisposition(start, end, Disposition.RELEASE, delay_us))

    def return_early(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Release, in the background, messages that came while an earlier one of their slot of order keys was on its
        way back; no pull asks for more before the broker has them.
        """
        in_flight.take_back(start, end)
        waiter = in_flight.owner.loop.create_future()
        self.unsure.add(waiter)
        waiter.add_done_callback(self._returned_early)
        self._queue(in_flight, PendingDisposition(start, end, Disposition.RELEASE), waiter=waiter)

    def _returned_early(self, waiter: asyncio.Future[None]) -> None:
        self.unsure.discard(waiter)
        if (error := waiter.exception()) is not None:
            log.debug("a release in the background was refused: %s", error)

    def _queue(
        self, in_flight: InFlightWindow, back: PendingDisposition, slots: Sequence[Slot] = (),
        waiter: asyncio.Future[None] | None = None,
    ) -> None:  # fmt: skip
        queued = _QueuedDisposition(in_flight, back, _Outcome(slots, waiter))
        self._unanswered[queued.outcome] = queued
        self._queue_piece(queued)

    def _queue_piece(self, queued: _QueuedDisposition) -> None:
        self._queued.append(queued)
        if self._sender is None:
            self._sender = self._spawn(self._send(), queued.in_flight.owner.loop)

    def _resolve(self, queued: _QueuedDisposition, error: Exception | None = None) -> None:
        """Note that a disposition, or a piece of it, is done, or has failed with *error*."""
        outcome = queued.outcome
        outcome.error = outcome.error or error
        outcome.left -= 1
        if outcome.left > 0 or self._unanswered.pop(outcome, None) is None:
            return
        queued.in_flight.end_failing(outcome.slots)
        if outcome.error is not None and not outcome.waiters:
            log.debug("a nack or release in the background was refused: %s", outcome.error)
        for waiter in outcome.waiters:
            if not waiter.done():
                if outcome.error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(outcome.error)

    async def _send(self) -> None:
        """Send the dispositions that were queued in the last turn."""
        self._sender = None
        queued, self._queued = self._queued, []
        parts = dict[tuple[int, bool], list[_QueuedDisposition]]()
        for one in queued:
            parts.setdefault((id(one.in_flight), one.back.whole is None), []).append(one)
        for part in parts.values():
            for at in range(0, len(part), MAX_PER_FRAME):
                some = part[at : at + MAX_PER_FRAME]
                task = self._spawn(self._deliver(some), asyncio.get_running_loop())
                task.add_done_callback(partial(self._delivered, some))

    async def _deliver(self, several: list[_QueuedDisposition]) -> None:
        """Send dispositions of one window, all of which have their whole messages or none."""
        for some in _by_reasons(several):
            try:
                refused = await self._deliver_some(some[0].in_flight, some)
            except QmqError as error:
                for one in some:
                    self._resolve(one, error)
                continue
            except Exception as error:  # a bug of the client: resolved as failed, or the callers would wait for ever
                log.exception("consumer %s: sending nacks failed", self._consumer)
                for one in several:
                    self._resolve(one, error)
                return
            for number, one in enumerate(some):
                refusal, start, end = refused.get(number), one.back.start, one.back.end
                if refusal is not None and end - start > 1:  # one of its messages may be the cause: try both halves
                    middle = (start + end) // 2
                    one.outcome.left += 1
                    self._queue_piece(one._replace(back=one.back._replace(end=middle)))
                    self._queue_piece(one._replace(back=one.back._replace(start=middle)))
                else:
                    self._resolve(one, refusal)

    def _delivered(self, several: list[_QueuedDisposition], task: asyncio.Task[None]) -> None:
        self.unsure.discard(task)
        if task.cancelled():  # maybe before it had begun
            self._refuse_left(several)

    def _refuse_left(self, several: list[_QueuedDisposition]) -> None:
        for one in several:
            self._resolve(one, left_block_error(self._consumer))

    async def _deliver_some(
        self, in_flight: InFlightWindow, several: Sequence[_QueuedDisposition]
    ) -> dict[int, Exception]:
        """Send dispositions; return the errors of the refused ones by index. Raises QmqError if all are refused."""
        tried = False
        while True:
            subscribed = await self._subscribed_unless_gone(in_flight, several)
            if in_flight.fenced is not None:
                raise Fenced(str(in_flight.fenced))
            if subscribed is None:
                return await self._hand_over(in_flight, several)
            connection, subscription = subscribed
            if in_flight.has_ordered and any(one.back.disposition != Disposition.REJECT for one in several):
                self._send_acks(subscribed)  # else the broker takes back what was acked behind these in their slots
            meta, payload = packed([one.back for one in several], subscription)
            try:
                answer = await connection.request(FrameKind.HAND_BACK, meta, payload)
            except Fenced:
                if tried:  # the first attempt had succeeded, and only its answer was lost
                    return {}
                raise
            except QmqError as error:
                if not error.retryable and type(error) is not UnknownSubscription:
                    raise
            else:
                refused = () if tried else struct.unpack(f"<{len(answer.payload) // 4}I", answer.payload)
                return {number: Fenced("this message has a disposition already") for number in refused}
            tried = True
            if any(one.outcome.slots for one in several) and (task := asyncio.current_task()) is not None:
                self.unsure.add(task)
            await asyncio.sleep(AGAIN_AFTER)

    async def _subscribed_unless_gone(
        self, in_flight: InFlightWindow, several: Sequence[_QueuedDisposition]
    ) -> Subscribed | None:
        """Return connection and subscription; None once the messages are no longer in flight, or if the broker stays
        away and other brokers can take the messages.
        """
        if in_flight.fenced is not None:
            return None
        after = None if self.handover is None or several[0].back.whole is None else self.handover[0].after
        wait = asyncio.timeout(after)
        try:
            async with wait:
                self._waits[wait] = in_flight
                return await self._subscribed()
        except TimeoutError:
            return None
        finally:
            self._waits.pop(wait, None)

    def fenced(self, in_flight: InFlightWindow) -> None:
        """End the waits of dispositions for their broker, as their messages are no longer in flight."""
        for wait, of in self._waits.items():
            if of is in_flight and not wait.expired():
                wait.reschedule(0.0)

    async def _hand_over(
        self, in_flight: InFlightWindow, several: Sequence[_QueuedDisposition]
    ) -> dict[int, Exception]:
        """Have other brokers or the spool take the messages; return the errors of those that none took, by index."""
        errors = await asyncio.gather(*(self._hand_one_over(in_flight, one.back) for one in several))
        return {number: error for number, error in enumerate(errors) if error is not None}

    async def _hand_one_over(self, in_flight: InFlightWindow, back: PendingDisposition) -> QmqError | None:
        assert self.handover is not None
        assert back.whole is not None
        handover, group = self.handover
        late = self._late(in_flight, group, [back.start, back.end])
        try:
            await handover.take(*back.whole, group, back.disposition, back.delay_us, back.reason, late)
        except QmqError as error:
            return error
        in_flight.handed_over(back.start, back.end)
        return None

    async def spool_acks(self, in_flight: InFlightWindow, handled: list[int]) -> bool:
        """Keep the acks *handled* in the spool until their broker is reached again; return whether it has them."""
        if self.handover is None:
            return False
        handover, group = self.handover
        return await handover.keep(self._late(in_flight, group, handled))

    def _late(self, in_flight: InFlightWindow, group: str, handled: list[int]) -> SpooledDispositions:
        consumer_state = in_flight.consumer_state
        return SpooledDispositions(
            self.store_id, group, self._consumer, consumer_state.since_us, consumer_state.generation, handled
        )

    def _spawn(self, work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        try:
            task = begin_task(work, loop, "qmq-hand-back")
        except RuntimeError:  # called in a wrong thread, in asyncio's debug mode
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait until the broker has, or has refused, every disposition so far. The consumer stops."""
        self.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Stop sending, and refuse the dispositions that were not sent."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()
        for task in tuple(self._tasks):
            task.cancel()
        self._sender = None
        queued, self._queued = self._queued, []
        self._refuse_left(queued)


def left_block_error(consumer: str) -> Fenced:
    """Return the error for dispositions after the consumer's block."""
    return Fenced(
        f"consumer {consumer} has left the block of its subscription: messages without a disposition were released; "
        "call nack and reject inside the block of `client.subscribe(...)`"
    )


def packed(backs: Sequence[PendingDisposition], subscription: int) -> tuple[dict[str, Any], bytes]:
    """Return meta and payload of HAND_BACK."""
    reasons: dict[str, int] = {}
    rows = b"".join(
        frames.BACK.pack(
            start, end, frames.OWN_DELAY if delay_us is None else delay_us, disposition,
            reasons.setdefault(cut_reason(reason), len(reasons)),
        )
        for start, end, disposition, delay_us, reason, _ in backs
    )  # fmt: skip
    return {"reasons": list(reasons)}, frames.HAND_BACK.pack(subscription, crc32c(rows)) + rows


def _by_reasons(several: list[_QueuedDisposition]) -> Iterator[list[_QueuedDisposition]]:
    """Yield the dispositions in groups whose reasons fit in one frame."""
    if REASON_BYTES * len(several) <= _REASONS_BYTES:
        yield several
        return
    some, known, size = list[_QueuedDisposition](), set[str](), 0
    for one in several:
        reason = cut_reason(one.back.reason)
        if reason not in known:
            size += len(reason.encode()) + 5
            if size > _REASONS_BYTES:
                yield some
                some, known, size = [], set(), len(reason.encode()) + 5
            known.add(reason)
        some.append(one)
    yield some


class FailedMessage(Protocol):
    """The fields of a message that the record of its failure has."""

    @property
    def id(self) -> str: ...
    @property
    def subject(self) -> str: ...
    @property
    def key(self) -> str | None: ...
    @property
    def attempt(self) -> int: ...


class FailureLog:
    """Logs the failures of one consumer at one broker."""

    def __init__(self, consumer: str, *, comes_again: bool = True) -> None:
        """*comes_again*: there are dispositions, so a message that failed is delivered again."""
        #: The consumer's group, None for a solo consumer, and the name of the program.
        self.group: str | None = None
        self.program = ""
        #: The program's function for failures, or None.
        self.on_failed: Callable[[Any, BaseException], object] | None = None
        #: How often the group tries a message, as the broker said at the subscription; 0 if it is not known.
        self.max_attempts = 0
        #: The delays after each attempt in microseconds; the last one holds for all later attempts.
        self.retry_delays_us: Sequence[int] = ()
        self._consumer = consumer
        self._comes_again = comes_again

    def add(self, message: FailedMessage, error: BaseException, delay_us: int | None) -> None:
        """[any thread] Log that *message* failed, and call the program's function. *delay_us* None: the group's."""
        self.add_batch([message], error, delay_us)

    def add_batch(self, messages: Sequence[FailedMessage], error: BaseException, delay_us: int | None) -> None:
        """[any thread] As ``add``, for messages that failed together: they share a record. A Retry that does not count
        is no failure, so the program's function is not called.
        """
        counts = not isinstance(error, Retry) or error.counts
        dead = sum(self.is_last(message.attempt) for message in messages) if counts else 0
        retries_us = [self._retry_us(message.attempt, delay_us, counts=counts) for message in messages]
        asked = isinstance(error, Retry) and not dead
        log.log(
            logging.INFO if asked else logging.ERROR if dead else logging.WARNING,
            "%s, %s: %s", self._failed(messages) if counts else f"{_named(messages)} had to wait",
            self._after(len(messages), dead, retries_us), reason_of(error),
            exc_info=None if isinstance(error, Retry) else error, extra=self._fields(messages, retries_us),
        )  # fmt: skip
        if self.on_failed is not None and counts:
            for message in messages:
                try:
                    self.on_failed(message, error)
                except Exception:
                    log.exception("consumer %s: on_failed raised an error", self._consumer)

    def add_rejected(self, messages: Sequence[FailedMessage], reason: str) -> None:
        """[any thread] Log that the program rejected *messages*, in one record."""
        is_one = len(messages) == 1
        log.error(
            "%s %s rejected, and %s now: %s", _named(messages), "was" if is_one else "were",
            "is a dead letter" if is_one else "are dead letters", reason or "the program gave no reason",
            extra=self._fields(messages, [None] * len(messages)),
        )  # fmt: skip

    def _failed(self, messages: Sequence[FailedMessage]) -> str:
        if len(messages) > 1:
            return f"{_named(messages)} failed"
        of = f" of {self.max_attempts}" if self.max_attempts else ""
        group = f" of group {self.group}" if self.group is not None else ""
        return f"{_named(messages)} failed at attempt {messages[0].attempt}{of}{group}"

    def _after(self, count: int, dead: int, retries_us: list[int | None]) -> str:
        """Say what happens next to *count* messages; *dead* of them were tried for the last time."""
        is_one, left = count == 1, count - dead
        if not self._comes_again:
            return "it does not come again" if is_one else "they do not come again"
        if not left:
            return "it is a dead letter now" if is_one else "they are dead letters now"
        first_us = min((retry_us for retry_us in retries_us if retry_us is not None), default=None)
        when = "" if first_us is None else f" in {duration_text(first_us / 1e6)}" if first_us else " at once"
        if is_one:
            return f"it comes again{when}"
        return f"they come again{when}" if not dead else f"{dead} are dead letters now, the others come again{when}"

    def _fields(self, messages: Sequence[FailedMessage], retries_us: list[int | None]) -> dict[str, Any]:
        """Return the fields of a record: those of the message, or a list with those of each."""
        several = [
            {
                "message_id": message.id,
                "subject": message.subject,
                "key": message.key,
                "attempt": message.attempt,
                "retry_in": None if retry_us is None else retry_us / 1e6,
            }
            for message, retry_us in zip(messages, retries_us, strict=True)
        ]
        common = {
            "group": self.group,
            "consumer": self._consumer,
            "program": self.program,
            "max_attempts": self.max_attempts or None,
            "count": len(several),
        }
        return common | (several[0] if len(several) == 1 else {"messages": several})

    def is_last(self, attempt: int) -> bool:
        """Return whether no other attempt follows *attempt*."""
        return not self._comes_again or 0 < self.max_attempts <= attempt

    def delay_after(self, attempt: int) -> int | None:
        """Return the group's delay after *attempt* in microseconds; None while it is not known."""
        return self.retry_delays_us[min(attempt, len(self.retry_delays_us)) - 1] if self.retry_delays_us else None

    def _retry_us(self, attempt: int, delay_us: int | None, *, counts: bool) -> int | None:
        if (counts and self.is_last(attempt)) or not self._comes_again:
            return None
        return self.delay_after(attempt) if delay_us is None else delay_us


def _named(messages: Sequence[FailedMessage]) -> str:
    if len(messages) == 1:
        return f"message {messages[0].id} of {messages[0].subject}"
    ids = ", ".join(message.id for message in messages[:_NAMED])
    more = f" and {len(messages) - _NAMED} more" if len(messages) > _NAMED else ""
    return f"{len(messages)} messages ({ids}{more})"


def delay_of(error: BaseException) -> tuple[int | None, BaseException]:
    """Return the delay in microseconds that *error* asks for (None: the group's) and the error to report.

    An ExceptionGroup with one error, as a TaskGroup raises it, counts as that error. A Retry with an invalid delay is
    reported as InvalidOption.
    """
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if not isinstance(error, Retry):
        return None, error
    try:
        return check_delay(error.after), error
    except InvalidOption as wrong:
        return None, wrong


def attempt_failed(
    failures: FailureLog, messages: Sequence[FailedMessage], error: BaseException
) -> FailedAttempt:  # fmt: skip
    """[any thread] Log that *error* ended the handler of *messages*; return the disposition to send: a nack, or a
    release where the error is a Retry that does not count.
    """
    delay_us, error = delay_of(error)
    failures.add_batch(messages, error, delay_us)
    return attempt_of(failures, error, delay_us, min(message.attempt for message in messages))


def attempt_of(failures: FailureLog, error: BaseException, delay_us: int | None, attempt: int) -> FailedAttempt:
    """Return the disposition that *error* asks for, with *delay_us*, for a message at *attempt*."""
    if not isinstance(error, Retry) or error.counts:
        return FailedAttempt(Disposition.NACK, delay_us, reason_of(error))
    if delay_us is None and (delay_us := failures.delay_after(attempt)) is None:
        delay_us = UNKNOWN_DELAY_US
    return FailedAttempt(Disposition.RELEASE, delay_us, reason_of(error))


class ReleaseDelays:
    """Chooses when a message comes again that the program released: at once, and later each time that this consumer
    releases it again, so that a message which nobody wants does not go round all the time.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}  # how often each was released, by partition and position

    def next_us(self, partition: int, position: int) -> int | None:
        """Return the delay of a release in microseconds; None for none."""
        message = partition, position
        count = self._counts.pop(message, 0)
        self._counts[message] = count + 1
        if len(self._counts) > MAX_RELEASED:
            del self._counts[next(iter(self._counts))]
        return min(FIRST_RELEASE_US << min(count - 1, 30), LAST_RELEASE_US) if count else None

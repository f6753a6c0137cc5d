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
from qmq.net.client.consumer.in_flight import InFlightWindow, PendingDisposition, Slot, check_delay, reason_of
from qmq.net.client.failover.handover import HandoverClient
from qmq.net.client.failover.spool import SpooledDispositions
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition, cut_reason

log = logging.getLogger("qmq.client")

#: Limits of one frame: how many dispositions, and bytes of all their reasons.
MAX_PER_FRAME: Final = 1_000
_REASONS_BYTES: Final = 60_000
#: Messages that a record about several names in its text; its fields name all.
_NAMED: Final = 3
#: Seconds after which a refusal that can pass is followed by another attempt.
AGAIN_AFTER: Final = 0.05

Subscribed = tuple[BrokerConnection, int]


class _QueuedDisposition(NamedTuple):
    """A disposition to send, and the future to resolve when it is done."""

    in_flight: InFlightWindow
    back: PendingDisposition
    waiter: asyncio.Future[None] | None
    #: Slots of order keys of which the messages are.
    slots: Sequence[Slot] = ()

    def resolve(self, error: Exception | None = None) -> None:
        """Resolve the future: done, or failed with *error*."""
        self.in_flight.end_failing(self.slots)
        waiter = self.waiter
        if waiter is None:
            if error is not None:
                log.debug("a nack or release in the background was refused: %s", error)
        elif not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


def _failing(in_flight: InFlightWindow, back: PendingDisposition) -> Sequence[Slot]:
    """Return the slots whose messages come again by a disposition."""
    return () if back.disposition == Disposition.REJECT else in_flight.begin_failing(back.start, back.end)


class NackSender:
    """Sends the nacks, releases and rejects of one consumer at one broker."""

    def __init__(self, consumer: str, subscribed: Callable[[], Awaitable[Subscribed]]) -> None:
        #: The store of the last subscription.
        self.store_id = b""
        #: The other brokers, which take whole messages when this broker is gone, and the group's name there.
        self.handover: tuple[HandoverClient, str] | None = None
        self._consumer = consumer
        self._subscribed = subscribed
        self._queued: list[_QueuedDisposition] = []
        self._sender: asyncio.Task[None] | None = None  # the task that sends the queue, in the next turn
        self._tasks: set[asyncio.Task[None]] = set()
        #: The waits for a subscription, each for dispositions of one window.
        self._waits: dict[asyncio.Timeout, InFlightWindow] = {}

    async def hand_back(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Send a nack or reject; return once the broker has it on disk or another broker has the whole message.

        Raises Fenced. Cancelling the call does not stop the sending: no consumer would get the message otherwise.
        """
        waiter = asyncio.get_running_loop().create_future()
        in_flight.begin_disposition(back.start, back.end)
        self._queue(_QueuedDisposition(in_flight, back, waiter, _failing(in_flight, back)))
        self._release_behind(in_flight, back)
        await waiter

    def release(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Release messages in the background."""
        self.hand_back_soon(in_flight, PendingDisposition(start, end, Disposition.RELEASE))

    async def confirm(self, in_flight: InFlightWindow, start: int, end: int) -> None:
        """Wait until the broker has the releases of [start, end) that this turn of the loop has queued."""
        waiters = list[asyncio.Future[None]]()
        for number, one in enumerate(self._queued):
            if one.in_flight is in_flight and one.waiter is None and start <= one.back.start and one.back.end <= end:
                waiters.append(asyncio.get_running_loop().create_future())
                self._queued[number] = one._replace(waiter=waiters[-1])
        if waiters:
            await asyncio.gather(*waiters)

    def hand_back_soon(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Send a disposition in the background; do nothing if a message has one already or is not in flight."""
        try:
            in_flight.begin_disposition(back.start, back.end)
        except Fenced:
            return
        self._queue(_QueuedDisposition(in_flight, back, None, _failing(in_flight, back)))
        self._release_behind(in_flight, back)

    def _release_behind(self, in_flight: InFlightWindow, back: PendingDisposition) -> None:
        """Release the messages behind a message in its slot of order keys: they must come after it again."""
        if back.disposition == Disposition.REJECT:
            return
        for start, end in in_flight.behind(back.start, back.end):
            self.return_early(in_flight, start, end, back.delay_us)

    def return_early(self, in_flight: InFlightWindow, start: int, end: int, delay_us: int | None = None) -> None:
        """Release, in the background, messages that an earlier one of their slot of order keys holds up."""
        in_flight.begin_disposition(start, end)
        in_flight.has_early_returns = True
        release = PendingDisposition(start, end, Disposition.RELEASE, delay_us)
        self._queue(_QueuedDisposition(in_flight, release, None))

    def _queue(self, waiting: _QueuedDisposition) -> None:
        self._queued.append(waiting)
        if self._sender is None:
            self._sender = self._spawn(self._send(), waiting.in_flight.owner.loop)

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
                    one.resolve(error)
                continue
            except Exception as error:  # a bug of the client: resolved as failed, or the callers would wait for ever
                log.exception("consumer %s: sending nacks failed", self._consumer)
                for one in several:
                    one.resolve(error)
                return
            for number, one in enumerate(some):
                refusal, start, end = refused.get(number), one.back.start, one.back.end
                if refusal is not None and end - start > 1:  # one of its messages may be the cause: try both halves
                    middle = (start + end) // 2
                    self._queue(one._replace(back=one.back._replace(end=middle)))
                    self._queue(one._replace(back=one.back._replace(start=middle)))
                else:
                    one.resolve(refusal)

    def _delivered(self, several: list[_QueuedDisposition], task: asyncio.Task[None]) -> None:
        if task.cancelled():  # maybe before it had begun
            self._refuse_left(several)

    def _refuse_left(self, several: list[_QueuedDisposition]) -> None:
        for one in several:
            one.resolve(left_block_error(self._consumer))

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
            task = loop.create_task(work, name="qmq-hand-back")
        except RuntimeError:  # called in a wrong thread, in asyncio's debug mode
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Wait until the broker has, or has refused, every disposition so far."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Stop sending, and refuse the dispositions that were not sent."""
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
        """[any thread] As ``add``, for messages that failed together: they share a record."""
        dead = sum(self.is_last(message.attempt) for message in messages)
        retries_us = [self._retry_us(message.attempt, delay_us) for message in messages]
        asked = isinstance(error, Retry) and not dead
        log.log(
            logging.INFO if asked else logging.ERROR if dead else logging.WARNING,
            "%s, %s: %s", self._failed(messages), self._after(len(messages), dead, retries_us), reason_of(error),
            exc_info=None if isinstance(error, Retry) else error, extra=self._fields(messages, retries_us),
        )  # fmt: skip
        if self.on_failed is not None:
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

    def _retry_us(self, attempt: int, delay_us: int | None) -> int | None:
        if self.is_last(attempt):
            return None
        if delay_us is None and self.retry_delays_us:
            return self.retry_delays_us[min(attempt, len(self.retry_delays_us)) - 1]
        return delay_us


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

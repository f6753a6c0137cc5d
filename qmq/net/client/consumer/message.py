"""Received messages: thin views over runs. Fields are decoded when they are read. Bodies are made at once, since nearly
all programs read them and the bodies of a whole run cost little.

The client compares tags by name: the broker compares only bits, and several tags may have the same bit.
"""

from __future__ import annotations

import asyncio
import gc
from bisect import bisect_right
from collections.abc import Awaitable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload

import numpy as np

from qmq.durations import Duration
from qmq.errors import Fenced, QmqError, UsageError
from qmq.format.lanes import priority_of
from qmq.format.layout import HAS_CREATED_AT, HAS_ORIGIN_ID, HAS_SOURCE, LANE_ORDERED, MESSAGE_ID, RUN_REPLAYED
from qmq.format.run import Envelopes, Run, messages_in
from qmq.net.client.consumer.in_flight import (
    RELEASED,
    FailedAttempt,
    InFlightWindow,
    PendingDisposition,
    WholeMessage,
    check_delay,
    check_reason,
)
from qmq.net.client.consumer.nacks import FailureLog, attempt_failed
from qmq.net.client.options import json_of
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol.types import Disposition

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow

    #: A bool for each message.
    Mask = npt.NDArray[np.bool_] | Sequence[bool]


def with_tags(runs: list[Run], tags: frozenset[str]) -> list[Run]:
    """Return the messages that have one of *tags*; ack the others, as the broker acks those that it filters out."""
    matching = []
    for run in runs:
        wanted = [not tags.isdisjoint(run.header(index).get("t", ())) for index in range(run.count)]
        if all(wanted):
            matching.append(run)
            continue
        for is_wanted, group in groupby(enumerate(wanted), itemgetter(1)):
            indexes = [index for index, _ in group]
            start, stop = indexes[0], indexes[-1] + 1
            if is_wanted:
                matching.append(run.slice(start, stop))
            elif run.in_flight is not None:
                run.in_flight.ack(run.delivery_sequence + start, run.delivery_sequence + stop, each=False)
    return matching


def _whole(run: Envelopes, index: int, body: bytes) -> WholeMessage | None:
    """Return the message for another broker, in case its own is gone. Return None for a message with an order key: only
    its own broker can keep the order, so only that one hands it out again.
    """
    return None if run.lane >= LANE_ORDERED else (run, index, body)


class Message:
    """One received message. A program may keep it: it keeps none of a large answer that it came in."""

    __slots__ = {"_number": None, "_run": None, "body": "The bytes that were sent."}

    body: bytes

    def __init__(self, run: Envelopes, number: int, body: bytes) -> None:
        """Make a view of the message of *run* with the delivery sequence *number* and this *body*."""
        self._run = run
        self._number = number
        self.body = body

    @property
    def _index(self) -> int:
        """The index of the message in its run."""
        return self._number - self._run.delivery_sequence

    @property
    def id(self) -> str:
        """The message's id, 32 hex digits, which never changes."""
        return str(self._run.id(self._index))

    @property
    def subject(self) -> str:
        """The subject it was sent to."""
        return self._run.subject

    @property
    def sequence(self) -> int:
        """Its sequence: the number among the messages of its subject."""
        return self._run.first_sequence + self._index

    @property
    def key(self) -> str | None:
        """The key it was sent with, the first of several, or None."""
        keys = self._run.header(self._index).get("k")
        return keys[0] if keys else None

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys it was sent with."""
        return tuple(self._run.header(self._index).get("k", ()))

    @property
    def priority(self) -> str:
        """The priority it was sent with: "low", "normal" or "high"."""
        return priority_of(self._run.lane)

    @property
    def order_key(self) -> str | None:
        """The order key it was sent with, or None."""
        keys = self._run.header(self._index).get("o")
        return keys[0] if keys else None

    @property
    def source(self) -> str | None:
        """The address that it was sent from, as the broker saw it: host:port; None if it is unknown."""
        return self._run.source(self._index).address

    @property
    def sender(self) -> str | None:
        """The name of the token that its sender had; None without one."""
        return self._run.source(self._index).sender

    @property
    def producer(self) -> str | None:
        """The id of the producer that sent it, 32 hex digits."""
        return self._run.source(self._index).producer

    @property
    def app(self) -> str | None:
        """The name that the program which sent it gave to ``connect(app=...)``."""
        return self._run.source(self._index).app

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags it was sent with."""
        return tuple(self._run.header(self._index).get("t", ()))

    @property
    def properties(self) -> dict[str, str]:
        """The properties it was sent with, as a new dict."""
        return dict(self._run.header(self._index).get("p", ()))

    def json(self) -> Any:
        """Return the value of the body, which is JSON. Raises ValueError if it is not.

            order = message.json()
            print(order["id"])

        With the extra ``qmq[json]`` (msgspec) it is several times as fast, with the same results.
        """
        try:
            return json_of(self.body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body of message {self.id} is no JSON: {error}") from error

    @property
    def attempt(self) -> int:
        """The number of this attempt to handle it, from 1."""
        return self._run.attempt

    @property
    def last_attempt(self) -> bool:
        """Whether no other attempt follows this one: if it fails, the message is dead.

            if message.last_attempt:
                alert(message.id)

        The group's ``max_attempts`` is that of the time when the consumer subscribed. Always True where there are no
        dispositions: for a solo consumer, and in an at_most_once group.
        """
        in_flight = self._run.in_flight
        return in_flight is None or in_flight.owner.failures.is_last(self._run.attempt)

    @property
    def in_flight(self) -> bool:
        """Whether the consumer still has it and it has no disposition.

            for message in await consumer.pull():
                if message.in_flight:  # else it comes again, behind the one that failed
                    async with message:
                        await handle(message)

        A message with an order key is taken back when an earlier one of its key fails or is released, so a program that
        takes several at a time asks before it begins one; ``run`` and ``async for`` do that themselves. False also
        where another subscriber took over, or the session expired. Always True where there are no dispositions: for a
        solo consumer, and in an at_most_once group. An ack of a ``SyncMessage`` that does not wait counts a moment
        later.
        """
        return is_open(self)

    @property
    def replayed(self) -> bool:
        """Whether a restore brought it back from an archive, or a resend handed it out again; its id is the original
        one.
        """
        return bool(self._run.run_flags & RUN_REPLAYED)

    @property
    def created_at_us(self) -> int:
        """The time when its sender made its batch: microseconds since 1970, by the sender's clock."""
        return self._run.created_us(self._index)

    @property
    def created_at(self) -> datetime:
        """The time when its sender made its batch: UTC, by the sender's clock."""
        return utc_from_us(self._run.created_us(self._index))

    @property
    def stored_at_us(self) -> int:
        """The time when the broker stored it: microseconds since 1970, UTC."""
        return self._run.stored_at_us

    @property
    def stored_at(self) -> datetime:
        """The time when the broker stored it, UTC."""
        return utc_from_us(self._run.stored_at_us)

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self) -> Awaitable[None]:
        """Ack the message: it is handled, and the group does not get it again.

            message.ack()        # sent and confirmed in the background, with others
            await message.ack()  # returns once the broker has it

        ``Consumer.flush`` waits for all acks so far. Does nothing for a solo consumer, or when the message has a
        disposition. After the consumer's block it changes nothing, because the message was released when the block
        ended; the first such call is logged. Awaiting it raises Fenced if the broker refuses the ack, as the message
        is no longer in flight, or if the message was taken back before (see ``in_flight``).
        """
        in_flight = self._run.in_flight
        if in_flight is not None:
            number = self._number
            if in_flight.tail == number:
                in_flight.tail = number + 1
            else:
                if in_flight.fenced is not None:
                    in_flight.late("ack()", number, number + 1, self)
                in_flight.ack(number, number + 1)
        return self  # no object is made for programs that do not wait

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until the broker has the ack of the message, as ``await message.ack()`` does."""
        in_flight = self._run.in_flight
        if in_flight is not None:
            yield from in_flight.owner.confirm(in_flight, self._number, self._number + 1).__await__()

    async def nack(self, delay: Duration | None = None, reason: str = "") -> None:
        """Nack the message: it could not be handled, and the group gets it again after *delay* seconds.

        None: the group's delay for this attempt. Returns once the broker has the nack on disk. If the message was taken
        back (see ``in_flight``), it changes nothing, and the log says so. Raises InvalidOption, and Fenced if the
        message is no longer in flight, as after the consumer's block.
        """
        await self._hand_back(Disposition.NACK, delay, reason)

    async def reject(self, reason: str) -> None:
        """Reject the message: no attempt can succeed, so it becomes a dead letter at once, with *reason*. Of one that
        was taken back, it does as ``nack``. Raises Fenced.
        """
        await self._hand_back(Disposition.REJECT, None, reason)

    def release(self, after: Duration | None = None) -> Awaitable[None]:
        """Release the message, which was not begun: the group gets it again after *after* seconds, and no attempt is
        counted.

            message.release()             # in the background
            message.release(after="10s")  # not yet
            await message.release()       # returns once the broker has it

        None: at once, as another consumer may want it. When this consumer releases the same message again, it comes
        after 0.1 seconds, then 0.2, 0.4 and so on up to 5. Raises InvalidOption. After the consumer's block it changes
        nothing, as ``ack``.
        """
        self._release(check_delay(after))
        in_flight = self._run.in_flight
        return _Released([] if in_flight is None else [(in_flight, self._number, self._number + 1)])

    def _release(self, delay_us: int | None) -> None:
        in_flight = self._run.in_flight
        if in_flight is not None:
            if in_flight.fenced is not None:
                in_flight.late("release()", self._number, self._number + 1, self)
            in_flight.owner.release(self._run, self._number, self._number + 1, delay_us)

    def _hand_back(self, disposition: Disposition, delay: Duration | None, reason: str) -> Awaitable[object]:
        """Begin a nack or reject; the result is done once the broker has it."""
        in_flight = self._run.in_flight
        if in_flight is None:
            raise UsageError("messages of solo consumers and of at_most_once groups cannot be nacked or rejected")
        number, whole = self._number, _whole(self._run, self._index, self.body)
        back = PendingDisposition(number, number + 1, disposition, check_delay(delay), check_reason(reason), whole)
        if disposition == Disposition.REJECT and in_flight.is_open(number):
            in_flight.owner.failures.add_rejected([self], back.reason)
        waiting: Awaitable[object] = in_flight.owner.hand_back(in_flight, [back])
        return waiting

    async def __aenter__(self) -> Self:
        in_flight = self._run.in_flight
        if in_flight is not None:
            if in_flight.fenced is not None:
                in_flight.late("`async with message`", self._number, self._number + 1, self)
            in_flight.begin(asyncio.current_task())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ack the message, or nack it when the block has raised an Exception, which goes on to the program.

        ``raise qmq.Retry(after=...)`` picks the delay, and with ``counts=False`` the message is released.
        CancelledError, as of a timeout around the block, nacks it too, unless the consumer stops or is left within a
        quarter of a second: then it releases it, as KeyboardInterrupt, SystemExit and GeneratorExit do. If the message
        is no longer in flight, the block is cancelled, and the program goes on after the block.
        """
        in_flight = self._run.in_flight
        if in_flight is None:
            return False
        task = asyncio.current_task()
        assert task is not None
        if in_flight.end(task):
            return await _go_on(task, error)
        if error is None:
            self.ack()
        elif isinstance(error, asyncio.CancelledError):
            cancelled = error
            in_flight.owner.cancelled(in_flight, [_nack_of(self)], lambda: fail_batch([self], cancelled))
        elif not isinstance(error, Exception):
            in_flight.owner.hand_back_soon(in_flight, _nack_of(self).of(RELEASED))
        else:
            back = failure(self, error)
            try:
                await in_flight.owner.hand_back(in_flight, [back])
            except Fenced:
                in_flight.late("the failure", back.start, back.end, self)
        return False

    def __repr__(self) -> str:
        return f"<Message {self.id} {self.subject!r} sequence {self.sequence}, {len(self.body)} bytes>"


class _Released:
    """Messages that the program has released: awaiting it waits until the broker has them."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Sequence[tuple[InFlightWindow, int, int]]) -> None:
        """*ranges* are delivery sequences of windows."""
        self._ranges = ranges

    def __await__(self) -> Generator[Any, None, None]:
        for in_flight, start, end in self._ranges:
            yield from in_flight.owner.confirm(in_flight, start, end, acked=False).__await__()


def is_open(message: Message) -> bool:
    """Return whether *message* has no disposition, and does not go back because of an earlier message of its slot."""
    in_flight = message._run.in_flight
    return in_flight is None or in_flight.is_open(message._number)


def is_dropped(message: Message) -> bool:
    """Return whether *message* is no longer in flight, because the broker has handed it out again or will do so."""
    in_flight = message._run.in_flight
    return in_flight is not None and in_flight.fenced is not None


def _nack_of(message: Message) -> PendingDisposition:
    number, whole = message._number, _whole(message._run, message._index, message.body)
    return PendingDisposition(number, number + 1, Disposition.NACK, whole=whole)


def failure(message: Message, error: BaseException) -> PendingDisposition:
    """[any thread] Log that *error* ended the handler of a message of a group; return the disposition to send."""
    return _nack_of(message).of(fail_batch([message], error))


def fail(message: Message, error: BaseException, failures: FailureLog, *, from_thread: bool = False) -> None:
    """Log that *error* ended the handler of *message*; if it is a message of a group, nack it in the background.
    *from_thread*: this is not the thread of the client's loop.
    """
    in_flight = message._run.in_flight
    if in_flight is None:
        failures.add(message, error, None)
        return
    owner, back = in_flight.owner, failure(message, error)
    if from_thread:
        owner.call_from_thread(lambda: owner.hand_back_soon(in_flight, back))
    else:
        owner.hand_back_soon(in_flight, back)


def fail_batch(messages: Iterable[Message], error: BaseException) -> FailedAttempt:
    """[any thread] Log that *error* ended the block of *messages*, which had no disposition; return the disposition to
    send.
    """
    several = dict[int, tuple[FailureLog, list[Message]]]()  # a batch may come from several brokers
    for message in messages:
        failures: FailureLog = message._run.in_flight.owner.failures
        several.setdefault(id(failures), (failures, []))[1].append(message)
    attempts = [attempt_failed(failures, found, error) for failures, found in several.values()]
    return attempts[0] if attempts else RELEASED


async def _fenced(error: Fenced) -> None:
    raise Fenced(str(error))


async def _go_on(task: asyncio.Task[Any], error: BaseException | None) -> bool:
    """Undo the cancellation of a task whose message is no longer in flight. Returns whether *error* is swallowed."""
    if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
        return False
    is_cancelled = isinstance(error, asyncio.CancelledError)
    if not is_cancelled:
        try:
            await asyncio.sleep(0)  # the cancellation may still be on the way
        except asyncio.CancelledError:
            is_cancelled = True
    if task.uncancel() and is_cancelled:
        raise asyncio.CancelledError  # the task was cancelled for another reason too
    return True


M = TypeVar("M", bound=Message)


def delivery_sequences_of(run: Run) -> range:
    """Return the delivery sequences of the messages of *run*."""
    return range(run.delivery_sequence, run.delivery_sequence + run.count)


def messages_of(runs: Sequence[Run], kind: type[M] = Message) -> list[M]:  # type: ignore[assignment]  # M is Message then
    """Return one view per message, run after run."""
    messages: list[M] = []
    # All views stay alive, so the collector would find nothing, and visit each two or three times as they are made.
    collects = gc.isenabled()
    gc.disable()
    try:
        for run in runs:
            envelopes, bodies = run.views()
            first = run.delivery_sequence
            messages += map(kind, envelopes, range(first, first + run.count), bodies)
    finally:
        if collects:
            gc.enable()
    return messages


def each_message(runs: Iterable[Run], kind: type[M] = Message) -> Iterator[M]:  # type: ignore[assignment]  # M is Message then
    """Yield one view per message, each made when it is reached."""
    return chain.from_iterable(_views(run, kind) for run in runs)


def _views(run: Run, kind: type[M]) -> Iterator[M]:
    envelopes, bodies = run.views()
    return map(kind, envelopes, delivery_sequences_of(run), bodies)


class MessageBatch(Sequence[Message]):
    """The messages of one ``pull_batch``: columns, and views of single messages on demand. All is decoded on demand."""

    __slots__ = ("_bodies", "_envelopes", "_runs", "_starts", "_total")

    _kind: ClassVar[type[Message]] = Message

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        # Made when a message is first accessed by its index.
        self._starts: list[int] = []
        self._envelopes: list[Envelopes] = []
        self._bodies: list[bytes] = []
        self._total = messages_in(runs)

    def __len__(self) -> int:
        return self._total

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice | Mask) -> Self: ...
    def __getitem__(self, index: int | slice | Mask) -> Message | Self:
        """Return one message, or the batch of those that a slice or a mask (a bool for each message) selects.

        batch[0], batch[-10:], batch[amounts > 100]
        """
        if not isinstance(index, int):
            return type(self)(self._selected(index))
        if index < 0:
            index += self._total
        if not 0 <= index < self._total:
            raise IndexError(f"message {index} of {self._total}")
        if not self._starts:
            for run in self._runs:
                several, bodies = run.split()
                self._envelopes += several
                self._bodies += bodies
            counts = np.array([some.count for some in self._envelopes], np.int64)
            self._starts = (np.cumsum(counts) - counts).tolist()
        number = bisect_right(self._starts, index) - 1
        envelopes = self._envelopes[number]
        sequence = envelopes.delivery_sequence + index - self._starts[number]
        return self._kind(envelopes, sequence, self._bodies[index])

    def _selected(self, index: slice | Mask) -> list[Run]:
        """Return the messages of a slice or mask, cut out of the runs. Raises TypeError and ValueError."""
        if isinstance(index, slice):
            numbers = np.arange(self._total)[index]
        else:
            mask = np.asarray(index)
            if mask.dtype != np.bool_:
                raise TypeError(f"a batch takes a number, a slice or a mask of bools, not {index!r:.80}")
            if mask.shape != (self._total,):
                raise ValueError(f"a mask of this batch has {self._total} bools, not {mask.shape}")
            numbers = np.flatnonzero(mask)
        if not len(numbers):
            return []
        counts = np.array([run.count for run in self._runs], np.int64)
        ends = np.cumsum(counts)
        runs = np.searchsorted(ends, numbers, side="right")
        # A part is cut where the numbers do not go on by one, or the run changes.
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(runs) != 0)) + 1
        selected = []
        for first, last in zip((0, *cuts.tolist()), (*(cuts - 1).tolist(), len(numbers) - 1), strict=True):
            run = self._runs[runs[first]]
            start = int(numbers[first] - ends[runs[first]] + run.count)
            stop = start + int(last - first) + 1
            selected.append(run if stop - start == run.count else run.slice(start, stop))
        return selected

    def __iter__(self) -> Iterator[Message]:
        return each_message(self._runs, self._kind)

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self) -> Awaitable[None]:
        """Ack all messages that have no disposition, as ``Message.ack``; it may be awaited.

        batch = await consumer.pull_batch()
        batch[batch_is_good].ack()
        """
        for in_flight, start, end in self._ranges():
            in_flight.ack(start, end, each=False)
        return self

    async def nack(self, delay: Duration | None = None, reason: str = "") -> None:
        """Nack all messages that have no disposition, as ``Message.nack``.

        await batch.nack("5m", "the warehouse is closed")
        """
        await self._hand_back(FailedAttempt(Disposition.NACK, check_delay(delay), check_reason(reason)))

    async def reject(self, reason: str) -> None:
        """Reject all messages that have no disposition, as ``Message.reject``.

        await batch[unreadable].reject("no such customer")
        """
        await self._hand_back(FailedAttempt(Disposition.REJECT, None, check_reason(reason)))

    def release(self, after: Duration | None = None) -> Awaitable[None]:
        """Release all messages that have no disposition, as ``Message.release``; it may be awaited.

        batch[1000:].release(after="1m")
        """
        self._release(check_delay(after))
        return _Released(list(self._ranges()))

    def _release(self, delay_us: int | None) -> None:
        for in_flight, start, end in self._ranges():
            if in_flight.fenced is not None:
                in_flight.late("release()", start, end, f"{end - start} messages")
        for run in self._runs:
            if run.in_flight is not None:
                first = run.delivery_sequence
                run.in_flight.owner.release(run, first, first + run.count, delay_us)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until the broker has the acks of the batch, as ``await batch.ack()`` does."""
        for in_flight, start, end in self._ranges():
            yield from in_flight.owner.confirm(in_flight, start, end, acked=False).__await__()

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        for in_flight in self._windows():
            in_flight.begin(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ack all messages that have no disposition; after an Exception nack them, and let it go on.

            async with batch:
                store(batch.to_arrow())

        ``qmq.Retry`` and a cancellation do as with ``async with message``.
        """
        task = asyncio.current_task()
        assert task is not None
        stopped = [in_flight.end(task) for in_flight in self._windows()]
        if any(stopped):
            return await _go_on(task, error)
        if error is None:
            self.ack()
        elif isinstance(error, asyncio.CancelledError):
            self._cancelled(error)
        elif not isinstance(error, Exception):
            self._released()
        elif self._windows():
            with suppress(Fenced):
                await self._fail(error)
        return False

    def _cancelled(self, error: asyncio.CancelledError) -> None:
        messages = self._open_messages()
        for in_flight, backs in self._open_backs().items():
            several = [message for message in messages if message._run.in_flight is in_flight]
            in_flight.owner.cancelled(in_flight, backs, partial(fail_batch, several, error))

    def _released(self) -> None:
        """Release the messages without a disposition, as the program ends."""
        for in_flight, backs in self._open_backs().items():
            for back in backs:
                in_flight.owner.hand_back_soon(in_flight, back.of(RELEASED))

    def _fail(self, error: Exception) -> Awaitable[object]:
        """Fail the messages without a disposition; the result is done once the broker has their dispositions."""
        return self._hand_back(fail_batch(self._open_messages(), error))

    def _hand_back(self, attempt: FailedAttempt) -> Awaitable[object]:
        """Begin a disposition of all messages without one; the result is done once the broker has it."""
        if self._total and not self._windows():
            raise UsageError("messages of solo consumers and of at_most_once groups cannot be nacked or rejected")
        if attempt.disposition == Disposition.REJECT and (rejected := self._open_messages()):
            rejected[0]._run.in_flight.owner.failures.add_rejected(rejected, attempt.reason)
        begun = [
            in_flight.owner.hand_back(in_flight, [back.of(attempt) for back in backs])
            for in_flight, backs in self._open_backs().items()
        ]
        begun += [_fenced(in_flight.fenced) for in_flight in self._windows() if in_flight.fenced is not None]
        return asyncio.gather(*begun)

    def _open_backs(self) -> dict[InFlightWindow, list[PendingDisposition]]:
        """Return nacks, by window, for the messages without a disposition: for ranges, or for single messages where
        another broker may have to take them.
        """
        several = dict[InFlightWindow, list[PendingDisposition]]()
        for run in self._runs:
            if run.in_flight is None or run.in_flight.fenced is not None:
                continue
            first = run.delivery_sequence
            for low, high in run.in_flight.open_within(first, first + run.count):
                backs = several.setdefault(run.in_flight, [])
                if run.in_flight.owner.hands_over:
                    for number in range(low, high):
                        whole = _whole(run, number - first, run.body(number - first))
                        backs.append(PendingDisposition(number, number + 1, Disposition.NACK, whole=whole))
                else:
                    backs.append(PendingDisposition(low, high, Disposition.NACK))
        return several

    def _open_messages(self) -> list[Message]:
        return [
            message
            for message in self
            if message._run.in_flight is not None and message._run.in_flight.is_open(message._number)
        ]

    def _windows(self) -> list[InFlightWindow]:
        return list({id(run.in_flight): run.in_flight for run in self._runs if run.in_flight is not None}.values())

    def _ranges(self) -> Iterator[tuple[InFlightWindow, int, int]]:
        """Yield the delivery sequences of the batch; those of consecutive runs as one range."""
        in_flight, start, end = None, 0, 0
        for run in self._runs:
            if run.in_flight is not in_flight or run.delivery_sequence != end:
                if in_flight is not None:
                    yield in_flight, start, end
                in_flight, start = run.in_flight, run.delivery_sequence
            end = run.delivery_sequence + run.count
        if in_flight is not None:
            yield in_flight, start, end

    # --- columns ------------------------------------------------------------------------------------------------------

    @property
    def subjects(self) -> list[str]:
        """The subject of each message."""
        subjects: list[str] = []
        for run in self._runs:
            subjects += [run.subject] * run.count
        return subjects

    @property
    def bodies(self) -> list[bytes]:
        """The body of each message."""
        bodies: list[bytes] = []
        for run in self._runs:
            bodies += run.bodies()
        return bodies

    def to_arrow(self) -> pyarrow.Table:
        """Return the messages as a pyarrow Table, a column per field of Message. Raises QmqError without pyarrow."""
        try:
            import pyarrow as pa
        except ImportError:
            raise QmqError("to_arrow needs pyarrow, which is not installed; run: pip install 'qmq[arrow]'") from None
        us = pa.timestamp("us", tz="UTC")
        text_list, text_map = pa.list_(pa.string()), pa.map_(pa.string(), pa.string())
        headers = [run.header(index) for run in self._runs for index in range(run.count)]
        return pa.table(
            {
                "id": pa.array(self._ids(), pa.string()),
                "subject": pa.array(self.subjects, pa.string()),
                "sequence": pa.array(self._per_message("first_sequence", count_up=True), pa.uint64()),
                "body": pa.array(self.bodies, pa.large_binary()),
                "key": pa.array([header["k"][0] if "k" in header else None for header in headers], pa.string()),
                "keys": pa.array([header.get("k", ()) for header in headers], text_list),
                "priority": pa.array(self._priorities(), pa.string()),
                "order_key": pa.array([header["o"][0] if "o" in header else None for header in headers], pa.string()),
                "tags": pa.array([header.get("t", ()) for header in headers], text_list),
                "properties": pa.array([list(header.get("p", {}).items()) for header in headers], text_map),
                "attempt": pa.array(self._per_message("attempt"), pa.uint32()),
                "created_at": pa.array(self._created_us(), pa.int64()).cast(us),
                "stored_at": pa.array(self._per_message("stored_at_us"), pa.int64()).cast(us),
                **{name: pa.array(texts, pa.string()) for name, texts in self._sources().items()},
            }
        )

    def _priorities(self) -> list[str]:
        return [name for run in self._runs for name in [priority_of(run.lane)] * run.count]

    def _sources(self) -> dict[str, list[str | None]]:
        columns: dict[str, list[str | None]] = {"source": [], "sender": [], "producer": [], "app": []}
        for run in self._runs:
            if run.flags & HAS_SOURCE:
                found = [run.source(index) for index in range(run.count)]
            else:
                found = [run.source(0)] * run.count
            for column, texts in zip(columns.values(), zip(*found, strict=True), strict=True):
                column += texts
        return columns

    def _ids(self) -> list[str]:
        pack = MESSAGE_ID.pack
        ids = list[str]()
        for run in self._runs:
            if run.flags & HAS_ORIGIN_ID:
                ids += [str(run.id(index)) for index in range(run.count)]
                continue
            first = run.position + run.ordinal
            ids += [pack(run.store_id, run.partition, position).hex() for position in range(first, first + run.count)]
        return ids

    def _created_us(self) -> Any:
        values, start = self._per_message("created_at_us"), 0
        for run in self._runs:
            column = run.column(HAS_CREATED_AT)
            if column is not None:
                values[start : start + run.count] = column
            start += run.count
        return values

    def _per_message(self, field: str, count_up: bool = False) -> Any:
        """Return a field of the runs for each message as int64[n]. *count_up*: the value grows by one within a run."""
        counts = np.array([run.count for run in self._runs], np.int64)
        values = np.repeat(np.array([getattr(run, field) for run in self._runs], np.int64), counts)
        if count_up:
            values += np.arange(self._total) - np.repeat(np.cumsum(counts) - counts, counts)
        return values

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._total} messages>"

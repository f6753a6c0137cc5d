"""The consumer without asyncio, its messages and their batches."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from qmq.durations import Duration, seconds_of
from qmq.errors import BadBatch, Fenced, UsageError
from qmq.format.layout import LANE_ORDERED
from qmq.format.run import Run
from qmq.net.client.brokers import Brokers
from qmq.net.client.consumer.feed import MessageFeed
from qmq.net.client.consumer.in_flight import (
    RELEASED,
    FailedAttempt,
    PendingDisposition,
    check_delay,
    check_reason,
)
from qmq.net.client.consumer.message import Message, MessageBatch, each_message, failure, messages_of
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.pull import Puller
from qmq.net.client.options import BATCH_BYTES, PULL_BYTES
from qmq.net.client.stop_signals import calling_at_signals
from qmq.net.client.sync.loop_thread import ClientThread
from qmq.net.client.sync.run import ThreadRun
from qmq.net.protocol.types import Disposition

if TYPE_CHECKING:
    from qmq.net.client.consumer.in_flight import InFlightWindow
    from qmq.net.client.consumer.message import Mask

log = logging.getLogger("qmq.client")


class SyncMessage(Message):
    """A message of a ``SyncConsumer``: a ``Message`` whose dispositions are plain calls; use it with ``with``."""

    __slots__ = ()

    def ack(self, *, wait: bool = False) -> None:  # type: ignore[override]  # a plain call
        """Acknowledge the message; with *wait* return once the broker has the ack. See ``Message.ack``."""
        in_flight = self._run.in_flight
        if in_flight is None:
            return
        if wait:
            wait_for(in_flight, super().ack)
            return
        number = self._number
        if in_flight.fenced is not None:
            in_flight.late("ack()", number, number + 1, self)
        acks = in_flight.owner.thread_dispositions
        acks.waiting.append(in_flight.thread_base + number)
        if not acks.is_due:  # else the loop takes it with those before
            try:
                acks.want_take(in_flight.owner.loop.call_soon_threadsafe)
            except RuntimeError:  # the client is closed
                in_flight.late("ack()", number, number + 1, self)

    def nack(self, delay: Duration | None = None, reason: str = "") -> None:  # type: ignore[override]  # waits by itself
        """Hand the message back as failed. See ``Message.nack``."""
        wait_for(self._run.in_flight, lambda: self._hand_back(Disposition.NACK, delay, reason))

    def reject(self, reason: str) -> None:  # type: ignore[override]  # likewise
        """Make the message a dead letter. See ``Message.reject``."""
        wait_for(self._run.in_flight, lambda: self._hand_back(Disposition.REJECT, None, reason))

    def release(self, after: Duration | None = None, *, wait: bool = False) -> None:  # type: ignore[override]  # a plain call
        """Hand the message back unhandled; with *wait* return once the broker has it. See ``Message.release``."""
        delay_us, in_flight = check_delay(after), self._run.in_flight
        if in_flight is None:
            return
        if wait:
            wait_for(in_flight, lambda: super(SyncMessage, self).release(after))
        elif not self._call_from_thread(in_flight, lambda: self._release(delay_us)):
            in_flight.late("release()", self._number, self._number + 1, self)

    def _call_from_thread(self, in_flight: InFlightWindow, dispose: Callable[[], object]) -> bool:
        """[any thread] Have the client's loop give a disposition; return False if it is closed. That of a message with
        an order key is given on return: a loop of the program must not reach those behind it.
        """
        if self._run.lane < LANE_ORDERED:
            return in_flight.owner.call_from_thread(dispose)
        done = Future[None]()

        def given() -> None:
            try:
                dispose()
            finally:
                done.set_result(None)

        if not in_flight.owner.call_from_thread(given):
            return False
        done.result()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Acknowledge the message, or nack it after an exception, which goes on. See ``Message.__aexit__``."""
        in_flight = self._run.in_flight
        if error is None:
            self.ack()
        elif in_flight is not None and not isinstance(error, Exception):
            released = PendingDisposition(self._number, self._number + 1, *RELEASED)
            self._call_from_thread(in_flight, lambda: in_flight.owner.hand_back_soon(in_flight, released))
        elif in_flight is not None:
            back = failure(self, error)
            try:
                wait_for(in_flight, lambda: in_flight.owner.hand_back(in_flight, [back]))
            except Fenced:  # the client is closed, or the message is no longer in flight
                in_flight.late("the failure", self._number, self._number + 1, self)


def wait_for(in_flight: InFlightWindow | None, dispose: Callable[[], Awaitable[object]]) -> None:
    """[any thread] Have the client's loop give a disposition, after those before it, and wait until it is done. Raises
    UsageError and Fenced.
    """
    if in_flight is None:
        raise UsageError("messages of solo consumers and of at_most_once groups cannot be nacked or rejected")
    done = Future[None]()
    owner = in_flight.owner
    if not owner.call_from_thread(lambda: owner.loop.create_task(_finish(_begun(dispose), done))):
        raise closed_error()
    done.result()


def _begun(dispose: Callable[[], Awaitable[object]]) -> Awaitable[object]:
    """Give a disposition now; the result raises its error."""
    try:
        return dispose()
    except Exception as error:
        return _raising(error)


async def _raising(error: Exception) -> None:
    raise error


async def _finish(disposition: Awaitable[object], done: Future[None]) -> None:
    try:
        await disposition
    except BaseException as error:
        done.set_exception(closed_error() if isinstance(error, asyncio.CancelledError) else error)
    else:
        done.set_result(None)


def closed_error() -> Fenced:
    """Return the error for dispositions after the client was closed."""
    return Fenced(
        "the client is closed, and handed back all messages without a disposition; call nack and reject inside "
        "the block of `client.subscribe(...)`"
    )


class SyncMessageBatch(MessageBatch):
    """The messages of one ``SyncConsumer.pull_batch``: a ``MessageBatch`` of ``SyncMessage``, whose dispositions are
    plain calls, from any thread; use it with ``with``.
    """

    __slots__ = ()

    _kind = SyncMessage

    @overload
    def __getitem__(self, index: int) -> SyncMessage: ...
    @overload
    def __getitem__(self, index: slice | Mask) -> Self: ...
    def __getitem__(self, index: int | slice | Mask) -> SyncMessage | Self:
        """Return one message, or the batch of those that a slice or a mask selects. See ``MessageBatch``."""
        return super().__getitem__(index)  # type: ignore[return-value]  # made by _kind

    def __iter__(self) -> Iterator[SyncMessage]:
        return each_message(self._runs, SyncMessage)

    def __reversed__(self) -> Iterator[SyncMessage]:
        return (self[index] for index in range(len(self) - 1, -1, -1))

    def ack(self, *, wait: bool = False) -> None:  # type: ignore[override]  # a plain call
        """Acknowledge all messages; with *wait* return once the broker has the acks. See ``MessageBatch.ack``."""
        self._do("ack()", super().ack, wait=wait)

    def nack(self, delay: Duration | None = None, reason: str = "") -> None:  # type: ignore[override]  # waits by itself
        """Hand all messages back as failed. See ``MessageBatch.nack``."""
        self._wait(FailedAttempt(Disposition.NACK, check_delay(delay), check_reason(reason)))

    def reject(self, reason: str) -> None:  # type: ignore[override]  # likewise
        """Make all messages dead letters. See ``MessageBatch.reject``."""
        self._wait(FailedAttempt(Disposition.REJECT, None, check_reason(reason)))

    def release(self, after: Duration | None = None, *, wait: bool = False) -> None:  # type: ignore[override]  # a plain call
        """Hand all messages back unhandled; with *wait* return once the broker has them. See
        ``MessageBatch.release``.
        """
        check_delay(after)
        self._do("release()", lambda: super(SyncMessageBatch, self).release(after), wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Acknowledge all messages, or nack them after an exception, which goes on. See ``MessageBatch.__aexit__``."""
        if error is None:
            self.ack()
        elif not isinstance(error, Exception):
            self._do("the release", self._released, wait=False)
        elif windows := self._windows():
            with suppress(Fenced):
                wait_for(windows[0], lambda: self._fail(error))

    def _do(self, call: str, dispose: Callable[[], Any], *, wait: bool) -> None:
        windows = self._windows()
        if not windows:
            return
        if wait:
            wait_for(windows[0], dispose)
        elif not windows[0].owner.call_from_thread(dispose):
            for in_flight, start, end in self._ranges():
                in_flight.late(call, start, end, self)

    def _wait(self, attempt: FailedAttempt) -> None:
        windows = self._windows()
        if windows or self._runs:
            wait_for(windows[0] if windows else None, lambda: self._hand_back(attempt))


class SyncConsumer:
    """A consumer of a group, or of its own. ``SyncClient.subscribe`` makes it; use it with ``with``.

    In the child of a fork it subscribes again at the first call. As with ``Consumer``, an exception that ends its block
    nacks the messages that the program got and gave no disposition.
    """

    def __init__(
        self, current_thread: Callable[[], ClientThread], make: Callable[[Brokers], Puller | MultiBrokerPuller]
    ) -> None:
        """*current_thread* returns the client thread of the process that calls it."""
        self._current_thread = current_thread
        self._make = make
        self._thread = current_thread()
        self._puller = make(self._thread.parts.brokers)
        self._feed = MessageFeed(self._puller, SyncMessage, self._thread.parts.brokers.consumers)

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._puller.id

    @property
    def damaged(self) -> int:
        """The count of parts of answers that were left out because they are damaged, on disk or by their sender."""
        return self._puller.damaged

    @property
    def on_failed(self) -> Callable[[SyncMessage, BaseException], object] | None:
        """A function that is called with each message that failed and the error, in the thread that handled it. See
        ``Consumer.on_failed``.
        """
        return self._puller.pullers[0].failures.on_failed

    @on_failed.setter
    def on_failed(self, call: Callable[[SyncMessage, BaseException], object] | None) -> None:
        for puller in self._puller.pullers:
            puller.failures.on_failed = call

    @property
    def on_unreadable(self) -> Callable[[BadBatch], object] | None:
        """A function that is called with each unreadable piece, in the client's thread. See
        ``Consumer.on_unreadable``.
        """
        return self._puller.pullers[0].on_unreadable

    @on_unreadable.setter
    def on_unreadable(self, call: Callable[[BadBatch], object] | None) -> None:
        for puller in self._puller.pullers:
            puller.on_unreadable = call

    def __enter__(self) -> Self:
        """Subscribe; wait while no broker can be reached. Raises the error with which the broker refuses it."""
        self._thread.run(self._feed.enter(), lambda _: self._puller.leave_now())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Unsubscribe; messages without a disposition are handed back."""
        if self._thread.pid == os.getpid():
            self._thread.run(self._feed.leave(error))

    def pull(self, max_count: int = 100, min_count: int = 1, timeout: Duration | None = None) -> list[SyncMessage]:
        """Return up to *max_count* messages, once *min_count* are there, or after *timeout* seconds fewer or none."""
        return messages_of(self._pull(max_count, min_count, timeout, PULL_BYTES), SyncMessage)

    def pull_batch(
        self, max_count: int = 10_000, min_count: int = 1, timeout: Duration | None = None
    ) -> SyncMessageBatch:
        """Do as ``pull``, but return columns: no object for each message, and up to 16 MiB at a time."""
        return SyncMessageBatch(self._pull(max_count, min_count, timeout, BATCH_BYTES))

    def flush(self) -> None:
        """Wait until every ack so far is confirmed. Raises Fenced, which says how many were refused.

        Of several threads that take messages, each is told of all refusals once.
        """
        if self._thread.pid == os.getpid():
            self._thread.run(self._feed.flush(threading.current_thread()))

    def __iter__(self) -> Iterator[SyncMessage]:
        """Yield message after message until ``stop``; wait while there are none. See ``Consumer.__aiter__``.

        for message in consumer:
            with message:
                print(message.subject, message.body)
        """
        while not self._feed.stopped or self._feed.has_ready:
            self._resubscribe()
            self._feed.note(threading.current_thread())
            yield from self._feed.ready
            self._thread.run(self._feed.refill())

    def run(self, handle: Callable[[SyncMessage], object], *, concurrency: int = 1, drain: Duration = 30) -> None:
        """Call *handle* with each message, in *concurrency* threads, until ``stop``, SIGTERM or SIGINT.

            def handle(message: qmq.SyncMessage) -> None:
                print(message.subject, message.json())

            consumer.run(handle, concurrency=8, drain="30s")

        It does as ``Consumer.run``: returns ack, errors nack. The calling thread waits, and handles the signals if it
        is the main thread. A handler in a thread cannot be cancelled: one that does not end within *drain* goes on in
        its thread when the run returns, and its message is released at the end of the consumer's block.
        """
        self._resubscribe()
        run = ThreadRun(self._thread, self._feed, handle, concurrency)
        seconds = seconds_of("drain", drain)
        with calling_at_signals(run.signalled):
            run.until_stopped(seconds)

    def stop(self) -> None:
        """[any thread] Take no more messages: ``run`` and loops end after the messages in hand, and pulls return none.
        See ``Consumer.stop``.
        """
        if self._thread.pid == os.getpid():
            self._thread.call(self._feed.stop)

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called, or a signal has stopped ``run``."""
        return self._feed.stopped

    def _pull(self, max_count: int, min_count: int, timeout: Duration | None, max_bytes: int) -> list[Run]:
        self._resubscribe()
        self._feed.note(threading.current_thread())
        puller = self._puller
        return self._thread.run(self._feed.pull(max_count, min_count, timeout, max_bytes), puller.put_back)

    def _resubscribe(self) -> None:
        """Subscribe in this process, if a fork has copied the consumer."""
        thread = self._current_thread()
        if thread is not self._thread:
            puller = self._make(thread.parts.brokers)
            _share_calls(self._puller, puller)
            feed = MessageFeed(puller, SyncMessage, thread.parts.brokers.consumers)
            thread.run(feed.enter(), lambda _: puller.leave_now())
            self._thread, self._puller, self._feed = thread, puller, feed


def _share_calls(before: Puller | MultiBrokerPuller, after: Puller | MultiBrokerPuller) -> None:
    for old, new in zip(before.pullers, after.pullers, strict=True):
        new.on_unreadable, new.failures.on_failed = old.on_unreadable, old.failures.on_failed

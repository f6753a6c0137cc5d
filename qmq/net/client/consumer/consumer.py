"""The consumer that a program uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self

from qmq.durations import Duration, seconds_of
from qmq.errors import BadBatch
from qmq.net.client.brokers import OpenConsumer
from qmq.net.client.consumer.feed import MessageFeed
from qmq.net.client.consumer.message import Message, MessageBatch, messages_of
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.pull import Puller
from qmq.net.client.consumer.run import Handler, HandlerRun
from qmq.net.client.options import BATCH_BYTES, PULL_BYTES
from qmq.net.client.stop_signals import calling_at_signals


class Consumer:
    """Takes messages of a group, or of subjects as a solo consumer. Made by ``Client.subscribe``, used as ``async
    with``.

    Several tasks may share one consumer; their pulls run one after another.

    When an Exception ends the consumer's block, the messages that the program was given and that have no disposition
    (ack, nack, release, reject) have failed: each counts an attempt with the exception as the reason, is delivered
    again after the group's delay (or that of ``qmq.Retry``), and is dead when that was its last attempt. A loop gives
    the program each message that it reaches; ``pull`` and ``pull_batch`` give all messages that they return. Messages
    that the program was not given are released, and so are all messages when the block ends normally or by
    CancelledError, KeyboardInterrupt, SystemExit or GeneratorExit: that counts no attempt.
    """

    def __init__(self, puller: Puller | MultiBrokerPuller, consumers: set[OpenConsumer], client: object = None) -> None:
        """Make a consumer that pulls by *puller* and keeps *client* alive as long as it lives itself."""
        self._client = client
        self._puller = puller
        self._feed = MessageFeed(puller, Message, consumers)

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._puller.id

    @property
    def damaged(self) -> int:
        """How many pieces of answers were left out because they are damaged and cannot be read."""
        return self._puller.damaged

    @property
    def on_failed(self) -> Callable[[Message, BaseException], object] | None:
        """A function that is called with each message that failed and the error, or None.

        A message fails when its handler in ``run`` or its block ``async with message`` raises an error, ``qmq.Retry``
        too. The failure is also a log record of the logger ``qmq.client`` with the fields message_id, subject, key,
        attempt, group, consumer, program (the client's name), max_attempts and retry_in (seconds; None: it is dead).
        Errors that the function raises are logged.

            consumer.on_failed = lambda message, error: sentry_sdk.capture_exception(error)
        """
        return self._puller.pullers[0].failures.on_failed

    @on_failed.setter
    def on_failed(self, call: Callable[[Message, BaseException], object] | None) -> None:
        for puller in self._puller.pullers:
            puller.failures.on_failed = call

    @property
    def on_unreadable(self) -> Callable[[BadBatch], object] | None:
        """A function that is called with a ``qmq.BadBatch`` for each piece that ``damaged`` counts, or None. Errors
        that it raises are logged.

            consumer.on_unreadable = lambda piece: print("cannot be read:", piece)
        """
        return self._puller.pullers[0].on_unreadable

    @on_unreadable.setter
    def on_unreadable(self, call: Callable[[BadBatch], object] | None) -> None:
        for puller in self._puller.pullers:
            puller.on_unreadable = call

    async def __aenter__(self) -> Self:
        """Subscribe; wait while no broker can be reached. Raises the broker's refusal, such as TooManyConsumers.

        When the call is cancelled, no subscription is left behind.
        """
        await self._feed.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave: have acks confirmed as far as there is time, and have the broker end the subscription.

        Messages without a disposition are released. Cancelling this call ends only the wait; the consumer has left.
        """
        await self._feed.leave(error)

    async def pull(self, max_count: int = 100, min_count: int = 1, timeout: Duration | None = None) -> list[Message]:
        """Return up to *max_count* messages as soon as there are *min_count*, or those there are after *timeout*
        seconds.

        Without a timeout the call waits without limit, also while no broker can be reached. An answer has at most 4 MiB
        (or one larger message), so there may be fewer messages than *min_count*. Raises InvalidOption, and errors that
        a retry cannot mend.
        """
        return messages_of(await self._feed.pull(max_count, min_count, timeout, PULL_BYTES), Message)

    async def pull_batch(
        self, max_count: int = 10_000, min_count: int = 1, timeout: Duration | None = None
    ) -> MessageBatch:
        """Pull as ``pull`` does, but return columns: no object per message, and up to 16 MiB at a time."""
        return MessageBatch(await self._feed.pull(max_count, min_count, timeout, BATCH_BYTES))

    async def flush(self) -> None:
        """Wait until every ack so far is confirmed. Raises Fenced, which says how many were refused.

        Of several tasks that take messages, each is told of all refusals once.
        """
        await self._feed.flush(asyncio.current_task())

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        """Yield message after message until ``stop``; wait while there are none, also while no broker can be reached.

            async for message in consumer:
                async with message:
                    print(message.subject, message.body)

        The loop takes several messages from the broker at a time, about as many as it handles in a tenth of a second.
        When the loop is left, the next pull returns the messages that it had not reached; messages that it does not
        reach within a second are released. A handler is stopped because its message is no longer in flight only inside
        ``async with message`` and in ``run``.
        """
        feed = self._feed
        feed.note(asyncio.current_task())
        while not feed.stopped or feed.has_ready:  # a stop may come just after an at_most_once group gave messages
            for message in feed.ready:
                yield message
            await feed.refill()

    async def run(self, handle: Handler, *, concurrency: int = 1, drain: Duration = 30) -> None:
        """Call *handle* with each message, up to *concurrency* at a time, until ``stop``, SIGTERM or SIGINT.

            async def handle(message: qmq.Message) -> None:
                print(message.subject, message.json())

            await consumer.run(handle, concurrency=8, drain="30s")

        When the handler returns, its message is acked. When it raises an error, the message is nacked, the failure is
        logged, ``on_failed`` is called, and the run goes on: the message comes again after the group's delay, or that
        of ``qmq.Retry(after=...)``. A handler that calls ``message.reject()`` or another disposition has decided
        itself. When a message is no longer in flight, its handler is cancelled.

        To stop, the run takes no more messages, releases those that no handler has begun, waits up to *drain* for the
        handlers that run, cancels those that are left, which releases their messages, and returns. A second signal
        cancels them at once. Signals reach a run in the main thread only; handlers of signals that the program had are
        called too. A run that is cancelled cancels its handlers. Raises InvalidOption, and errors that a retry cannot
        mend.
        """
        run = HandlerRun(self._feed, handle, concurrency)
        loop = asyncio.get_running_loop()
        with calling_at_signals(lambda: loop.call_soon_threadsafe(run.signalled)):
            await run.until_stopped(seconds_of("drain", drain))

    def stop(self) -> None:
        """Take no more messages: ``run`` and ``async for`` end after the messages in hand, and pulls return none.

            loop.add_signal_handler(signal.SIGTERM, consumer.stop)

        Messages that were taken and not reached are released. Call it in the thread of the event loop. A stopped
        consumer stays stopped.
        """
        self._feed.stop()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called, or a signal has stopped ``run``."""
        return self._feed.stopped

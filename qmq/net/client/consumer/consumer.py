"""The consumer that a program uses, and the loop over its messages with its prefetch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import chain, repeat
from operator import length_hint
from types import TracebackType
from typing import Final, Generic, Self

from qmq.durations import Duration
from qmq.format.run import Run
from qmq.net.client.consumer.message import M, Message, MessageBatch, delivery_sequences_of, messages_of
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.pull import Puller, release
from qmq.net.client.options import BATCH_BYTES, PULL_BYTES

#: Seconds after which a loop that reaches no message releases those it holds: its handler may take forever.
STUCK_AFTER: Final = 1.0

#: Seconds of work that a loop takes at a time.
PREFETCH_SECONDS: Final = 0.1
#: A solo consumer takes no messages from others, so it begins with more than one.
FIRST_SOLO_PREFETCH: Final = 16
MAX_PREFETCH: Final = 32_768


class Prefetch:
    """Decides how many messages one loop takes from the broker at a time. No I/O; time is an argument.

    Messages that one consumer of a group has received are not available to the others. So the loop takes about as many
    as it handles in PREFETCH_SECONDS at the rate of the messages before, and at least one: a slow consumer leaves none
    waiting, and a fast one seldom pulls.
    """

    def __init__(self, is_solo: bool) -> None:
        self._count = FIRST_SOLO_PREFETCH if is_solo else 1
        self._last_count = 0
        self._last_at = 0.0

    def wanted(self, now: float) -> int:
        """Return how many messages to take next, from the time that the last ones took."""
        if not self._last_count:
            return self._count
        took = now - self._last_at
        fits = max(int(self._last_count * PREFETCH_SECONDS / took), 1) if took > 0 else MAX_PREFETCH
        if fits < self._count:
            self._count = fits
        elif self._last_count > self._count // 2:  # a batch comes as a whole, so the count is rarely the one asked for
            self._count = min(2 * self._count, fits, MAX_PREFETCH)
        return self._count

    def record(self, count: int, now: float) -> None:
        """Record that *count* messages were received at *now*."""
        self._last_count, self._last_at = count, now


class MessageFeed(Generic[M]):
    """Holds the messages that a loop has taken from the broker and has not reached yet."""

    def __init__(self, puller: Puller | MultiBrokerPuller, kind: type[M]) -> None:
        #: The next messages. Messages that are removed from the feed do not come out of it.
        self.ready: Iterator[M] = iter(())
        self._puller = puller
        self._kind = kind
        self._prefetch = Prefetch(puller.is_solo)
        self._runs: deque[Run] = deque()
        # The run that is handed out, and an iterator over its next messages. A loop in another thread may advance it.
        self._current: tuple[Run | None, Iterator[int]] = None, iter(())
        self._timer: asyncio.TimerHandle | None = None
        for ack_sender in puller.ack_senders:
            ack_sender.on_dropped.append(self._drop)

    async def refill(self) -> None:
        """Wait for the next messages and put them into ``ready``: fewer when the last ones took long to handle."""
        loop = asyncio.get_running_loop()
        runs = await self._puller.pull(self._prefetch.wanted(loop.time()), 1, None)
        self._prefetch.record(sum(run.count for run in runs), loop.time())
        self._runs += runs
        self.ready = chain.from_iterable(self._views())
        if self._timer is None and not self._puller.is_solo:
            self._watch(loop)

    async def pull(self, max_count: int, min_count: int, timeout: Duration | None, max_bytes: int) -> list[Run]:
        """Pull as ``Puller.pull`` does, and return the messages that the loop has not reached first."""
        left = self.take_rest()
        if left:
            self._puller.put_back(left)
        return await self._puller.pull(max_count, min_count, timeout, max_bytes)

    async def leave(self, error: BaseException | None) -> None:
        """Have the puller leave. An Exception as *error* fails the messages given out without a disposition."""
        if isinstance(error, Exception) and not self._puller.is_solo:
            release(self.take_rest())
        await self._puller.leave(error)

    def take_rest(self) -> list[Run]:
        """Return the messages that the loop has not reached, and remove them from it."""
        run, coming = self._current
        left = list(coming)
        rest = []
        if run is not None and left:
            rest.append(run.slice(left[0] - run.delivery_sequence, run.count))
        while self._runs:
            rest.append(self._runs.popleft())
        return rest

    def _views(self) -> Iterator[Iterator[M]]:
        while self._runs:
            run = self._runs.popleft()
            if run.in_flight is not None and run.in_flight.fenced is not None:
                continue
            coming = iter(delivery_sequences_of(run))
            self._current = run, coming
            yield map(self._kind, repeat(run), coming, run.bodies())

    def _drop(self) -> None:
        """Remove the messages of the current run from the loop if they are no longer in flight."""
        run, coming = self._current
        if run is not None and run.in_flight.fenced is not None:
            deque(coming, maxlen=0)

    def _left(self) -> int:
        return length_hint(self._current[1]) + sum(run.count for run in list(self._runs))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._left()
        self._timer = loop.call_later(STUCK_AFTER, self._look, loop, left) if left else None

    def _look(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """Release the messages that the loop has not reached, if it has reached none since the last look."""
        self._timer = None
        if self._left() == before:
            release([run for run in self.take_rest() if run.in_flight.fenced is None])
        self._watch(loop)


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

    def __init__(self, puller: Puller | MultiBrokerPuller, client: object = None) -> None:
        """Make a consumer that pulls by *puller* and keeps *client* alive as long as it lives itself."""
        self._client = client
        self._puller = puller
        self._feed = MessageFeed(puller, Message)

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._puller.id

    @property
    def damaged(self) -> int:
        """How many pieces of answers were left out because they are damaged and cannot be read."""
        return self._puller.damaged

    @property
    def on_error(self) -> Callable[[Exception], object] | None:
        """A function that is called with errors, or None.

        It is called with each error but ``qmq.Retry`` by which the program leaves `async with message`, and with a
        BadBatch for each piece that ``damaged`` counts. Errors that the function raises are logged.
        """
        return self._puller.on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._puller.on_error = call

    async def __aenter__(self) -> Self:
        """Subscribe; wait while no broker can be reached. Raises the broker's refusal, such as TooManyConsumers.

        When the call is cancelled, no subscription is left behind.
        """
        await self._puller.enter()
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
        """Wait until every ack so far is confirmed. Raises Fenced, which says how many were refused."""
        await self._puller.flush()

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        """Yield message after message, without end; wait while there are none, also while no broker can be reached.

        The loop takes several messages from the broker at a time, about as many as it handles in a tenth of a second.
        When the loop is left, the next pull returns the messages that it had not reached; messages that it does not
        reach within a second are released. A handler is stopped because its message is no longer in flight only inside
        ``async with message``.
        """
        feed = self._feed
        while True:
            for message in feed.ready:
                yield message
            await feed.refill()

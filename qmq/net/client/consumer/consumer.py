"""Consumers: messages of a group, or of one who follows alone, as they are handed to a program.

Messages one after another, for a loop over them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import chain, repeat
from operator import length_hint
from types import TracebackType
from typing import Final, Generic, Self

from qmq.format.run import Run
from qmq.net.client.consumer.message import M, Message, MessageBatch, delivery_sequences_of, messages_of
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.pull import Puller, release
from qmq.net.client.options import BATCH_BYTES, PULL_BYTES

#: What a loop has not come to for so long, it hands back to others: its handler may take forever.
STUCK_AFTER: Final = 1.0

#: Seconds of work that are taken at a time.
PREFETCH_SECONDS: Final = 0.1
#: Who follows alone takes nothing from others.
FIRST_SOLO_PREFETCH: Final = 16
MAX_PREFETCH: Final = 32_768


class Prefetch:
    """Of one loop."""

    def __init__(self, is_solo: bool) -> None:
        self._count = FIRST_SOLO_PREFETCH if is_solo else 1
        self._came = 0
        self._came_at = 0.0

    def wanted(self, now: float) -> int:
        """How many to take, as those that came before are handled."""
        if not self._came:
            return self._count
        took = now - self._came_at
        fits = max(int(self._came * PREFETCH_SECONDS / took), 1) if took > 0 else MAX_PREFETCH
        if fits < self._count:
            self._count = fits
        elif self._came > self._count // 2:  # batches go whole, so it is rarely all that was asked for
            self._count = min(2 * self._count, fits, MAX_PREFETCH)
        return self._count

    def came(self, count: int, now: float) -> None:
        """So many were taken."""
        self._came, self._came_at = count, now


class MessageFeed(Generic[M]):
    """What a loop takes, some at a time, and has not come to."""

    def __init__(self, puller: Puller | MultiBrokerPuller, kind: type[M]) -> None:
        #: The next messages; what is taken away from it meanwhile does not come.
        self.ready: Iterator[M] = iter(())
        self._puller = puller
        self._kind = kind
        self._prefetch = Prefetch(puller.is_solo)
        self._runs: deque[Run] = deque()
        # The run that is handed out, and which of its messages come next. A loop in another thread may be at it.
        self._current: tuple[Run | None, Iterator[int]] = None, iter(())
        self._timer: asyncio.TimerHandle | None = None
        for ack_sender in puller.ack_senders:
            ack_sender.on_dropped.append(self._drop)

    async def refill(self) -> None:
        """Wait for the next messages and put them into ``ready``: fewer when those before took long to handle."""
        loop = asyncio.get_running_loop()
        runs = await self._puller.pull(self._prefetch.wanted(loop.time()), 1, None)
        self._prefetch.came(sum(run.count for run in runs), loop.time())
        self._runs += runs
        self.ready = chain.from_iterable(self._views())
        if self._timer is None and not self._puller.is_solo:
            self._watch(loop)

    async def pull(self, max_count: int, min_count: int, timeout: float | None, max_bytes: int) -> list[Run]:
        """As the puller's, but what was not come to is first."""
        left = self.take_rest()
        if left:
            self._puller.put_back(left)
        return await self._puller.pull(max_count, min_count, timeout, max_bytes)

    async def leave(self, error: BaseException | None) -> None:
        """Have the puller leave. An Exception as *error* fails what was handed out and has no disposition."""
        if isinstance(error, Exception) and not self._puller.is_solo:
            release(self.take_rest())
        await self._puller.leave(error)

    def take_rest(self) -> list[Run]:
        """What was not come to: it does not come any more."""
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
        """Something is not in flight any more: it does not come."""
        run, coming = self._current
        if run is not None and run.in_flight.fenced is not None:
            deque(coming, maxlen=0)

    def _left(self) -> int:
        return length_hint(self._current[1]) + sum(run.count for run in list(self._runs))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._left()
        self._timer = loop.call_later(STUCK_AFTER, self._look, loop, left) if left else None

    def _look(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        """Hand back what the loop has not come to, when it has come to nothing of it."""
        self._timer = None
        if self._left() == before:
            release([run for run in self.take_rest() if run.in_flight.fenced is None])
        self._watch(loop)


class Consumer:
    """Takes messages of a group, or follows alone. Made by ``Client.subscribe``, used as ``async with``.

    Several tasks may share one consumer; their pulls go one after another.

    When an Exception ends its block, it has failed the messages that the program was given and that have no disposition
    (ack, nack, release, reject): each counts an attempt with the exception as the reason, comes again after the group's
    delay (or that of ``qmq.Retry``), and is dead when that was its last. A loop is given each message that it comes to;
    ``pull`` and ``pull_batch`` give all that they return. What the program was not given is released, and so is
    everything where the block ends by itself, or by CancelledError, KeyboardInterrupt, SystemExit or GeneratorExit:
    that counts as no attempt.
    """

    def __init__(self, puller: Puller | MultiBrokerPuller, client: object = None) -> None:
        """*client*: not to be let go of as long as the consumer is there."""
        self._client = client
        self._puller = puller
        self._feed = MessageFeed(puller, Message)

    @property
    def id(self) -> str:
        """The consumer's id."""
        return self._puller.id

    @property
    def damaged(self) -> int:
        """Pieces of answers that were left out because nobody can read them: rotten, or made wrong by their sender."""
        return self._puller.damaged

    @property
    def on_error(self) -> Callable[[Exception], object] | None:
        """Called, when it is set, with each error but ``qmq.Retry`` by which the program left `async with message`, and
        with a BadBatch for each piece that ``damaged`` counts. What it raises itself is logged.
        """
        return self._puller.on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._puller.on_error = call

    async def __aenter__(self) -> Self:
        """Subscribe; waits while no broker can be reached. Raises what the broker refuses it with, such as
        TooManyConsumers. Who cancels this leaves no subscription behind.
        """
        await self._puller.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave: acknowledgements are confirmed, as far as there is time, and the broker forgets the subscription.

        Messages without a disposition are handed back. Who cancels this ends the wait only: the consumer has left even
        so.
        """
        await self._feed.leave(error)

    async def pull(self, max_count: int = 100, min_count: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to *max_count* messages, once *min_count* are there; what is there, maybe [], after *timeout* seconds.

        Waits without end when there is no timeout, also while no broker can be reached. At most 4 MiB come at a time
        (one message always does), so it may be fewer than *min_count*. Raises InvalidOption, and what trying again
        can't help.
        """
        return messages_of(await self._feed.pull(max_count, min_count, timeout, PULL_BYTES), Message)

    async def pull_batch(
        self, max_count: int = 10_000, min_count: int = 1, timeout: float | None = None
    ) -> MessageBatch:
        """As ``pull``, but as columns: no object per message, and up to 16 MiB at a time."""
        return MessageBatch(await self._feed.pull(max_count, min_count, timeout, BATCH_BYTES))

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced, which says how many were refused."""
        await self._puller.flush()

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        """Message after message, without end; waits while there are none, also while no broker can be reached.

        They are taken from the broker some at a time, about as many as are handled in a tenth of a second. Those that
        the loop was left before come with the next pull; what it has not come to for a second is handed back.
        A message that is not in flight any more stops its handler inside ``async with message`` only.
        """
        feed = self._feed
        while True:
            for message in feed.ready:
                yield message
            await feed.refill()

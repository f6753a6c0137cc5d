"""Consumers: messages of a group, or of one who follows alone, as they are handed to a program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import chain
from types import TracebackType
from typing import Final, Generic, Self

from qmq.format.run import Run
from qmq.net.merging import MergedPuller
from qmq.net.messages import M, Message, MessageBatch, each_message, messages_of, runs_of
from qmq.net.pulling import Puller

#: `async for` takes as many messages at a time as are handled in about this time (seconds), so that others get theirs.
HAND_OUT: Final = 0.02
FIRST_HAND_OUT: Final = 16
MOST_HAND_OUT: Final = 32_768


class Feed(Generic[M]):
    """Messages one after another, for a loop over them; taken some at a time."""

    def __init__(self, puller: Puller | MergedPuller, kind: type[M]) -> None:
        #: What was taken and not come to.
        self.ready: Iterator[M] = iter(())
        self._puller = puller
        self._kind = kind
        # What a consumer of a group has in hand, others can't have: a slow one must not begin with many.
        self._hand_out = FIRST_HAND_OUT if puller.is_alone else 1
        self._handed_out = 0
        self._handed_out_at = 0.0

    async def refill(self) -> None:
        """Wait for the next messages and put them into ``ready``: fewer when those before took long to handle."""
        clock = asyncio.get_running_loop().time
        took = clock() - self._handed_out_at
        if took > 2 * HAND_OUT and self._handed_out:
            self._hand_out = max(int(self._handed_out * HAND_OUT / took), 1)
        elif self._handed_out > self._hand_out // 2:  # batches go whole, so it is rarely all that was asked for
            self._hand_out = min(self._hand_out * 2, MOST_HAND_OUT)
        runs = await self._puller.pull(self._hand_out, 1, None)
        self._handed_out, self._handed_out_at = sum(run.count for run in runs), clock()
        left = list(self.ready)  # which another task may have put there meanwhile
        fresh = each_message(runs, self._kind)
        self.ready = chain(left, fresh) if left else fresh

    async def pull(self, max_count: int, min_count: int, timeout: float | None) -> list[Run]:
        """As the puller's, but what was not come to is first."""
        left = list(self.ready)
        if left:
            self._puller.put_back(runs_of(left))
        return await self._puller.pull(max_count, min_count, timeout)


class Consumer:
    """Takes messages of a group, or follows alone. Made by ``Client.subscribe``, used as ``async with``.

    Several tasks may share one consumer; their pulls go one after another.
    """

    def __init__(self, puller: Puller | MergedPuller) -> None:
        self._puller = puller
        self._feed = Feed(puller, Message)

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
        """Called with the error for each such piece, when it is set. What it raises is logged."""
        return self._puller.on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._puller.on_error = call

    async def __aenter__(self) -> Self:
        """Subscribe; waits while no broker can be reached. Raises what the broker refuses it with."""
        await self._puller.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave: the broker forgets the subscription."""
        await self._puller.leave()

    async def pull(self, max_count: int = 100, min_count: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to *max_count* messages, once *min_count* are there; what is there, maybe [], after *timeout* seconds.

        Waits without end when there is no timeout, also while no broker can be reached. At most 4 MiB come at a time
        (one message always does), so it may be fewer than *min_count*. Raises InvalidOption, and what trying again
        can't help.
        """
        return messages_of(await self._feed.pull(max_count, min_count, timeout), Message)

    async def pull_batch(
        self, max_count: int = 10_000, min_count: int = 1, timeout: float | None = None
    ) -> MessageBatch:
        """As ``pull``, but as columns: no object per message."""
        return MessageBatch(await self._feed.pull(max_count, min_count, timeout))

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced, which says how many were refused."""
        await self._puller.flush()

    async def __aiter__(self) -> AsyncGenerator[Message, None]:
        """Message after message, without end; waits while there are none, also while no broker can be reached.

        They are taken from the broker some at a time. Those that the loop was left before come with the next pull.
        """
        feed = self._feed
        while True:
            for message in feed.ready:
                yield message
            await feed.refill()

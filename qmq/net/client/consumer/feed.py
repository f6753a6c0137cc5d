"""Messages one after another, for a loop over them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from operator import length_hint
from typing import Final, Generic

from qmq.format.run import Run
from qmq.net.client.consumer.kept import release
from qmq.net.client.consumer.message import M, numbers
from qmq.net.client.consumer.multi_broker import MergedPuller
from qmq.net.client.consumer.prefetch import Prefetch
from qmq.net.client.consumer.pull import Puller

#: What a loop has not come to for so long, it hands back to others: its handler may take forever.
STUCK_AFTER: Final = 1.0


class Feed(Generic[M]):
    """What a loop takes, some at a time, and has not come to."""

    def __init__(self, puller: Puller | MergedPuller, kind: type[M]) -> None:
        #: The next messages; what is taken away from it meanwhile does not come.
        self.ready: Iterator[M] = iter(())
        self._puller = puller
        self._kind = kind
        self._prefetch = Prefetch(puller.is_alone)
        self._runs: deque[Run] = deque()
        # The run that is handed out, and which of its messages come next. A loop in another thread may be at it.
        self._current: tuple[Run | None, Iterator[int]] = None, iter(())
        self._timer: asyncio.TimerHandle | None = None
        for holder in puller.holders:
            holder.on_dropped.append(self._drop)

    async def refill(self) -> None:
        """Wait for the next messages and put them into ``ready``: fewer when those before took long to handle."""
        loop = asyncio.get_running_loop()
        runs = await self._puller.pull(self._prefetch.wanted(loop.time()), 1, None)
        self._prefetch.came(sum(run.count for run in runs), loop.time())
        self._runs += runs
        self.ready = chain.from_iterable(self._views())
        if self._timer is None and not self._puller.is_alone:
            self._watch(loop)

    async def pull(self, max_count: int, min_count: int, timeout: float | None, max_bytes: int) -> list[Run]:
        """As the puller's, but what was not come to is first."""
        left = self.take_rest()
        if left:
            self._puller.put_back(left)
        return await self._puller.pull(max_count, min_count, timeout, max_bytes)

    async def leave(self, error: BaseException | None) -> None:
        """Have the puller leave. An Exception as *error* fails what was handed out and has no disposition."""
        if isinstance(error, Exception) and not self._puller.is_alone:
            release(self.take_rest())
        await self._puller.leave(error)

    def take_rest(self) -> list[Run]:
        """What was not come to: it does not come any more."""
        run, coming = self._current
        left = list(coming)
        rest = []
        if run is not None and left:
            rest.append(run.slice(left[0] - run.pull_sequence, run.count))
        while self._runs:
            rest.append(self._runs.popleft())
        return rest

    def _views(self) -> Iterator[Iterator[M]]:
        while self._runs:
            run = self._runs.popleft()
            if run.holder is not None and run.holder.fenced is not None:
                continue
            coming = iter(numbers(run))
            self._current = run, coming
            yield map(self._kind, repeat(run), coming, run.bodies())

    def _drop(self) -> None:
        """Something is not held any more: it does not come."""
        run, coming = self._current
        if run is not None and run.holder.fenced is not None:
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
            release([run for run in self.take_rest() if run.holder.fenced is None])
        self._watch(loop)

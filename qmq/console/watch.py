"""Asks the brokers for their statistics, once for all who look: each second while somebody looks, else every 10 s.

Where there are so many groups that an answer takes long, it asks less often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Protocol, Self

from qmq import BrokerStats, Client, QmqError, connect
from qmq.console.snapshot import Away, Snapshot, make_snapshot
from qmq.errors import BrokersMissed

log = logging.getLogger("qmq.console")

#: Seconds between two snapshots while somebody looks, and while nobody does.
FAST_SECONDS: Final = 1.0
SLOW_SECONDS: Final = 10.0
#: With many groups a snapshot takes long: the next one comes no sooner than after this many times as long, so that the
#: console and the brokers spend a tenth of their time on it at most. SLOW_SECONDS is the limit of that.
RESTS: Final = 10
#: Who has looked in the last so many seconds, looks still.
LOOKED_SECONDS: Final = 15.0
#: A snapshot waits so long for a broker that answered before; one that is away is waited for by none.
PATIENCE_SECONDS: Final = 2.0
#: A broker has so long for an answer, before the attempt counts as failed.
_ANSWER_SECONDS: Final = 10.0


def between(took: float, fast_seconds: float, slow_seconds: float) -> float:
    """Return the seconds from one snapshot to the next while somebody looks, where the last one took so many.

    >>> between(0.02, 1.0, 10.0), between(0.6, 1.0, 10.0), between(3.0, 1.0, 10.0)
    (1.0, 6.0, 10.0)
    """
    return max(fast_seconds, min(RESTS * took, slow_seconds))


class StatsSource(Protocol):
    """Where a watch gets the statistics of one broker."""

    @property
    def broker(self) -> str: ...
    async def stats(self) -> BrokerStats: ...
    async def close(self) -> None: ...


class ClientSource:
    """One broker, asked by a client of its own, which is made anew after an error."""

    def __init__(self, url: str, broker: str, token: str | None = None, *, name: str = "console") -> None:
        """*name* is what the broker knows its connection by."""
        self.broker = broker
        self._name = name
        self._url = url
        self._token = token
        self._client: Client | None = None

    async def stats(self) -> BrokerStats:
        """Return the statistics of the broker. Raises QmqError, OSError."""
        client = self._client
        try:
            if client is None:
                client = self._client = connect(
                    self._url,
                    token=self._token,
                    name=self._name,
                    app=f"qmq {self._name}",
                    admin_timeout=_ANSWER_SECONDS,
                )
                await client
            (stats,) = await client.admin.stats()
        except BrokersMissed:  # the client connects again by itself
            raise
        except BaseException:
            await self.close()
            raise
        return stats

    async def close(self) -> None:
        """Close the client."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(QmqError, OSError):
                await client.close()


class Watch:
    """Makes a snapshot of all brokers again and again, and has the latest one. Use it with ``async with``.

    ``latest`` is number 0, and empty, before the first one. A broker that does not answer holds up none of them:
    it is in ``away`` of each.

        async with Watch([ClientSource(url, "10.0.0.5:20881")], [history.add]) as watch:
            watch.look()
            snapshot = await watch.newer_than(0)
    """

    def __init__(
        self,
        sources: Sequence[StatsSource],
        listeners: Iterable[Callable[[Snapshot], object]] = (),
        *,
        fast_seconds: float = FAST_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Each of *listeners* is called with each snapshot."""
        self.latest = Snapshot(0, datetime.now(UTC))
        self._sources = tuple(sources)
        self._listeners = tuple(listeners)
        self._fast_seconds = fast_seconds
        self._slow_seconds = slow_seconds
        self._patience_seconds = patience_seconds
        self._asked: dict[str, asyncio.Task[BrokerStats]] = {}
        self._away: dict[str, Away] = {}
        self._looked_at = float("-inf")
        self._is_wanted = False
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[Snapshot] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def missed(self) -> tuple[str, ...]:
        """The brokers that the latest snapshot lacks."""
        return tuple(self.latest.away)

    @property
    def is_alone(self) -> bool:
        """Whether the latest snapshot lacks all brokers."""
        return bool(self.latest.number) and len(self.latest.away) == len(self._sources)

    async def __aenter__(self) -> Self:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run(), name="watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ask no more, and close the connections. Who waits for a snapshot is cancelled."""
        tasks = [task for task in (self._task, *self._asked.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._next is not None:
            self._next.cancel()
        for source in self._sources:
            await source.close()

    def look(self) -> None:
        """Note that somebody looks: the next snapshots come each second."""
        self._looked_at = time.monotonic()
        self._wanted.set()

    async def newer_than(self, number: int) -> Snapshot:
        """Return a snapshot with a number above *number*: the latest, or else the next one."""
        while self.latest.number <= number:
            if self._next is None or self._next.done():
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next)
        return self.latest

    async def recent(self, seconds: float) -> Snapshot:
        """Return a snapshot that is at most so many *seconds* old, for somebody who looks from time to time only."""
        if self.latest.number and (datetime.now(UTC) - self.latest.at).total_seconds() <= seconds:
            return self.latest
        self._is_wanted = True
        self._wanted.set()
        return await self.newer_than(self.latest.number)

    async def _run(self) -> None:
        while True:
            began, took, self._is_wanted = time.monotonic(), 0.0, False
            try:
                snapshot = await self._snapshot()
                took = time.monotonic() - began
                self._publish(snapshot)
            except Exception:  # whoever looks sees an older snapshot, and the next one may succeed
                log.exception("a snapshot of the brokers failed")
            if took >= self._patience_seconds:  # a broker fell silent: whether it comes back is wanted soon
                took = 0.0
            await self._pause(began, between(took, self._fast_seconds, self._slow_seconds))

    async def _pause(self, began: float, fast_seconds: float) -> None:
        """Wait until the next snapshot is due."""
        while True:
            now = time.monotonic()
            is_fast = now - self._looked_at < LOOKED_SECONDS
            left = began + (fast_seconds if is_fast else self._slow_seconds) - now
            if left <= 0 or self._is_wanted:
                return
            self._wanted.clear()
            if is_fast:
                await asyncio.sleep(left)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), left)

    async def _snapshot(self) -> Snapshot:
        for source in self._sources:
            if source.broker not in self._asked:
                self._asked[source.broker] = asyncio.create_task(source.stats(), name=f"stats of {source.broker}")
        there = [task for broker, task in self._asked.items() if broker not in self._away]
        if there:
            await asyncio.wait(there, timeout=self._patience_seconds)
        else:
            await asyncio.sleep(0)
        now, answers = datetime.now(UTC), list[BrokerStats]()
        for source in self._sources:
            stats = self._taken(source.broker, now)
            if stats is not None:
                answers.append(stats)
        return make_snapshot(self.latest.number + 1, now, answers, self._away, self.latest)

    def _taken(self, broker: str, now: datetime) -> BrokerStats | None:
        """Return the answer of a broker; None, and note that it is away, without one."""
        task = self._asked[broker]
        error = f"no answer within {self._patience_seconds:g} s"
        if task.done():
            del self._asked[broker]
            try:
                stats = task.result()
            except (QmqError, OSError) as failure:
                error = str(failure) or repr(failure)
            else:
                if self._away.pop(broker, None) is not None:
                    log.info("the broker at %s answers again", broker)
                return stats
        elif broker in self._away:
            return None
        known = self._away.get(broker)
        if known is None:
            log.warning("the broker at %s does not answer: %s", broker, error)
        self._away[broker] = Away(now if known is None else known.since, error)
        return None

    def _publish(self, snapshot: Snapshot) -> None:
        self.latest = snapshot
        for listener in self._listeners:
            listener(snapshot)
        if self._next is not None and not self._next.done():
            self._next.set_result(snapshot)
        self._next = None

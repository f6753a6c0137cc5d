"""Asks the brokers for their statistics, once for all viewers: each second while somebody looks, else every 10 s.

If there are so many groups that an answer takes long, it asks less often.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self

from qmq import BrokerStats, Client, QmqError, connect
from qmq.console.snapshot import Away, Snapshot, make_snapshot
from qmq.errors import BrokersMissed

log = logging.getLogger("qmq.console")

#: Seconds between two snapshots while somebody looks, and while nobody does.
FAST_SECONDS: Final = 1.0
SLOW_SECONDS: Final = 10.0
#: With many groups a snapshot takes long. The time from one snapshot to the next is RESTS times the duration of the
#: last one, at most SLOW_SECONDS. Up to that limit, console and brokers spend a tenth of their time on it at most.
RESTS: Final = 10
#: Seconds for which somebody who looked once counts as looking.
LOOKED_SECONDS: Final = 15.0
#: Seconds that a snapshot waits for a broker that answered last time. No snapshot waits for a broker that is away.
PATIENCE_SECONDS: Final = 2.0
#: Seconds that a broker has for an answer before the attempt counts as failed.
_ANSWER_SECONDS: Final = 10.0


def between(took: float, fast_seconds: float, slow_seconds: float) -> float:
    """Return the seconds from the begin of one snapshot to that of the next, while somebody looks. The last one *took*
    this many seconds.

    >>> between(0.02, 1.0, 10.0), between(0.6, 1.0, 10.0), between(3.0, 1.0, 10.0)
    (1.0, 6.0, 10.0)
    """
    return max(fast_seconds, min(RESTS * took, slow_seconds))


class StatsSource(Protocol):
    """The source from which a watch gets the statistics of one broker."""

    @property
    def broker(self) -> str: ...
    async def stats(self) -> BrokerStats: ...
    async def close(self) -> None: ...


class ClientSource:
    """Asks one broker by a client of its own; after an error it makes a new client."""

    def __init__(self, url: str, broker: str, token: str | None = None, *, name: str = "console") -> None:
        """*name* is the name of the connection at the broker."""
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
    """Makes a snapshot of all brokers again and again, and keeps the latest one. Use it with ``async with``.

    Before the first snapshot ``latest`` is empty, with number 0. A broker that does not answer holds up no further
    snapshot: each has it in ``away``.

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
        """Ask no more, close the connections, and cancel the calls that wait for a snapshot."""
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
        """Return a snapshot that is at most *seconds* old, for somebody who looks only from time to time."""
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
            except Exception:  # viewers see an older snapshot, and the next one may succeed
                log.exception("a snapshot of the brokers failed")
            if took >= self._patience_seconds:  # a broker fell silent: look soon whether it is back
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
            with suppress(TimeoutError):
                async with asyncio.timeout(left):  # wait_for may lose a cancellation
                    await self._wanted.wait()

    async def _snapshot(self) -> Snapshot:
        for source in self._sources:
            if source.broker not in self._asked:
                self._ask(source)
        there = [task for broker, task in self._asked.items() if broker not in self._away]
        if there:
            await asyncio.wait(there, timeout=self._patience_seconds)
        else:
            await asyncio.sleep(0)
        now, answers = datetime.now(UTC), list[BrokerStats]()
        for source in self._sources:
            stats = self._taken(source)
            if stats is not None:
                answers.append(stats)
        return make_snapshot(self.latest.number + 1, now, answers, self._away, self.latest)

    def _ask(self, source: StatsSource) -> None:
        name = f"stats of {source.broker}"
        task = self._asked[source.broker] = asyncio.create_task(self._until_answered(source), name=name)
        task.add_done_callback(partial(self._answered, source.broker))

    async def _until_answered(self, source: StatsSource) -> BrokerStats:
        """Return the answer of a broker. One that is away is asked until it answers."""
        while True:
            try:
                return await source.stats()
            except (QmqError, OSError) as failure:
                if source.broker not in self._away:
                    raise
                self._note_away(source.broker, str(failure) or repr(failure))
                await asyncio.sleep(self._fast_seconds)

    def _answered(self, broker: str, task: asyncio.Task[BrokerStats]) -> None:
        """Make a snapshot at once of the answer of a broker that was away, else its groups would be missing longer."""
        if broker in self._away and not task.cancelled():
            self._is_wanted = True
            self._wanted.set()

    def _taken(self, source: StatsSource) -> BrokerStats | None:
        """Return the answer of a broker; without one, note that it is away and return None."""
        broker, task = source.broker, self._asked[source.broker]
        if task.done():
            del self._asked[broker]
            try:
                stats = task.result()
            except (QmqError, OSError) as failure:
                self._note_away(broker, str(failure) or repr(failure))
                self._ask(source)
                return None
            if self._away.pop(broker, None) is not None:
                log.info("the broker at %s answers again", broker)
            return stats
        if broker not in self._away:
            self._note_away(broker, f"no answer within {self._patience_seconds:g} s")
        return None

    def _note_away(self, broker: str, error: str) -> None:
        known = self._away.get(broker)
        if known is None:
            log.warning("the broker at %s does not answer: %s", broker, error)
        self._away[broker] = Away(datetime.now(UTC) if known is None else known.since, error)

    def _publish(self, snapshot: Snapshot) -> None:
        self.latest = snapshot
        for listener in self._listeners:
            listener(snapshot)
        if self._next is not None and not self._next.done():
            self._next.set_result(snapshot)
        self._next = None

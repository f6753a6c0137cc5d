"""What becomes of a message that failed when the broker it came from is gone: another broker takes it, or the spool."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

from qmq.errors import QmqError, SequenceForgotten
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.format.private import private_batch
from qmq.format.run import Run
from qmq.net.connection import Connection
from qmq.net.spool import Record, Spool
from qmq.net.wire import Kind

if TYPE_CHECKING:
    from qmq.net.brokers import Brokers

log = logging.getLogger("qmq.client")

#: What no broker takes is tried again so long after (seconds), twice as long each time, at most the second.
AGAIN_AFTER: Final = 1.0
LONGEST_AFTER: Final = 30.0


class Elsewhere:
    """Of one client: hands messages over to whatever broker is there, and what was spooled once one is."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._spool = Spool([str(link.address) for link in brokers.links])
        self._spooling = asyncio.Lock()
        self._producer_id = os.urandom(PRODUCER_ID_SIZE)
        self._next_number = 0
        self._replaying: asyncio.Task[None] | None = None

    @property
    def after(self) -> float | None:
        """How long a broker is away, in seconds, before it is taken for gone; None: it never is."""
        return self._brokers.options.failover_after

    async def take(self, run: Run, index: int, group: str, verdict: int, delay_us: int | None, reason: str) -> None:
        """Have a broker or the spool take message *index* of a run. Raises StorageFailed when neither does."""
        number, self._next_number = self._next_number, self._next_number + 1
        record: Record = {
            "group": group, "attempt": run.attempt, "verdict": verdict, "delay_us": delay_us, "reason": reason[:300],
            "at_us": time.time_ns() // 1_000, "batch": private_batch(run, index, group, self._producer_id, number),
        }  # fmt: skip
        if await self._handed_over(record):
            return
        async with self._spooling:
            await asyncio.to_thread(self._spool.put, record)
        log.warning("no broker takes what has failed of group %s: it is kept on this machine until one does", group)

    async def _handed_over(self, record: Record) -> bool:
        """Whether one of the brokers that are there has taken it."""
        for link in self._brokers.links:
            connection = link.connection
            if connection is not None and await self._took(connection, record):
                return True
        return False

    async def _took(self, connection: Connection, record: Record) -> bool:
        meta: dict[str, Any] = {name: record[name] for name in ("group", "attempt", "verdict", "delay_us", "reason")}
        if meta["delay_us"] is not None:  # the time it has waited here counts
            meta["delay_us"] = max(0, meta["delay_us"] - max(0, time.time_ns() // 1_000 - record["at_us"]))
        try:
            await connection.request(Kind.HAND_OVER, meta, record["batch"])
        except SequenceForgotten:
            return True  # it was handed over long ago
        except QmqError as error:
            log.debug("a message of group %s could not be handed over: %s", record["group"], error)
            return False
        return True

    # --- the spool ---------------------------------------------------------------------------------------------------

    def broker_came(self) -> None:
        """A broker is there: what waits in the spool may go to it."""
        if (self._replaying is None or self._replaying.done()) and self._spool.may_wait:
            self._replaying = asyncio.get_running_loop().create_task(self._replay(), name="qmq-spool")

    async def _replay(self) -> None:
        delay = AGAIN_AFTER
        while not await self._replayed():
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_AFTER)

    async def _replayed(self) -> bool:
        """Hand over what waits; False when something of it was not taken."""
        async with self._spooling:
            files = await asyncio.to_thread(self._spool.take)
        done = True
        for waiting in files:
            try:
                taken = [await self._handed_over(record) for record in waiting.records]
            except BaseException:
                self._spool.kept(waiting)
                raise
            if all(taken):
                log.info("%d messages that were kept on this machine are with a broker", len(taken))
                self._spool.removed(waiting)
            else:
                self._spool.kept(waiting)
                done = False
        return done

    def close(self) -> None:
        """Stop; what waits in the spool stays there."""
        if self._replaying is not None:
            self._replaying.cancel()
        self._spool.close()

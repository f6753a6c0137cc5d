"""What becomes of a message that failed when the broker it came from is gone: another broker takes it, or the spool.

The acknowledgement follows, to the broker that it came from; until that one has it, it waits in the spool too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from qmq.errors import QmqError, StorageFailed
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.format.private import private_batch
from qmq.format.run import Run
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import BrokerConnection
from qmq.net.client.failover.spool import Late, Record, Spool, WaitingSpool
from qmq.net.client.in_thread import taken_in_thread
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind, pack_meta

log = logging.getLogger("qmq.client")

#: What no broker takes is tried again so long after (seconds), twice as long each time, at most the second.
AGAIN_AFTER: Final = 1.0
LONGEST_AFTER: Final = 30.0
#: So many are on their way to brokers at once.
AT_ONCE: Final = 100


class HandoverClient:
    """Of one client: hands messages over to whatever broker is there, and what was spooled once one is."""

    def __init__(self, links: Sequence[Link], after: float | None) -> None:
        #: A broker is taken for gone after this many seconds; None: never.
        self.after = after
        self._links = links
        self._spool = Spool([str(link.address) for link in links])
        self._spooling = asyncio.Lock()
        self._producer_id = os.urandom(PRODUCER_ID_SIZE)
        self._next_number = 0
        self._replaying: asyncio.Task[None] | None = None

    async def take(
        self, run: Run, index: int, group: str, disposition: int, delay_us: int | None, reason: str, late: Late
    ) -> None:
        """Have a broker or the spool take message *index* of a run, and the spool that it is handled then (*late*).

        Raises StorageFailed when neither takes the message.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        record: Record = {
            "group": group, "attempt": run.attempt, "disposition": disposition, "delay_us": delay_us,
            "reason": reason[:300], "at_us": time.time_ns() // 1_000,
            "batch": private_batch(run, index, group, self._producer_id, number),
            "ack": late._asdict(),
        }  # fmt: skip
        if await self._handed_over(record):
            await self.keep(late)
            return
        await self._put(record)
        log.warning("no broker takes what has failed of group %s: it is kept on this machine until one does", group)

    async def keep(self, late: Late) -> bool:
        """Keep acknowledgements until their broker is back; whether that can be."""
        try:
            await self._put({"ack": late._asdict()})
        except StorageFailed as error:
            log.warning("acknowledgements of consumer %s are not kept: %s", late.consumer, error)
            return False
        return True

    async def _put(self, record: Record) -> None:
        async with self._spooling:
            await asyncio.to_thread(self._spool.put, record)

    async def _handed_over(self, record: Record) -> bool:
        """Whether one of the brokers that are there has taken it."""
        for link in self._links:
            if link.connection is not None and await self._took(link, link.connection, record):
                return True
        return False

    async def _took(self, link: Link, connection: BrokerConnection, record: Record) -> bool:
        meta: dict[str, Any] = {
            name: record[name] for name in ("group", "attempt", "disposition", "delay_us", "reason")
        }
        if meta["delay_us"] is not None:  # the time it has waited here counts
            meta["delay_us"] = max(0, meta["delay_us"] - max(0, time.time_ns() // 1_000 - record["at_us"]))
        assert link.welcome is not None
        size = FRAME_SIZE + len(pack_meta(meta)) + len(record["batch"])
        if size > link.welcome.max_frame_bytes:  # it would end the connection, and each one after it
            log.warning(
                "a message of group %s that has failed is too large for %s: a frame of %d bytes, over its "
                "max_frame_bytes of %d", record["group"], link.address, size, link.welcome.max_frame_bytes,
            )  # fmt: skip
            return False
        try:
            await connection.request(FrameKind.HAND_OVER, meta, record["batch"])
        except QmqError as error:
            log.debug("a message of group %s could not be handed over: %s", record["group"], error)
            return False
        return True

    async def _was_told(self, late: Late) -> bool:
        """Whether the broker of these is there, and has heard of them: it may have handed them to others since."""
        fields = late._asdict()
        store = fields.pop("store")
        for link in self._links:
            if link.connection is None or link.store_id != store:
                continue
            try:
                await link.connection.request(FrameKind.ADMINISTER, {"action": "handled", **fields})
            except QmqError as error:
                if error.retryable:
                    return False
                log.debug("acknowledgements of consumer %s were refused: %s", late.consumer, error)
            return True
        return False

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
            files = await taken_in_thread(self._spool.take, self._put_back)
        done, todo = True, deque(files)
        try:
            while todo:
                left = await self._left_of(todo[0].records)
                done = done and not left
                # Begun it is ended, also when this is cancelled: the file would stay locked otherwise.
                letting_go = asyncio.get_running_loop().run_in_executor(None, self._let_go, todo.popleft(), left)
                await asyncio.shield(letting_go)
        finally:
            self._put_back(todo)
        return done

    def _put_back(self, files: Iterable[WaitingSpool]) -> None:
        for waiting in files:
            self._spool.kept(waiting, waiting.records)

    def _let_go(self, waiting: WaitingSpool, left: Sequence[Record]) -> None:
        if left:
            self._spool.kept(waiting, left)
        else:
            log.info("what was kept on this machine (%d records) is with a broker", len(waiting.records))
            self._spool.removed(waiting)

    async def _left_of(self, records: Sequence[Record]) -> list[Record]:
        left = list[Record]()
        for at in range(0, len(records), AT_ONCE):
            rest = await asyncio.gather(*map(self._rest_of, records[at : at + AT_ONCE]))
            left += [record for record in rest if record is not None]
        return left

    async def _rest_of(self, record: Record) -> Record | None:
        """What no broker has taken of it yet; None when that is nothing."""
        if "batch" in record:
            if not await self._handed_over(record):
                return record
            record = {"ack": record["ack"]}
        return None if await self._was_told(Late(**record["ack"])) else record

    def close(self) -> None:
        """Stop; what waits in the spool stays there."""
        if self._replaying is not None:
            self._replaying.cancel()
        self._spool.close()

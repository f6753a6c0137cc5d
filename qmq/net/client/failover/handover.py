"""The handover of a failed message whose broker is lost: another broker takes it, or the spool on this machine.

The message's own broker hears later that it is handled; until then this ack waits in the spool, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from qmq.errors import QmqError, StorageFailed
from qmq.format.copies.for_group import private_batch
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.format.run import Envelopes
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import BrokerConnection
from qmq.net.client.failover.spool import Record, Spool, SpooledDispositions, WaitingSpool
from qmq.net.client.in_thread import going_on, in_thread, taken_in_thread
from qmq.net.client.tasks import begin_task
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind, pack_meta

log = logging.getLogger("qmq.client")

#: Records that no broker takes are tried again after this many seconds, doubled each time up to the second.
AGAIN_AFTER: Final = 1.0
LONGEST_AFTER: Final = 30.0
#: Records of the spool that are sent at once.
AT_ONCE: Final = 100


class HandoverClient:
    """Hands messages of one client over to a connected broker; spools them while there is none."""

    def __init__(self, links: Sequence[Link], after: float | None) -> None:
        #: A broker counts as lost after this many seconds without a connection; None: never.
        self.after = after
        self._links = links
        self._spool = Spool([str(link.address) for link in links])
        self._spooling = asyncio.Lock()
        self._producer_id = os.urandom(PRODUCER_ID_SIZE)
        self._next_number = 0
        self._replaying: asyncio.Task[None] | None = None
        #: Broker and group of the refusals that were logged: each is tried again and again, and told once.
        self._refused: set[tuple[str, str]] = set()

    async def take(
        self,
        envelopes: Envelopes,
        index: int,
        body: bytes,
        group: str,
        disposition: int,
        delay_us: int | None,
        reason: str,
        late: SpooledDispositions,
    ) -> None:
        """Give message *index* of *envelopes*, with its *body*, to a broker or the spool, and its acknowledgement,
        *late*, to the spool.

        Raises StorageFailed if neither takes the message.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        record: Record = {
            "group": group, "attempt": envelopes.attempt, "disposition": disposition, "delay_us": delay_us,
            "reason": reason[:300], "at_us": time.time_ns() // 1_000,
            "batch": private_batch(envelopes.with_body(index, body), 0, group, self._producer_id, number),
            "ack": late._asdict(),
        }  # fmt: skip
        if await self._handed_over(record):
            await self.keep(late)
            return
        await self._put(record)
        log.warning("no broker takes a failed message of group %s: it waits on this machine until one does", group)

    async def keep(self, late: SpooledDispositions) -> bool:
        """Spool acks until their broker is back; return whether that succeeds."""
        try:
            await self._put({"ack": late._asdict()})
        except StorageFailed as error:
            log.warning("acks of consumer %s are lost, so its messages come again: %s", late.consumer, error)
            return False
        return True

    async def _put(self, record: Record) -> None:
        async with self._spooling:
            await in_thread(partial(self._spool.put, record))

    async def _handed_over(self, record: Record) -> bool:
        """Hand a message over to a connected broker; return whether one took it."""
        for link in self._links:
            if link.connection is not None and await self._took(link, link.connection, record):
                return True
        return False

    async def _took(self, link: Link, connection: BrokerConnection, record: Record) -> bool:
        meta: dict[str, Any] = {
            name: record[name] for name in ("group", "attempt", "disposition", "delay_us", "reason")
        }
        if meta["delay_us"] is not None:  # the time in the spool counts
            meta["delay_us"] = max(0, meta["delay_us"] - max(0, time.time_ns() // 1_000 - record["at_us"]))
        assert link.welcome is not None
        size = FRAME_SIZE + len(pack_meta(meta)) + len(record["batch"])
        if size > link.welcome.max_frame_bytes:  # the broker would end the connection, and each one after it
            log.warning(
                "a failed message of group %s is too large for %s: its frame has %d bytes, and max_frame_bytes there "
                "is %d", record["group"], link.address, size, link.welcome.max_frame_bytes,
            )  # fmt: skip
            return False
        try:
            await connection.request(FrameKind.HAND_OVER, meta, record["batch"])
        except QmqError as error:
            self._log_refusal(link, record["group"], error)
            return False
        self._refused.discard((str(link.address), record["group"]))
        return True

    def _log_refusal(self, link: Link, group: str, error: QmqError) -> None:
        """Log that a broker did not take a message: as a warning, once, if trying again does not help by itself."""
        refusal = (str(link.address), group)
        if error.retryable or refusal in self._refused:
            log.debug("%s did not take a failed message of group %s: %s", link.address, group, error)
            return
        self._refused.add(refusal)
        log.warning(
            "%s refuses failed messages of group %s: %s; they wait in %s, are tried again, and hold up no others",
            link.address, group, error, self._spool.directory,
        )  # fmt: skip

    async def _acknowledged(self, late: SpooledDispositions) -> bool:
        """Send late acks; return whether their broker got them. It may refuse them, as others have the messages."""
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
                log.debug("late acks of consumer %s were refused: %s", late.consumer, error)
            return True
        return False

    # --- the spool ---------------------------------------------------------------------------------------------------

    def broker_came(self) -> None:
        """Send the records of the spool, as a broker is connected."""
        if (self._replaying is None or self._replaying.done()) and self._spool.may_wait:
            self._replaying = begin_task(
                going_on(self._replay, "sending the spool"), asyncio.get_running_loop(), "qmq-spool"
            )

    async def _replay(self) -> None:
        delay = AGAIN_AFTER
        while not await self._replayed():
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_AFTER)

    async def _replayed(self) -> bool:
        """Send the records of the spool; return whether brokers took all of them."""
        async with self._spooling:
            files = await taken_in_thread(self._spool.take, self._put_back)
        done, todo = True, deque(files)
        left: list[Record | None] = []
        try:
            while todo:
                left = list(todo[0].records)
                await self._send(left)
                rest, left = [record for record in left if record is not None], []
                done = done and not rest
                # The shield lets this end also when the task is cancelled: the file would stay locked otherwise.
                await asyncio.shield(in_thread(partial(self._finish, todo.popleft(), rest)))
        finally:
            if left and left != todo[0].records:  # the client ends; brokers forget some day what they have of this file
                self._finish(todo.popleft(), [record for record in left if record is not None])
            self._put_back(todo)
        return done

    def _put_back(self, files: Iterable[WaitingSpool]) -> None:
        for waiting in files:
            self._spool.kept(waiting, waiting.records)

    def _finish(self, waiting: WaitingSpool, left: Sequence[Record]) -> None:
        if left:
            self._spool.kept(waiting, left)
        else:
            log.info("brokers took %d records that waited on this machine", len(waiting.records))
            self._spool.removed(waiting)

    async def _send(self, records: list[Record | None]) -> None:
        """Send records; put in the place of each the part of it that no broker took, None if that is nothing."""

        async def send(at: int) -> None:
            record = records[at]
            assert record is not None
            records[at] = await self._rest_of(record)

        for at in range(0, len(records), AT_ONCE):
            await asyncio.gather(*map(send, range(at, min(at + AT_ONCE, len(records)))))

    async def _rest_of(self, record: Record) -> Record | None:
        """Send a record; return the part of it that no broker took, None if that is nothing."""
        if "batch" in record:
            if not await self._handed_over(record):
                return record
            record = {"ack": record["ack"]}
        return None if await self._acknowledged(SpooledDispositions(**record["ack"])) else record

    def close(self) -> None:
        """Stop; the records of the spool stay there."""
        if self._replaying is not None:
            self._replaying.cancel()
        self._spool.close()

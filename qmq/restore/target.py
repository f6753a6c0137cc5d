"""Send a restore to a broker over several connections, one after another, so that each frame is stored once."""

from __future__ import annotations

import asyncio

from qmq.errors import InvalidOption, QmqError
from qmq.intervals import Intervals
from qmq.net.client.address import Address
from qmq.net.client.backoff import Backoff
from qmq.net.client.restore import RestoreBegun, RestoreTarget
from qmq.restore.frames import RestoreFrame
from qmq.restore.progress import RestoreProgress
from qmq.restore.read import Found


class TargetBroker:
    """The broker that a restore sends to; it opens a new connection when one is lost."""

    def __init__(
        self, address: Address, target: RestoreTarget, progress: RestoreProgress, group: str | None, give_up_s: float
    ) -> None:
        self._address = address
        self._target: RestoreTarget | None = target
        self._store_id = target.welcome.store_id
        self._run = bytes.fromhex(progress.run)
        self._group = group
        self._give_up_s = give_up_s
        self._begun = False
        #: The positions from which on unanswered messages are looked up; None: nothing was sent yet.
        self._since = progress.since
        #: The ends of its logs at its last answer; the messages of the restore that it had at the beginning of the
        #: connection.
        self.ends: list[int] = []
        self.found: Found = {}
        #: The number of the next message.
        self.following = progress.following

    async def begin(self) -> None:
        """Begin the restore at the broker, which ends an earlier connection of it. Raises QmqError."""
        await self._try(None)

    async def store(self, frame: RestoreFrame) -> None:
        """Store a frame once. Raises QmqError: then it is unknown whether the broker has stored it."""
        if frame.batches:
            await self._try(frame)

    async def _try(self, frame: RestoreFrame | None) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        give_up_at = loop.time() + self._give_up_s
        while True:
            try:
                await self._once(frame)
                return
            except QmqError as error:
                await self.close()
                if not error.retryable or loop.time() > give_up_at:
                    raise
                await asyncio.sleep(backoff.next_delay())

    async def _once(self, frame: RestoreFrame | None) -> None:
        if self._target is None:
            self._target = await RestoreTarget.open(self._address)
            if self._target.welcome.store_id != self._store_id:
                raise InvalidOption(
                    f"{self._address} serves store {self._target.welcome.store_id.hex()} , but this restore goes to "
                    f"{self._store_id.hex()}: name the broker that has it"
                )
        if not self._begun:
            begun = await self._target.begin(self._run, self._group, self._since)
            self.found = _found_of(begun)
            self.following = max(self.following, begun.following)
            if self._since is None:
                self._since = begun.ends
            self.ends = self._since
            self._begun = True
            if frame is not None:
                frame.without(self.found)
        if frame is not None and frame.batches:
            packed, following = frame.pack(self._run, self.following)
            self._since = self.ends = await self._target.store(packed)
            self.following = following

    async def close(self) -> None:
        """Close the connection; the next call opens another one."""
        target, self._target, self._begun = self._target, None, False
        if target is not None:
            await target.close()


def _found_of(begun: RestoreBegun) -> Found:
    found: Found = {}
    for store_id, partition, positions in begun.found:
        intervals = found.setdefault((store_id, partition), Intervals())
        for start, stop in zip(positions[::2], positions[1::2], strict=True):
            intervals.add(start, stop)
    return found

"""What a restore says to one broker: it begins its run, or goes on with it, and sends batches."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple, Self

import msgpack

from qmq.errors import ConnectionLost, ProtocolError, QmqError
from qmq.net.client.address import Address
from qmq.net.client.broker_link import CONNECT_TIMEOUT
from qmq.net.client.connection import Answer, BrokerConnection, Welcome
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind

#: How long a broker may look up what is stored of a run, and store a frame, in seconds.
_LOOK_TIMEOUT: Final = 600.0
_STORE_TIMEOUT: Final = 60.0


class Begun(NamedTuple):
    """Where each partition's log ends; which messages of the run are stored, by store id and partition of their ids as
    positions start, stop, start, stop, ...; the number that the run's next message may have.
    """

    ends: list[int]
    found: list[tuple[bytes, int, list[int]]]
    following: int


class RestoreTarget:
    """One connection to one broker. Made by ``open``; ``close`` it."""

    def __init__(self, connection: BrokerConnection, welcome: Welcome) -> None:
        self._connection = connection
        self.welcome = welcome

    @classmethod
    async def open(cls, address: Address) -> Self:
        """Connect. Raises QmqError."""
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(_RequestOwner(), str(address), loop)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await loop.create_connection(lambda: connection, address.host, address.port)
                return cls(connection, await connection.hello("qmq-restore"))
        except BaseException as error:
            connection.abort(ConnectionLost("given up"))
            if isinstance(error, TimeoutError):
                raise ConnectionLost(f"{address} did not answer within {CONNECT_TIMEOUT:g} s") from None
            if isinstance(error, OSError):
                raise ConnectionLost(f"{address}: {error.strerror or error}") from error
            raise

    @property
    def most_bytes(self) -> int:
        """What the batches of one frame may take."""
        return self.welcome.max_frame_bytes - FRAME_SIZE

    async def begin(self, run: bytes, group: str | None, since: list[int] | None) -> Begun:
        """Go on with a run, 16 bytes, of which messages may be stored from positions *since* on, one a partition; or
        (None) begin it. What another connection still sends of it is refused from then on. Raises QmqError.
        """
        fields = {"action": "restore", "run": run, "group": group, "since": since}
        answer = await self._ask(FrameKind.ADMINISTER, _LOOK_TIMEOUT, fields)
        try:
            said: dict[str, Any] = msgpack.unpackb(answer.payload)
            found = [(bytes(store_id), int(number), list(places)) for store_id, number, places in said["found"]]
            return Begun(list(said["ends"]), found, int(said["next"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the broker at {self._connection.address} does not say what is stored") from error

    async def store(self, batches: bytes) -> list[int]:
        """Have batches stored and synced, of at most ``most_bytes`` together; where each partition's log ends then.
        Raises QmqError: then nobody knows, but for what ``begin`` tells.
        """
        answer = await self._ask(FrameKind.RESTORE, _STORE_TIMEOUT, None, batches)
        ends = answer.meta.get("ends")
        if type(ends) is not list or not all(type(end) is int for end in ends):
            raise ProtocolError(f"the broker at {self._connection.address} does not say where its logs end")
        return ends

    async def _ask(
        self, kind: FrameKind, timeout_s: float, meta: dict[str, Any] | None, payload: bytes = b""
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connection.request(kind, meta, payload)
        except TimeoutError:
            error = ConnectionLost(f"the broker at {self._connection.address} did not answer within {timeout_s:g} s")
            self._connection.abort(error)
            raise error from None

    async def close(self) -> None:
        """End the connection."""
        self._connection.close()
        await self._connection.wait_closed()


class _RequestOwner:
    """Who is told of a connection that has requests only."""

    def batch_stored(self, request: int, payload: memoryview) -> None:
        """No batch is sent by itself."""

    def batch_refused(self, request: int, error: QmqError) -> None:
        """As above."""

    def writable(self) -> None:
        """One frame at a time is on its way."""

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        """Its requests were told."""

"""The connection of a restore to one broker: it begins its run, or continues it, and sends batches."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple, Self

import msgpack

from qmq.errors import ConnectionLost, ProtocolError
from qmq.net.client.address import Address
from qmq.net.client.broker_link import CONNECT_TIMEOUT
from qmq.net.client.connection import Answer, BrokerConnection, RequestsOnly, Welcome, timeout_while_still
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind

#: A broker has this long, in seconds, to look up the stored messages of a run, and to store a frame.
_LOOK_TIMEOUT: Final = 600.0
_STORE_TIMEOUT: Final = 60.0


class RestoreBegun(NamedTuple):
    """The broker's answer to the begin of a run: the end of each partition's log; the stored messages of the run, by
    the store id and partition of their ids, as positions start, stop, start, stop, ...; the number for the next one.
    """

    ends: list[int]
    found: list[tuple[bytes, int, list[int]]]
    following: int


class RestoreTarget:
    """One connection to one broker. ``open`` makes it; call ``close`` at the end."""

    def __init__(self, connection: BrokerConnection, welcome: Welcome) -> None:
        self._connection = connection
        self.welcome = welcome

    @classmethod
    async def open(cls, address: Address) -> Self:
        """Connect to a broker. Raises QmqError."""
        loop = asyncio.get_running_loop()
        connection = BrokerConnection(RequestsOnly(), str(address), loop)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.open(address)
                return cls(connection, await connection.hello("qmq-restore", token=address.token))
        except BaseException as error:
            connection.abort(ConnectionLost("given up"))
            if isinstance(error, TimeoutError):
                raise ConnectionLost(f"{address} did not answer within {CONNECT_TIMEOUT:g} s") from None
            raise

    @property
    def most_bytes(self) -> int:
        """The size limit of the batches of one frame."""
        return self.welcome.max_frame_bytes - FRAME_SIZE

    async def begin(self, run: bytes, group: str | None, since: list[int] | None) -> RestoreBegun:
        """Begin the run with this id of 16 bytes (*since* None), or continue it: its messages may be stored from
        positions *since* on, one a partition. From now on the broker refuses frames of this run on other connections.
        Raises QmqError.
        """
        asked = {"action": "restore", "run": run, "group": group, "since": since}
        answer = await self._ask(FrameKind.ADMINISTER, _LOOK_TIMEOUT, asked)
        try:
            fields: dict[str, Any] = msgpack.unpackb(answer.payload)
            found = [(bytes(store_id), int(number), list(ends)) for store_id, number, ends in fields["found"]]
            return RestoreBegun(list(fields["ends"]), found, int(fields["next"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"the broker at {self._connection.address} sent an invalid list of stored messages"
            ) from error

    async def store(self, batches: bytes) -> list[int]:
        """Have the broker store and sync batches of at most ``most_bytes``; return the end of each partition's log.

        Raises QmqError; then they may be stored or not, and ``begin`` on another connection tells which are.
        """
        answer = await self._ask(FrameKind.RESTORE, _STORE_TIMEOUT, None, batches)
        ends = answer.meta.get("ends")
        if type(ends) is not list or not all(type(end) is int for end in ends):
            raise ProtocolError(f"RESTORED of the broker at {self._connection.address} lacks the ends of its logs")
        return ends

    async def _ask(
        self, kind: FrameKind, timeout_s: float, meta: dict[str, Any] | None, payload: bytes = b""
    ) -> Answer:
        try:
            async with timeout_while_still(timeout_s, self._moved_at):
                return await self._connection.request(kind, meta, payload)
        except TimeoutError:
            error = ConnectionLost(f"the broker at {self._connection.address} did not answer within {timeout_s:g} s")
            self._connection.abort(error)
            raise error from None

    def _moved_at(self) -> float:
        self._connection.look(asyncio.get_running_loop().time())
        return self._connection.moved_at

    async def close(self) -> None:
        """Close the connection, and wait until it has ended."""
        self._connection.close()
        await self._connection.wait_closed()

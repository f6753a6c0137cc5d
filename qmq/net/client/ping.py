"""Whether a broker is there: one connection, one question, and how long its answer took."""

from __future__ import annotations

import asyncio
import os
import time
from typing import NamedTuple

from qmq.errors import ConnectionLost, QmqError
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.net.client.address import Address
from qmq.net.client.broker_link import client_name
from qmq.net.client.connection import BrokerConnection
from qmq.net.protocol.frames import FrameKind


class Pong(NamedTuple):
    """A broker is there: its version, and seconds that a question and its answer took."""

    version: str
    round_trip: float


async def ping(address: Address, timeout: float) -> Pong:
    """Ask a broker for what costs it next to nothing. Raises QmqError: it is not there, does not answer within
    *timeout* seconds, or is no broker that this client can talk to.
    """
    loop = asyncio.get_running_loop()
    connection = BrokerConnection(_NoOwner(), str(address), loop)
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(lambda: connection, address.host, address.port)
            welcome = await connection.hello(client_name())
            asked = time.perf_counter()
            await connection.request(FrameKind.LAST_SEQUENCE, payload=os.urandom(PRODUCER_ID_SIZE))
            return Pong(welcome.version, time.perf_counter() - asked)
    except TimeoutError:
        raise ConnectionLost(f"{address} did not answer within {timeout:g} s") from None
    except OSError as error:
        raise ConnectionLost(f"{address}: {error.strerror or error}") from error
    finally:
        connection.abort(ConnectionLost("the question is answered"))


class _NoOwner:
    """Sends nothing, so is told of nothing."""

    def batch_stored(self, request: int, payload: memoryview) -> None:
        """As Owner."""

    def batch_refused(self, request: int, error: QmqError) -> None:
        """As Owner."""

    def writable(self) -> None:
        """As Owner."""

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        """As Owner."""

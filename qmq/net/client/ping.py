"""A check that a broker answers: one connection, one request, and the time that its answer took."""

from __future__ import annotations

import asyncio
import os
import time
from typing import NamedTuple

from qmq.errors import ConnectionLost
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.net.client.address import Address
from qmq.net.client.broker_link import client_name
from qmq.net.client.connection import BrokerConnection, RequestsOnly
from qmq.net.protocol.frames import FrameKind


class Pong(NamedTuple):
    """A broker has answered: its version, and the seconds from the request to its answer."""

    version: str
    round_trip: float


async def ping(address: Address, timeout: float) -> Pong:
    """Send a broker a request that costs it next to nothing. Raises QmqError if it does not answer within *timeout*
    seconds, or is not a broker that this client can talk to.
    """
    loop = asyncio.get_running_loop()
    connection = BrokerConnection(RequestsOnly(), str(address), loop)
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

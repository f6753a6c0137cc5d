"""A consumer's pull on its way to the broker, one at a time, and its answer until somebody looks at that."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

from qmq.errors import ProtocolError, QmqError
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.in_flight import InFlightWindow
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind


class PullRequest:
    """Of one consumer. *answered* is called when an answer came, before who is_pending for it goes on."""

    def __init__(self, answered: Callable[[], None]) -> None:
        #: What the last pull brought, not looked at yet.
        self.answer: Answer | QmqError | None = None
        #: The connection it was asked on; who is to hold that, and how many messages it was to bring at max_count.
        self.connection: BrokerConnection | None = None
        self.in_flight: InFlightWindow | None = None
        self.max_count = 0
        self._answered = answered
        self._pending: tuple[BrokerConnection, int] | None = None  # connection, request
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_pending(self) -> bool:
        """A pull is on its way."""
        return self._pending is not None

    def send(
        self,
        connection: BrokerConnection,
        pull: bytes,
        max_count: int,
        in_flight: InFlightWindow | None,
        due: float,
        flags: int = 0,
    ) -> None:
        """Send a *pull*, for *max_count* messages. With no answer at *due* the connection is taken for dead."""
        self.connection, self.max_count, self.in_flight = connection, max_count, in_flight
        request = connection.ask(FrameKind.PULL, self._answer_came, payload=pull, due=due, flags=flags)
        self._pending = connection, request

    def _answer_came(self, answer: Answer | QmqError) -> None:
        self._pending = None
        self.answer = answer
        self._answered()
        self.wake()

    def wake(self) -> None:
        """Whoever is_pending goes on."""
        if self._waiter is not None:
            _wake(self._waiter)

    async def wait(self, until: float | None) -> None:
        """Wait for the answer, but not beyond *until*. A wait that is cancelled withdraws the pull."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if until is None else loop.call_at(until, _wake, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self.withdraw()
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def withdraw(self) -> None:
        """Have the pull that is on its way answered now: what it brings is for the next one."""
        if self._pending is not None:
            connection, request = self._pending
            connection.tell(FrameKind.WITHDRAW, frames.WITHDRAW.pack(request))

    def take(self) -> Answer | QmqError:
        """The answer, which is looked at now."""
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer


def message_ranges_of(meta: dict[str, Any]) -> list[int]:
    """What an answer says of its messages: first delivery sequence, count, attempt; again and again. Raises
    ProtocolError when that is not what the broker has said.
    """
    ranges = meta.get("ranges", [])
    try:
        crc = frames.pack_numbers(ranges)[1]
    except (struct.error, TypeError):
        raise ProtocolError("the broker's answer does not say what its messages are") from None
    if ranges and crc != meta.get("ranges_crc"):
        raise ProtocolError("what the broker's answer says of its messages does not fit its checksum")
    return list(ranges)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

"""The one PULL that a consumer may have open at a broker, and its answer until the puller takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from qmq.errors import QmqError
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.in_flight import InFlightWindow
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind

#: A plain integer: reading a member of an enum looks it up by name.
_PULL: Final = int(FrameKind.PULL)
#: Seconds in which the next bytes of an answer have to come.
STEP_S: Final = 2.0


class PullRequest:
    """Sends one PULL at a time and holds its answer. *answered* is called when an answer arrives that nobody waits
    for.
    """

    def __init__(self, answered: Callable[[], None]) -> None:
        #: The answer to the last pull, until ``take``.
        self.answer: Answer | QmqError | None = None
        #: The last pull: its connection, the window that its messages belong to, and how many it asked for.
        self.connection: BrokerConnection | None = None
        self.in_flight: InFlightWindow | None = None
        self.max_count = 0
        self._answered = answered
        #: Whether a pull has been sent and not answered.
        self.is_pending = False
        self._number = 0  # the request number of the last pull
        self._waiter: asyncio.Future[None] | None = None

    def send(
        self,
        connection: BrokerConnection,
        pull: bytes,
        max_count: int,
        in_flight: InFlightWindow | None,
        due: float,
        flags: int = 0,
    ) -> None:
        """Send *pull* for up to *max_count* messages. If no answer has come by the time *due*, the connection counts as
        dead.
        """
        self.connection, self.max_count, self.in_flight = connection, max_count, in_flight
        self.is_pending = True
        self._number = connection.ask(_PULL, self._answer_came, b"", pull, due, flags)

    def _answer_came(self, answer: Answer | QmqError) -> None:
        self.is_pending = False
        self.answer = answer
        if self._waiter is None:
            self._answered()
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def wake(self) -> None:
        """Let ``wait`` return."""
        if self._waiter is not None:
            _wake(self._waiter)

    async def wait(self, until: float | None, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the answer, at most until *until*. Cancelling the wait withdraws the pull."""
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

    async def wait_while_arriving(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait on while bytes of the answer come in."""
        before = 0
        while self.is_pending and self.connection is not None:
            arrived = self.connection.arrived_of(self._number)
            if arrived <= before:
                return
            before = arrived
            await self.wait(loop.time() + STEP_S, loop)

    def withdraw(self) -> None:
        """Ask the broker to answer the pull now; the next pull gets the messages of the answer."""
        if self.is_pending:
            assert self.connection is not None
            self.connection.tell(FrameKind.WITHDRAW, frames.WITHDRAW.pack(self._number))

    def take(self) -> Answer | QmqError:
        """Return the answer and clear it."""
        answer, self.answer = self.answer, None
        assert answer is not None
        return answer


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

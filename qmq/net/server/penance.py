"""Who sends what is wrong waits, so that all of them together cost others little.

A right client hardly ever sends what must be refused. A stranger may send nothing else, as fast as it can, on as many
connections as it likes: each such frame costs the loop that all share. So what wrong frames cost is measured, their
connection is not read from until it is paid for, one after another, and new connections are taken slowly meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from qmq.net.server.connection import PENANCE, Connection

#: Wrong frames get this part of the loop's time.
_SHARE: Final = 1 / 40
#: What an answer costs beside reading its request, and a connection that is ended beside its frame.
ANSWER_S: Final = 20e-6
END_S: Final = 300e-6
#: What is beyond is forgiven, or a stranger could have one wait for ever who went wrong once.
_MOST_S: Final = 10.0
#: With so much to pay for, new connections are taken slowly.
_MUCH_S: Final = 0.05


class Penance:
    """What wrong frames cost, and whose connections wait for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paid_at = 0.0
        self._waiting: deque[tuple[float, Connection]] = deque()  # in order of time
        self._timer: asyncio.TimerHandle | None = None

    @property
    def much(self) -> bool:
        """There is much to pay for."""
        return self._paid_at - self._loop.time() > _MUCH_S

    def charge(self, cost_s: float) -> None:
        """So much of the loop's time went into what was wrong."""
        now = self._loop.time()
        self._paid_at = min(max(self._paid_at, now) + cost_s / _SHARE, now + _MOST_S)

    def wait(self, connection: Connection) -> None:
        """It is not read from until all is paid for that was charged before."""
        connection.stop_reading(PENANCE)
        self._waiting.append((self._paid_at, connection))
        if self._timer is None:
            self._timer = self._loop.call_later(self._paid_at - self._loop.time(), self._fire)

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()[1].read_on(PENANCE)
        if self._waiting:
            self._timer = self._loop.call_later(self._waiting[0][0] - now, self._fire)

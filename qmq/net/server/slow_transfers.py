"""Looks whether bytes of large answers and frames move: such clients live, and do not stall."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import Final

from qmq.net.server.admission import Admission
from qmq.net.server.connection import ClientConnection

#: Seconds between two looks at a connection, and from one look at many to the next.
LOOK_S: Final = 1.0
_AT_ONCE: Final = 1_000
#: Bytes between two looks that a connection has to move, or it counts as one that stalls: a stranger might send and
#: read a byte now and then, on any number of connections.
LEAST_BYTES: Final = 8 << 10


class SlowTransfers:
    """Tells the admission, and a function, which of the connections with a transfer under way move bytes."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, admission: Admission, moved: Callable[[ClientConnection], None]
    ) -> None:
        """*moved* is called for a connection whose bytes have moved."""
        self._loop = loop
        self._admission = admission
        self._moved = moved
        self._timer: asyncio.TimerHandle | None = None
        self._watched: dict[ClientConnection, None] = {}

    def watch(self, connection: ClientConnection) -> None:
        """Look at a connection from now on, until its transfer is done."""
        self._watched[connection] = None
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self._watched:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in list(islice(self._watched, _AT_ONCE)):
            del self._watched[connection]
            moved = connection.moved_bytes()
            if moved is None:
                continue
            if moved >= LEAST_BYTES:
                self._admission.moved(connection, now)
            if moved:
                self._moved(connection)
            self._watched[connection] = None  # after the others
        self._arm()

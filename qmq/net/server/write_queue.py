"""Large answers: written in pieces, one piece per turn of the loop. No I/O.

Writing 4 MiB to a socket takes a millisecond of the loop's time or more. With pieces, small answers come in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

log = logging.getLogger("qmq.server")

Buffer = bytes | memoryview

#: The size of a piece; larger answers of all connections are written a piece at a time.
PIECE_BYTES: Final = 512 << 10


class UnsentBytes:
    """The bytes that a connection has still to write, in order."""

    __slots__ = ("_buffers", "size")

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        #: Bytes in all.
        self.size = 0

    def add(self, buffers: list[Buffer], size: int) -> None:
        """Append *buffers*, *size* bytes in all."""
        self._buffers += buffers
        self.size += size

    def take(self, most: int) -> list[Buffer]:
        """Remove and return the next *most* bytes, or all there are."""
        buffers, left = self._buffers, min(most, self.size)
        self.size -= left
        taken: list[Buffer] = []
        while left:
            buffer = buffers.popleft()
            if len(buffer) > left:
                view = memoryview(buffer)
                buffers.appendleft(view[left:])
                buffer = view[:left]
            taken.append(buffer)
            left -= len(buffer)
        return taken

    def clear(self) -> None:
        """Drop all bytes."""
        self._buffers.clear()
        self.size = 0


class QueuedWriter(Protocol):
    """A connection with pieces to write."""

    number: int

    def write_on(self) -> None:
        """Write a piece, and call ``WriteQueue.add`` again if there is more."""

    def abort(self) -> None:
        """Close after a failed write."""

    def __hash__(self) -> int: ...


class WriteQueue:
    """Lets connections with large answers write in turn."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """*call_soon* schedules a call for the next turn of the loop."""
        self._call_soon = call_soon
        self._waiting: dict[QueuedWriter, None] = {}
        self._due = False

    def add(self, writer: QueuedWriter) -> None:
        """Append *writer* to the queue."""
        self._waiting[writer] = None
        if not self._due:
            self._due = True
            self._call_soon(self._next)

    def _next(self) -> None:
        writer = next(iter(self._waiting))
        del self._waiting[writer]
        self._due = bool(self._waiting)
        if self._due:
            self._call_soon(self._next)
        try:
            writer.write_on()
        except Exception:
            log.exception("could not write to connection %d", writer.number)
            writer.abort()

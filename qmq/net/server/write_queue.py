"""Large answers, written piece by piece, one piece a turn of the loop. Without I/O.

To hand 4 MiB to the system takes a millisecond of the loop's time and more. Who waits for little comes in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

log = logging.getLogger("qmq.server")

Buffer = bytes | memoryview

#: What is written at a time, of all answers to all connections that are larger than this.
PIECE_BYTES: Final = 512 << 10


class UnsentBytes:
    """What a connection is still to be sent, in order."""

    __slots__ = ("_buffers", "size")

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        #: Bytes in all.
        self.size = 0

    def add(self, buffers: list[Buffer], size: int) -> None:
        """Put them, *size* bytes in all, behind the others."""
        self._buffers += buffers
        self.size += size

    def take(self, most: int) -> list[Buffer]:
        """The next *most* bytes, or all there are."""
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
        """It will not be sent."""
        self._buffers.clear()
        self.size = 0


class QueuedWriter(Protocol):
    """Who has something to write."""

    number: int

    def write_on(self) -> None:
        """Write a piece, and say so when there is more."""

    def abort(self) -> None:
        """It could not."""

    def __hash__(self) -> int: ...


class WriteQueue:
    """Lets those who have large answers write in turns."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """*call_soon* has something called in the next turn of the loop."""
        self._call_soon = call_soon
        self._waiting: dict[QueuedWriter, None] = {}
        self._due = False

    def add(self, writer: QueuedWriter) -> None:
        """It is its turn behind the others."""
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

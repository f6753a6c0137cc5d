"""What connections make the broker hold: frames that are not complete, answers not read, requests not answered. No I/O.

All together are bounded. Beyond the bound the connection goes that has been behind for longest: a frame that is on its
way and answers that are being read are soon done with, so who goes is who stalls, however many of them there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.net.server.connection import Connection

#: What a request without an answer takes, parked pulls too.
REQUEST_BYTES: Final = 1 << 10


class Holdings:
    """Bytes by connection. *measure* gives how much of a connection's answers is unread now."""

    def __init__(self, limit_bytes: int, measure: Callable[[Connection], int]) -> None:
        self._limit = limit_bytes
        self._measure = measure
        #: bytes and since when, in the order of that
        self._frames: dict[Connection, tuple[int, float]] = {}
        self._answers: dict[Connection, tuple[int, float]] = {}
        self._requests = 0
        #: bytes held for all together
        self.total = 0

    def frame(self, connection: Connection, size: int, now: float) -> None:
        """Room for *size* bytes is kept for a frame of it; 0: for none any more."""
        self._set(self._frames, connection, size, now)

    def answers(self, connection: Connection, size: int, now: float) -> None:
        """It has so many bytes of answers to read; 0: it has read all."""
        self._set(self._answers, connection, size, now)

    def requests(self, more: int) -> None:
        """So many requests more (or less) wait for an answer."""
        self._requests += more
        self.total += more * REQUEST_BYTES

    def forget(self, connection: Connection) -> None:
        """It is gone, with its frame and its answers."""
        self._set(self._frames, connection, 0, 0)
        self._set(self._answers, connection, 0, 0)

    @property
    def crowded(self) -> bool:
        """Half the room is taken."""
        return self.total > self._limit >> 1

    def may_ask(self, requests: int, connections: int) -> bool:
        """Whether one that has so many requests open may have another: all may have their even share of half the room,
        and more than that while half the room is not taken.
        """
        half = self._limit // 2
        return self._requests * REQUEST_BYTES < half or requests * REQUEST_BYTES < half // connections

    def over(self) -> Connection | None:
        """Who has to go, now; None while there is room."""
        if self.total <= self._limit:
            return None
        for connection, (size, since) in list(self._answers.items()):
            unread = self._measure(connection)
            self._answers[connection] = unread, since
            self.total += unread - size
        if self.total <= self._limit:
            return None
        heads = [next(iter(held.items())) for held in (self._frames, self._answers) if held]
        return min(heads, key=lambda head: head[1][1])[0] if heads else None

    def _set(self, held: dict[Connection, tuple[int, float]], connection: Connection, size: int, now: float) -> None:
        before, since = held.pop(connection, (0, now)) if not size else held.get(connection, (0, now))
        if size:
            held[connection] = size, since
        self.total += size - before

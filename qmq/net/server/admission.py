"""What connections make the broker hold: frames that are not complete, answers not read, requests not answered. No I/O.

All together are bounded. Beyond the bound the connection goes that has been behind for longest: a frame that is on its
way and answers that are being read are soon done with, so who goes is who stalls, however many of them there are.

Who sends what is wrong waits, so that all of them together cost others little.

A right client hardly ever sends what must be refused. An untrusted client may send nothing else, as fast as it can, on
as many connections as it likes: each such frame costs the loop that all share. So what wrong frames cost is measured,
their connection is not read from until it is paid for, one after another, and new connections are taken slowly
meanwhile.

Pulls beyond a connection's share of a turn: they wait for the next one, so that others come in between. No I/O.

A pull is a frame of 36 bytes, and may be milliseconds of work: what one connection sends at once must not become one
long turn. So it is with what reads the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from qmq.broker.ports import commands
from qmq.broker.ports.commands import Command
from qmq.net.server.connection import THROTTLED, ClientConnection

#: What a request without an answer takes, waiting pulls too.
REQUEST_BYTES: Final = 1 << 10


class Admission:
    """Bytes by connection. *measure* gives how much of a connection's answers is unread now."""

    def __init__(self, limit_bytes: int, measure: Callable[[ClientConnection], int]) -> None:
        self._limit = limit_bytes
        self._measure = measure
        #: bytes and since when, in the order of that
        self._frames: dict[ClientConnection, tuple[int, float]] = {}
        self._answers: dict[ClientConnection, tuple[int, float]] = {}
        self._requests = 0
        #: bytes held for all together
        self.total = 0

    def frame(self, connection: ClientConnection, size: int, now: float) -> None:
        """Room for *size* bytes is kept for a frame of it; 0: for none any more."""
        self._set(self._frames, connection, size, now)

    def answers(self, connection: ClientConnection, size: int, now: float) -> None:
        """It has so many bytes of answers to read; 0: it has read all."""
        self._set(self._answers, connection, size, now)

    def requests(self, more: int) -> None:
        """So many requests more (or less) wait for an answer."""
        self._requests += more
        self.total += more * REQUEST_BYTES

    def forget(self, connection: ClientConnection) -> None:
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

    def over(self) -> ClientConnection | None:
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

    def _set(
        self, held: dict[ClientConnection, tuple[int, float]], connection: ClientConnection, size: int, now: float
    ) -> None:
        before, since = held.pop(connection, (0, now)) if not size else held.get(connection, (0, now))
        if size:
            held[connection] = size, since
        self.total += size - before


#: Wrong frames get this part of the loop's time.
_SHARE: Final = 1 / 40
#: What an answer costs beside reading its request, and a connection that is ended beside its frame.
ANSWER_S: Final = 20e-6
END_S: Final = 300e-6
#: What is beyond is forgiven, or an untrusted client could have one wait for ever who went wrong once.
_MOST_S: Final = 10.0
#: With so much to pay for, new connections are taken slowly.
_MUCH_S: Final = 0.05


class Throttle:
    """What wrong frames cost, and whose connections wait for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paid_at = 0.0
        self._waiting: deque[tuple[float, ClientConnection]] = deque()  # in order of time
        self._timer: asyncio.TimerHandle | None = None

    @property
    def much(self) -> bool:
        """There is much to pay for."""
        return self._paid_at - self._loop.time() > _MUCH_S

    def charge(self, cost_s: float) -> None:
        """So much of the loop's time went into what was wrong."""
        now = self._loop.time()
        self._paid_at = min(max(self._paid_at, now) + cost_s / _SHARE, now + _MOST_S)

    def wait(self, connection: ClientConnection) -> None:
        """It is not read from until all is paid for that was charged before."""
        connection.stop_reading(THROTTLED)
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
            self._waiting.popleft()[1].read_on(THROTTLED)
        if self._waiting:
            self._timer = self._loop.call_later(self._waiting[0][0] - now, self._fire)


#: Pulls of one connection that are handed in in a turn.
PULLS_A_TURN: Final = 8
_PULLS: Final = frozenset((commands.Pull, commands.ListSegments, commands.ListBatches, commands.ReadLog))


class DeferredRequests:
    """Who pulled in this turn, and whose requests wait for the next."""

    def __init__(self, hand_in: Callable[[ClientConnection, Command], None]) -> None:
        self._hand_in = hand_in
        self._pulling: list[ClientConnection] = []
        self._waiting: dict[ClientConnection, None] = {}

    def take(self, connection: ClientConnection, command: Command) -> bool:
        """Whether the command has to wait, behind those before it. What a SEND holds can't: it never does."""
        pulls = type(command) in _PULLS
        if pulls and not connection.deferred and connection.pulls < PULLS_A_TURN:
            self._count(connection)
            return False
        if not pulls and (not connection.deferred or type(command) is commands.Send):
            return False
        connection.deferred.append(command)
        self._waiting[connection] = None
        return True

    def resume(self, connection: ClientConnection) -> bool:
        """It has read its answers; whether requests of it wait."""
        if connection.deferred:
            self._waiting[connection] = None
        return bool(connection.deferred)

    def turn(self) -> bool:
        """Hand in the next ones; whether there are more. Who does not read its answers waits until it does."""
        for connection in self._pulling:
            connection.pulls = 0
        self._pulling.clear()
        for connection in list(self._waiting):
            waiting = connection.deferred
            while waiting and connection.pulls < PULLS_A_TURN and not connection.slow():
                command = waiting.popleft()
                if type(command) in _PULLS:
                    self._count(connection)
                self._hand_in(connection, command)
            if not waiting or connection.slow():
                del self._waiting[connection]
        return bool(self._waiting)

    def _count(self, connection: ClientConnection) -> None:
        if not connection.pulls:
            self._pulling.append(connection)
        connection.pulls += 1

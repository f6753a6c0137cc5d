"""Bounds on the memory and time that clients take from each other. No I/O.

Admission bounds the bytes that all connections hold together: incomplete frames, unread answers, unanswered requests.
Beyond the bound, the connection ends that has been behind for longest: frames on their way and answers being read are
soon done, so the bound ends those that stall, however many they are.

Throttle measures the time that invalid frames cost. A correct client hardly ever sends one; an untrusted client may
send nothing else, on any number of connections. So its connections are not read from until that time is paid for, one
after another, and new connections are accepted slowly meanwhile.

DeferredRequests puts off pulls and reads beyond a connection's share of a turn, so that other connections come in
between: a pull is a frame of 36 bytes, and may be milliseconds of work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from qmq.broker.ports import commands
from qmq.broker.ports.commands import Command
from qmq.net.server.connection import THROTTLED, ClientConnection

#: Bytes counted for a request without an answer, such as a waiting pull.
REQUEST_BYTES: Final = 1 << 10


class Admission:
    """Counts the bytes that connections hold. *measure* returns how many bytes of a connection's answers are unread."""

    def __init__(self, limit_bytes: int, measure: Callable[[ClientConnection], int]) -> None:
        self._limit = limit_bytes
        self._measure = measure
        #: bytes, and since when, in the order of time
        self._frames: dict[ClientConnection, tuple[int, float]] = {}
        self._answers: dict[ClientConnection, tuple[int, float]] = {}
        self._requests = 0
        #: bytes of all connections together
        self.total = 0

    def frame(self, connection: ClientConnection, size: int, now: float) -> None:
        """Record that *connection* holds *size* bytes of an incomplete frame; 0: none."""
        self._set(self._frames, connection, size, now)

    def answers(self, connection: ClientConnection, size: int, now: float) -> None:
        """Record that *connection* has *size* bytes of unread answers; 0: none."""
        self._set(self._answers, connection, size, now)

    def requests(self, more: int) -> None:
        """Record that *more* requests (if negative, fewer) wait for an answer."""
        self._requests += more
        self.total += more * REQUEST_BYTES

    def moved(self, connection: ClientConnection, now: float) -> None:
        """Record that the bytes of *connection* move: it is behind from now on only."""
        for sizes in (self._frames, self._answers):
            if connection in sizes:
                sizes[connection] = sizes.pop(connection)[0], now

    def forget(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed, with its frame and its answers."""
        self._set(self._frames, connection, 0, 0)
        self._set(self._answers, connection, 0, 0)

    @property
    def crowded(self) -> bool:
        """Whether more than half of the limit is taken."""
        return self.total > self._limit >> 1

    def may_ask(self, requests: int, connections: int) -> bool:
        """Return whether a connection with *requests* unanswered ones may have another.

        All connections may have an even share of half of the limit, and more while that half is not taken.
        """
        half = self._limit // 2
        return self._requests * REQUEST_BYTES < half or requests * REQUEST_BYTES < half // connections

    def over(self) -> ClientConnection | None:
        """Return the connection to end now; None while all are within the limit."""
        if self.total <= self._limit:
            return None
        for connection, (size, since) in list(self._answers.items()):
            unread = self._measure(connection)
            self._answers[connection] = unread, since
            self.total += unread - size
        if self.total <= self._limit:
            return None
        heads = [next(iter(sizes.items())) for sizes in (self._frames, self._answers) if sizes]
        return min(heads, key=lambda head: head[1][1])[0] if heads else None

    def _set(
        self, sizes: dict[ClientConnection, tuple[int, float]], connection: ClientConnection, size: int, now: float
    ) -> None:
        before, since = sizes.pop(connection, (0, now)) if not size else sizes.get(connection, (0, now))
        if size:
            sizes[connection] = size, since
        self.total += size - before


#: The part of the loop's time that invalid frames get.
_SHARE: Final = 1 / 40
#: Seconds that an answer costs besides reading its request, and that ending a connection costs besides its frame.
ANSWER_S: Final = 20e-6
END_S: Final = 300e-6
#: The most seconds to pay for: else a client with one invalid frame would wait for ever because of an untrusted one.
_MOST_S: Final = 10.0
#: With more seconds than this to pay for, new connections are accepted slowly.
_MUCH_S: Final = 0.05


class Throttle:
    """Charges the time that invalid frames cost, and makes their connections wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paid_at = 0.0
        self._waiting: deque[tuple[float, ClientConnection]] = deque()  # in order of time
        self._timer: asyncio.TimerHandle | None = None

    @property
    def much(self) -> bool:
        """Whether there is much time to pay for."""
        return self._paid_at - self._loop.time() > _MUCH_S

    def charge(self, cost_s: float) -> None:
        """Charge *cost_s* seconds of the loop's time."""
        now = self._loop.time()
        self._paid_at = min(max(self._paid_at, now) + cost_s / _SHARE, now + _MOST_S)

    def wait(self, connection: ClientConnection) -> None:
        """Stop reading from *connection* until all time charged before is paid for."""
        connection.stop_reading(THROTTLED)
        self._waiting.append((self._paid_at, connection))
        if self._timer is None:
            self._timer = self._loop.call_later(self._paid_at - self._loop.time(), self._fire)

    def close(self) -> None:
        """Let no connection wait any more."""
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


#: Pulls of one connection that are handed in per turn.
PULLS_A_TURN: Final = 8
_PULLS: Final = frozenset((commands.Pull, commands.ListSegments, commands.ListBatches, commands.ReadLog))


class DeferredRequests:
    """Counts each connection's pulls in a turn, and keeps the requests that wait for the next one."""

    def __init__(self, hand_in: Callable[[ClientConnection, Command], None]) -> None:
        self._hand_in = hand_in
        self._pulling: list[ClientConnection] = []
        self._waiting: dict[ClientConnection, None] = {}

    def take(self, connection: ClientConnection, command: Command) -> bool:
        """Return whether *command* waits, behind earlier ones of its connection. A SEND never waits: its bytes are
        views of the receive buffer, and valid in this turn only.
        """
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
        """Let *connection*, which has read its answers, continue; return whether requests of it wait."""
        if connection.deferred:
            self._waiting[connection] = None
        return bool(connection.deferred)

    def turn(self) -> bool:
        """Hand in the next requests; return whether there are more. Connections with unread answers wait until they
        read.
        """
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

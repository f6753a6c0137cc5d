"""Pulls beyond a connection's share of a turn: they wait for the next one, so that others come in between. No I/O.

A pull is a frame of 36 bytes, and may be milliseconds of work: what one connection sends at once must not become one
long turn. So it is with what reads the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq.broker.ports import commands
from qmq.broker.ports.commands import Command
from qmq.net.server.connection import Connection

#: Pulls of one connection that are handed in in a turn.
PULLS_A_TURN: Final = 8
_PULLS: Final = frozenset((commands.Pull, commands.ListSegments, commands.ListBatches, commands.ReadLog))


class Postponed:
    """Who pulled in this turn, and whose requests wait for the next."""

    def __init__(self, hand_in: Callable[[Connection, Command], None]) -> None:
        self._hand_in = hand_in
        self._pulling: list[Connection] = []
        self._waiting: dict[Connection, None] = {}

    def take(self, connection: Connection, command: Command) -> bool:
        """Whether the command has to wait, behind those before it. What a SEND holds can't: it never does."""
        pulls = type(command) in _PULLS
        if pulls and not connection.postponed and connection.pulls < PULLS_A_TURN:
            self._count(connection)
            return False
        if not pulls and (not connection.postponed or type(command) is commands.Send):
            return False
        connection.postponed.append(command)
        self._waiting[connection] = None
        return True

    def resume(self, connection: Connection) -> bool:
        """It has read its answers; whether requests of it wait."""
        if connection.postponed:
            self._waiting[connection] = None
        return bool(connection.postponed)

    def turn(self) -> bool:
        """Hand in the next ones; whether there are more. Who does not read its answers waits until it does."""
        for connection in self._pulling:
            connection.pulls = 0
        self._pulling.clear()
        for connection in list(self._waiting):
            waiting = connection.postponed
            while waiting and connection.pulls < PULLS_A_TURN and not connection.slow():
                command = waiting.popleft()
                if type(command) in _PULLS:
                    self._count(connection)
                self._hand_in(connection, command)
            if not waiting or connection.slow():
                del self._waiting[connection]
        return bool(self._waiting)

    def _count(self, connection: Connection) -> None:
        if not connection.pulls:
            self._pulling.append(connection)
        connection.pulls += 1

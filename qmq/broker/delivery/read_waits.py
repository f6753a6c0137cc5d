"""Reads that pulls and commands wait for, and the detection of reads that do not help."""

from __future__ import annotations

from typing import Final

from qmq.broker.delivery.at_most_once import Reserve
from qmq.broker.groups.group import SubjectFilter
from qmq.broker.ports.commands import Administer, Subscribe
from qmq.broker.ports.effects import Asker, Effect, ReadWanted, first_number
from qmq.storage.store import ColdRead

#: After this many reads without a result, a waiter reads while everybody waits.
_IN_VAIN: Final = 10_000


Wanted = ColdRead | Reserve


class DeferredCommand:
    """A command that waits for a read from disk."""

    __slots__ = ("command", "reads")

    def __init__(self, command: Subscribe | Administer) -> None:
        self.command = command
        self.reads: set[object] = set()


class ReadWaits:
    """The reads under way, with the filter or command that waits for each."""

    def __init__(self, effects: list[Effect]) -> None:
        self._effects = effects
        self._last = first_number(Asker.PULLS)
        self._running: dict[int, tuple[SubjectFilter | DeferredCommand, Wanted]] = {}

    def begin(self, read: Wanted, waiter: SubjectFilter | DeferredCommand) -> bool:
        """Ask for a read. Return False when *waiter* has had the same read before, and its bytes have left memory."""
        if read.key in waiter.reads or len(waiter.reads) >= _IN_VAIN:
            waiter.reads.clear()
            return False
        waiter.reads.add(read.key)
        if isinstance(waiter, SubjectFilter):
            waiter.reading = True
        self._last += 1
        self._running[self._last] = waiter, read
        self._effects.append(ReadWanted(self._last, read))
        return True

    def end(self, number: int, *, failed: bool) -> tuple[SubjectFilter | DeferredCommand | None, Wanted]:
        """End a read; return what waits for it, None when that has left, and the read."""
        waiter, read = self._running.pop(number)
        if failed:
            waiter.reads.discard(read.key)
        if isinstance(waiter, SubjectFilter):
            waiter.reading = False
        elif waiter.command.connection < 0:
            return None, read
        return waiter, read

    def disconnected(self, connection: int) -> None:
        """Forget the commands of a connection; their reads go on."""
        for waiter, _ in self._running.values():
            if isinstance(waiter, DeferredCommand) and waiter.command.connection == connection:
                waiter.command = waiter.command._replace(connection=-1)

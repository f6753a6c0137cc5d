"""Runs the work of administrative commands, a part in each turn, so that the longest one holds up nobody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.ports.commands import Administer, ListSubjects
from qmq.broker.ports.effects import Effect, Refused
from qmq.broker.ports.work import TURN_WORK, Work
from qmq.errors import QmqError
from qmq.storage.store import NotInMemory, Store

#: What is done with a command whose work needs a read: it begins anew after that.
Missing = Callable[[NotInMemory], None]


@dataclass(slots=True, eq=False)
class _Task:
    command: Administer | ListSubjects
    work: Work[Any]
    done: Callable[[Any], object]
    missing: Missing | None
    #: The work changes something: it goes on when its client has gone.
    is_change: bool


class WorkQueue:
    """The work that is under way; each piece of work gets its part in turn. Refusals go to *effects*."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._tasks: deque[_Task] = deque()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(
        self, command: Administer | ListSubjects, work: Work[Any], done: Callable[[Any], object],
        missing: Missing | None = None, *, is_change: bool = False,
    ) -> None:  # fmt: skip
        """Begin the work of a command, and call *done* with the result at its end.

        *missing* is called where it needs a read, which ends it; without one it reads while everybody waits.
        """
        task = _Task(command, work, done, missing, is_change)
        if not self._do_part(task):
            self._tasks.append(task)

    def tick(self) -> None:
        """Go on with the task that has waited for longest."""
        if self._tasks:
            task = self._tasks.popleft()
            if not self._do_part(task):
                self._tasks.append(task)

    def disconnected(self, connection: int) -> None:
        """Drop the lists that a closed connection has asked for."""
        gone = [task for task in self._tasks if task.command.connection == connection and not task.is_change]
        for task in gone:
            self._tasks.remove(task)
            task.work.close()

    def _do_part(self, task: _Task) -> bool:
        """Do a turn's part of a task; return True when it has ended."""
        command, work = task.command, 0
        try:
            if task.missing is None:
                with blocking_reads(self._store):
                    while work < TURN_WORK:
                        work += next(task.work)
            else:
                while work < TURN_WORK:
                    work += next(task.work)
        except StopIteration as end:
            task.done(end.value)
            return True
        except NotInMemory as missing:
            assert task.missing is not None
            task.missing(missing)
            return True
        except QmqError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return True
        return False

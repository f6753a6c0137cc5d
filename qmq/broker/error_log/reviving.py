"""Dead letters handed out again, or deleted: some in each turn, however many there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from qmq.broker.delivery.handing import Handing
from qmq.broker.error_log.dead_letters import numbers_between
from qmq.broker.groups.group_state import Ledger
from qmq.broker.journal.durable_replies import Durable
from qmq.broker.ports.commands import Administer, Now
from qmq.broker.ports.effects import Administered, Effect, Refused
from qmq.errors import StorageError

#: Letters of one turn that are handed out again: about 40 us each. Of those that are named in no order each may take
#: a read of its own, so they are fewer.
LETTERS: Final = 256
NAMED: Final = 128
#: Letters of one turn that are deleted.
DELETED: Final = 4_096


@dataclass(slots=True)
class _Work:
    command: Administer
    ledger: Ledger
    #: Letters that die from now on are not meant: those have this number, or a higher one.
    before: int
    #: Those that are meant, ascending, and so many of them are done; None: all.
    named: list[int] | None
    done: int = 0
    last: int = 0
    count: int = 0

    def next_some(self) -> tuple[list[int], bool]:
        """The letters of this turn, and whether there are more. Raises StorageFailed."""
        if self.named is None:
            found = numbers_between(self.ledger.dead, self.last, self.before, LETTERS)
            return found, len(found) == LETTERS
        most = DELETED if self.deletes else NAMED
        start, self.done = self.done, self.done + most
        return self.named[start : self.done], self.done < len(self.named)

    @property
    def deletes(self) -> bool:
        return self.command.action == "delete_dead"


class Redriving:
    """Of all groups, one after another."""

    def __init__(self, handing: Handing, durable: Durable, effects: list[Effect]) -> None:
        self._handing = handing
        self._durable = durable
        self._effects = effects
        self._waiting: deque[_Work] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, command: Administer, ledger: Ledger, named: list[int] | None, now: Now) -> None:
        """Have these dead letters of it (None: all) handed out again, or deleted; *command* is answered with how many
        when that is done.
        """
        if named is not None:
            named = sorted(set(named))
        self._waiting.append(_Work(command, ledger, ledger.dead.next_number, named))
        if len(self._waiting) == 1:
            self.tick(now)

    def tick(self, now: Now) -> None:
        """Go on with it."""
        if self._waiting and self._do_some(self._waiting[0], now):
            self._waiting.popleft()

    def _do_some(self, work: _Work, now: Now) -> bool:
        """True when that was all, and it is answered."""
        ledger, command = work.ledger, work.command
        is_there = self._handing.ledgers.get(ledger.number) is ledger  # or it was deleted meanwhile
        numbers, goes_on = list[int](), False
        try:
            if is_there and work.deletes and work.named is None:
                work.count = ledger.forget_dead(None)
            elif is_there:
                numbers, goes_on = work.next_some()
            if numbers and work.deletes:
                work.count += ledger.forget_dead(numbers)
            elif numbers:
                work.count += ledger.redrive(numbers, now.wall_us)
                work.last = numbers[-1]
                self._handing.members.look(ledger)
        except StorageError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return True
        if goes_on:
            return False
        self._durable.answer(Administered(command.connection, command.request, {"messages": work.count}))
        return True

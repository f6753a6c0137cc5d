"""All dead letters of a group handed out again: some in each turn, however many there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from qmq.broker.commands import Administer, Now
from qmq.broker.dead_letters import numbers_between
from qmq.broker.durable import Durable
from qmq.broker.effects import Administered, Effect, Refused
from qmq.broker.handing import Handing
from qmq.broker.ledger import Ledger
from qmq.errors import StorageError

#: Letters of one turn: about 40 us each.
LETTERS: Final = 256


@dataclass(slots=True)
class _Work:
    command: Administer
    ledger: Ledger
    #: Letters that die from now on are not meant: those have this number, or a higher one.
    before: int
    last: int = 0
    count: int = 0


class Reviving:
    """Of all groups, one after another."""

    def __init__(self, handing: Handing, durable: Durable, effects: list[Effect]) -> None:
        self._handing = handing
        self._durable = durable
        self._effects = effects
        self._waiting: deque[_Work] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, command: Administer, ledger: Ledger, now: Now) -> None:
        """Have all of its dead letters handed out again; *command* is answered with how many when that is done."""
        self._waiting.append(_Work(command, ledger, ledger.dead.next_number))
        if len(self._waiting) == 1:
            self.tick(now)

    def tick(self, now: Now) -> None:
        """Go on with it."""
        if self._waiting and self._revive_some(self._waiting[0], now):
            self._waiting.popleft()

    def _revive_some(self, work: _Work, now: Now) -> bool:
        """True when that was all, and it is answered."""
        ledger, command = work.ledger, work.command
        is_there = self._handing.ledgers.get(ledger.number) is ledger  # or it was deleted meanwhile
        try:
            numbers = numbers_between(ledger.dead, work.last, work.before, LETTERS) if is_there else []
            if numbers:
                work.count += ledger.revive(numbers, now.wall_us)
                work.last = numbers[-1]
                self._handing.members.look(ledger)
        except StorageError as error:
            self._effects.append(Refused(command.connection, command.request, error))
            return True
        if len(numbers) == LETTERS:
            return False
        self._durable.answer(Administered(command.connection, command.request, {"messages": work.count}))
        return True

"""Histories of consumers (consumption.py) of a group that is told again and again to follow less, or more: what was in
flight or waited to come again may be dead with that reason, and everything else is handled or dead as ever once it
follows all again.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from qmq.broker.delivery.redeliver import NOT_FOLLOWED
from qmq.broker.ports.commands import Administer, Command, Subscribe
from tests.sim.consumption import Consumption
from tests.sim.runs import run_one
from tests.sim.worker import Worker

GROUP: Final = "g"
FOLLOWS: Final = (("a.",), ("b",), ("a.x", "b"), ("a.y",), ("",), ("",))


class Again(Worker):
    """One that comes back over another connection asks for nothing anew."""

    def _next(self, request: int, connection: int) -> Command:
        command = super()._next(request, connection)
        if isinstance(command, Subscribe) and self.in_flight is not None:
            return command._replace(asks="again")
        return command


class Narrowing(Consumption):
    """One history."""

    def __init__(self, seed: int) -> None:
        self._passed = set[int]()
        super().__init__(seed)
        self.order.may_be_skipped = self._may_be_dead

    def _may_be_dead(self, group: str, message: int) -> bool:
        """Return whether a group may have a dead letter that nobody was told of; the end of the step looks."""
        if group == GROUP:
            self._passed.add(message)
        return group == GROUP

    def _worker(self, name: str, group: str, prefixes: tuple[str, ...]) -> Worker:
        self._lives += 1
        return Again(name, group, prefixes, self.tallies[group], self._lives, self.chance.getrandbits(32))

    def step(self, is_late: bool = False) -> None:
        """As ever, and now and then the group is told what to follow."""
        if self.chance.random() < 0.04 and GROUP in self.driven.broker.groups:
            self.follow_only(self.chance.choice(FOLLOWS))
        super().step(is_late)
        if self._passed and GROUP in self.driven.broker.groups:
            passed, self._passed = self._passed, set()
            self.count["passed as dead"] += len(passed)
            assert passed <= self.dead(GROUP).keys(), passed

    def follow_only(self, prefixes: tuple[str, ...]) -> None:
        """Tell it."""
        self.count["narrowed" if prefixes != ("",) else "widened"] += 1
        for letter in self.tallies[GROUP].letters.values():
            letter.may_be_dead = True
        fields = {"group": GROUP, "follows": list(prefixes)}
        self.do([Administer(1, self.driven.request(), "set_group", fields)])

    def drain(self) -> None:
        """It follows all again."""
        self.disk.before = None
        self.follow_only(("",))
        super().drain()

    def dead(self, group: str) -> dict[int, str]:
        """As ever; what is dead by being followed no more may have been given to one whose answer was lost."""
        found = super().dead(group)
        if group == GROUP:
            for message, reason in found.items():
                if reason == NOT_FOLLOWED:
                    self.count["dead as it was not followed"] += 1
                    self.tallies[group].letter(message).may_be_dead = True
        assert group == GROUP or NOT_FOLLOWED not in found.values()
        return found


def run(seed: int, commands: int = 800) -> Counter[str]:
    """One history, and what happened in it."""
    return run_one(Narrowing(seed), commands, f"narrowing {seed}")

"""Forget subjects that have had no messages for an hour, so that new ones find room.

Each look remembers the numbers without messages. Those that the look before had, too, and that got no message between,
are forgotten: their names leave all lists, their cursors those of the groups, and a message to such a name makes a new
number, with sequences above all that were ever forgotten. These stay:

- a subject that a group or a consumer follows by its full name, since ranges of messages name it by its number
- a subject of which delayed messages wait
- a subject that has a private one, for messages that a group has still to handle; that one goes first

The delay log has a registry of its own, which forgets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.subscriptions import Subscriptions
from qmq.broker.groups.group import Group, is_exact
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.ports.commands import Now
from qmq.broker.ports.work import TURN_WORK, Work
from qmq.broker.publish.publish import Intake
from qmq.broker.stats import SubjectFamilies
from qmq.storage.store import IdleSubjects, Store

#: The time between two looks: a subject is forgotten one to two of them after its last message has gone.
LOOK_US: Final = 3_600_000_000
#: A look takes at most so much of a turn, beside other work.
_TURN_WORK: Final = TURN_WORK // 4
#: Numbers that one piece looks at, and that it forgets.
_LOOKED_AT: Final = 262_144
_FORGOTTEN: Final = 512
#: The work of a piece that looks, of a number that is forgotten, and of the known names for each piece that forgets.
_LOOK_WORK: Final = 400
_FORGET_WORK: Final = 5
_NAMES_A_UNIT: Final = 32
_CURSORS_A_UNIT: Final = 512
#: The cursors of a group.
_GROUP_WORK: Final = 5


class IdleSubjectsForgetting:
    """Forgets the subjects of one broker that have no messages."""

    def __init__(
        self, store: Store, subscriptions: Subscriptions, intake: Intake, delayed: Mapping[str, int],
        order: NameOrder, families: SubjectFamilies,
    ) -> None:  # fmt: skip
        """*delayed* is the number of delayed messages by subject."""
        self._store = store
        self._subscriptions = subscriptions
        self._intake = intake
        self._delayed = delayed
        self._order = order
        self._families = families
        self._before: dict[int, IdleSubjects] = {}  # at the last look, by the first number that was looked at
        #: The time between two looks.
        self.every_us = LOOK_US
        self._look_us = 0
        self._dropped = -1  # segments that had gone at the last look
        self._work: Work[None] | None = None

    def tick(self, now: Now) -> None:
        """Do a turn's part of a look, or begin one that is due."""
        if self._work is None:
            if now.monotonic_us < self._look_us:
                return
            self._look_us = now.monotonic_us + self.every_us
            self._dropped = self._store.dropped_segments
            self._work = self._look()
        work = 0
        while work < _TURN_WORK:
            done = next(self._work, None)
            if done is None:
                self._work = None
                return
            work += done

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when ``tick`` has something to do; None while no subject is idle and no segment has gone."""
        if self._work is not None:
            return now.monotonic_us
        may_find = self._dropped != self._store.dropped_segments or any(
            len(one.numbers) for one in self._before.values()
        )
        return self._look_us if may_find else None

    def _look(self) -> Work[None]:
        self._subscriptions.followed_since = followed = set[str]()
        try:
            yield from self._look_at_all(followed)
        finally:
            self._subscriptions.followed_since = None

    def _look_at_all(self, followed: set[str]) -> Work[None]:
        """Look at all subjects; *followed* gets what is followed from now on."""
        store, gone = self._store, list[npt.NDArray[np.int64]]()
        for start in range(0, store.subjects.count, _LOOKED_AT):
            end = min(start + _LOOKED_AT, store.subjects.count)
            idle, before = store.idle_subjects(start, end), self._before.get(start)
            self._before[start] = idle
            yield _LOOK_WORK
            long_idle = idle.numbers[_same(idle, before)] if before is not None else idle.numbers[:0]
            if len(long_idle):
                yield from self._families.caught_up()
                if not gone:
                    yield from self._add_followed(followed)
            for at in range(0, len(long_idle), _FORGOTTEN):
                numbers = long_idle[at : at + _FORGOTTEN]
                still_idle = np.isin(numbers, store.idle_subjects(start, end).numbers, assume_unique=True)
                gone.append(self._forget(numbers[still_idle], followed))
                yield _FORGET_WORK * len(numbers) + store.subjects.name_count // _NAMES_A_UNIT
        if gone:
            yield from self._forget_cursors(np.concatenate(gone))

    def _forget(self, numbers: npt.NDArray[np.int64], followed: set[str]) -> npt.NDArray[np.int64]:
        """Forget those of these numbers without messages that nothing holds; return them."""
        store, subjects = self._store, self._store.subjects
        chosen = [
            (number, name)
            for number, name in zip(numbers.tolist(), subjects.names_of(numbers), strict=True)
            if name is not None and name not in followed and name not in self._delayed and not subjects.has_copies(name)
        ]
        found, names = [number for number, _ in chosen], {name for _, name in chosen}
        if found:
            self._families.forget(found)
            self._families.recount(self._first_numbers(names), -1)
            store.forget_subjects(found)
            self._families.recount(self._first_numbers(names), 1)
            self._order.forget(names)
            self._intake.forget_numbers(found)
        return np.array(found, np.int64)

    def _first_numbers(self, names: set[str]) -> list[int]:
        several = map(self._store.subjects.numbers_of, names)
        return [numbers[0] for numbers in several if numbers]

    def _add_followed(self, followed: set[str]) -> Work[None]:
        """Add the subjects that groups and consumers follow, or once followed, by their full names."""
        for group in self._groups():
            filters = list(group.all_filters())
            followed.update(one.prefix for one in filters if is_exact(one.prefix))
            yield _GROUP_WORK + len(filters)

    def _groups(self) -> list[Group]:
        return [*self._subscriptions.groups.values(), *self._subscriptions.solo()]

    def _forget_cursors(self, numbers: npt.NDArray[np.int64]) -> Work[None]:
        for group in self._groups():
            if group.cursors.forget(numbers):
                group.dirty = True
            yield _GROUP_WORK + len(group.cursors.column) // _CURSORS_A_UNIT


def _same(idle: IdleSubjects, before: IdleSubjects) -> npt.NDArray[np.bool_]:
    """Return which of *idle* were idle before, with the same next sequence."""
    if not len(before.numbers):
        return np.zeros(len(idle.numbers), np.bool_)
    at = np.minimum(np.searchsorted(before.numbers, idle.numbers), len(before.numbers) - 1)
    found: npt.NDArray[np.bool_] = (before.numbers[at] == idle.numbers) & (before.ends[at] == idle.ends)
    return found

"""Who is to be looked at when something arrives: what is followed, by prefix and by subject."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.encode import FEW_ROWS
from qmq.broker.groups.group import Following
from qmq.errors import StorageError
from qmq.format.batch import EntryRow
from qmq.storage.store import NotAtHand, Store

#: An arrival of more rows than this in one turn is looked at by columns, a piece at a time.
_ROWS_AT_ONCE: Final = 65_536
#: Subjects whose watchers are remembered.
_WATCHED_SUBJECTS: Final = 200_000


class Arrivals:
    """Looks at what became visible, and keeps in ``ready`` the followings for which there is something."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._followings: dict[str, list[Following]] = {}  # by prefix, of groups with subscriptions or parked pulls
        self._watchers: dict[int, list[Following]] = {}  # by subject number: who is to look at an arrival
        self._seen = [store.visible_row(partition) for partition in range(store.partitions)]
        #: To be served at the end of the turn, by id.
        self.ready: dict[int, Following] = {}

    def watch(self, following: Following) -> None:
        """Look at arrivals for it from now on."""
        watched = self._followings.setdefault(following.prefix, [])
        if following not in watched:
            watched.append(following)
            self._watchers.clear()

    def unwatch(self, following: Following) -> None:
        """Nobody waits for it any more."""
        watched = self._followings[following.prefix]
        watched.remove(following)
        if not watched:
            del self._followings[following.prefix]
        self._watchers.clear()

    def make_ready(self, followings: Iterable[Following]) -> None:
        """There may be something for these."""
        self.ready.update((id(following), following) for following in followings)

    def look(self, anyone_waits: bool) -> None:
        """Look at what became visible since the last call."""
        for partition in range(self._store.partitions):
            row, visible = self._seen[partition], self._store.visible_row(partition)
            self._seen[partition] = visible
            if row == visible or not anyone_waits:
                continue
            try:
                self._look_at(partition, row, visible)
            except (NotAtHand, StorageError):  # so it may be for anyone
                for watched in self._followings.values():
                    self.make_ready(following for following in watched if following.waiting)

    def _look_at(self, partition: int, row: int, visible: int) -> None:
        store = self._store
        if visible - row <= FEW_ROWS:
            for number in range(row, visible):
                self._wake_by(partition, store.read_entry(partition, number))
            return
        while row < visible:
            rows = store.rows(partition, row, min(visible - row, _ROWS_AT_ONCE))
            for subject in _distinct(rows["subject"]):
                self.make_ready(following for following in self._watching(subject) if following.waiting)
            row += len(rows)

    def _wake_by(self, partition: int, entry: EntryRow) -> None:
        """One row arrived: who follows its subject exactly is handed it, so that it need not be looked up."""
        for following in self._watching(entry[3]):
            if following.waiting:
                self.ready[id(following)] = following
                if following.exact:
                    following.arrived.append((partition, entry))

    def _watching(self, number: int) -> list[Following]:
        """Who follows that subject: exactly, by each of its prefixes, or everything."""
        watchers = self._watchers.get(number)
        if watchers is None:
            if len(self._watchers) > _WATCHED_SUBJECTS:
                self._watchers.clear()
            watchers = self._watchers[number] = self._find_watchers(number)
        return watchers

    def _find_watchers(self, number: int) -> list[Following]:
        name = self._store.subject_name(number)
        found = [*self._followings.get("", ()), *self._followings.get(name, ())]
        end = name.find(".")
        while end >= 0:
            found += self._followings.get(name[: end + 1], ())
            end = name.find(".", end + 1)
        return found


def _distinct(numbers: npt.NDArray[np.uint32]) -> list[int]:
    """Each once. (The first call of numpy's own takes 50 ms, to import what it does not need.)"""
    ordered = np.sort(numbers)
    return [*ordered[:1].tolist(), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]

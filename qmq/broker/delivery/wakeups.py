"""Waiting pulls with their deadlines, and the filters to serve when messages arrive."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.encode import FEW_ROWS
from qmq.broker.groups.group import SubjectFilter, Subscription, Waiting
from qmq.errors import StorageError
from qmq.format.batch import EntryRow
from qmq.format.layout import LANE_NORMAL
from qmq.storage.store import NotInMemory, Store

#: Up to this many deadlines, those of answered pulls are left in the heap.
_FEW_DEADLINES: Final = 64


class WaitingPulls:
    """All waiting pulls, by connection and by deadline."""

    def __init__(self) -> None:
        #: By connection, then by request; no inner dict is empty.
        self.by_connection: dict[int, dict[int, Waiting]] = {}
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self.count = 0
        #: Pulls past their deadline that still wait for a read.
        self.overdue: list[Waiting] = []

    def add(self, waiting: Waiting) -> None:
        """Have a pull wait for everything that its subscription follows."""
        pull = waiting.pull
        self.by_connection.setdefault(pull.connection, {})[pull.request] = waiting
        self.count += 1
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting[id(waiting)] = waiting
        if pull.timeout_ms:
            heapq.heappush(self._deadlines, (waiting.deadline_us, id(waiting), waiting))
        else:
            self.overdue.append(waiting)

    def remove(self, waiting: Waiting) -> None:
        """Mark a pull as done, and forget it if it waited."""
        pull = waiting.pull
        waiting.done = True
        waiting_pulls = self.by_connection.get(pull.connection)
        if waiting_pulls is None or waiting_pulls.pop(pull.request, None) is None:
            return
        self.count -= 1
        if not waiting_pulls:
            del self.by_connection[pull.connection]
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting.pop(id(waiting), None)
        if len(self._deadlines) > _FEW_DEADLINES and len(self._deadlines) > 4 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)

    def detach(self, waiting: Waiting) -> None:
        """Take a pull off the filters of its subscription; call this before these change."""
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting.pop(id(waiting), None)

    def attach(self, waiting: Waiting) -> None:
        """Put a pull on the filters that its subscription has now."""
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting[id(waiting)] = waiting

    def __contains__(self, connection: int) -> bool:
        """Return whether the connection has waiting pulls."""
        return connection in self.by_connection

    def get(self, connection: int, request: int) -> Waiting | None:
        """Return the waiting pull of a request."""
        return self.by_connection.get(connection, {}).get(request)

    def count_of(self, connection: int) -> int:
        """Return how many waiting pulls a connection has."""
        return len(self.by_connection.get(connection, ()))

    def of(self, connection: int) -> list[Waiting]:
        """Return the waiting pulls of a connection."""
        return list(self.by_connection.get(connection, {}).values())

    def of_subscription(self, subscription: Subscription) -> list[Waiting]:
        """Return the waiting pulls of a subscription."""
        return [waiting for waiting in self.of(subscription.connection) if waiting.subscription is subscription]

    def all(self) -> list[Waiting]:
        """Return all waiting pulls."""
        return [waiting for waiting_pulls in self.by_connection.values() for waiting in waiting_pulls.values()]

    def due(self, now_us: int) -> Iterator[Waiting]:
        """Yield, once each, the pulls whose deadline has come."""
        while self._deadlines and (self._deadlines[0][0] <= now_us or self._deadlines[0][2].done):
            waiting = heapq.heappop(self._deadlines)[2]
            if not waiting.done:
                yield waiting

    def next_deadline_us(self) -> int | None:
        """Return a time at or before the next deadline."""
        return self._deadlines[0][0] if self._deadlines else None


#: Rows that one step over an arrival looks at.
_ROWS_AT_ONCE: Final = 65_536
#: Subjects whose watching filters are remembered.
_WATCHED_SUBJECTS: Final = 200_000


class Arrivals:
    """Finds the filters that newly visible rows are for, and collects them in ``ready``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: By prefix, of groups with subscriptions or waiting pulls, each once: many groups may follow one subject.
        self._filters: dict[str, dict[SubjectFilter, None]] = {}
        #: Found before, by subject number.
        self._watchers: dict[int, list[SubjectFilter]] = {}
        self._seen = [part.consumer_log.visible_row for part in store.partitions]
        #: Filters to serve at the end of the turn, by id.
        self.ready: dict[int, SubjectFilter] = {}

    def watch(self, subject_filter: SubjectFilter) -> None:
        """Look for arrivals for a filter from now on."""
        watched = self._filters.setdefault(subject_filter.prefix, {})
        if subject_filter not in watched:
            watched[subject_filter] = None
            self._watchers.clear()

    def unwatch(self, subject_filter: SubjectFilter) -> None:
        """Look for arrivals for a filter no longer."""
        watched = self._filters[subject_filter.prefix]
        del watched[subject_filter]
        if not watched:
            del self._filters[subject_filter.prefix]
        self._watchers.clear()

    def make_ready(self, filters: Iterable[SubjectFilter]) -> None:
        """Have these filters served at the end of the turn."""
        self.ready.update((id(subject_filter), subject_filter) for subject_filter in filters)

    def see(self, row: int, entry: EntryRow) -> list[SubjectFilter] | None:
        """Note that a row of the only partition became visible; return the filters that take its subject.

        Return None where rows before it have not been seen yet: ``look`` sees them all.
        """
        if self._seen[0] != row:
            return None
        self._seen[0] = row + 1
        found = self._watchers.get(entry[3])
        return self._watching(entry[3]) if found is None else found

    def seen(self) -> list[int]:
        """Return the rows that had become visible when ``look`` was last called, by partition, or earlier ones."""
        return list(self._seen)

    def pass_over(self, row: int) -> None:
        """Note that a row of the only partition became visible while no pull waited."""
        if self._seen[0] == row:
            self._seen[0] = row + 1

    def look(self, anyone_waits: bool) -> None:
        """Make ready the filters of rows that became visible since the last call, if *anyone_waits*."""
        for partition, part in enumerate(self._store.partitions):
            row, visible = self._seen[partition], part.consumer_log.visible_row
            self._seen[partition] = visible
            if row == visible or not anyone_waits:
                continue
            try:
                self._look_at(partition, row, visible)
            except (NotInMemory, StorageError):  # the rows may be for any filter
                for watched in self._filters.values():
                    self.make_ready(subject_filter for subject_filter in watched if subject_filter.waiting)

    def _look_at(self, partition: int, row: int, visible: int) -> None:
        store = self._store
        part = store.partitions[partition]
        if visible - row <= FEW_ROWS:
            for number in range(row, visible):
                self._wake_by(partition, part.consumer_log.read_entry(number))
            return
        while row < visible:
            rows = part.consumer_log.rows(row, min(visible - row, _ROWS_AT_ONCE))
            for subject in _distinct(rows["subject"]):
                self.make_ready(subject_filter for subject_filter in self._watching(subject) if subject_filter.waiting)
            row += len(rows)

    def _wake_by(self, partition: int, entry: EntryRow) -> None:
        """Make ready the filters of one row. Exact filters get the row itself, which saves a lookup."""
        for subject_filter in self._watching(entry[3]):
            if subject_filter.waiting:
                self.wake(subject_filter, partition, entry)

    def wake(self, subject_filter: SubjectFilter, partition: int, entry: EntryRow) -> None:
        """Make ready a filter that takes a row."""
        self.ready[id(subject_filter)] = subject_filter
        if subject_filter.exact and entry[6] == LANE_NORMAL:
            subject_filter.arrived.append((partition, entry))

    def _watching(self, number: int) -> list[SubjectFilter]:
        """Return the filters that take a subject: the exact one, its prefixes, and the empty prefix."""
        watchers = self._watchers.get(number)
        if watchers is None:
            if len(self._watchers) > _WATCHED_SUBJECTS:
                self._watchers.clear()
            watchers = self._watchers[number] = self._find_watchers(number)
        return watchers

    def _find_watchers(self, number: int) -> list[SubjectFilter]:
        name = self._store.subjects.name(number)
        found = [*self._filters.get("", ()), *self._filters.get(name, ())]
        end = name.find(".")
        while end >= 0:
            found += self._filters.get(name[: end + 1], ())
            end = name.find(".", end + 1)
        return found


def _distinct(numbers: npt.NDArray[np.uint32]) -> list[int]:
    """Return each number once. (The first call of ``np.unique`` takes 50 ms of imports.)"""
    ordered = np.sort(numbers)
    return [*ordered[:1].tolist(), *ordered[1:][ordered[1:] != ordered[:-1]].tolist()]

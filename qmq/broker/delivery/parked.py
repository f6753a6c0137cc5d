"""Pulls that wait for messages, and when the time of each is up."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from qmq.broker.groups.group import Subscription, Waiting

#: Entries of deadlines beyond which those of pulls that were answered are looked for.
_FEW_DEADLINES: Final = 64


class WaitingPulls:
    """All of them."""

    def __init__(self) -> None:
        self._by_connection: dict[int, dict[int, Waiting]] = {}  # by pull request; none of them empty
        self._deadlines: list[tuple[int, int, Waiting]] = []
        #: How many there are.
        self.count = 0
        #: Those whose time is up, and which wait for a read.
        self.overdue: list[Waiting] = []

    def add(self, waiting: Waiting) -> None:
        """It waits for whatever its subscription follows."""
        pull = waiting.pull
        self._by_connection.setdefault(pull.connection, {})[pull.request] = waiting
        self.count += 1
        self.attach(waiting)
        if pull.timeout_ms:
            heapq.heappush(self._deadlines, (waiting.deadline_us, id(waiting), waiting))
        else:
            self.overdue.append(waiting)

    def remove(self, waiting: Waiting) -> None:
        """It is answered, or nobody waits for the answer; one that was never waiting is done just so."""
        pull = waiting.pull
        waiting.done = True
        waiting_pulls = self._by_connection.get(pull.connection)
        if waiting_pulls is None or waiting_pulls.pop(pull.request, None) is None:
            return
        self.count -= 1
        if not waiting_pulls:
            del self._by_connection[pull.connection]
        self.detach(waiting)
        if len(self._deadlines) > _FEW_DEADLINES and len(self._deadlines) > 4 * self.count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)

    def detach(self, waiting: Waiting) -> None:
        """What its subscription follows is about to change: it waits for none of that any more."""
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting.pop(id(waiting), None)

    def attach(self, waiting: Waiting) -> None:
        """It waits for what its subscription follows now."""
        for subject_filter in waiting.subscription.filters:
            subject_filter.waiting[id(waiting)] = waiting

    def __contains__(self, connection: int) -> bool:
        """That connection has some."""
        return connection in self._by_connection

    def get(self, connection: int, request: int) -> Waiting | None:
        """The one of that request."""
        return self._by_connection.get(connection, {}).get(request)

    def count_of(self, connection: int) -> int:
        """How many that connection has."""
        return len(self._by_connection.get(connection, ()))

    def of(self, connection: int) -> list[Waiting]:
        """Those of a connection."""
        return list(self._by_connection.get(connection, {}).values())

    def of_subscription(self, subscription: Subscription) -> list[Waiting]:
        """Those of a subscription."""
        return [waiting for waiting in self.of(subscription.connection) if waiting.subscription is subscription]

    def all(self) -> list[Waiting]:
        """Every one."""
        return [waiting for waiting_pulls in self._by_connection.values() for waiting in waiting_pulls.values()]

    def due(self, now_us: int) -> Iterator[Waiting]:
        """Those whose time is up by now, and was not before."""
        while self._deadlines and (self._deadlines[0][0] <= now_us or self._deadlines[0][2].done):
            waiting = heapq.heappop(self._deadlines)[2]
            if not waiting.done:
                yield waiting

    def next_deadline_us(self) -> int | None:
        """When the next one's time is up, at the latest."""
        return self._deadlines[0][0] if self._deadlines else None

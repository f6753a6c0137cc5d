"""Broadcasts: the group of a member goes when the member has left for good, or has been away for too long.

A member whose id its client made up comes back only over a lost connection, so its group goes when it leaves, and a few
session timeouts after its session has expired. A member with an id of its own is kept for ``broadcast_ttl_ms``.
"""

from __future__ import annotations

import heapq
from typing import Final

from qmq.broker.delivery.subscriptions import Subscriptions
from qmq.broker.groups.group import Group
from qmq.broker.groups.membership import Members
from qmq.broker.ports.commands import Now
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.startup.replay import GroupReplay
from qmq.net.protocol.types import BROADCAST

#: The group of a made-up id goes so many session timeouts after its session has expired.
MADE_UP_TIMEOUTS: Final = 3
#: The wall clock may be set at any time: what is due by it is looked at so often.
_LOOK_FOR_EXPIRY_EVERY_US: Final = 60_000_000


class Broadcasts:
    """Deletes the groups of members of all broadcasts when they are due."""

    def __init__(
        self, subscriptions: Subscriptions, members: Members, changes: GroupReplay, limits: BrokerLimits
    ) -> None:
        self._subscriptions = subscriptions
        self._members = members
        self._changes = changes
        self._ttl_us = limits.broadcast_ttl_ms * 1_000
        self._made_up_us = min(MADE_UP_TIMEOUTS * limits.session_timeout_ms * 1_000, self._ttl_us)
        self._due: list[tuple[int, int]] = []  # wall clock, number of the group's ledger
        self._looks: dict[int, int] = {}  # by that number: the first time at which it is in _due

    def restore(self, now: Now) -> None:
        """After a start: look at the groups whose members are away."""
        for number, group in self._subscriptions.by_ledger.items():
            if group.mode == BROADCAST:
                # Records that a member ever joined may be lost: then it gets the whole time from now on.
                self._wait_for(number, group, now.wall_us + self._ttl_us)

    def tick(self, now: Now) -> None:
        """Delete the groups that are due."""
        left = self._members.left_groups
        while left:
            number = left.pop()
            group = self._subscriptions.by_ledger.get(number)
            if group is not None:
                self._wait_for(number, group, now.wall_us)
        while self._due and self._due[0][0] <= now.wall_us:
            due_us, number = heapq.heappop(self._due)
            group = self._subscriptions.by_ledger.get(number)
            if self._looks.get(number) != due_us:
                continue
            del self._looks[number]
            until_us = self._due_us(group, due_us) if group is not None else None
            if group is not None and until_us is not None and until_us <= now.wall_us:
                self._changes.delete(group)
            elif until_us is not None:
                self._look_at(number, until_us)

    def _wait_for(self, number: int, group: Group, empty_us: int) -> None:
        due_us = self._due_us(group, empty_us)
        if due_us is not None:
            self._look_at(number, due_us)

    def _look_at(self, number: int, due_us: int) -> None:
        if due_us < self._looks.get(number, due_us + 1):
            self._looks[number] = due_us
            heapq.heappush(self._due, (due_us, number))

    def _due_us(self, group: Group, empty_us: int) -> int | None:
        """Return when a group is to go: None while its consumer is there, *empty_us* where it knows none."""
        assert group.ledger is not None
        members = group.ledger.members.values()
        if not all(member.closed for member in members):
            return None
        kept = ((self._made_up_us if member.transient else self._ttl_us) + member.left_us for member in members)
        return max(kept, default=empty_us)

    def next_deadline_us(self, now: Now) -> int | None:
        """When ``tick`` has something to do."""
        if self._members.left_groups:
            return now.monotonic_us
        if not self._due:
            return None
        return now.monotonic_us + min(max(0, self._due[0][0] - now.wall_us), _LOOK_FOR_EXPIRY_EVERY_US)

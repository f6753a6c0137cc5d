"""Broadcasts: the group of a member that has been away for long is deleted."""

from __future__ import annotations

from typing import Final

from qmq.broker.changes import Changes
from qmq.broker.commands import Now
from qmq.broker.groups import Group
from qmq.broker.modes import BROADCAST
from qmq.broker.subscriptions import Subscriptions

_LOOK_EVERY_US: Final = 60_000_000


class Broadcasts:
    """Looks at the members of all broadcasts now and then."""

    def __init__(self, subscriptions: Subscriptions, changes: Changes, ttl_us: int, now: Now) -> None:
        self._subscriptions = subscriptions
        self._changes = changes
        self._ttl_us = ttl_us
        self._look_us = now.monotonic_us + _LOOK_EVERY_US

    def tick(self, now: Now) -> None:
        """Delete the groups of members that nobody has been for the time that they are kept."""
        if now.monotonic_us < self._look_us or not self._subscriptions.broadcasts:
            return
        self._look_us = now.monotonic_us + _LOOK_EVERY_US
        for group in list(self._subscriptions.groups.values()):
            if group.mode == BROADCAST and self._is_over(group, now.wall_us):
                self._changes.delete(group)

    def _is_over(self, group: Group, now_us: int) -> bool:
        """A consumer without an id of its own does not come back."""
        assert group.ledger is not None
        members = group.ledger.members.values()
        return all(member.closed and now_us - member.left_us >= self._ttl_us for member in members)

    def next_deadline_us(self) -> int | None:
        """When ``tick`` has something to do."""
        return self._look_us if self._subscriptions.broadcasts else None

"""One consumer of a group, as the broker knows it.

Who the consumers of a group are, those that are away among them: by number and by name.
"""

from __future__ import annotations

from typing import Any, Final

from qmq.broker.groups.in_flight import InFlight
from qmq.errors import Fenced, TooManyConsumers

#: Consumers of a group, those that are away among them.
MAX_CONSUMERS: Final = 10_000


class Consumers:
    """Of one group."""

    def __init__(self) -> None:
        self.by_number: dict[int, Member] = {}
        self.by_name: dict[str, Member] = {}
        self.next_number = 1

    def check_room(self, name: str) -> None:
        """Raises TooManyConsumers when there can be no consumer of that name."""
        if name not in self.by_name and len(self.by_number) >= MAX_CONSUMERS and self._longest_away() is None:
            raise TooManyConsumers(f"{MAX_CONSUMERS:,} consumers of this group are there, the most it may have")

    def _longest_away(self) -> Member | None:
        """Who may be forgotten: it holds nothing."""
        return next((member for member in self.by_number.values() if member.closed), None)

    def make(self, name: str, transient: bool, now_us: int) -> Member:
        """A new one; where there are many, who has been away for longest is forgotten."""
        away = self._longest_away() if len(self.by_number) >= MAX_CONSUMERS else None
        if away is not None:
            del self.by_number[away.number], self.by_name[away.name]
        return self._add(Member(self.next_number, name, transient, now_us))

    def follow_on(self, leaving: Member) -> Member:
        """Who goes on under the name of one that is leaving, and holds nothing; that one is forgotten once it has."""
        member = Member(self.next_number, leaving.name, leaving.transient, leaving.since_us)
        member.epoch, member.pulled_us = leaving.epoch, leaving.pulled_us
        member.in_flight = InFlight(leaving.in_flight.next_sequence)
        leaving.transient = True
        return self._add(member)

    def _add(self, member: Member) -> Member:
        self.by_name[member.name] = self.by_number[member.number] = member
        self.next_number = max(self.next_number, member.number + 1)
        return member

    def forget(self, member: Member) -> None:
        """Nobody comes back as that one."""
        del self.by_number[member.number]
        if self.by_name.get(member.name) is member:
            del self.by_name[member.name]

    def there(self, number: int) -> Member | None:
        """Who a record is of; None when the one by which it joined is lost."""
        member = self.by_number.get(number)
        return None if member is None or member.closed else member

    def caller(self, number: int, epoch: int) -> Member:
        """Who calls. Raises Fenced when it is not that consumer any more."""
        member = self.by_number.get(number)
        if member is None or not member.is_there or member.epoch != epoch:
            raise Fenced(_gone(member, epoch))
        return member

    def packed(self) -> list[Any]:
        """For the checkpoint."""
        return [member.packed() for member in self.by_number.values()]

    def restore(self, fields: list[Any], next_number: int) -> None:
        """Take over what ``packed`` gave."""
        for said in fields:
            self._add(Member.restored(said))
        self.next_number = next_number


def _gone(member: Member | None, epoch: int) -> str:
    """What has become of a consumer that was that epoch."""
    if member is not None and member.epoch == epoch:
        return (
            f"consumer {member.name!r} is not there any more: it left, was silent for too long, or its group has gone "
            "elsewhere, so it holds nothing now"
        )
    who = f"consumer {member.name!r} is epoch {member.epoch}" if member is not None else "it is nobody"
    return f"{who} now, not {epoch}: what it held was taken over or is handed out again"


class Member:
    """One consumer of a group."""

    __slots__ = (
        "quarantined", "client", "closed", "in_flight", "epoch", "is_timed", "leaving", "left_us", "name", "nonce",
        "number", "progress", "pulled_us", "seen_us", "since_us", "stalled_us", "takeovers", "transient",
    )  # fmt: skip

    def __init__(self, number: int, name: str, transient: bool, since_us: int) -> None:
        self.number = number
        self.name = name
        self.transient = transient
        self.since_us = since_us  # wall clock: with its name what it is known by for good
        self.epoch = 0
        self.nonce = b""
        self.in_flight = InFlight()
        self.closed = True  # nobody is it now
        self.leaving = 0  # why, while what it held is handed out again in parts
        self.left_us = 0  # wall clock, when it was so last
        self.progress = False  # something was handled since the last takeover
        self.takeovers = 0  # in a row, without progress
        self.quarantined = False  # it holds what was handed out alone
        self.client = b""  # whose heartbeats are its own
        self.is_timed = False  # it is among those whose silence is watched
        self.pulled_us = 0  # wall clock, when it was given something last
        self.seen_us = 0  # monotonic
        self.stalled_us = 0  # for so long its loop had not turned when it last said so

    @property
    def is_there(self) -> bool:
        """Somebody is it now: no one else has its messages."""
        return not self.closed and not self.leaving

    def progressed(self, handled: int) -> None:
        """So many messages more are handled."""
        if handled:
            self.progress = True
        if self.quarantined and not self.in_flight.count:
            self.quarantined = False

    def emptied(self) -> None:
        """It holds nothing any more."""
        self.in_flight = InFlight(self.in_flight.next_sequence)
        self.quarantined = False
        self.takeovers = 0

    def packed(self) -> list[Any]:
        """For the checkpoint."""
        return [
            self.number, self.name, self.transient, self.epoch, self.nonce, self.closed, self.left_us,
            self.progress, self.takeovers, self.quarantined, self.leaving, self.since_us, self.client, self.pulled_us,
            self.in_flight.packed(),
        ]  # fmt: skip

    @classmethod
    def restored(cls, fields: list[Any]) -> Member:
        """The one of which ``packed`` gave the fields."""
        number, name, transient, epoch, nonce, closed, left_us, *state, since_us, client, pulled_us, in_flight = fields
        member = cls(number, name, transient, since_us)
        member.epoch, member.nonce, member.client = epoch, nonce, client
        member.closed, member.left_us, member.pulled_us = closed, left_us, pulled_us
        member.progress, member.takeovers, member.quarantined, member.leaving = state
        member.in_flight = InFlight.restored(in_flight)
        return member

"""The consumers of a group, also those that are away: what the broker knows of each, by number and by name."""

from __future__ import annotations

from typing import Any, Final

from qmq.broker.groups.in_flight import InFlight
from qmq.errors import Fenced, TooManyConsumers

#: The most consumers of a group, counting those that are away.
MAX_CONSUMERS: Final = 10_000


class Consumers:
    """The consumers of one group."""

    def __init__(self) -> None:
        self.by_number: dict[int, Member] = {}
        self.by_name: dict[str, Member] = {}
        self.next_number = 1

    def check_room(self, name: str) -> None:
        """Raise TooManyConsumers if the group can have no consumer of that name."""
        if name not in self.by_name and len(self.by_number) >= MAX_CONSUMERS and self._longest_away() is None:
            raise TooManyConsumers(f"{MAX_CONSUMERS:,} consumers of this group are there, the most it may have")

    def _longest_away(self) -> Member | None:
        """Return the consumer that may be forgotten: it is away and has nothing in flight."""
        return next((member for member in self.by_number.values() if member.closed), None)

    def make(self, name: str, transient: bool, now_us: int) -> Member:
        """Add a consumer; where there are too many, forget the one that has been away for longest."""
        away = self._longest_away() if len(self.by_number) >= MAX_CONSUMERS else None
        if away is not None:
            del self.by_number[away.number], self.by_name[away.name]
        return self._add(Member(self.next_number, name, transient, now_us))

    def follow_on(self, leaving: Member) -> Member:
        """Add a consumer that goes on under the name of a leaving one, with nothing in flight. The leaving one is
        forgotten once it has left.
        """
        member = Member(self.next_number, leaving.name, leaving.transient, leaving.since_us)
        member.epoch, member.pulled_us, member.program = leaving.epoch, leaving.pulled_us, leaving.program
        member.in_flight = InFlight(leaving.in_flight.next_sequence)
        leaving.transient = True
        return self._add(member)

    def _add(self, member: Member) -> Member:
        self.by_name[member.name] = self.by_number[member.number] = member
        self.next_number = max(self.next_number, member.number + 1)
        return member

    def forget(self, member: Member) -> None:
        """Remove a consumer for good."""
        del self.by_number[member.number]
        if self.by_name.get(member.name) is member:
            del self.by_name[member.name]

    def there(self, number: int) -> Member | None:
        """Return the consumer of a record; None if the record of its join is lost."""
        member = self.by_number.get(number)
        return None if member is None or member.closed else member

    def caller(self, number: int, epoch: int) -> Member:
        """Return the consumer that calls. Raise Fenced if the call is of another epoch, or it is gone."""
        member = self.by_number.get(number)
        if member is None or not member.is_there or member.epoch != epoch:
            raise Fenced(_gone(member, epoch))
        return member

    def packed(self) -> list[Any]:
        """Return the state for the checkpoint."""
        return [member.packed() for member in self.by_number.values()]

    def restore(self, fields: list[Any], next_number: int) -> None:
        """Take over a state from ``packed``."""
        for said in fields:
            self._add(Member.restored(said))
        self.next_number = next_number


def _gone(member: Member | None, epoch: int) -> str:
    """Return the reason why a consumer of that epoch may not call any more."""
    if member is not None and member.epoch == epoch:
        return (
            f"consumer {member.name!r} is gone: it left, its session expired, or its group was sought elsewhere or "
            "deleted, so it has nothing in flight; subscribe again"
        )
    if member is None:
        return "this consumer is forgotten: its messages are handed out again; subscribe again"
    return (
        f"consumer {member.name!r} is epoch {member.epoch} now, not {epoch}: its messages were taken over or are "
        "handed out again"
    )


class Member:
    """One consumer of a group."""

    __slots__ = (
        "quarantined", "client", "closed", "gone_us", "handled_us", "in_flight", "epoch", "is_awaited", "is_timed",
        "leaving", "left_us", "name", "nonce", "number", "program", "progress", "pulled_us", "seen_us", "session",
        "since_us", "stalled_us", "takeovers", "transient",
    )  # fmt: skip

    def __init__(self, number: int, name: str, transient: bool, since_us: int) -> None:
        self.number = number
        self.name = name
        self.transient = transient
        self.since_us = since_us  # wall clock, when it first joined; identifies it together with its name
        self.epoch = 0
        self.nonce = b""
        self.in_flight = InFlight()
        self.closed = True  # no client is subscribed as it
        self.leaving = 0  # the LeaveReason while its messages become retries, some in each turn
        self.left_us = 0  # wall clock, when it left last
        self.progress = False  # it handled a message since the last takeover
        self.takeovers = 0  # in a row, without progress
        self.quarantined = False  # it has quarantined messages in flight
        self.program = ""  # the name of the program that is or was it
        self.client = b""  # the process whose heartbeats count for it
        self.session = 0  # which one of that client's it is in; no restart knows it, nor frames of before
        self.is_timed = False  # its session has a deadline
        self.gone_us = 0  # monotonic, when it expires if its client has not come back; 0: it need not come back
        self.is_awaited = False  # Membership looks then whether it is back
        self.pulled_us = 0  # wall clock, when it got messages last
        self.handled_us = 0  # wall clock, when it handled a message last; 0: not since the broker's start
        self.seen_us = 0  # monotonic, its last call or heartbeat
        self.stalled_us = 0  # how long its loop had not turned at the last heartbeat

    @property
    def is_there(self) -> bool:
        """Whether a client is subscribed as it, so that no other consumer has its messages."""
        return not self.closed and not self.leaving

    @property
    def next_takeovers(self) -> int:
        """How many takeovers in a row were without progress, if one more program takes the consumer over."""
        return self.takeovers + 1 if self.in_flight.count and not self.progress else 0

    @property
    def expires_at_takeover(self) -> bool:
        """Whether its session expires when another program takes it over: its messages may be deadly."""
        return self.quarantined or self.next_takeovers > 1

    def progressed(self, handled: int) -> None:
        """Count *handled* more messages as handled."""
        if handled:
            self.progress = True
        if self.quarantined and not self.in_flight.count:
            self.quarantined = False

    def emptied(self) -> None:
        """Drop all that is in flight."""
        self.in_flight = InFlight(self.in_flight.next_sequence)
        self.quarantined = False
        self.takeovers = 0

    def packed(self) -> list[Any]:
        """Return the state for the checkpoint."""
        return [
            self.number, self.name, self.transient, self.epoch, self.nonce, self.closed, self.left_us,
            self.progress, self.takeovers, self.quarantined, self.leaving, self.since_us, self.client, self.pulled_us,
            self.in_flight.packed(), self.program,
        ]  # fmt: skip

    @classmethod
    def restored(cls, fields: list[Any]) -> Member:
        """Return the member whose state ``packed`` returned."""
        number, name, transient, epoch, nonce, closed, left_us, *state = fields
        *state, since_us, client, pulled_us, in_flight, program = state
        member = cls(number, name, transient, since_us)
        member.epoch, member.nonce, member.client, member.program = epoch, nonce, client, program
        member.closed, member.left_us, member.pulled_us = closed, left_us, pulled_us
        member.progress, member.takeovers, member.quarantined, member.leaving = state
        member.in_flight = InFlight.restored(in_flight)
        return member

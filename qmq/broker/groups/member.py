"""One consumer of a group, as the broker knows it."""

from __future__ import annotations

from typing import Any

from qmq.broker.groups.in_flight import Held


class Member:
    """One consumer of a group."""

    __slots__ = (
        "alone", "client", "closed", "held", "incarnation", "is_timed", "leaving", "left_us", "name", "nonce", "number",
        "progress", "pulled_us", "seen_us", "since_us", "stalled_us", "takeovers", "transient",
    )  # fmt: skip

    def __init__(self, number: int, name: str, transient: bool, since_us: int) -> None:
        self.number = number
        self.name = name
        self.transient = transient
        self.since_us = since_us  # wall clock: with its name what it is known by for good
        self.incarnation = 0
        self.nonce = b""
        self.held = Held()
        self.closed = True  # nobody is it now
        self.leaving = 0  # why, while what it held is handed out again in parts
        self.left_us = 0  # wall clock, when it was so last
        self.progress = False  # something was handled since the last takeover
        self.takeovers = 0  # in a row, without progress
        self.alone = False  # it holds what was handed out alone
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
        if self.alone and not self.held.count:
            self.alone = False

    def emptied(self) -> None:
        """It holds nothing any more."""
        self.held = Held(self.held.next_sequence)
        self.alone = False
        self.takeovers = 0

    def packed(self) -> list[Any]:
        """For the checkpoint."""
        return [
            self.number, self.name, self.transient, self.incarnation, self.nonce, self.closed, self.left_us,
            self.progress, self.takeovers, self.alone, self.leaving, self.since_us, self.client, self.pulled_us,
            self.held.packed(),
        ]  # fmt: skip

    @classmethod
    def restored(cls, fields: list[Any]) -> Member:
        """The one of which ``packed`` gave the fields."""
        number, name, transient, incarnation, nonce, closed, left_us, *state, since_us, client, pulled_us, held = fields
        member = cls(number, name, transient, since_us)
        member.incarnation, member.nonce, member.client = incarnation, nonce, client
        member.closed, member.left_us, member.pulled_us = closed, left_us, pulled_us
        member.progress, member.takeovers, member.alone, member.leaving = state
        member.held = Held.restored(held)
        return member

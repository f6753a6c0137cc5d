"""Ack deadlines: messages in flight for longer than ``ack_deadline`` are nacked, and delivered again."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.ports.commands import DispositionRange, Now
from qmq.net.protocol.types import Disposition

#: Ranges that are nacked in one turn, of about 20 us each; the next turn takes more.
MOST_RANGES: Final = 512
#: After a start, clients have this long to bring the acks of the time before.
REACH_US: Final = 5_000_000


class AckDeadlines:
    """The timers of all groups with an ``ack_deadline``: one a consumer, for its oldest pull."""

    def __init__(self) -> None:
        self._timers: list[tuple[int, int, int, Ledger, Member]] = []  # monotonic time, group, member
        self._timed: dict[tuple[int, int], int] = {}  # the time of the valid timer, by group and member

    def start(self, ledger: Ledger, member: Member, now: Now) -> None:
        """Start the time of messages that were just delivered."""
        if not ledger.settings.ack_deadline_us:
            return
        for pull in reversed(member.in_flight.pulls):
            if pull.since_us:
                break
            pull.since_us = now.monotonic_us
        self._watch(ledger, member)

    def changed(self, ledger: Ledger, now: Now) -> None:
        """Apply a new ``ack_deadline``, also to messages in flight; those without a deadline so far start now."""
        for member in ledger.members.values():
            self._timed.pop((ledger.number, member.number), None)
            self.start(ledger, member, now)

    def _watch(self, ledger: Ledger, member: Member) -> None:
        key = ledger.number, member.number
        since_us = next((pull.since_us for pull in member.in_flight.pulls if pull.since_us), 0)
        if since_us and key not in self._timed:
            self._timed[key] = due_us = since_us + ledger.settings.ack_deadline_us
            heapq.heappush(self._timers, (due_us, *key, ledger, member))

    def tick(self, now: Now) -> list[Ledger]:
        """Nack some of the overdue messages; return the ledgers that have changed."""
        changed, left = [], MOST_RANGES
        while left > 0 and self._timers and self._timers[0][0] <= now.monotonic_us:
            due_us, group, number, ledger, member = heapq.heappop(self._timers)
            if self._timed.get((group, number)) != due_us:
                continue  # the setting has changed since
            del self._timed[group, number]
            if ledger.members.get(number) is not member or not member.is_there or not ledger.settings.ack_deadline_us:
                continue
            taken = self._nack_overdue(ledger, member, now, left)
            if taken:
                changed.append(ledger)
            left -= taken
            self._watch(ledger, member)
        return changed

    def _nack_overdue(self, ledger: Ledger, member: Member, now: Now, most: int) -> int:
        """Nack up to *most* overdue ranges of a consumer; return how many."""
        most_us, in_flight = ledger.settings.ack_deadline_us, member.in_flight
        over = [pull for pull in in_flight.pulls if pull.since_us and pull.since_us + most_us <= now.monotonic_us]
        if not over:
            return 0
        end = min(over[-1].first + over[-1].total, in_flight.end_of_first(most))
        intervals = in_flight.unhandled(end=end)
        for pull in over:
            if pull.first + pull.total <= end:
                pull.since_us = 0
        taken = sum(1 for one in intervals for _ in in_flight.between(*one))
        reason = f"not handled within {most_us / 1e6:g} s"
        ledger.hand_back(
            member, [DispositionRange(*one, Disposition.NACK, None, reason) for one in intervals], now.wall_us
        )
        return taken

    def next_deadline_us(self) -> int | None:
        """Return when ``tick`` has work next; None for never."""
        return self._timers[0][0] if self._timers else None

    def restore(self, ledgers: Iterable[Ledger], now: Now) -> None:
        """Set the timers after a start: time counts from the pull, but none is up sooner than REACH_US from now."""
        for ledger in ledgers:
            most_us = ledger.settings.ack_deadline_us
            for member in ledger.members.values() if most_us else ():
                for pull in member.in_flight.pulls:
                    passed_us = max(0, now.wall_us - pull.taken_us)
                    left_us = max(most_us - passed_us, min(REACH_US, most_us))
                    pull.since_us = now.monotonic_us + left_us - most_us or -1
                self._watch(ledger, member)

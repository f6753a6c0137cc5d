"""Consumers that hold much and leave, or fall silent: what they held is handed out again a little in each turn.

Each part is a record of the pull log, so a start goes on where that ends. From the first one on the consumer is fenced,
as if all of it were done.
"""

from __future__ import annotations

from collections import deque

from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.journal.record_types import LEAVING_RANGES, Leaving
from qmq.broker.ports.commands import Now


class Leavers:
    """Of all groups."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Ledger, Member]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def leave(self, ledger: Ledger, member: Member, why: Leaving, now: Now) -> bool:
        """Have it leave; False when the rest of that is for the next turns."""
        done = _leave_some(ledger, member, why, now.wall_us)
        if not done:
            self._waiting.append((ledger, member))
        return done

    def resume(self, ledger: Ledger, member: Member) -> None:
        """It is leaving already: a start found it so, or another one took over from it."""
        self._waiting.append((ledger, member))

    def tick(self, now: Now) -> tuple[Ledger, Member] | None:
        """Go on with one of them; returns it when it has left."""
        while self._waiting:
            ledger, member = self._waiting[0]
            if ledger.members.get(member.number) is not member or not member.leaving:
                self._waiting.popleft()  # its group went elsewhere
                continue
            if not _leave_some(ledger, member, Leaving(member.leaving), now.wall_us):
                self._waiting.rotate(-1)
                return None
            self._waiting.popleft()
            return ledger, member
        return None


def _leave_some(ledger: Ledger, member: Member, why: Leaving, now_us: int) -> bool:
    """Hand out again a part of what it held; True when that was all, and it has left."""
    end = member.held.end_of_first(LEAVING_RANGES[why])
    if member.closed or end == member.held.next_sequence:
        ledger.leave(member, why, now_us)
        return True
    ledger.leave_in_part(member, why, end, now_us)
    return False

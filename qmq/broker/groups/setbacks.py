"""The recent setbacks of a group: sessions that ended with messages in flight, and attempts that failed.

It is kept in memory alone; a start that replays records learns of what they tell.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from qmq.broker.groups.member import Member
from qmq.broker.journal.record_types import MessageRange

#: Sessions count for so long after their end, and failed attempts.
SESSIONS_US: Final = 600_000_000
FAILURES_US: Final = 60_000_000
#: The most sessions that are remembered, and ranges of messages of each.
_MOST_SESSIONS: Final = 64
_MOST_RANGES: Final = 64
#: Failures within this time are one row.
_ROW_US: Final = 1_000_000


class EndedSession(NamedTuple):
    """A session that ended with messages in flight."""

    ended_us: int
    consumer: int
    messages: int
    ranges: tuple[MessageRange, ...]


class Crashes(NamedTuple):
    """How many sessions ended of late with the same messages in flight, and how many messages these were at last."""

    sessions: int
    messages: int


class FailedAttempts(NamedTuple):
    """Failed attempts of a moment, and how many messages had been acked before it since the broker's start."""

    at_us: int
    messages: int
    acked: int


class Setbacks:
    """The recent setbacks of the consumers of one group. Times are of the wall clock."""

    def __init__(self) -> None:
        self._sessions: deque[EndedSession] = deque(maxlen=_MOST_SESSIONS)
        self._failures: deque[FailedAttempts] = deque()

    def __bool__(self) -> bool:
        return bool(self._sessions or self._failures)

    def session_ended(self, member: Member, now_us: int) -> None:
        """Note that the session of a consumer ends with all that it has in flight, now or in several turns."""
        in_flight = member.in_flight
        if not in_flight.count or (self._sessions and self._sessions[-1].consumer == member.number and member.leaving):
            return
        every = (one for start, end in in_flight.unhandled() for one in in_flight.between(start, end))
        ranges = tuple(one.messages for one in islice(every, _MOST_RANGES))
        self._sessions.append(EndedSession(now_us, member.number, in_flight.count, ranges))

    def failed(self, messages: int, acked: int, now_us: int) -> None:
        """Note that attempts failed; *acked* messages of the group were acked since the broker's start."""
        failures = self._failures
        if failures and 0 <= now_us - failures[-1].at_us < _ROW_US:
            failures[-1] = failures[-1]._replace(messages=failures[-1].messages + messages)
        else:
            failures.append(FailedAttempts(now_us, messages, acked))
        while failures[0].at_us < now_us - FAILURES_US:
            failures.popleft()

    def forget_failures(self) -> None:
        """Forget the failed attempts: acked messages are counted from 0 again."""
        self._failures.clear()

    def crashes(self, now_us: int) -> Crashes:
        """Return how often of late a session ended with the messages that the last one had in flight."""
        while self._sessions and self._sessions[0].ended_us < now_us - SESSIONS_US:
            self._sessions.popleft()
        if not self._sessions:
            return Crashes(0, 0)
        last = self._sessions[-1]
        return Crashes(sum(_have_common(one, last) for one in self._sessions), last.messages)

    def attempts(self, acked: int, now_us: int) -> tuple[int, int]:
        """Return how many attempts failed of late, and how many messages were acked since the first of these; *acked*
        were since the broker's start.
        """
        while self._failures and self._failures[0].at_us < now_us - FAILURES_US:
            self._failures.popleft()
        if not self._failures:
            return 0, 0
        return sum(one.messages for one in self._failures), max(acked - self._failures[0].acked, 0)


def _have_common(one: EndedSession, other: EndedSession) -> bool:
    return any(mine.overlaps(theirs) for mine in one.ranges for theirs in other.ranges)

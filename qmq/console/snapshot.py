"""A snapshot: the statistics of all brokers at one moment, with rates since another one; groups with one name are one.

A rate is the difference of two counts, divided by the time between the two answers of the broker. The counts of a
broker begin at 0 when it starts, so after a restart the whole count is the difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from qmq.net.client.admin.statistics import BrokerStats, GroupStats, GroupTotals

#: A message that is in flight for this many seconds is a likely reason why a group is behind.
LONG_IN_FLIGHT: Final = 60.0


@dataclass(frozen=True, slots=True)
class Away:
    """A broker that does not answer: since when, and the error of the last attempt."""

    since: datetime
    error: str


@dataclass(frozen=True, slots=True)
class GroupNow:
    """A group over all brokers: counts as in GroupStats, and rates in messages a second since the snapshot before.

    ``delivered_rate`` includes messages that are handed out again; ``failed_rate`` counts attempts that failed: nacked,
    rejected, expired, and in flight at a consumer that fell silent. A broker with more than 200 groups that change all
    the time counts each group anew only every few seconds, so the rates of these groups change in steps.
    ``blocked`` of the ready messages wait for an earlier one of their order key, as in GroupStats.
    """

    name: str
    brokers: tuple[str, ...]
    mode: str
    follows: tuple[str, ...]
    consumers: int
    ready: int
    ready_exact: bool
    in_flight: int
    in_retry: int
    dead: int
    delayed: int
    oldest: datetime | None
    in_flight_since: datetime | None
    delivered_rate: float
    acked_rate: float
    failed_rate: float
    blocked: int = 0
    blocked_slots: int = 0
    blocked_retrying: int = 0

    def oldest_age(self, at: datetime) -> float:
        """Return the age in seconds of the oldest message that is ready, in flight or in retry; 0 without any."""
        return _age(self.oldest, at)

    def in_flight_age(self, at: datetime) -> float:
        """Return the age in seconds of the oldest pull that has messages in flight; 0 without any."""
        return _age(self.in_flight_since, at)

    def reason(self, at: datetime) -> str:
        """Say why messages wait: the likeliest reason as a few words, or "" if none waits."""
        if not self.ready and not self.in_flight and not self.in_retry:
            return ""
        if not self.consumers:
            return "no consumer is there"
        if self.in_flight_age(at) >= LONG_IN_FLIGHT and not self.acked_rate:
            return "a consumer holds messages without an ack"
        if self.failed_rate and self.failed_rate >= self.acked_rate:
            return "most attempts fail"
        if self.in_retry and not self.ready and not self.in_flight:
            return "failed messages wait for their next attempt"
        if self.ready and not self.delivered_rate:
            return self._blocked_reason() if self.blocked >= self.ready else "consumers take nothing"
        return "consumers are at work"

    def _blocked_reason(self) -> str:
        if not self.blocked_retrying:
            return "all wait: their order keys are in flight"
        if self.blocked_retrying == self.blocked_slots:
            return "all wait: their order keys are in retry"
        return "all wait: their keys are in flight or retry"


@dataclass(frozen=True, slots=True)
class SubjectsNow:
    """All subjects over all brokers whose names begin with ``name``, up to the first dot; ``received_rate`` is in
    messages a second. Beyond 100 names a broker sums the rest as "(others)".
    """

    name: str
    subjects: int
    messages: int
    received_rate: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All brokers at one moment. ``number`` counts snapshots from 1; ``at`` is by this machine's clock.

    ``brokers`` are those that answered; ``away`` has the others by address. ``groups`` are in the order of their names.
    Rates are in messages a second since the snapshot before (0 in the first one). ``ready``, ``in_flight``,
    ``in_retry`` and ``dead`` are the counts of all groups together: a message counts once for each group. ``oldest`` is
    when the oldest message was stored that is ready, in flight or in retry in a group; None without any.
    """

    number: int
    at: datetime
    brokers: tuple[BrokerStats, ...] = ()
    away: Mapping[str, Away] = field(default_factory=dict)
    groups: Mapping[str, GroupNow] = field(default_factory=dict)
    subjects: tuple[SubjectsNow, ...] = ()
    received_rate: float = 0.0
    delivered_rate: float = 0.0
    acked_rate: float = 0.0
    failed_rate: float = 0.0
    ready: int = 0
    in_flight: int = 0
    in_retry: int = 0
    dead: int = 0
    oldest: datetime | None = None

    def behind(self) -> list[GroupNow]:
        """Return the groups whose messages wait, the one with the oldest message first."""
        waiting = [group for group in self.groups.values() if group.oldest is not None]
        return sorted(waiting, key=lambda group: (group.oldest, -group.ready, group.name))

    def since(self, before: Snapshot | None) -> Snapshot:
        """Return this snapshot with its rates since another one."""
        return make_snapshot(self.number, self.at, self.brokers, self.away, before)


def make_snapshot(
    number: int, at: datetime, brokers: Sequence[BrokerStats], away: Mapping[str, Away], before: Snapshot | None
) -> Snapshot:
    """Return the snapshot of the brokers that answered, with rates since the one *before*."""
    earlier = {} if before is None else {stats.broker: stats for stats in before.brokers}
    rows = defaultdict[str, list[_GroupRow]](list)
    families = dict[str, SubjectsNow]()
    received_rate, totals = 0.0, [0.0, 0.0, 0.0]
    for stats in brokers:
        then, seconds = earlier.get(stats.broker), 0.0
        old_groups, old_subjects, old_totals = dict[str, GroupStats](), dict[str, int](), _NONE
        if then is not None:
            seconds = (stats.at - max(then.at, stats.started_at)).total_seconds()
            if (then.store_id, then.started_at) == (stats.store_id, stats.started_at):
                old_groups = {group.name: group for group in then.groups}
                old_subjects = {subject.name: subject.received for subject in then.subjects}
                old_totals = _totals(then)
        for index, (count, old) in enumerate(zip(_totals(stats), old_totals, strict=True)):
            totals[index] += _rate(count, old, seconds)
        for group in stats.groups:
            rows[group.name].append(_row(stats.broker, group, old_groups.get(group.name), seconds))
        for subject in stats.subjects:
            rate = _rate(subject.received, old_subjects.get(subject.name, 0), seconds)
            known = families.get(subject.name, SubjectsNow(subject.name, 0, 0, 0.0))
            families[subject.name] = SubjectsNow(
                subject.name,
                known.subjects + subject.subjects,
                known.messages + subject.messages,
                known.received_rate + rate,
            )
            received_rate += rate
    groups = {name: _merged(name, rows[name]) for name in sorted(rows)}
    return Snapshot(
        number=number,
        at=at,
        brokers=tuple(brokers),
        away=dict(away),
        groups=groups,
        subjects=tuple(families[name] for name in sorted(families)),
        received_rate=received_rate,
        delivered_rate=totals[0],
        acked_rate=totals[1],
        failed_rate=totals[2],
        ready=sum(group.ready for group in groups.values()),
        in_flight=sum(group.in_flight for group in groups.values()),
        in_retry=sum(group.in_retry for group in groups.values()),
        dead=sum(group.dead for group in groups.values()),
        oldest=_earliest(group.oldest for group in groups.values()),
    )


class _Handled(NamedTuple):
    delivered: int
    acked: int
    failed: int


_NONE: Final = _Handled(0, 0, 0)


class _GroupRow(NamedTuple):
    """A group at one broker, and the rates of its counts."""

    broker: str
    group: GroupStats
    delivered_rate: float
    acked_rate: float
    failed_rate: float


def _counts(counted: GroupTotals) -> _Handled:
    failed = counted.nacked + counted.rejected + counted.expired + counted.session_expired
    return _Handled(counted.delivered + counted.redelivered, counted.acked, failed)


def _totals(stats: BrokerStats) -> _Handled:
    counted = [_counts(stats.ended), *map(_counts, stats.groups)]
    return _Handled(*map(sum, zip(*counted, strict=True)))


def _rate(count: int, old: int, seconds: float) -> float:
    """Return the rate at which a count grew; a count that fell has begun again at 0."""
    if seconds <= 0:
        return 0.0
    return (count - old if count >= old else count) / seconds


def _row(broker: str, group: GroupStats, old: GroupStats | None, seconds: float) -> _GroupRow:
    if group is old or seconds <= 0:
        return _GroupRow(broker, group, 0.0, 0.0, 0.0)
    pairs = zip(_counts(group), _NONE if old is None else _counts(old), strict=True)
    return _GroupRow(broker, group, *(_rate(count, before, seconds) for count, before in pairs))


def _merged(name: str, rows: Sequence[_GroupRow]) -> GroupNow:
    """Return the groups with one name at several brokers as one."""
    if len(rows) == 1:  # without the sums: with one broker these are all groups, and may be very many
        broker, group, delivered_rate, acked_rate, failed_rate = rows[0]
        return GroupNow(
            name, (broker,), group.mode, tuple(group.follows), group.consumers, group.ready, group.ready_exact,
            group.in_flight, group.in_retry, group.dead, group.delayed, group.oldest, group.in_flight_since,
            delivered_rate, acked_rate, failed_rate, group.blocked, group.blocked_slots, group.blocked_retrying,
        )  # fmt: skip
    groups = [row.group for row in rows]
    return GroupNow(
        name=name,
        brokers=tuple(row.broker for row in rows),
        mode=groups[0].mode,
        follows=tuple(sorted({one for group in groups for one in group.follows})),
        consumers=sum(group.consumers for group in groups),
        ready=sum(group.ready for group in groups),
        ready_exact=all(group.ready_exact for group in groups),
        in_flight=sum(group.in_flight for group in groups),
        in_retry=sum(group.in_retry for group in groups),
        dead=sum(group.dead for group in groups),
        delayed=sum(group.delayed for group in groups),
        oldest=_earliest(group.oldest for group in groups),
        in_flight_since=_earliest(group.in_flight_since for group in groups),
        delivered_rate=sum(row.delivered_rate for row in rows),
        acked_rate=sum(row.acked_rate for row in rows),
        failed_rate=sum(row.failed_rate for row in rows),
        blocked=sum(group.blocked for group in groups),
        blocked_slots=sum(group.blocked_slots for group in groups),
        blocked_retrying=sum(group.blocked_retrying for group in groups),
    )


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _age(since: datetime | None, at: datetime) -> float:
    return 0.0 if since is None else max(0.0, (at - since).total_seconds())

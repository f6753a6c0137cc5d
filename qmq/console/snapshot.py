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

#: A consumer that handles nothing for this many seconds, and for so many times as long as messages took lately, holds
#: its messages.
LONG_HELD: Final = 60.0
_TIMES_HELD: Final = 3
#: Handlers that take longer, in seconds, are said to: shorter times are those of batches.
SLOW_HANDLER: Final = 0.5
#: Consumers that have taken nothing for this many seconds, while messages were ready, take nothing.
IDLE: Final = 10.0
#: A time that is further away has its day.
_DAY: Final = 64_800
#: Why the messages of a group may wait, the reasons of ``GroupNow.why``.
REASONS: Final = (
    "consumers_crash", "no_consumer", "held", "retry_delay", "order_keys", "attempts_fail", "hands_full",
    "nothing_taken", "at_work",
)  # fmt: skip


class Reason(NamedTuple):
    """Why the messages of a group wait: ``code`` is one of REASONS, ``text`` says it to people."""

    code: str
    text: str

    @property
    def is_good(self) -> bool:
        """Whether consumers handle messages, and nothing holds them up."""
        return self.code in ("hands_full", "at_work")


@dataclass(frozen=True, slots=True)
class Away:
    """A broker that does not answer: since when, and the error of the last attempt."""

    since: datetime
    error: str


@dataclass(frozen=True, slots=True)
class GroupNow:
    """A group over all brokers: counts as in GroupStats, and rates in messages a second since the snapshot before.

    ``delivered_rate`` includes messages that are handed out again; ``failed_rate`` counts attempts that failed: nacked,
    rejected and expired. A broker with more than 200 groups that change all the time counts each group anew only every
    few seconds, so the rates of these groups change in steps.
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
    returned: int = 0
    held_since: datetime | None = None
    held: float | None = None
    last_pull: datetime | None = None
    retry_due: datetime | None = None
    crashes: int = 0
    crashed_messages: int = 0
    failed_lately: int = 0
    acked_lately: int = 0

    def oldest_age(self, at: datetime) -> float:
        """Return the age in seconds of the oldest message that is ready, in flight or in retry; 0 without any."""
        return _age(self.oldest, at)

    def in_flight_age(self, at: datetime) -> float:
        """Return the age in seconds of the oldest pull that has messages in flight; 0 without any."""
        return _age(self.in_flight_since, at)

    def why(self, at: datetime) -> Reason | None:
        """Return the likeliest reason why messages wait, as seen at the time *at*; None if none waits."""
        if not self.ready and not self.in_flight and not self.in_retry:
            return None
        if self.crashes > 1:
            these = "this message" if self.crashed_messages == 1 else f"these {self.crashed_messages:,} messages"
            return Reason(
                "consumers_crash", f"consumers crash ({self.crashes:,} sessions ended with {these} in flight)"
            )
        if not self.consumers:
            return Reason("no_consumer", "no consumer is there")
        held = _age(self.held_since, at)
        if held >= max(LONG_HELD, _TIMES_HELD * (self.held or 0.0)):
            return Reason("held", f"a consumer holds messages without an ack for {_short(held)}")
        if not self.ready and not self.in_flight and self.retry_due is not None and self.retry_due > at:
            day = "%Y-%m-%d " if (self.retry_due - at).total_seconds() > _DAY else ""
            return Reason("retry_delay", f"all wait for a retry until {self.retry_due:{day}%H:%M:%S} UTC")
        if self.ready and self.blocked >= self.ready:
            return Reason("order_keys", self._blocked_text())
        if self.failed_lately and self.failed_lately >= self.acked_lately:
            return Reason("attempts_fail", "most attempts fail")
        if self.ready and self.in_flight and max(self.held or 0.0, held) >= SLOW_HANDLER:
            takes = f" (handlers take {_short(self.held)})" if self.held is not None else ""
            return Reason("hands_full", f"all hands are full{takes}")
        if self.ready and not self.in_flight and self._is_idle(at):
            return Reason("nothing_taken", "consumers take nothing")
        return Reason("at_work", "consumers are at work")

    def _is_idle(self, at: datetime) -> bool:
        """Return whether consumers have taken nothing for long while messages were ready."""
        if self.mode == "at_most_once" or self.oldest_age(at) < IDLE:  # the broker knows of no pull of such a group
            return False
        return self.last_pull is None or _age(self.last_pull, at) >= IDLE

    def _blocked_text(self) -> str:
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
    failed = counted.nacked + counted.rejected + counted.expired
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
            group.in_flight, group.in_retry, group.dead, group.delayed, group.oldest_unacked, group.in_flight_since,
            delivered_rate, acked_rate, failed_rate, group.blocked, group.blocked_slots, group.blocked_retrying,
            group.returned, group.held_since, group.held, group.last_pull, group.retry_due, group.crashes,
            group.crashed_messages, group.failed_lately, group.acked_lately,
        )  # fmt: skip
    groups = [row.group for row in rows]
    worst = max(groups, key=lambda group: group.crashes)
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
        oldest=_earliest(group.oldest_unacked for group in groups),
        in_flight_since=_earliest(group.in_flight_since for group in groups),
        delivered_rate=sum(row.delivered_rate for row in rows),
        acked_rate=sum(row.acked_rate for row in rows),
        failed_rate=sum(row.failed_rate for row in rows),
        blocked=sum(group.blocked for group in groups),
        blocked_slots=sum(group.blocked_slots for group in groups),
        blocked_retrying=sum(group.blocked_retrying for group in groups),
        returned=sum(group.returned for group in groups),
        held_since=_earliest(group.held_since for group in groups),
        held=max((group.held for group in groups if group.held is not None), default=None),
        last_pull=max((group.last_pull for group in groups if group.last_pull is not None), default=None),
        retry_due=_earliest(group.retry_due for group in groups) if all(map(_waits_for_delay, groups)) else None,
        crashes=worst.crashes,
        crashed_messages=worst.crashed_messages,
        failed_lately=sum(group.failed_lately for group in groups),
        acked_lately=sum(group.acked_lately for group in groups),
    )


def _waits_for_delay(group: GroupStats) -> bool:
    """Return whether no message in retry is due."""
    return group.retry_due is not None or not group.in_retry


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _short(seconds: float) -> str:
    """Format how long something takes or has lasted: "3s", "90s", "5m", "3h"."""
    unit, size = next(((unit, size) for unit, size in (("h", 3_600), ("m", 60)) if seconds >= 2 * size), ("s", 1))
    return f"{seconds / size:.0f}{unit}" if unit == "s" else f"{int(seconds // size)}{unit}"


def _age(since: datetime | None, at: datetime) -> float:
    return 0.0 if since is None else max(0.0, (at - since).total_seconds())

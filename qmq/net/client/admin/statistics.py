"""The result of ``client.admin.stats``: what one broker has done since its start, and the state of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from qmq.net.client.admin.broker_info import DiskInfo
from qmq.net.client.admin.results import time_of
from qmq.net.client.producer.receipts import utc_from_us


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Counts of the messages of one or several groups since the broker's start.

    ``delivered`` messages were handed out for the first time, ``redelivered`` ones again; ``nacked`` includes those at
    their ack deadline; ``rejected`` does not include ``expired``; ``session_expired`` ones were in flight at a consumer
    that fell silent; ``died`` became dead letters.
    """

    delivered: int
    redelivered: int
    acked: int
    nacked: int
    rejected: int
    released: int
    expired: int
    session_expired: int
    died: int


@dataclass(frozen=True, slots=True)
class GroupStats(GroupTotals):
    """A group now, and the counts of its messages since the broker's start, as in GroupTotals.

    ``ready``, ``in_flight``, ``in_retry``, ``dead``, ``delayed``, ``skipped`` and ``filtered`` are as in GroupInfo.
    ``at`` is when this was true: some seconds ago where thousands of groups are busy.
    ``oldest_unacked``: when the oldest message that is ready, in flight or in retry was stored; ``in_retry_oldest``:
    the same of failed ones in retry alone, of some of them where they are very many. ``returned`` of the messages in
    retry have not failed: they were released, or a consumer was lost, or they are sent again. ``retry_due``: when the
    next message in retry is due; None where one is due now, or there is none.
    ``in_flight_since``: when the oldest pull that is not acknowledged got its messages; ``held_since``: since when a
    consumer has had messages and handled none of them, the longest such time; ``held``: seconds for which messages are
    in flight, at the slowest consumer lately. ``last_pull``: when a consumer last got messages. These are None where
    unknown.
    ``crashes``: how many sessions of consumers ended within 10 minutes with the same ``crashed_messages`` in flight,
    which still wait. ``failed_lately``: attempts that failed within a minute, and ``acked_lately`` messages were acked
    meanwhile.
    ``blocked``: how many of the ready messages wait for an earlier one of their order key, in ``blocked_slots`` slots;
    of ``blocked_retrying`` of these the earlier message is in retry, of the others in flight.
    """

    name: str
    at: datetime
    mode: str
    follows: list[str]
    consumers: int
    ready: int
    ready_exact: bool
    oldest_unacked: datetime | None
    in_flight: int
    in_flight_since: datetime | None
    held_since: datetime | None
    held: float | None
    last_pull: datetime | None
    in_retry: int
    returned: int
    in_retry_oldest: datetime | None
    retry_due: datetime | None
    crashes: int
    crashed_messages: int
    failed_lately: int
    acked_lately: int
    dead: int
    delayed: int
    skipped: int
    filtered: int
    blocked: int
    blocked_slots: int
    blocked_retrying: int


@dataclass(frozen=True, slots=True)
class SubjectStats:
    """All subjects whose names begin with ``name``, up to the first dot: their count, their stored messages, and the
    messages that came since the broker's start. Beyond 100 names, the rest is summed as "(others)".
    """

    name: str
    subjects: int
    messages: int
    received: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations since the broker's start: ``buckets`` are (seconds, how many took less), the sum is in seconds."""

    count: int
    sum: float
    buckets: list[tuple[float, int]]

    def quantile(self, share: float) -> float | None:
        """Return a duration in seconds that *share* of all (0 to 1) were below, to a factor of 2; None without any."""
        wanted = share * self.count
        return next((bound for bound, below in self.buckets if below >= wanted and below), None)


@dataclass(frozen=True, slots=True)
class ArchiveStats:
    """How far the archive of a broker's messages is behind, by the receipts that `qmq archive` leaves.

    ``unarchived_bytes`` of the message log, in so many ``unarchived_segments``, are in no archive, those of the
    segments that are still written included; ``oldest`` is when the first of them was stored, None without one.
    ``verified_at``: when a copy was verified last.
    """

    unarchived_bytes: int
    unarchived_segments: int
    oldest: datetime | None
    verified_at: datetime


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """The statistics of one broker. Counts are since its start at ``started_at``; a restart begins at 0 again.

    ``received_bytes`` are the bytes that the message log grew by, ``handed_messages`` and ``handed_bytes`` went to
    consumers, also again. ``refused`` counts refused requests by the code of their error. ``durations`` has "turn" (of
    the broker's loop), "send" (from the arrival of a batch to the end of the turn that stores it) and "fsync".
    ``ended`` has the counts of groups that were deleted. ``cpu`` is processor time in seconds, ``memory_bytes`` leaves
    mapped files out. ``python`` is the version of Python. ``file_bytes`` is what the files take on the disks by kind
    (message_log, indexes, key_indexes, consumer_log, pull_log, error_log, delay_log, other), some seconds ago at least;
    ``archive`` is None for a broker whose messages no archive has.
    """

    version: str
    python: str
    store_id: str
    at: datetime
    started_at: datetime
    uptime: float
    subject_count: int
    group_count: int
    connections: int
    requests: int
    waiting_pulls: int
    waiting_syncs: int
    delayed: int
    received_bytes: int
    handed_messages: int
    handed_bytes: int
    log_bytes: int
    segments: int
    file_bytes: dict[str, int]
    refused: dict[str, int]
    damage: int
    failed_checkpoints: int
    failed_syncs: int
    scrubbed_bytes: int
    scrub_rounds: int
    dropped_segments: int
    dropped_messages: int
    lost_messages: int
    skipped_messages: int
    unique_texts: int
    forgotten_texts: int
    duplicate_messages: int
    checkpoint_age: float
    cpu: float
    memory_bytes: int
    files: int
    threads: int
    disks: list[DiskInfo]
    durations: dict[str, Histogram]
    subjects: list[SubjectStats]
    ended: GroupTotals
    archive: ArchiveStats | None = None
    groups: list[GroupStats] = field(default_factory=list)
    broker: str = ""

    @property
    def received(self) -> int:
        """The count of messages that came since the broker's start."""
        return sum(subject.received for subject in self.subjects)

    @property
    def totals(self) -> GroupTotals:
        """The counts of all groups, with those that were deleted."""
        counted = [*self.groups, self.ended]
        return GroupTotals(*(sum(getattr(one, name) for one in counted) for name in _COUNTS))


_COUNTS: Final = tuple(GroupTotals.__dataclass_fields__)
_SAME: Final = (
    "version",
    "python",
    "subject_count",
    "group_count",
    "connections",
    "requests",
    "waiting_pulls",
    "waiting_syncs",
    "delayed",
    "received_bytes",
    "handed_messages",
    "handed_bytes",
    "log_bytes",
    "segments",
    "file_bytes",
    "refused",
    "damage",
    "failed_checkpoints",
    "failed_syncs",
    "scrubbed_bytes",
    "scrub_rounds",
    "dropped_segments",
    "dropped_messages",
    "lost_messages",
    "skipped_messages",
)
#: Counts that a broker of an older version does not have.
_LATER: Final = ("unique_texts", "forgotten_texts", "duplicate_messages")  # fmt: skip
_TIMES: Final = {
    "at_us": "at", "oldest_unacked_us": "oldest_unacked", "in_flight_since_us": "in_flight_since",
    "held_since_us": "held_since", "last_pull_us": "last_pull", "in_retry_oldest_us": "in_retry_oldest",
    "retry_due_us": "retry_due",
}  # fmt: skip


def group_stats_of(columns: Sequence[str], row: Sequence[Any]) -> GroupStats:
    """Return the group of a row of the action stats."""
    fields = dict(zip(columns, row, strict=True))
    for name, attribute in _TIMES.items():
        fields[attribute] = time_of(fields.pop(name))
    held_us = fields.pop("held_us")
    fields["held"] = None if held_us is None else held_us / 1e6
    return GroupStats(name=fields.pop("group"), **fields)


def broker_stats_of(fields: Mapping[str, Any], groups: list[GroupStats]) -> BrokerStats:
    """Return the statistics of the first answer to the action stats, with the groups of all answers."""
    process = fields["process"]
    return BrokerStats(
        **{name: fields[name] for name in _SAME},
        **{name: fields.get(name, 0) for name in _LATER},
        store_id=fields["store_id"].hex(),
        at=utc_from_us(fields["now_us"]),
        started_at=utc_from_us(fields["started_us"]),
        uptime=fields["uptime_us"] / 1e6,
        checkpoint_age=fields["checkpoint_age_us"] / 1e6,
        cpu=process["cpu_us"] / 1e6,
        memory_bytes=process["memory_bytes"],
        files=process["files"],
        threads=process["threads"],
        disks=[DiskInfo(**disk) for disk in fields["disks"]],
        durations={name: _histogram_of(*packed) for name, packed in fields["durations"].items()},
        subjects=[SubjectStats(*row) for row in fields["families"] if row[1]],
        ended=GroupTotals(*fields["ended"]),
        archive=_archive_of(fields["archive"]),
        groups=groups,
    )


def _archive_of(fields: Mapping[str, Any] | None) -> ArchiveStats | None:
    if fields is None:
        return None
    return ArchiveStats(
        fields["unarchived_bytes"], fields["unarchived_segments"], time_of(fields["oldest_us"]),
        utc_from_us(fields["verified_us"]),
    )  # fmt: skip


def _histogram_of(sum_us: int, counts: Sequence[int]) -> Histogram:
    buckets, below = list[tuple[float, int]](), 0
    for power, count in enumerate(counts[:-1]):
        below += count
        buckets.append(((1 << power) / 1e6, below))
    return Histogram(sum(counts), sum_us / 1e6, buckets)

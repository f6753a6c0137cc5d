"""The metrics of a snapshot in the form that Prometheus reads, with a bounded number of series whatever clients do.

Counts of groups and of subjects are summed over the brokers. A broker that starts again counts from 0, so this module
adds up by how much each count grows, and the sums never fall. A metric of groups has a series for each of MOST_GROUPS
or MOST_DETAILED groups, and one for the sum of all others. Those that have dead letters, or have been behind for long,
come first, then those that have messages, then idle ones; among equals a group keeps its series.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qmq.console.replies import error_reply
from qmq.console.snapshot import GroupNow, Snapshot
from qmq.net.client.admin.statistics import BrokerStats, GroupStats, Histogram

#: The content type of ``Metrics.text``.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Groups with series of their own for what waits, since when and why, and for consumers. All further ones are OTHERS.
MOST_GROUPS: Final = 1_000
#: Groups with series of their own in all other metrics of groups.
MOST_DETAILED: Final = 100
#: A group whose oldest message has waited for this many seconds is behind for long.
LONG_BEHIND: Final = 60.0
#: First parts of subjects with series of their own, over all brokers.
MOST_SUBJECTS: Final = 100
OTHERS: Final = "(others)"
#: Buckets of histograms: each second power of two of microseconds.
_EVERY: Final = 2

#: For each count: its name, the metric without ``qmq_``, and the help text.
_COUNTS: Final = (
    ("delivered", "delivered_messages", "Messages handed out for the first time."),
    ("redelivered", "redelivered_messages", "Messages handed out again."),
    ("acked", "acked_messages", "Messages that consumers acknowledged."),
    ("nacked", "nacked_messages", "Messages that failed at a consumer, or passed their ack deadline."),
    ("rejected", "rejected_messages", "Messages that were rejected, so that they died at once."),
    ("released", "released_messages", "Messages that consumers gave back without trying them."),
    ("expired", "expired_messages", "Messages that were too old to be handed out."),
    ("session_expired", "session_expired_messages", "Messages in flight at a consumer that fell silent."),
    ("died", "died_messages", "Messages that became dead letters."),
)
_COUNT_NAMES: Final = tuple(name for name, _, _ in _COUNTS)
_GROUP_COUNTS: Final = frozenset({"delivered", "redelivered", "acked", "nacked", "session_expired", "died"})
_BROKER_COUNTS: Final[tuple[tuple[str, str, Callable[[BrokerStats], float]], ...]] = (
    ("received_messages", "Messages that senders stored.", lambda one: one.received),
    ("received_bytes", "Bytes by which the message log grew.", lambda one: one.received_bytes),
    ("handed_messages", "Messages that went out to consumers, those handed out again included.",
     lambda one: one.handed_messages),
    ("handed_bytes", "Bytes that went out to consumers.", lambda one: one.handed_bytes),
    ("requests", "Requests of clients.", lambda one: one.requests),
    ("damage_found", "Bad places found in the files.", lambda one: one.damage),
    ("failed_checkpoints", "Checkpoints that could not be taken.", lambda one: one.failed_checkpoints),
    ("failed_syncs", "Partitions whose disk failed to keep what was written.", lambda one: one.failed_syncs),
    ("scrubbed_bytes", "Bytes of files that the scrub has checked.", lambda one: one.scrubbed_bytes),
    ("scrub_rounds", "Times that the scrub has checked all files.", lambda one: one.scrub_rounds),
    ("dropped_segments", "Segments that retention dropped.", lambda one: one.dropped_segments),
    ("dropped_messages", "Messages that retention dropped.", lambda one: one.dropped_messages),
    ("lost_messages", "Messages in dropped segments that could not be read.", lambda one: one.lost_messages),
    ("skipped_messages", "Messages that retention dropped before a group had taken them, for each such group.",
     lambda one: one.skipped_messages),
    ("duplicate_messages", "Messages that were not stored, as they repeated a unique text.",
     lambda one: one.duplicate_messages),
    ("forgotten_texts", "Unique texts that were forgotten before their time, for want of room.",
     lambda one: one.forgotten_texts),
    ("process_cpu_seconds", "Processor time of the broker.", lambda one: one.cpu),
)  # fmt: skip
_BROKER_GAUGES: Final[tuple[tuple[str, str, Callable[[BrokerStats], float]], ...]] = (
    ("start_time_seconds", "When the broker started, in seconds since 1970.", lambda one: one.started_at.timestamp()),
    ("connections", "Connections of clients.", lambda one: one.connections),
    ("waiting_pulls", "Pulls that wait for messages.", lambda one: one.waiting_pulls),
    ("waiting_syncs", "Answers to senders that wait for a disk.", lambda one: one.waiting_syncs),
    ("delayed_messages", "Messages to be delivered later.", lambda one: one.delayed),
    ("subjects", "Subjects.", lambda one: one.subject_count),
    ("groups", "Groups.", lambda one: one.group_count),
    ("unique_texts", "Unique texts that are remembered.", lambda one: one.unique_texts),
    ("log_bytes", "Bytes of the message log.", lambda one: one.log_bytes),
    ("segments", "Segments of the message log.", lambda one: one.segments),
    ("checkpoint_age_seconds", "Age of the last checkpoint.", lambda one: one.checkpoint_age),
    ("process_memory_bytes", "Memory of the broker, mapped files left out.", lambda one: one.memory_bytes),
    ("process_open_files", "Files and sockets that the broker has open.", lambda one: one.files),
    ("process_threads", "Threads of the broker.", lambda one: one.threads),
)
_DURATIONS: Final = {
    "send": ("send_duration_seconds", "Time from the arrival of a batch to the end of the turn that stores it."),
    "fsync": ("fsync_duration_seconds", "Time of an fsync that senders wait for."),
    "turn": ("turn_duration_seconds", "Time of a turn of the broker's event loop."),
}


def routes() -> list[Route]:
    """Return the route of the metrics, for sessions that may see the statistics of whole brokers."""
    metrics = Metrics()

    async def get_metrics(request: Request) -> Response:
        if not request.state.session.sees_all:
            message = 'a token needs the right to browse everything for metrics: qmq tokens create NAME --browse ""'
            return error_reply(request, 403, "forbidden", message)
        return Response(metrics.text(request.app.state.watch.latest), media_type=CONTENT_TYPE)

    return [Route("/metrics", get_metrics, methods=["GET"])]


class _Start(NamedTuple):
    """A broker from one start to the next; meanwhile its counts only grow."""

    store_id: str
    started_at: datetime


class Metrics:
    """Makes the text of the metrics of one snapshot after another, and remembers the sums of the counters.

    metrics = Metrics()
    text = metrics.text(watch.latest)
    """

    def __init__(self) -> None:
        self._counters = _Counters()
        self._named = _NamedGroups(MOST_GROUPS)
        self._detailed = _NamedGroups(MOST_DETAILED)
        self._subjects = _NamedSeries(MOST_SUBJECTS)
        self._known: tuple[int, bytes] | None = None

    def text(self, snapshot: Snapshot) -> bytes:
        """Return the metrics of a snapshot. It returns the same bytes when asked for the same snapshot again."""
        if self._known is None or self._known[0] != snapshot.number:
            self._known = snapshot.number, generate_latest(_registry(self._metrics(snapshot)))
        return self._known[1]

    def _metrics(self, snapshot: Snapshot) -> list[Metric]:
        self._counters.look_at(snapshot.brokers)
        return [
            _gauge("console_snapshot_timestamp_seconds", "When the console asked the brokers last.", (), [
                ((), snapshot.at.timestamp()),
            ]),
            _gauge("up", "Whether the broker answers the console.", ("broker",), [
                *(((one.broker,), 1.0) for one in snapshot.brokers), *(((name,), 0.0) for name in snapshot.away),
            ]),
            *self._of_brokers(snapshot.brokers),
            *self._of_subjects(snapshot.brokers),
            *self._of_groups(snapshot),
        ]  # fmt: skip

    def _of_brokers(self, brokers: Sequence[BrokerStats]) -> Iterator[Metric]:
        label, counters = ("broker",), self._counters
        yield _gauge("build_info", "Versions of QMQ and of Python, of each broker.", ("broker", "version", "python"), [
            ((one.broker, one.version, one.python), 1.0) for one in brokers
        ])  # fmt: skip
        for name, text, of in _BROKER_GAUGES:
            yield _gauge(name, text, label, [((one.broker,), of(one)) for one in brokers])
        for name, text, of in _BROKER_COUNTS:
            found = [((one.broker,), counters.total(name, one.broker, one, of(one))) for one in brokers]
            yield _counter(name, text, label, found)
        totals = [(one, one.totals) for one in brokers]
        for count, name, text in _COUNTS:
            found = [
                ((one.broker,), counters.total(name, one.broker, one, getattr(sums, count))) for one, sums in totals
            ]
            yield _counter(name, text, label, found)
        yield _counter("refused_requests", "Refused requests, by the code of their error.", ("broker", "error"), [
            ((one.broker, code), float(count)) for one in brokers for code, count in sorted(one.refused.items())
        ])  # fmt: skip
        for kind, (name, text) in _DURATIONS.items():
            histogram = HistogramMetricFamily(f"qmq_{name}", text, labels=label)
            for one in brokers:
                if (times := one.durations.get(kind)) is not None:
                    histogram.add_metric((one.broker,), _buckets(times), times.sum)
            yield histogram
        yield from _of_disks(brokers)

    def _of_subjects(self, brokers: Sequence[BrokerStats]) -> Iterator[Metric]:
        names = {subject.name for one in brokers for subject in one.subjects}
        self._subjects.choose(sorted(names, key=lambda name: (name not in self._subjects, name)))
        numbers, stored = defaultdict[str, int](int), defaultdict[str, int](int)
        received = defaultdict[str, float](float)
        for one in brokers:
            for subject in one.subjects:
                label = self._subjects.label(subject.name)
                numbers[label] += subject.subjects
                stored[label] += subject.messages
                received[label] += self._counters.growth("subjects", subject.name, one, subject.received)
        sums = self._counters.grown("subject_received", received, numbers)
        labels = ("subject",)
        yield _gauge("subject_subjects", "Subjects by the first part of their names.", labels, _by_name(numbers))
        yield _gauge("subject_stored_messages", "Stored messages by the first part of the subject.", labels,
                     _by_name(stored))  # fmt: skip
        yield _counter("subject_received_messages", "Messages that senders stored, by the first part of the subject.",
                       labels, _by_name(sums))  # fmt: skip

    def _of_groups(self, snapshot: Snapshot) -> Iterator[Metric]:
        for chosen in (self._named, self._detailed):
            chosen.choose_groups(snapshot)
        ready, in_flight, in_retry, returned, consumers = (defaultdict[str, int](int) for _ in range(5))
        oldest = defaultdict[str, float](float)
        delayed, dead, blocked, there = (defaultdict[str, int](int) for _ in range(4))
        retried, taken = defaultdict[str, float](float), defaultdict[str, float](float)
        grown = {name: defaultdict[str, float](float) for name in _COUNT_NAMES if name in _GROUP_COUNTS}
        for one in snapshot.brokers:
            for group in one.groups:
                label = self._named.label(group.name)
                ready[label] += group.ready
                in_flight[label] += group.in_flight
                oldest[label] = max(oldest[label], _age(group.oldest_unacked, group.at))
                in_retry[label] += group.in_retry - group.returned
                returned[label] += group.returned
                consumers[label] += group.consumers
                label = self._detailed.label(group.name)
                there[label] += 1
                delayed[label] += group.delayed
                dead[label] += group.dead
                blocked[label] += group.blocked
                retried[label] = max(retried[label], _age(group.in_retry_oldest, group.at))
                taken[label] = max(taken[label], _age(group.in_flight_since, group.at))
                for name, growth in self._counters.of_group(one, group):
                    grown[name][label] += growth
        labels = ("group",)
        gauges: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("ready_messages", "Messages that no consumer of the group had yet.", ready),
            ("in_flight_messages", "Messages that consumers have, without a disposition yet.", in_flight),
            ("oldest_unacked_age_seconds", "Age of the oldest message that is ready, in flight or in retry.", oldest),
            ("retrying_messages", "Failed messages that wait for their next attempt.", in_retry),
            (
                "returned_messages",
                "Messages that came back untried, and go out again at once.",
                returned,
            ),
            ("oldest_retrying_age_seconds", "Age of the oldest failed message in retry.", retried),
            ("in_flight_age_seconds", "Time since the oldest pull without an ack got its messages.", taken),
            ("delayed_messages", "Delayed messages that the group gets once they are due.", delayed),
            ("dead_messages", "Dead letters.", dead),
            ("consumers", "Consumers that are there.", consumers),
            ("blocked_messages", "Ready messages that wait for an earlier one of their order key.", blocked),
        )
        for name, text, values in gauges:
            yield _gauge(f"group_{name}", text, labels, _by_name(values))
        yield self._reasons(snapshot)
        for count, name, text in _COUNTS:
            if count in grown:
                sums = self._counters.grown(f"group_{count}", grown[count], there)
                yield _counter(f"group_{name}", text, labels, _by_name(sums))

    def _reasons(self, snapshot: Snapshot) -> Metric:
        """Return the reasons why messages wait."""
        counts = Counter[tuple[str, str]](
            (self._named.label(group.name), why.code)
            for group in snapshot.groups.values()
            if (why := group.why(snapshot.at)) is not None
        )
        text = "Groups whose messages wait, by the likeliest reason: 1 for the reason of a group."
        return _gauge("group_waiting_reason", text, ("group", "reason"), sorted(counts.items()))


class _Counters:
    """Turns the counts of brokers, which begin at 0 with each start, into sums that never fall."""

    def __init__(self) -> None:
        self._starts: dict[str, _Start] = {}
        self._restarted: set[str] = set()
        self._seen: dict[tuple[str, str, str], float] = {}  # by name of the metric, label, broker: the count
        self._groups: dict[tuple[str, str], GroupStats] = {}  # by broker and name
        self._before: dict[tuple[str, str], GroupStats] = {}
        self._sums: dict[str, dict[str, float]] = {}

    def look_at(self, brokers: Iterable[BrokerStats]) -> None:
        """Begin a snapshot with these brokers."""
        self._restarted = set()
        away = set(self._starts)
        for one in brokers:
            start = _Start(one.store_id, one.started_at)
            away.discard(one.broker)
            if self._starts.get(one.broker) != start:
                self._restarted.add(one.broker)
                self._starts[one.broker] = start
        kept = {key: group for key, group in self._groups.items() if key[0] in away}
        self._before, self._groups = self._groups, kept

    def growth(self, name: str, label: str, broker: BrokerStats, count: float) -> float:
        """Return by how much a count has grown: if its broker has started again, since 0."""
        key = (name, label, broker.broker)
        seen = 0.0 if broker.broker in self._restarted else self._seen.get(key, 0.0)
        self._seen[key] = count
        return max(0.0, count - seen)

    def of_group(self, broker: BrokerStats, group: GroupStats) -> Iterator[tuple[str, float]]:
        """Yield by how much each count of a group has grown; the counts of a new group of the same name begin at 0."""
        key = (broker.broker, group.name)
        before = None if broker.broker in self._restarted else self._before.get(key)
        self._groups[key] = group
        is_new = before is None or before.delivered > group.delivered
        for name in _COUNT_NAMES:
            if name in _GROUP_COUNTS:
                count = getattr(group, name)
                growth = count if is_new else max(0, count - getattr(before, name))
                if growth:
                    yield name, growth

    def total(self, name: str, label: str, broker: BrokerStats, count: float) -> float:
        """Return the sum of a count of one broker over its starts."""
        sums = self._sums.setdefault(name, {})
        sums[label] = sums.get(label, 0.0) + self.growth(name, label, broker, count)
        return sums[label]

    def grown(self, name: str, growth: Mapping[str, float], labels: Iterable[str]) -> dict[str, float]:
        """Add the growth to the sums by label and return them; remove sums whose label is not in *labels*."""
        known = self._sums.get(name, {})
        self._sums[name] = {label: known.get(label, 0.0) + growth.get(label, 0.0) for label in labels}
        return self._sums[name]


class _NamedSeries:
    """The names that have series of their own: at most *most*."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: frozenset[str] = frozenset()

    def choose(self, names: Sequence[str]) -> None:
        """Give the first of *names* series of their own."""
        self._named = frozenset(names[: self._most])

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def label(self, name: str) -> str:
        """Return the name, or OTHERS."""
        return name if name in self._named else OTHERS


class _NamedGroups(_NamedSeries):
    """The groups that have series of their own."""

    def choose_groups(self, snapshot: Snapshot) -> None:
        """Give series to the groups that need them most."""

        def place(group: GroupNow) -> tuple[int, bool, float, str]:
            age = group.oldest_age(snapshot.at)
            is_idle = group.oldest is None and not group.in_flight
            need = 0 if group.dead or age >= LONG_BEHIND else 2 if is_idle else 1
            return need, group.name not in self, -age, group.name

        groups = snapshot.groups.values()
        self.choose([group.name for group in (groups if len(groups) <= self._most else sorted(groups, key=place))])


class _Collected(Collector):
    """Gives ready-made metrics to a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the registry need not know the names of the metrics before."""
        return ()


def _registry(metrics: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics))
    return registry


Samples = Iterable[tuple[Sequence[str], float]]


def _gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"qmq_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(f"qmq_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _by_name(values: Mapping[str, float]) -> Samples:
    return [((name,), value) for name, value in sorted(values.items())]


def _of_disks(brokers: Sequence[BrokerStats]) -> Iterator[Metric]:
    disks = [(one.broker, disk) for one in brokers for disk in one.disks]
    for name, text in (
        ("free", "Free space of a disk of the broker."),
        ("total", "Size of a disk of the broker."),
        ("reserved", "Sends are refused when less of the disk would stay free."),
    ):
        yield _gauge(f"disk_{name}_bytes", text, ("broker", "directory"), [
            ((broker, disk.directory), size)
            for broker, disk in disks
            if (size := getattr(disk, f"{name}_bytes")) is not None
        ])  # fmt: skip
    yield _gauge("file_bytes", "Bytes that files take on the disks, by kind.", ("broker", "kind"), [
        ((one.broker, kind), size) for one in brokers for kind, size in one.file_bytes.items()
    ])  # fmt: skip
    archives = [(one, one.archive) for one in brokers if one.archive is not None]
    label = ("broker",)
    yield _gauge("archive_lag_seconds", "Age of the oldest message that is in no archive; 0 without one.", label, [
        ((one.broker,), _age(archive.oldest, one.at)) for one, archive in archives
    ])  # fmt: skip
    yield _gauge("unarchived_bytes", "Bytes of the message log that are in no archive.", label, [
        ((one.broker,), archive.unarchived_bytes) for one, archive in archives
    ])  # fmt: skip
    yield _gauge("archive_verified_timestamp_seconds", "When a copy in an archive was verified last.", label, [
        ((one.broker,), archive.verified_at.timestamp()) for one, archive in archives
    ])  # fmt: skip


def _buckets(times: Histogram) -> list[tuple[str, float]]:
    kept = times.buckets[::-_EVERY][::-1]  # the longest one stays
    return [*((f"{bound:g}", float(below)) for bound, below in kept), ("+Inf", float(times.count))]


def _age(since: datetime | None, at: datetime) -> float:
    return 0.0 if since is None else max(0.0, (at - since).total_seconds())

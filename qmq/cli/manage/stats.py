"""``qmq stats``: what a broker has done since its start, once."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age, age_of, number, size, visible
from qmq.cli.common.listing import Fields, end_if_incomplete, json_option, plain, show_details

if TYPE_CHECKING:
    from qmq import BrokerStats, Histogram

FIELDS: Final[Fields[BrokerStats]] = {
    "broker": lambda stats: stats.broker,
    "version": lambda stats: stats.version,
    "python": lambda stats: stats.python,
    "store_id": lambda stats: stats.store_id,
    "at": lambda stats: stats.at,
    "started_at": lambda stats: stats.started_at,
    "uptime": lambda stats: round(stats.uptime, 3),
    "subject_count": lambda stats: stats.subject_count,
    "group_count": lambda stats: stats.group_count,
    "connections": lambda stats: stats.connections,
    "requests": lambda stats: stats.requests,
    "waiting_pulls": lambda stats: stats.waiting_pulls,
    "waiting_syncs": lambda stats: stats.waiting_syncs,
    "received": lambda stats: stats.received,
    "received_bytes": lambda stats: stats.received_bytes,
    "handed_messages": lambda stats: stats.handed_messages,
    "handed_bytes": lambda stats: stats.handed_bytes,
    "delayed": lambda stats: stats.delayed,
    "log_bytes": lambda stats: stats.log_bytes,
    "segments": lambda stats: stats.segments,
    "checkpoint_age": lambda stats: round(stats.checkpoint_age, 3),
    "damage": lambda stats: stats.damage,
    "failed_checkpoints": lambda stats: stats.failed_checkpoints,
    "failed_syncs": lambda stats: stats.failed_syncs,
    "scrubbed_bytes": lambda stats: stats.scrubbed_bytes,
    "scrub_rounds": lambda stats: stats.scrub_rounds,
    "dropped_segments": lambda stats: stats.dropped_segments,
    "dropped_messages": lambda stats: stats.dropped_messages,
    "lost_messages": lambda stats: stats.lost_messages,
    "skipped_messages": lambda stats: stats.skipped_messages,
    "unique_texts": lambda stats: stats.unique_texts,
    "forgotten_texts": lambda stats: stats.forgotten_texts,
    "duplicate_messages": lambda stats: stats.duplicate_messages,
    "cpu": lambda stats: round(stats.cpu, 3),
    "memory_bytes": lambda stats: stats.memory_bytes,
    "files": lambda stats: stats.files,
    "threads": lambda stats: stats.threads,
}
_NESTED: Final[Fields[BrokerStats]] = {
    "totals": lambda stats: asdict(stats.totals),
    "refused": lambda stats: stats.refused,
    "file_bytes": lambda stats: stats.file_bytes,
    "archive": lambda stats: _rows([] if stats.archive is None else [stats.archive]),
    "disks": lambda stats: _rows(stats.disks),
    "durations": lambda stats: [{"name": name, **_times(one)} for name, one in stats.durations.items()],
    "subjects": lambda stats: _rows(stats.subjects),
    "groups": lambda stats: [{"name": group["name"], **group} for group in _rows(stats.groups)],
}
#: The most groups and names of subjects that are shown on a terminal.
_MOST_SHOWN: Final = 10


@click.command(short_help="Show what a broker has done since its start.")
@json_option
@admin_options
def stats(as_json: bool, server: str, timeout: float) -> None:
    """Show the statistics of each broker: messages and bytes in and out since its start, how long its work takes, and
    the groups with the oldest messages that are not acknowledged. In a pipe and with --json it has all groups.

    It costs a broker little, so a script may ask every few seconds; the difference of two counts is a rate.

    \b
    Examples:
      qmq stats
      qmq stats --json | jq '.groups[] | {name, ready, oldest_unacked, acked}'
    """

    async def load() -> tuple[list[BrokerStats], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.stats(), not client.admin.missed

    found, is_whole = run(load())
    show_details(found, FIELDS, _pairs, as_json=as_json, nested=_NESTED)
    end_if_incomplete(is_whole)


def _rows(several: list[Any]) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in asdict(one).items()} for one in several]


def _times(histogram: Histogram) -> dict[str, Any]:
    return {
        "count": histogram.count,
        "sum": round(histogram.sum, 6),
        "p50": histogram.quantile(0.5),
        "p99": histogram.quantile(0.99),
    }


def _pairs(stats: BrokerStats) -> list[tuple[str, str]]:
    from rich.markup import escape

    totals = stats.totals
    failed = (
        f"{number(totals.nacked)} nacked, {number(totals.rejected)} rejected, {number(totals.expired)} expired, "
        f"{number(totals.session_expired)} by consumers that fell silent; {number(totals.died)} died"
    )
    pairs = [
        ("broker", f"[bold]{stats.broker}[/]"),
        ("up", f"{age(stats.uptime)}, {number(stats.connections, 'connection')}"),
        ("received", f"{_messages(stats.received)}, {size(stats.received_bytes)}"),
        ("handed out", f"{_messages(stats.handed_messages)}, {size(stats.handed_bytes)}"),
        ("acknowledged", number(totals.acked)),
        ("failed", failed),
        ("stored", f"{size(stats.log_bytes)} in {number(stats.segments, 'segment')}"),
        *_archive_pairs(stats),
        ("process", f"{age(stats.cpu)} of processor time, {size(stats.memory_bytes)}, {number(stats.files, 'file')}"),
    ]
    for name, what in (("turn", "a turn"), ("send", "a send"), ("fsync", "an fsync")):
        histogram = stats.durations[name]
        if histogram.count:
            median, most = histogram.quantile(0.5), histogram.quantile(0.99)
            pairs.append((what, f"half in less than {_short(median)}, 99% in less than {_short(most)}"))
    if stats.refused:
        pairs.append(("refused", escape(", ".join(f"{count:,} {code}" for code, count in stats.refused.items()))))
    for subject in sorted(stats.subjects, key=lambda one: -one.received)[:_MOST_SHOWN]:
        subjects = number(subject.subjects, "subject")
        text = f"{subject.name}: {number(subject.messages)} stored in {subjects}, {number(subject.received)} received"
        pairs.append(("subjects", escape(visible(text))))
    behind = [group for group in stats.groups if group.oldest_unacked is not None]
    for group in sorted(behind, key=lambda one: one.oldest_unacked or stats.at)[:_MOST_SHOWN]:
        more = "" if group.ready_exact else " or more"
        text = (
            f"{group.name}: {number(group.ready)}{more} ready, {number(group.in_flight)} in flight, "
            f"{number(group.in_retry)} in retry; the oldest waits for {age_of(group.oldest_unacked)}"
        )
        pairs.append(("behind", escape(visible(text))))
    if not behind:
        pairs.append(("behind", "no group"))
    return pairs


def _messages(count: int) -> str:
    return f"{number(count)} {'message' if count == 1 else 'messages'}"


def _archive_pairs(stats: BrokerStats) -> list[tuple[str, str]]:
    archive = stats.archive
    if archive is None:
        return []
    if archive.oldest is None:
        return [("archive", "has all messages")]
    return [("archive", f"lacks {size(archive.unarchived_bytes)}, the first stored {age_of(archive.oldest)} ago")]


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"

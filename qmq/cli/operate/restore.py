"""``qmq restore``: send messages of an archive to a broker."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import click

from qmq.archive.archive import is_archive
from qmq.archive.locations import files_at, writable_files_at
from qmq.archive.lock import this_process
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import run, server_option
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import iso, number
from qmq.cli.common.progress import reading_bar
from qmq.errors import InvalidOption
from qmq.net.client.address import parse_url, shown_location
from qmq.net.client.producer.receipts import utc_from_us
from qmq.restore.progress import RestoreProgress
from qmq.restore.run import RestoreRun
from qmq.restore.selection import END_US, RestoreSelection

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The most ranges of bad bytes that are named; more are only counted.
_MOST_NAMED = 20


def _now_us() -> int:
    return time.time_ns() // 1_000


@click.command(short_help="Send messages of an archive to a broker.")
@click.option(
    "--from", "source", required=True, metavar="DEST", help="The archive: a path, or a file:// or hdfs:// URL."
)
@click.option(
    "--prefix", metavar="P", default="", help='Only these subjects: "a.b." takes all that begin so, "a.b" that one.'
)
@click.option("--since", metavar="TIME", help="Only messages stored at this time or later: 2026-01-31T12:00:00Z.")
@click.option("--until", metavar="TIME", help="Only messages stored before this time.")
@click.option("--to-subject", metavar="S", help="Send all messages to this subject.")
@click.option(
    "--group",
    metavar="G",
    help="Deliver them to this group alone; for a member of a broadcast group, GROUP@CONSUMER.",
)
@click.option("--with-replayed", is_flag=True, help="Also messages that were restored before they were archived.")
@click.option("--again", is_flag=True, help="Restore again what the same command has restored before.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@yes_option
@server_option
def restore(
    source: str,
    prefix: str,
    since: str | None,
    until: str | None,
    to_subject: str | None,
    group: str | None,
    with_replayed: bool,
    again: bool,
    as_json: bool,
    yes: bool,
    server: str,
) -> None:
    """Send messages of the archive DEST to a broker, under their ids, marked as replayed.

    A run can be killed at any moment and repeated, also much later: the same command continues where it was, and
    restores no message twice. Once it has finished, the same command restores only what was archived since. It asks on
    a terminal; without one it needs --yes. Ends with 1 if bytes of the archive are bad; everything readable is restored
    all the same.

    \b
    Examples:
      qmq restore --from /mnt/archive --prefix shop. --since 2026-01-31T12:00:00Z
      qmq restore --from /mnt/archive --group billing --yes
    """
    since_us = 0 if since is None else time_of(since, "--since")
    until_us = END_US if until is None else time_of(until, "--until")
    selection = RestoreSelection(prefix, since_us, until_us, to_subject, group, with_replayed)
    selection.check()
    with writable_files_at(source) as files:
        if not is_archive(files):
            raise InvalidOption(f"{shown_location(source)} is no archive; give --from the DEST of `qmq archive --to`")
        reading = files_at(source)  # reading HDFS needs no Java, and is several times as fast without it
        addresses = parse_url(server)
        does = f"send {_wanted(selection)} of {shown_location(source)} to {', '.join(map(str, addresses))} again"
        confirm(yes, f"this will {does}", lambda: f"{does}?")
        restoring = RestoreRun(files, selection, addresses, _now_us, this_process(), source=reading, again=again)
        try:
            with reading_bar() as shown:
                progress = run(restoring.run(shown))
        finally:
            reading.close()
    for damage in restoring.damages[:_MOST_NAMED]:
        click.echo(f"qmq: {damage}", err=True)
    if len(restoring.damages) > _MOST_NAMED:
        more = number(len(restoring.damages) - _MOST_NAMED, "more range", "more ranges")
        click.echo(f"qmq: {more} of bad bytes", err=True)
    bad = restoring.bad_ranges()
    click.echo(json.dumps(_object(source, progress, bad)) if as_json else _summary(source, progress, bad))
    if bad:
        click.get_current_context().exit(EXIT_FAILED)


def _wanted(selection: RestoreSelection) -> str:
    """Return a description of the selected messages for the question."""
    found = [f"the messages of {selection.prefix}" if selection.prefix else "all messages"]
    if selection.since_us:
        found.append(f"since {iso(utc_from_us(selection.since_us))}")
    if selection.until_us != END_US:
        found.append(f"until {iso(utc_from_us(selection.until_us))}")
    if selection.to_subject is not None:
        found.append(f"as {selection.to_subject}")
    if selection.group is not None:
        found.append(f"for group {selection.group} alone")
    return " ".join(found)


def time_of(text: str, option: str) -> int:
    """Return the time of an option in microseconds since 1970. Raises InvalidOption."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidOption(f"{option} {text!r:.80} is not a time with its zone such as 2026-01-31T12:00:00Z")
    return max((time - _EPOCH) // timedelta(microseconds=1), 0)


def _object(source: str, progress: RestoreProgress, bad: int) -> dict[str, object]:
    return {
        "source": shown_location(source),
        "store": progress.store,
        **vars(progress.counts),
        "damages": bad,
        "started_at": iso(utc_from_us(progress.started_at_us)),
        "finished_at": None if progress.finished_at_us is None else iso(utc_from_us(progress.finished_at_us)),
    }


def _summary(source: str, progress: RestoreProgress, bad: int) -> str:
    counts = progress.counts
    parts = [f"{number(counts.restored, 'message')} restored ({number(counts.restored_bytes, 'byte')})"]
    if counts.private:
        parts.append(f"{counts.private:,} left out, which belong to one group alone")
    if counts.replayed:
        parts.append(f"{counts.replayed:,} left out, which were restored before (--with-replayed takes them)")
    if bad:
        parts.append(f"{number(bad, 'range', 'ranges')} of bad bytes left out")
    return f"{shown_location(source)}: " + ", ".join(parts)

"""``qmq trace``: what has become of a message in each group, as a timeline."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from qmq import connect
from qmq.cli.common.arguments import text_of, time_of
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age, age_of, iso, number, size, visible
from qmq.cli.common.listing import (
    Fields,
    RowWriter,
    are_several,
    end_if_incomplete,
    is_for_people,
    output_options,
    plain,
)

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import GroupTrace, Trace, TraceEvent


class _Row(NamedTuple):
    """One group of a trace."""

    trace: Trace
    group: GroupTrace


FIELDS: Final[Fields[_Row]] = {
    "id": lambda row: row.trace.id,
    "subject": lambda row: row.trace.message.subject if row.trace.message else None,
    "sequence": lambda row: row.trace.message.sequence if row.trace.message else None,
    "group": lambda row: row.group.group,
    "state": lambda row: row.group.state,
    "consumer": lambda row: row.group.consumer,
    "since": lambda row: row.group.since,
    "attempts": lambda row: row.group.attempts,
    "due_at": lambda row: row.group.due_at,
    "reason": lambda row: row.group.reason,
    "broker": lambda row: row.group.broker,
}
_NESTED: Final[Fields[_Row]] = {
    "events": lambda row: [
        {
            "kind": event.kind,
            "time": plain(event.time),
            "consumer": event.consumer,
            "attempt": event.attempt,
            "reason": event.reason,
        }
        for event in row.group.events
    ],
    "is_partial": lambda row: row.trace.is_partial,
}
_COLOURS: Final = {
    "in_flight": "cyan", "retrying": "yellow", "dead": "red", "acked": "green", "expired": "yellow",
    "waiting": "bold", "delayed": "bold", "dropped": "red",
}  # fmt: skip
#: The mark of each event, and its colour; others have a dot.
_MARKS: Final = {
    "handed_out": ("▶", "cyan"), "acked": ("✔", "green"), "nacked": ("✘", "yellow"), "rejected": ("✘", "red"),
    "session_expired": ("✘", "yellow"), "redriven": ("↻", "bold"), "resent": ("↻", "bold"),
    "restored": ("↻", "bold"), "deleted": ("✘", "red"), "sought": ("⇄", "bold"),
}  # fmt: skip
_LATE: Final = "the pull log does not reach back to all events of this message (see pull_log_keep_ms)"


@click.command(short_help="Show what has become of messages, or what a consumer did.")
@click.argument("message", metavar="[ID | PREFIX]", required=False)
@click.option("--key", metavar="K", help="The messages with this key, of PREFIX or of all subjects.")
@click.option("--consumer", metavar="NAME", help="What this consumer did: its id, or the name of its program.")
@click.option("--since", metavar="T", help="With --key or --consumer: from this time on: 2026-01-31T12:00:00Z, 2h.")
@click.option("--limit", type=click.IntRange(1, 1_000), metavar="N",
              help="The last messages with the key (20), or events of the consumer (1,000), at most.")  # fmt: skip
@output_options
@admin_options
def trace(
    message: str | None, key: str | None, consumer: str | None, since: str | None, limit: int | None, as_json: bool,
    header: bool, server: str, timeout: float,
) -> None:  # fmt: skip
    """Show what has become of the message with that id: for each group whether it waits, who has it, when it comes
    again and why, or what ended it, and what happened to it so far. With --key, show this for the last messages with a
    key.

    The states are those that the broker acts on. The events come from its pull log, which is kept for a day
    (pull_log_keep_ms). In a pipe and with --json, one line a group.

    With --consumer, show what a consumer was given and what it did with it, one line a pull, ack or failure, as far as
    the pull log is kept.

    \b
    Examples:
      qmq trace 7f000001515f000003c4a9e0d1f20b3c
      qmq trace 7f000001515f000003c4a9e0d1f20b3c --json | jq '{group, state}'
      qmq trace shop. --key order-4421
      qmq trace --consumer worker-7 --since 1h
    """
    if sum((consumer is not None, key is not None, message is not None and key is None)) != 1:
        raise click.UsageError("give the ID of a message, --key (with a PREFIX if you like), or --consumer")
    if key is None and consumer is None and (since is not None or limit is not None):
        raise click.UsageError("--since and --limit go with --key or --consumer")
    since_time = None if since is None else time_of(since, "--since")
    if consumer is not None:
        from qmq.cli.find.trace_consumer import show_consumer

        show_consumer(text_of(consumer), since_time, limit or 1_000, as_json, header, server, timeout)
        return

    async def load() -> list[Trace]:
        async with connect(server, admin_timeout=timeout) as client:
            ids = [message or ""]
            if key is not None:
                finder = client.find(message or "", key=text_of(key), since=since_time, newest=True, limit=limit or 20)
                ids = [stored.id async for stored in finder][::-1]
            return [await client.trace(message_id) for message_id in ids]

    traces = run(load())
    if is_for_people(as_json):
        for number, found in enumerate(traces):
            if number:
                click.echo("")
            _print(found)
        if not traces:
            click.echo(f"no message has the key {text_of(key or '')}", err=True)
    else:
        writer = RowWriter(FIELDS, as_json, header, _NESTED)
        for found in traces:
            for group in found.groups:
                writer.write(_Row(found, group))
    if any(found.is_partial for found in traces):
        click.echo(_LATE, err=True)
    end_if_incomplete(not any(found.missed for found in traces))


# ---------------------------------------------------------------------------------------------------------------------
# For people


def _print(found: Trace) -> None:
    from rich.console import Console

    from qmq.cli.common.tables import print_pairs, print_table

    console = Console()
    print_pairs(_facts(found), console)
    others = dict[str, list[str]]()
    brokers = are_several(found.groups)
    for group in found.groups:
        if group.state == "not_subscribed" and not group.events:
            others.setdefault(group.broker, []).append(group.group)
            continue
        console.print()
        console.print(_headline(group, brokers), highlight=False)
        if group.events:
            print_table(_timeline(group, found), console)
    for broker, names in others.items():
        console.print()
        at = f" at {broker}" if brokers else ""
        console.print(f"[dim]not subscribed{at}: {', '.join(names)}[/]", highlight=False)
    if not found.groups:
        console.print("\nno group has it")


def _facts(found: Trace) -> list[tuple[str, str]]:
    from rich.markup import escape

    message = found.message
    pairs = [("message", f"[bold]{found.id}[/]")]
    if message is None:
        return [*pairs, ("", "no broker keeps it any more")]
    sequence = "" if message.sequence is None else f", sequence {message.sequence:,}"
    pairs.append(("subject", f"{escape(message.subject)}{sequence}"))
    if message.keys:
        pairs.append(("key" if len(message.keys) == 1 else "keys", escape(visible(", ".join(message.keys)))))
    if message.order_key is not None:
        pairs.append(("order key", escape(visible(message.order_key))))
    if message.priority != "normal":
        pairs.append(("priority", message.priority))
    if message.tags:
        pairs.append(("tags", escape(visible(", ".join(message.tags)))))
    pairs.append(("stored", f"{iso(message.stored_at)}, {size(message.size)}, at {message.broker}"))
    if message.deliver_at is not None:
        pairs.append(("due", iso(message.deliver_at)))
    if message.expires_at is not None:
        pairs.append(("expires", iso(message.expires_at)))
    return pairs


def _headline(group: GroupTrace, with_broker: bool) -> str:
    """Return the line of a group: its state, and what matters about it."""
    from rich.markup import escape

    state = group.state.replace("_", " ")
    if colour := _COLOURS.get(group.state):
        state = f"[{colour}]{state}[/]"
    text = f"[bold]{escape(group.group)}[/]  {state}"
    if group.consumer is not None and group.state in ("in_flight", "acked"):
        text += f" {'at' if group.state == 'in_flight' else 'by'} {escape(visible(group.consumer))}"
    if group.state == "in_flight":
        text += f" for {age_of(group.since)}, attempt {group.attempts}"
    elif group.attempts and group.state in ("retrying", "dead", "deleted"):
        text += f" after {number(group.attempts, 'attempt')}"
    if group.due_at is not None and group.state in ("retrying", "delayed"):
        text += f", due {_moment(group.due_at)}"
    elif group.since is not None and group.state in ("dead", "acked", "deleted"):
        text += f", {_moment(group.since)}"
    if group.reason:
        text += f": {escape(visible(group.reason))}"
    return text + (f"  [dim]{group.broker}[/]" if with_broker else "")


def _timeline(group: GroupTrace, found: Trace) -> Table:
    """Return a line for each event: when, how long after the message was stored, and what."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", min_width=13)
    began = found.message.stored_at if found.message is not None else group.events[0].time
    for event in group.events:
        mark, colour = _MARKS.get(event.kind, ("•", "default"))
        table.add_row("", _clock(event.time, began), _after(event.time - began), f"[{colour}]{mark}[/]", _what(event))
    return table


def _what(event: TraceEvent) -> str:
    from rich.markup import escape

    text = event.kind.replace("_", " ")
    if event.kind == "handed_out":
        text += " to"
    elif event.consumer is not None:
        text += " by" if event.kind in ("acked", "nacked", "released", "rejected") else " of"
    if event.consumer is not None:
        text += f" {escape(visible(event.consumer))}"
    elif event.kind == "handed_out":
        text += " a consumer that is gone"
    if event.kind == "handed_out" and event.attempt > 1:
        text += f", attempt {event.attempt}"
    return text + (f": {escape(visible(event.reason))}" if event.reason else "")


def _clock(time: datetime, began: datetime) -> str:
    """Return the time of an event; with its day where that is not the day on which the message was stored."""
    text = _moment(time)
    return text[11:] if text[:10] == _moment(began)[:10] else text


def _moment(time: datetime) -> str:
    """Return a time to the millisecond."""
    return f"{iso(time)[:-4]}Z"


def _after(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"+{seconds:.3f}s" if seconds < 120 else f"+{age(seconds)}"

"""``qmq trace --consumer``: what a consumer was given, and what it did with it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from qmq import connect
from qmq.cli.common.connect import run
from qmq.cli.common.formatting import iso, number, visible
from qmq.cli.common.listing import Fields, are_several, end_if_incomplete, in_cell, show

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import ConsumerEvent, ConsumerTrace

FIELDS: Final[Fields[ConsumerEvent]] = {
    "time": lambda event: event.time,
    "event": lambda event: event.kind,
    "group": lambda event: event.group,
    "consumer": lambda event: event.consumer,
    "subject": lambda event: event.subject,
    "sequence": lambda event: event.sequence,
    "count": lambda event: event.count,
    "attempt": lambda event: event.attempt,
    "reason": lambda event: event.reason,
    "id": lambda event: event.message_id,
    "broker": lambda event: event.broker,
}
_COLOURS: Final = {
    "handed_out": "cyan", "acked": "green", "nacked": "yellow", "rejected": "red", "session_expired": "red",
}  # fmt: skip
_EARLIER: Final = (
    "there are earlier events: more than --limit, or the pull log reaches back less far (pull_log_keep_ms)"
)


def show_consumer(
    name: str, since: datetime | None, limit: int, as_json: bool, header: bool, server: str, timeout: float
) -> None:
    """Print what the consumers of a name did."""

    async def load() -> ConsumerTrace:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.trace_consumer(name, since=since, limit=limit)

    trace = run(load())
    none = f"no consumer or program {name} has left events that are still kept"
    caption = number(len(trace.events), "event")
    show(trace.events, FIELDS, _table, as_json=as_json, header=header, none=none, caption=caption)
    if trace.is_partial:
        click.echo(_EARLIER, err=True)
    end_if_incomplete(not trace.missed)


def _table(events: Sequence[ConsumerEvent], width: int) -> Table:
    from rich.box import HORIZONTALS
    from rich.markup import escape
    from rich.table import Table

    several_brokers, consumers = are_several(events), {(event.group, event.consumer) for event in events}
    table = Table(box=HORIZONTALS, pad_edge=False, collapse_padding=True)
    table.add_column("time", no_wrap=True)
    table.add_column("event", no_wrap=True)
    table.add_column("messages", overflow="fold")
    day = ""
    for event in events:
        moment = f"{iso(event.time)[:-4]}Z"
        shown, day = (moment[11:] if moment[:10] == day else moment), moment[:10]
        kind = event.kind.replace("_", " ")
        if colour := _COLOURS.get(event.kind):
            kind = f"[{colour}]{kind}[/]"
        text = _messages(event)
        if len(consumers) > 1 or event.kind == "joined":
            text += f"  [dim]{escape(event.group)}, {escape(visible(event.consumer))}[/]"
        table.add_row(shown, kind, text + in_cell(event, several_brokers))
    return table


def _messages(event: ConsumerEvent) -> str:
    """Return which messages an event is about, and why."""
    from rich.markup import escape

    if not event.count:
        text = ""
    elif event.subject is None:
        text = f"{number(event.count)} earlier" if event.count > 1 else "an earlier one"
    elif event.count == 1:
        text = f"{escape(event.subject)} {event.sequence}  [dim]{event.message_id}[/]"
    else:
        assert event.sequence is not None
        last = event.sequence + event.count - 1
        text = f"{escape(event.subject)} {event.sequence} to {last}"
    if event.attempt > 1:
        text += f", attempt {event.attempt}"
    if event.reason:
        text += f": {escape(visible(event.reason))}" if text else escape(visible(event.reason))
    return text

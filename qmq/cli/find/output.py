"""Print stored messages: a table or blocks for people, lines and JSON objects for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import click

from qmq.cli.common.formatting import age_of, iso, number, size, visible
from qmq.cli.common.listing import Fields, RowWriter, is_for_people
from qmq.cli.messages.message_text import lane_lines, shown_body, text_or_base64

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from qmq import FindProgress, StoredMessage

#: The most characters of a body in a table.
_PREVIEW: Final = 60
#: From this many columns on a table has the time, and a part of the body.
_VERY_WIDE: Final = 180
_EVERY_S: Final = 0.1
#: A search that is done sooner shows no progress.
_SHOWN_AFTER_S: Final = 0.5

FIELDS: Final[Fields[StoredMessage]] = {
    "id": lambda message: message.id,
    "subject": lambda message: message.subject,
    "sequence": lambda message: message.sequence,
    "keys": lambda message: message.keys,
    "priority": lambda message: message.priority,
    "order_key": lambda message: message.order_key,
    "tags": lambda message: message.tags,
    "stored_at": lambda message: message.stored_at,
    "size": lambda message: message.size,
    "broker": lambda message: message.broker,
}
_WITH_BODY: Final[Fields[StoredMessage]] = {**FIELDS, "body": lambda message: text_or_base64(message.body)}


class MessagePrinter:
    """Prints messages in the form that was asked for: each when it comes, a table at the end."""

    def __init__(self, *, as_json: bool, header: bool, bodies: bool) -> None:
        self._as_json = as_json
        self._bodies = bodies
        self._for_people = is_for_people(as_json)
        self._gathered: list[StoredMessage] = []
        self._lines: RowWriter[StoredMessage] | None = None
        if not as_json and not self._for_people:
            self._lines = RowWriter(_WITH_BODY if bodies else FIELDS, False, header)

    def add(self, message: StoredMessage) -> None:
        """Print a message, or keep it for the table."""
        if self._as_json:
            click.echo(json.dumps(json_object(message), ensure_ascii=False))
        elif self._lines is not None:
            self._lines.write(message)
        elif self._bodies:
            click.echo(block(message))
        else:
            self._gathered.append(message)

    def end(self) -> None:
        """Print the table of the messages that were kept."""
        if self._gathered:
            from rich.console import Console

            from qmq.cli.common.tables import print_table

            console = Console()
            print_table(table_of_messages(self._gathered, console.width), console)


def json_object(message: StoredMessage) -> dict[str, Any]:
    """Return all fields of a message; the body as text if it is UTF-8, else in base64."""
    fields: dict[str, Any] = {
        "id": message.id,
        "subject": message.subject,
        "sequence": message.sequence,
        "key": message.key,
        "keys": message.keys,
        "priority": message.priority,
        "order_key": message.order_key,
        "tags": message.tags,
        "properties": message.properties,
        "created_at": iso(message.created_at),
        "stored_at": iso(message.stored_at),
        "deliver_at": iso(message.deliver_at),
        "expires_at": iso(message.expires_at),
        "replayed": message.replayed,
        "size": message.size,
        "source": message.source,
        "sender": message.sender,
        "producer": message.producer,
        "app": message.app,
        "broker": message.broker,
    }
    try:
        fields["body"] = message.body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = text_or_base64(message.body)
    return fields


def block(message: StoredMessage) -> str:
    """Return a message as people read it, in several lines."""
    at = "delayed" if message.sequence is None else f"#{message.sequence}"
    if message.sequence is None and message.deliver_at is None:
        at = "of one group alone"
    lines = [click.style(f"{message.subject} {at}", bold=True), f"  id {message.id}"]
    lines.append(f"  stored {age_of(message.stored_at)} ago, at {iso(message.stored_at)}, at {message.broker}")
    sent = (("sent from", message.source), ("by", message.app), ("as", message.sender))
    if any(text for _, text in sent):
        lines.append("  " + ", ".join(f"{word} {visible(text)}" for word, text in sent if text))
    if message.deliver_at is not None:
        lines.append(f"  is delivered at {iso(message.deliver_at)}")
    if message.expires_at is not None:
        lines.append(f"  expires at {iso(message.expires_at)}")
    if message.replayed:
        lines.append("  restored from an archive")
    if message.keys:
        lines.append(f"  {'key' if len(message.keys) == 1 else 'keys'} {visible(', '.join(message.keys))}")
    lines += lane_lines(message)
    if message.tags:
        lines.append(f"  tags {visible(', '.join(message.tags))}")
    lines += [f"  {visible(name)} = {visible(value)}" for name, value in message.properties.items()]
    return "\n".join([*lines, *(f"  {line}" for line in shown_body(message.body)), ""])


def table_of_messages(messages: Sequence[StoredMessage], width: int) -> Table:
    """Return a table of messages for so many columns: with fewer than 120 the id stands below the subject, and so does
    what few messages have.
    """
    from rich.markup import escape

    from qmq.cli.common.tables import WIDE, table_of

    several = len({message.broker for message in messages}) > 1
    has_lanes = any(map(lane_lines, messages))
    has_keys = any(message.keys for message in messages)
    table = table_of("subject")
    wide, very_wide = width >= WIDE, width >= _VERY_WIDE
    columns: list[tuple[str, Callable[[StoredMessage], str], bool]] = []  # name, cell, whether it folds
    if wide:
        columns.append(("id", lambda message: message.id, False))
    if has_keys:
        columns.append(("keys", lambda message: visible(", ".join(message.keys)), True))
    if has_lanes and wide:
        columns.append(("priority, order key", lambda message: "".join(lane_lines(message)).strip(), True))
    if very_wide:
        columns.append(("stored at", lambda message: iso(message.stored_at), False))
    else:
        columns.append(("stored", lambda message: f"{age_of(message.stored_at)} ago", False))
    columns.append(("size", lambda message: size(message.size), False))
    if very_wide:
        columns.append(("body", _preview, True))
    if several and wide:
        columns.append(("broker", lambda message: message.broker, False))
    if not wide:
        table.columns[0].min_width = max(len(message.id) for message in messages)
    for name, _, folds in columns:
        table.add_column(name, overflow="fold", no_wrap=not folds)
    for message in messages:
        subject = message.subject if message.sequence is None else f"{message.subject} #{message.sequence}"
        if not wide:
            lanes = [line.strip() for line in lane_lines(message)]
            subject = "\n".join([subject, message.id, *lanes, *([message.broker] if several else [])])
        table.add_row(escape(subject), *(escape(cell(message)) for _, cell, _ in columns))
    return table


def _preview(message: StoredMessage) -> str:
    line = shown_body(message.body[: 8 * _PREVIEW])[0]
    return line if len(line) <= _PREVIEW else line[: _PREVIEW - 3] + "..."


class SearchProgress:
    """Shows on stderr, if that is a terminal, how far a search is; removed when it ends."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + _SHOWN_AFTER_S
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: FindProgress) -> None:
        """Show how far the search is, at most ten times a second."""
        now = self._clock()
        if now < self._next or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        self._next = now + _EVERY_S
        self._live.update(Text(progress_line(progress)), refresh=True)


def progress_line(progress: FindProgress) -> str:
    """Return how far a search is."""
    return f"{progress.share:.0%} searched, {number(progress.found, 'message')} found; Ctrl-C ends it"

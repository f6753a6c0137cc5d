"""Print messages: bodies, JSON objects, lines of fields with tabs, and blocks that people read."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import click

from qmq.cli.common.formatting import age_of, iso, number, visible
from qmq.cli.common.listing import Fields, RowWriter, is_for_people

if TYPE_CHECKING:
    from qmq import Message, MessageBatch, StoredMessage

_ENCODE: Final = json.JSONEncoder(ensure_ascii=False).encode
#: The most characters of a body on a terminal.
_MOST_SHOWN: Final = 2_000

FIELDS: Final[Fields[StoredMessage]] = {
    "id": lambda message: message.id,
    "subject": lambda message: message.subject,
    "sequence": lambda message: message.sequence,
    "key": lambda message: message.key,
    "keys": lambda message: message.keys,
    "priority": lambda message: message.priority,
    "order_key": lambda message: message.order_key,
    "tags": lambda message: message.tags,
    "attempt": lambda message: 1,
    "stored_at": lambda message: message.stored_at,
    "source": lambda message: message.source,
    "sender": lambda message: message.sender,
    "producer": lambda message: message.producer,
    "app": lambda message: message.app,
    "encoding": lambda message: encoding_of(message.body),
    "body": lambda message: text_or_base64(message.body),
}


def show_messages(messages: Sequence[StoredMessage], as_json: bool, header: bool, none: str) -> None:
    """Print stored messages in the form that was asked for; *none* on a terminal if there are none."""
    if as_json:
        for message in messages:
            sys.stdout.buffer.write(json_line(message))
        sys.stdout.buffer.flush()
    elif not is_for_people(as_json):
        writer = RowWriter(FIELDS, False, header)
        for message in messages:
            writer.write(message)
    elif not messages:
        click.echo(none)
    else:
        for message in messages:
            click.echo(block(message))


def block(message: StoredMessage) -> str:
    """Return a message as people read it, in several lines."""
    head = click.style(f"{message.subject} #{message.sequence}", bold=True)
    parts = [f"id {message.id}", f"stored {age_of(message.stored_at)} ago, at {iso(message.stored_at)}"]
    if message.source is not None:
        program = f" by {visible(message.app)}" if message.app else ""
        token = f", as {visible(message.sender)}" if message.sender else ""
        parts.append(f"sent from {message.source}{program}{token}")
    lines = [head, *(f"  {part}" for part in parts)]
    if message.keys:
        lines.append(f"  {'key' if len(message.keys) == 1 else 'keys'} {visible(', '.join(message.keys))}")
    lines += lane_lines(message)
    if message.tags:
        lines.append(f"  tags {visible(', '.join(message.tags))}")
    lines += [f"  {visible(name)} = {visible(value)}" for name, value in message.properties.items()]
    return "\n".join([*lines, *(f"  {line}" for line in shown_body(message.body)), ""])


def lane_lines(message: Message | StoredMessage) -> list[str]:
    """Return the priority of a message if it is not the normal one, and its order key, as people read them."""
    lines = [f"  priority {message.priority}"] if message.priority != "normal" else []
    return lines if message.order_key is None else [*lines, f"  order key {visible(message.order_key)}"]


def shown_body(body: bytes) -> list[str]:
    """Return a body as lines for a terminal; a long one ends with the count of what is left out."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return [f"{number(len(body), 'byte')} that are no text; --json prints them in base64"]
    lines = [visible(line) for line in text[:_MOST_SHOWN].split("\n")]
    if len(text) > _MOST_SHOWN:
        lines.append(f"... {number(len(text) - _MOST_SHOWN, 'more character')}; --json prints all")
    return lines if text else ["(empty)"]


def text_or_base64(body: bytes) -> str:
    """Return a body as text, or in base64 if it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return base64.b64encode(body).decode("ascii")


def encoding_of(body: bytes) -> str:
    """Return how ``text_or_base64`` writes a body: "text" or "base64"; "empty" if there is nothing to write."""
    if not body:
        return "empty"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "base64"
    return "text"


def raw_lines(batch: MessageBatch) -> Iterable[bytes]:
    """Return the bodies, each followed by a newline."""
    return (b"\n".join(batch.bodies), b"\n")


def json_lines(batch: MessageBatch) -> Iterable[bytes]:
    """Return the messages as JSON objects, one a line."""
    return [json_line(message) for message in batch]


def json_line(message: Message | StoredMessage) -> bytes:
    """Return all fields of a message; the body as text if it is UTF-8, else in base64."""
    fields: dict[str, object] = {
        "id": message.id,
        "subject": message.subject,
        "sequence": message.sequence,
        "key": message.key,
        "keys": message.keys,
        "priority": message.priority,
        "order_key": message.order_key,
        "tags": message.tags,
        "properties": message.properties,
        "attempt": getattr(message, "attempt", 1),  # the first one of a stored message is still to come
        "created_at": iso_time(message.created_at_us),
        "stored_at": iso_time(message.stored_at_us),
        "source": message.source,
        "sender": message.sender,
        "producer": message.producer,
        "app": message.app,
    }
    if message.replayed:
        fields["replayed"] = True
    body = message.body
    try:
        fields["body"] = body.decode()
    except UnicodeDecodeError:
        fields["body_base64"] = base64.b64encode(body).decode("ascii")
    return _ENCODE(fields).encode() + b"\n"


@lru_cache(maxsize=64)  # the messages of a batch share their times
def iso_time(time_us: int) -> str:
    """Format microseconds since 1970 as ISO 8601 in UTC."""
    from qmq.net.client.producer.receipts import utc_from_us

    return iso(utc_from_us(time_us))

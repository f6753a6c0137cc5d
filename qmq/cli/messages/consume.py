"""``qmq consume``: print messages on stdout."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import BinaryIO, Final, Literal

import click

from qmq import connect
from qmq.cli.common.arguments import Seconds, text_of
from qmq.cli.common.connect import run, server_option
from qmq.cli.common.formatting import iso
from qmq.cli.common.progress import Counting
from qmq.errors import InvalidOption
from qmq.names import check_consumer, check_group, check_prefix
from qmq.net.client.client import Client
from qmq.net.client.consumer.consumer import Consumer
from qmq.net.client.consumer.message import Message, MessageBatch
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol.types import Mode

#: The most messages of one pull: few on a terminal, where somebody reads them as they arrive.
_AT_ONCE: Final = 10_000
_AT_ONCE_TERMINAL: Final = 100

_ENCODE: Final = json.JSONEncoder(ensure_ascii=False).encode

Start = Literal["first", "new"] | datetime | int | None


@click.command(short_help="Print messages as they arrive.")
@click.argument("prefix")
@click.option("--group", metavar="G", help="Share the messages with the other consumers of this group.")
@click.option("--solo", is_flag=True, help="Consume without a group: all messages, and no state in the broker.")
@click.option("--consumer", metavar="ID", help="This consumer's id.  [default: from host and process]")
@click.option("--count", metavar="N", type=click.IntRange(min=0), help="End after N messages; take no more.")
@click.option("--timeout", metavar="S", type=Seconds(), help="End after S seconds without a message.")
@click.option(
    "--start",
    metavar="first|new|TIME|SEQ",
    help="Where a new group or a solo consumer begins: at the first message stored, with new messages, at a time such "
    "as 2026-01-31T12:00:00Z, or at a sequence.  [default: first for a group, new for --solo]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="raw: a body a line; json: all fields of a message as an object a line.",
)
@click.option("--at-most-once", is_flag=True, help="Create the group as one that gets each message once, or never.")
@click.option("--broadcast", is_flag=True, help="Create the group as one whose consumer ids each get every message.")
@click.option("--tag", "tags", metavar="T", multiple=True, help="In a new group: only messages with one of these tags.")
@click.option(
    "--no-ack",
    is_flag=True,
    help="Only look at an existing group: acknowledge nothing, release all messages at the end, follow nothing more.",
)
@server_option
def consume(
    prefix: str,
    group: str | None,
    solo: bool,
    consumer: str | None,
    count: int | None,
    timeout: float | None,
    start: str | None,
    form: str,
    at_most_once: bool,
    broadcast: bool,
    tags: tuple[str, ...],
    no_ack: bool,
    server: str,
) -> None:
    """Print the messages of PREFIX as they arrive: "a.b." takes each subject that begins so, "a.b" that one, "" all.

    Runs until Ctrl-C, --count or --timeout ends it.
    """
    if (group is None) is not solo:
        raise click.UsageError("give either --group G or --solo")
    if solo and (at_most_once or broadcast or tags):
        raise click.UsageError("--at-most-once, --broadcast and --tag go with --group G")
    if at_most_once and (broadcast or no_ack):
        raise click.UsageError("--at-most-once goes with neither --broadcast nor --no-ack")
    looks = no_ack and group is not None
    if looks and (broadcast or consumer is not None or tags or start is not None):
        raise click.UsageError(
            "--no-ack looks at an existing group under an id of its own: it goes with none of --broadcast, "
            "--consumer, --tag and --start; --solo --start first shows messages without a group"
        )
    check_prefix(prefix)
    if group is not None:
        check_group(group)
    if consumer is not None:
        check_consumer(consumer)
    begin = start_of(start)
    wanted = [text_of(tag) for tag in tags]
    lines = raw_lines if form == "raw" else json_lines
    printer = Printer(sys.stdout.buffer, lines, count, timeout, acknowledges=not no_ack)
    mode: Mode = "at_most_once" if at_most_once else "broadcast" if broadcast else "reliable"

    def subscribed(client: Client) -> Consumer:
        return client.subscribe(
            prefix, group=group, consumer=consumer, start=begin, mode=mode, tags=wanted or None, look=looks
        )

    run(printer.run(server, subscribed))


def start_of(text: str | None, option: str = "--start") -> Start:
    """Return where to begin, as --start or a similar option says it. Raises InvalidOption."""
    if text is None or text == "first" or text == "new":
        return text  # type: ignore[return-value]  # equal to one of the literals
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidOption(
            f"{option} {text!r:.80} is not first, new, a sequence, or a time with its zone such as 2026-01-31T12:00:00Z"
        )
    return time


class Printer:
    """One run of the command."""

    def __init__(
        self,
        out: BinaryIO,
        lines: Callable[[MessageBatch], Iterable[bytes]],
        count: int | None,
        timeout: float | None,
        *,
        acknowledges: bool = True,
    ) -> None:
        self._out = out
        self._acknowledges = acknowledges
        self._lines = lines
        self._left = count
        self._timeout = timeout
        self._printed = 0
        self._on_terminal = out.isatty()

    async def run(self, server: str, subscribed: Callable[[Client], Consumer]) -> None:
        """Print until the count is reached or the time is up. Raises QmqError, and OSError if stdout is closed."""
        if self._left == 0:
            return
        failure: Exception | None = None
        async with (
            connect(server) as client,
            subscribed(client) as subscription,
        ):
            try:
                with Counting("received", shown=sys.stderr.isatty() and not self._on_terminal) as counting:
                    while self._left != 0 and await self._print_some(subscription):
                        counting.show(self._printed)
            except Exception as error:  # raised after the consumer is closed, or it would count the messages as failed
                failure = error
        if failure is not None:
            raise failure

    async def _print_some(self, subscription: Consumer) -> bool:
        """Print the messages of one pull; return False if the time was up."""
        at_once = _AT_ONCE_TERMINAL if self._on_terminal else _AT_ONCE
        most = at_once if self._left is None else min(self._left, at_once)
        try:
            batch = await subscription.pull_batch(most, timeout=self._timeout)
        except asyncio.CancelledError:
            # The broker has handed these out already, and nobody else would print them.
            self._print(await subscription.pull_batch(most, timeout=0))
            raise
        self._print(batch)
        return bool(batch)

    def _print(self, batch: MessageBatch) -> None:
        if not batch:
            return
        self._out.writelines(self._lines(batch))
        self._out.flush()
        if self._acknowledges:
            batch.ack()
        self._printed += len(batch)
        if self._left is not None:
            self._left -= len(batch)


def raw_lines(batch: MessageBatch) -> Iterable[bytes]:
    """Return the bodies, each followed by a newline."""
    return (b"\n".join(batch.bodies), b"\n")


def json_lines(batch: MessageBatch) -> Iterable[bytes]:
    """Return the messages as JSON objects, one a line."""
    return [json_line(message) for message in batch]


def json_line(message: Message) -> bytes:
    """Return all fields of a message; the body as text if it is UTF-8, else in base64."""
    fields: dict[str, object] = {
        "id": message.id,
        "subject": message.subject,
        "sequence": message.sequence,
        "key": message.key,
        "tags": message.tags,
        "properties": message.properties,
        "attempt": message.attempt,
        "created_at": iso_time(message.created_at_us),
        "stored_at": iso_time(message.stored_at_us),
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
    return iso(utc_from_us(time_us))

"""``qmq consume``: print messages on stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, BinaryIO, Final

import click

from qmq import connect
from qmq.cli.common.arguments import Seconds, start_of, text_of
from qmq.cli.common.completion import complete_groups, complete_prefixes
from qmq.cli.common.connect import run, server_option
from qmq.cli.common.progress import Counting
from qmq.cli.messages.message_text import json_lines, raw_lines
from qmq.names import check_consumer, check_group, check_prefix

if TYPE_CHECKING:
    from qmq import Client, Consumer, MessageBatch
    from qmq.net.protocol.types import Mode

#: The most messages of one pull: few on a terminal, where somebody reads them as they arrive.
_AT_ONCE: Final = 10_000
_AT_ONCE_TERMINAL: Final = 100


@click.command(short_help="Print messages as they arrive, and acknowledge them.")
@click.argument("prefix", shell_complete=complete_prefixes)
@click.option(
    "--group",
    metavar="G",
    shell_complete=complete_groups,
    help="Share the messages with the other consumers of this group.",
)
@click.option("--solo", is_flag=True, help="Consume without a group: all messages, and no state in the broker.")
@click.option("--consumer", metavar="ID", help="This consumer's id.  [default: from host and process]")
@click.option("--count", metavar="N", type=click.IntRange(min=0), help="End after N messages; take no more.")
@click.option("--timeout", metavar="S", type=Seconds(), help="End after S seconds without a message.")
@click.option(
    "--start",
    metavar="first|new|TIME|SEQ",
    help="Where a new group or a solo consumer begins: at the first message stored, with new messages, at a time such "
    "as 2026-01-31T12:00:00Z or 2h (ago), or at a sequence.  [default: first for a group, new for --solo]",
)
@click.option("--json", "as_json", is_flag=True, help="Print all fields of a message as one JSON object a line.")
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
    as_json: bool,
    at_most_once: bool,
    broadcast: bool,
    tags: tuple[str, ...],
    no_ack: bool,
    server: str,
) -> None:
    """Print the messages of PREFIX as they arrive: "a.b." takes each subject that begins so, "a.b" that one, "" all.

    Runs until Ctrl-C, --count or --timeout ends it. It acknowledges what it has printed; `qmq peek` only looks.

    \b
    Examples:
      qmq consume shop.order. --group billing
      qmq consume shop.order. --solo --start 2h --json | jq .body
      qmq consume "" --solo --count 10 --timeout 5s
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
    begin = None if start is None else start_of(start, "--start")
    wanted = [text_of(tag) for tag in tags]
    lines = json_lines if as_json else raw_lines
    printer = Printer(sys.stdout.buffer, lines, count, timeout, acknowledges=not no_ack)
    mode: Mode = "at_most_once" if at_most_once else "broadcast" if broadcast else "reliable"

    def subscribed(client: Client) -> Consumer:
        return client.subscribe(
            prefix, group=group, consumer=consumer, start=begin, mode=mode, tags=wanted or None, look=looks
        )

    run(printer.run(server, subscribed))


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

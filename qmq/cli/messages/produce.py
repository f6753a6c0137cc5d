"""``qmq produce``: send a message, or the lines of stdin as messages."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from datetime import datetime
from io import UnsupportedOperation
from typing import TYPE_CHECKING, BinaryIO, Final, TypedDict

import click

from qmq import connect
from qmq.cli.common.arguments import Seconds, text_of
from qmq.cli.common.completion import complete_subjects
from qmq.cli.common.connect import run, server_option
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import number
from qmq.cli.common.progress import Counting
from qmq.cli.messages.input_lines import InputMessage, LineSplitter, draft_of
from qmq.errors import InvalidOption, MessageTooLarge, QmqError, QueueFull, SendFailed, UsageError
from qmq.names import check_subject

if TYPE_CHECKING:
    from qmq import Client, Durability, Priority, Receipt

#: The most messages in flight whose ids are printed.
_IDS_AT_ONCE: Final = 1_000
_CHUNK_BYTES: Final = 256 << 10
#: The most failed lines that are named; more are only counted.
_MOST_NAMED: Final = 20
#: How many messages may be sent before all must be answered, which bounds the memory for failures.
_SETTLE_EVERY: Final = 1 << 17
#: How long an interrupted command waits for the answers to what it has sent.
_LAST_FLUSH_S: Final = 2.0


@click.command(short_help="Send a message, or each line of stdin as one.")
@click.argument("subject", required=False, shell_complete=complete_subjects)
@click.argument("body", required=False)
@click.option("--key", "keys", metavar="K", multiple=True, help="A key of each message; may be repeated.")
@click.option("--property", "pairs", metavar="NAME=VALUE", multiple=True, help="A property; may be repeated.")
@click.option("--tag", "tags", metavar="T", multiple=True, help="A tag; may be repeated.")
@click.option("--delay", type=Seconds(signed=True), metavar="S", help="Deliver each message later: 30m, 2h.")
@click.option(
    "--expires-in",
    type=Seconds(signed=True),
    metavar="S",
    help="Deliver no message that was stored longer ago: 2h, 7d.",
)
@click.option(
    "--priority",
    type=click.Choice(["low", "normal", "high", "0", "1", "2"]),
    callback=lambda _, __, value: int(value) if value in ("0", "1", "2") else value,
    help="How soon each message is handed out; 0 is low, 2 high.",
)
@click.option("--order-key", metavar="K", help="Hand messages with this order key out one after another, as stored.")
@click.option("--unique", metavar="TEXT", help="Store BODY only if none with this text was sent within an hour.")
@click.option(
    "--durability",
    type=click.Choice(["flush", "append"]),
    default="flush",
    show_default=True,
    help="Acknowledge when it is on disk (flush), or written (append).",
)
@click.option("--json", "as_json", is_flag=True, help="Take each line as a JSON object, see above.")
@click.option("--ids", is_flag=True, help="Print the id of each stored message, one a line, and not their count.")
@server_option
@click.pass_context
def produce(
    context: click.Context,
    subject: str | None,
    body: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    tags: tuple[str, ...],
    delay: float | None,
    expires_in: float | None,
    priority: Priority | None,
    order_key: str | None,
    unique: str | None,
    durability: Durability,
    as_json: bool,
    ids: bool,
    server: str,
) -> None:
    """Send BODY as a message to SUBJECT; without BODY each line of stdin. Print how many were acknowledged.

    With --json a line is an object with body or body_base64 and, optionally, subject, key or keys, tags, properties,
    priority, order_key, unique, expires_in and delay (seconds, or a text such as 30m) or deliver_at (a time such as
    2027-01-31T12:00:00Z, or seconds since 1970), which override the options; blank lines are ignored. It takes what
    `qmq consume --json` prints.

    Ends with 1, and names the lines, if some were not acknowledged.

    \b
    Examples:
      qmq produce shop.order.paid '{"id": 4421}' --key order-4421 --key user-7
      qmq produce shop.mail --delay 30m --priority low < mails.txt
      qmq produce shop.order.changed '{"id": 4421}' --order-key order-4421
      qmq produce shop.charge '{"id": 4421}' --unique order-4421-charge
      qmq consume shop. --solo --start first --json | qmq produce copy.shop --json
    """
    from qmq.format.build import make_header
    from qmq.format.unique import hash_of
    from qmq.net.client.options import deliver_at_of, expire_at_of, lane_of

    if subject is not None:
        check_subject(subject)
    elif not as_json:
        raise click.UsageError("give the SUBJECT to send to")
    deliver_at_of(delay, None)
    expire_at_of(expires_in)
    words = [text_of(tag) for tag in tags]
    if body is not None and as_json:
        raise click.UsageError("give either a BODY or --json, which takes the lines of stdin")
    properties = dict(map(_pair, pairs))
    texts = [text_of(key) for key in keys]
    fields = texts or None, words or None, properties or None
    order_key = None if order_key is None else text_of(order_key)
    if unique is not None:
        if body is None:
            raise click.UsageError("--unique is for one BODY: of lines with one text only the first would be stored")
        unique = text_of(unique)
        hash_of(unique)
    defaults = InputMessage(subject or "", b"", *fields, delay, None, expires_in, priority, order_key, unique)
    # Raises if an option is wrong, before a connection is made.
    make_header(texts, words, properties, lane=lane_of(priority), order_key=order_key)
    if body is not None:
        sent = run(_send_one(server, durability, defaults._replace(body=os.fsencode(body))))
        repeated = f"; it was sent before, and is stored as {sent.id}" if sent.duplicate else ""
        click.echo(sent.id if ids else f"1 acknowledged{repeated}")
        return
    if sys.stdin.isatty():
        click.echo("qmq: each line is a message; Ctrl-D ends the input", err=True)
    production = (IdProduction if ids else Production)(defaults, as_json)
    try:
        run(production.run(server, durability, sys.stdin.buffer))
    finally:
        production.report()
    if production.failed:
        context.exit(EXIT_FAILED)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text_of(text).partition("=")
    if not equals or not name:
        raise InvalidOption(f"--property {text!r} is not NAME=VALUE")
    return name, value


class Production:
    """One run of the command: sends lines, and remembers which line each send came from."""

    def __init__(self, defaults: InputMessage, as_json: bool) -> None:
        self._defaults = defaults
        self._as_json = as_json
        self._lines = LineSplitter()
        self._connected = False
        self._queued = 0
        self._settled = 0  # how many of the queued messages have their answer
        self._refused = 0  # how many of the settled ones were refused
        #: From ticket _tickets[i] on, the line of a message is its ticket plus _ahead[i].
        self._tickets = array("q")
        self._ahead = array("q")
        self._named: list[tuple[int, str]] = []
        #: How many lines were not acknowledged.
        self.failed = 0

    async def run(self, server: str, durability: Durability, stream: BinaryIO) -> None:
        """Send all of *stream*; stop early if a send fails. Raises QmqError if no broker can be reached."""
        async with connect(server, durability=durability) as client:
            self._connected = True
            try:
                await self._send_all(client, InputSource(stream))
            except BaseException:  # the messages sent before are counted in any case
                try:
                    async with asyncio.timeout(_LAST_FLUSH_S):
                        await self._settle(client)
                except (TimeoutError, QmqError):
                    pass
                raise

    async def _send_all(self, client: Client, source: InputSource) -> None:
        with Counting("sent", shown=sys.stderr.isatty() and not source.is_terminal) as counting:
            while chunk := await source.read():
                if not await self._send(client, self._lines.feed(chunk)):
                    return
                await client.drain()
                counting.show(self._queued)
            await self._send(client, self._lines.end())
            await self._settle(client)

    async def _send(self, client: Client, lines: Iterable[bytes | MessageTooLarge]) -> bool:
        """Queue each line; return False if a send has failed and the rest would fail too."""
        for line in lines:
            if self._as_json and isinstance(line, bytes) and not line.strip():
                continue
            try:
                if isinstance(line, MessageTooLarge):
                    raise line
                self._note(self._queue(client, line))
            except QueueFull:
                if not await self._settle(client):
                    return False
                self._note(self._queue(client, line))
            except QmqError as error:
                self._fail(self._lines.number, error)
            if self._queued - self._settled >= _SETTLE_EVERY and not await self._settle(client):
                return False
        return True

    def _draft(self, line: bytes | MessageTooLarge) -> InputMessage:
        if isinstance(line, MessageTooLarge):
            raise line
        if not self._as_json:
            return self._defaults._replace(body=line)
        draft = draft_of(line, self._defaults)
        if not draft.subject:
            raise InvalidOption("neither the line nor the command names a subject")
        return draft

    def _queue(self, client: Client, line: bytes | MessageTooLarge) -> int:
        draft = self._draft(line)
        return client.send_nowait(draft.subject, draft.body, **_options(draft))

    def _note(self, ticket: int) -> None:
        self._queued += 1
        ahead = self._lines.number - ticket
        if not self._ahead or self._ahead[-1] != ahead:
            self._tickets.append(ticket)
            self._ahead.append(ahead)

    async def _settle(self, client: Client) -> bool:
        """Wait until each queued message has its answer; return False if some were not acknowledged."""
        queued = self._queued
        try:
            await client.flush()
        except SendFailed as error:
            for failure in error.failures:
                self._refused += 1
                ahead = self._ahead[bisect_right(self._tickets, failure.ticket) - 1]
                self._fail(failure.ticket + ahead, failure.error)
        self._settled = queued
        del self._tickets[:-1], self._ahead[:-1]
        return not self._refused

    def _fail(self, line: int, error: QmqError) -> None:
        self.failed += 1
        if self.failed <= _MOST_NAMED:
            self._named.append((line, f"line {line}: {error}"))

    def report(self) -> None:
        """Print the count on stdout, and the lines that failed on stderr."""
        if not self._connected:
            return
        for _, text in sorted(self._named):
            click.echo(f"qmq: {' '.join(text.split())}", err=True)
        if self.failed > _MOST_NAMED:
            click.echo(f"qmq: and {number(self.failed - _MOST_NAMED, 'more line')}", err=True)
        if self._queued > self._settled:
            unanswered = number(self._queued - self._settled, "more message")
            click.echo(f"qmq: {unanswered} sent, but not answered in time", err=True)
        self._end()

    def _end(self) -> None:
        click.echo(f"{self._settled - self._refused} acknowledged")


class IdProduction(Production):
    """A run of the command that prints the id of each stored message, in the order of the lines."""

    def __init__(self, defaults: InputMessage, as_json: bool) -> None:
        super().__init__(defaults, as_json)
        self._sends: list[tuple[int, asyncio.Future[Receipt]]] = []

    async def _send(self, client: Client, lines: Iterable[bytes | MessageTooLarge]) -> bool:
        for line in lines:
            if self._as_json and isinstance(line, bytes) and not line.strip():
                continue
            try:
                draft = self._draft(line)
            except QmqError as error:
                self._fail(self._lines.number, error)
                continue
            send = client.send(draft.subject, draft.body, **_options(draft))
            self._sends.append((self._lines.number, asyncio.ensure_future(send)))
            self._queued += 1
            if len(self._sends) >= _IDS_AT_ONCE and not await self._settle(client):
                return False
        return True

    async def _settle(self, client: Client) -> bool:
        sends, self._sends = self._sends, []
        for line, send in sends:
            try:
                click.echo((await send).id)
            except (UsageError, MessageTooLarge) as error:  # of this line alone: the others go on
                self._fail(line, error)
            except QmqError as error:
                self._refused += 1
                self._fail(line, error)
            self._settled += 1
        return not self._refused

    def _end(self) -> None:
        pass  # the ids are printed already


async def _send_one(server: str, durability: Durability, draft: InputMessage) -> Receipt:
    """Send one message, and return its receipt."""
    async with connect(server, durability=durability) as client:
        return await client.send(draft.subject, draft.body, **_options(draft))


def _options(draft: InputMessage) -> SendOptions:
    """Return the options with which a message is sent."""
    return {
        "keys": draft.keys,
        "tags": draft.tags,
        "properties": draft.properties,
        "delay": draft.delay,
        "deliver_at": draft.deliver_at,
        "expires_in": draft.expires_in,
        "priority": draft.priority,
        "order_key": draft.order_key,
        "unique": draft.unique,
    }


class SendOptions(TypedDict):
    """The options with which a message of the command is sent."""

    keys: list[str] | None
    tags: list[str] | None
    properties: dict[str, str] | None
    delay: float | None
    deliver_at: float | datetime | None
    expires_in: float | None
    priority: Priority | None
    order_key: str | None
    unique: str | None


class InputSource:
    """Reads a stream in a thread, and passes each chunk to the loop as it arrives."""

    def __init__(self, stream: BinaryIO) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = self._reader(stream)
        self.is_terminal = stream.isatty()
        self._wanted: queue.SimpleQueue[asyncio.Future[bytes]] = queue.SimpleQueue()
        # A daemon thread: nothing can end the read of a terminal, and the command must end all the same.
        threading.Thread(target=self._run, name="qmq-stdin", daemon=True).start()

    async def read(self) -> bytes:
        """Return the next chunk, at least a byte; b"" at the end of the stream."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._wanted.put(future)
        return await future

    @staticmethod
    def _reader(stream: BinaryIO) -> Callable[[], bytes]:
        try:
            descriptor = stream.fileno()
        except UnsupportedOperation:
            return lambda: stream.read(_CHUNK_BYTES)
        # Not through the stream object: a read that never ends would hold its lock and stop the interpreter from
        # ending.
        return lambda: os.read(descriptor, _CHUNK_BYTES)

    def _run(self) -> None:
        while True:
            future = self._wanted.get()
            try:
                outcome: bytes | OSError = self._read()
            except OSError as error:
                outcome = error
            try:
                self._loop.call_soon_threadsafe(_give, future, outcome)
            except RuntimeError:
                return  # the loop is closed, so nobody waits for it


def _give(future: asyncio.Future[bytes], outcome: bytes | OSError) -> None:
    if future.done():
        return
    if isinstance(outcome, bytes):
        future.set_result(outcome)
    else:
        future.set_exception(InvalidOption(f"stdin cannot be read: {outcome.strerror}"))

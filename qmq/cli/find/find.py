"""``qmq find``: find stored messages, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.common.arguments import text_of, time_of
from qmq.cli.common.completion import complete_prefixes
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import is_for_people, output_options
from qmq.cli.find.output import MessagePrinter, SearchProgress
from qmq.errors import QmqError, UnknownMessage
from qmq.net.client.find.finder import Finder, search_terms

if TYPE_CHECKING:
    from qmq import Client, StoredMessage
    from qmq.cli.find.files import StoredFiles


@click.command(short_help="Find stored messages by id, key, time or text.")
@click.argument("prefix", required=False, shell_complete=complete_prefixes)
@click.option("--id", "ids", metavar="ID", multiple=True, help="The message with this id; may be given several times.")
@click.option("--key", metavar="K", help="Only messages with this key.")
@click.option("--since", metavar="T", help="Only messages stored at this time or later: 2026-01-31T12:00:00Z, 2h.")
@click.option("--until", metavar="T", help="Only messages stored before this time.")
@click.option("--contains", metavar="TEXT", help="Only messages with this text in body, keys, tags or properties.")
@click.option("--newest", is_flag=True, help="The newest first.")
@click.option("--limit", metavar="N", type=click.IntRange(1), default=100, show_default=True, help="So many at most.")
@click.option("--stop-after", metavar="T", default="1m", show_default=True, help="Search no longer than this.")
@click.option("--cursor", metavar="C", help="Go on where the same search ended, as it said.")
@click.option("--bodies", is_flag=True, help="Show all of each message, with its body.")
@click.option(
    "--data", metavar="DIR|DEST", help="Search a data directory or an archive, also hdfs://, without a broker."
)
@output_options
@admin_options
def find(
    prefix: str | None,
    ids: tuple[str, ...],
    key: str | None,
    since: str | None,
    until: str | None,
    contains: str | None,
    newest: bool,
    limit: int,
    stop_after: str,
    cursor: str | None,
    bodies: bool,
    data: str | None,
    as_json: bool,
    header: bool,
    server: str,
    timeout: float,
) -> None:
    """Find stored messages of PREFIX ("shop." is all that begin so, without PREFIX all), or those with an --id. Nothing
    changes: no attempt is counted, no message is acknowledged.

    A search that ends early, at --limit or after --stop-after, says so, and how to go on. Ends with 1 if a broker did
    not answer, if bytes could not be read, if an id is unknown, or if --stop-after was over.

    \b
    Examples:
      qmq find --id 7f0000015191000300000100000000ff --bodies
      qmq find shop. --key order-4421
      qmq find shop.order. --since 2h --contains 'no stock' --newest
      qmq find --data /var/lib/qmq --key order-4421 --json
    """
    others = (prefix, key, since, until, contains, cursor)
    if ids and (newest or any(one is not None for one in others)):
        raise click.UsageError("give either --id, or what to look for")
    search: dict[str, Any] = {
        "prefix": prefix or "",
        "key": None if key is None else text_of(key),
        "since": None if since is None else time_of(since, "--since"),
        "until": None if until is None else time_of(until, "--until"),
        "contains": None if contains is None else text_of(contains),
        "newest": newest,
        "limit": limit,
        "stop_after": stop_after,
        "cursor": cursor,
    }
    search_terms(**search)  # a mistake is said before anything is opened
    printer = MessagePrinter(as_json=as_json, header=header, bodies=bodies)
    place = _place(data, server, timeout)
    if not run(_by_ids(ids, place, printer) if ids else _search(search, place, printer, as_json)):
        click.get_current_context().exit(EXIT_FAILED)


@asynccontextmanager
async def _place(data: str | None, server: str, timeout: float) -> AsyncIterator[Client | StoredFiles]:
    """Connect to the brokers, or open the files of *data*."""
    if data is None:
        async with connect(server, admin_timeout=timeout) as client:
            yield client
    else:
        from qmq.cli.find.files import StoredFiles

        with StoredFiles(data) as files:
            yield files


async def _by_ids(
    ids: Sequence[str], opening: AbstractAsyncContextManager[Client | StoredFiles], printer: MessagePrinter
) -> bool:
    """Print the messages with these ids; return whether all were found."""
    is_whole = True
    async with opening as place:
        for one in ids:
            try:
                printer.add(await place.get(one))
            except UnknownMessage as error:
                click.echo(f"qmq: {error}", err=True)
                is_whole = False
    printer.end()
    return is_whole


async def _search(
    search: dict[str, Any],
    opening: AbstractAsyncContextManager[Client | StoredFiles],
    printer: MessagePrinter,
    as_json: bool,
) -> bool:
    """Print the messages of a search; return whether it was whole, but for its limit."""
    async with opening as place:
        finder = place.find(**search)
        try:
            with SearchProgress() as progress:
                while page := await _page(finder, progress):
                    for message in page:
                        printer.add(message)
        except (asyncio.CancelledError, QmqError):
            printer.end()
            _say_how_to_go_on(finder, "the search ended")
            raise
    printer.end()
    return _say_what_is_missing(finder, search["limit"], for_people=is_for_people(as_json))


async def _page(finder: Finder, progress: SearchProgress) -> list[StoredMessage]:
    """Return the next messages, and show meanwhile how far the search is."""
    asked = asyncio.ensure_future(finder.page())
    try:
        while not (await asyncio.wait([asked], timeout=0.1))[0]:
            progress.show(finder.progress)
        return asked.result()
    finally:
        asked.cancel()


def _say_what_is_missing(finder: Finder, limit: int, *, for_people: bool) -> bool:
    """Say what a search that has ended lacks, and how to go on; return whether it lacks only what its limit cut off."""
    for missed in finder.missed:
        click.echo(f"qmq: no answer from {missed}: its messages are missing", err=True)
    if finder.unreadable:
        places = number(finder.unreadable, "place")
        click.echo(f"qmq: {places} could not be read: messages may be missing; run qmq verify there", err=True)
    found, is_whole = finder.progress.found, not finder.missed and not finder.unreadable
    if finder.cursor is None:
        if for_people:
            click.echo(number(found, "message") if found else "no message is found")
        return is_whole
    if found == limit:
        _say_how_to_go_on(finder, f"the first {number(found, 'message')}, there may be more")
        return is_whole
    if is_whole:
        _say_how_to_go_on(finder, f"--stop-after is over, and {finder.progress.share:.0%} is searched")
    return False


def _say_how_to_go_on(finder: Finder, why: str) -> None:
    cursor = finder.cursor
    if cursor is not None:
        click.echo(f"qmq: {why}" + (f"; go on with --cursor {cursor}" if finder.progress.looked else ""), err=True)

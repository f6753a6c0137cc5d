"""``qmq dead-letters``: what groups have given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.brief import age_of, number
from qmq.cli.connecting import run, server_option
from qmq.cli.where import are_several, end_where_lacking, in_cell, show, table_of
from qmq.names import check_group
from qmq.net.admin import DeadLetter

if TYPE_CHECKING:
    from rich.table import Table


@click.group(short_help="List, retry and delete dead letters.")
def dead_letters() -> None:
    """The messages that a group has given up: out of attempts, rejected, expired, or deadly to their consumers."""


@dead_letters.command("list", short_help="List the dead letters of a group.")
@click.argument("group")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@server_option
def list_letters(group: str, as_json: bool, server: str) -> None:
    """List the dead letters of GROUP, the oldest first."""
    check_group(group)

    async def load() -> tuple[list[DeadLetter], bool]:
        async with connect(server) as client:
            return [letter async for letter in client.admin.dead_letters(group)], not client.admin.missed

    found, is_whole = run(load())
    show(found, False, _object if as_json else None, lambda letter: list(_object(letter).values()), _table)
    end_where_lacking(is_whole)


@dead_letters.command("retry", short_help="Hand dead letters out again.")
@click.argument("group")
@click.argument("ids", nargs=-1)
@server_option
def retry(group: str, ids: tuple[str, ...], server: str) -> None:
    """Hand out the dead letters of GROUP again, as if for the first time: those with these message IDS, or all."""
    check_group(group)

    async def change() -> int:
        async with connect(server) as client:
            return await client.admin.retry_dead(group, ids or None, all=not ids)

    click.echo(f"{run(change())} handed out again")


@dead_letters.command("delete", short_help="Delete dead letters.")
@click.argument("group")
@click.argument("ids", nargs=-1)
@server_option
def delete(group: str, ids: tuple[str, ...], server: str) -> None:
    """Delete the dead letters of GROUP for good: those with these message IDS, or all."""
    check_group(group)

    async def change() -> int:
        async with connect(server) as client:
            return await client.admin.delete_dead(group, ids or None, all=not ids)

    click.echo(f"{run(change())} deleted")


def _object(letter: DeadLetter) -> dict[str, Any]:
    fields = letter._asdict() | {"died_at": letter.died_at.isoformat()}
    del fields["number"]
    return fields


def _table(found: Sequence[DeadLetter]) -> Table:
    from rich.markup import escape

    table = table_of("message\n  subject", ("died", "attempts", "lapses"), number(len(found), "dead letter"))
    table.columns[0].min_width = 32
    table.add_column("reason", overflow="fold")
    several = are_several(found)
    for letter in found:
        counts = str(letter.attempts), str(letter.lapses)
        name = f"[bold]{letter.id or '(unreadable)'}[/]\n  {letter.subject or ''}{in_cell(letter, several)}"
        table.add_row(name, age_of(letter.died_at), *counts, escape(letter.reason))
    return table

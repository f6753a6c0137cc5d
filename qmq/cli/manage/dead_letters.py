"""``qmq dead-letters``: list, redrive and delete the dead letters of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from qmq import connect
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number, visible
from qmq.cli.common.listing import are_several, end_if_incomplete, in_cell, show, table_of
from qmq.names import check_group_or_member
from qmq.net.client.admin.results import DeadLetter

if TYPE_CHECKING:
    from rich.table import Table


@click.group(short_help="List, redrive and delete dead letters.")
def dead_letters() -> None:
    """List, redrive or delete the messages that a group is not given any more: rejected, expired, out of attempts,
    unreadable, or lost with too many consumers.

    Each member of a broadcast group has dead letters of its own; its group is GROUP@CONSUMER, as `qmq groups` prints
    it.
    """


@dead_letters.command("list", short_help="List the dead letters of a group.")
@click.argument("group")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@admin_options
def list_letters(group: str, as_json: bool, server: str, timeout: float) -> None:
    """List the dead letters of GROUP, the oldest first."""
    check_group_or_member(group)

    async def load() -> tuple[list[DeadLetter], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return [letter async for letter in client.admin.dead_letters(group)], not client.admin.missed

    found, is_whole = run(load())
    show(found, False, _object if as_json else None, lambda letter: list(_object(letter).values()), _table)
    end_if_incomplete(is_whole)


_all_option = click.option("--all", "every", is_flag=True, help="All dead letters of the group.")


@dead_letters.command("redrive", short_help="Deliver dead letters again.")
@click.argument("group")
@click.argument("ids", nargs=-1)
@_all_option
@yes_option
@admin_options
def redrive(group: str, ids: tuple[str, ...], every: bool, yes: bool, server: str, timeout: float) -> None:
    """Deliver dead letters of GROUP again, as if for the first time: those with these message IDS, or --all.

    With --all it asks on a terminal; without one it needs --yes.
    """
    click.echo(f"{_changed('redrive', group, ids, every, yes, server, timeout)} redriven")


@dead_letters.command("delete", short_help="Delete dead letters.")
@click.argument("group")
@click.argument("ids", nargs=-1)
@_all_option
@yes_option
@admin_options
def delete(group: str, ids: tuple[str, ...], every: bool, yes: bool, server: str, timeout: float) -> None:
    """Delete dead letters of GROUP for good: those with these message IDS, or --all.

    With --all it asks on a terminal; without one it needs --yes.
    """
    click.echo(f"{_changed('delete', group, ids, every, yes, server, timeout)} deleted")


def _changed(
    action: Literal["redrive", "delete"],
    group: str,
    ids: tuple[str, ...],
    every: bool,
    yes: bool,
    server: str,
    timeout: float,
) -> int:
    """Redrive or delete dead letters, and return how many."""
    if every is bool(ids):
        raise click.UsageError(f"give the IDS of the dead letters to {action}, or --all")
    check_group_or_member(group)

    async def count() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            return sum(row.dead for row in await client.admin.groups(group))

    async def change() -> int:
        async with connect(server, admin_timeout=timeout) as client:
            call = client.admin.redrive if action == "redrive" else client.admin.delete_dead
            return await call(group, None if every else ids, all=every)

    if every:
        does = f"this {action}s all dead letters of {group}"
        confirm(yes, does, lambda: f"{action} {number(run(count()), 'dead letter')} of {group}?")
    return run(change())


def _object(letter: DeadLetter) -> dict[str, Any]:
    fields = asdict(letter) | {"died_at": iso(letter.died_at)}
    del fields["number"]
    return fields


def _table(found: Sequence[DeadLetter]) -> Table:
    from rich.markup import escape

    table = table_of("message\n  subject", ("died", "attempts", "expiries"), number(len(found), "dead letter"))
    table.columns[0].min_width = 32
    table.add_column("reason", overflow="fold")
    several = are_several(found)
    for letter in found:
        counts = str(letter.attempts), str(letter.session_expiries)
        name = f"[bold]{letter.id or '(unreadable)'}[/]\n  {letter.subject or ''}{in_cell(letter, several)}"
        table.add_row(name, age_of(letter.died_at), *counts, escape(visible(letter.reason)))
    return table

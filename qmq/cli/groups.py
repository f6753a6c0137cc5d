"""``qmq groups``: which groups there are; their settings, where they are, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.brief import age_of, iso, number
from qmq.cli.connecting import run, server_option
from qmq.cli.consume import start_of
from qmq.cli.where import are_several, end_where_lacking, in_cell, show, table_of
from qmq.errors import InvalidOption
from qmq.names import check_group
from qmq.net.admin import GroupInfo
from qmq.net.group_settings import packed_settings

if TYPE_CHECKING:
    from rich.table import Table

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")


@click.group(invoke_without_command=True, short_help="List groups, set, seek and delete them.")
@click.pass_context
@_json_option
@server_option
def groups(context: click.Context, as_json: bool, server: str) -> None:
    """List the groups: what each follows, how many of its consumers are online, and where its messages are.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (given to nobody yet; ~: or more), in flight (held by consumers), in retry (to be
    handed out again), dead, skipped and delayed, and when the oldest that is ready was stored.
    """
    if context.invoked_subcommand is None:
        _list(as_json, server)


@groups.command("list", short_help="List the groups.")
@_json_option
@server_option
def list_groups(as_json: bool, server: str) -> None:
    """List the groups: what each follows, how many of its consumers are online, and where its messages are.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (given to nobody yet; ~: or more), in flight (held by consumers), in retry (to be
    handed out again), dead, skipped and delayed, and when the oldest that is ready was stored.
    """
    _list(as_json, server)


@groups.command("set", short_help="Change settings of a group.")
@click.argument("group")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@server_option
def set_group(group: str, settings: tuple[str, ...], server: str) -> None:
    """Change settings of GROUP: max_attempts, retry_delays (seconds, comma separated), expire_after, max_handling
    (seconds, 0: never), max_lapses, max_unacked, max_unacked_bytes, tags (comma separated; none: all).
    """
    given = dict(setting_of(text) for text in settings)
    packed_settings(given)  # what is wrong is said before anything else
    check_group(group)

    async def change() -> dict[str, Any]:
        async with connect(server) as client:
            return await client.admin.set_group(group, **given)

    for name, value in run(change()).items():
        click.echo(f"{name}={shown_value(value)}")


@groups.command("seek", short_help="Have a group go on elsewhere.")
@click.argument("group")
@click.option("--to", required=True, metavar="first|last|TIME|SEQ", help="Where it goes on.")
@click.option("--clear-retries", is_flag=True, help="Drop what waits to be handed out again, too.")
@server_option
def seek(group: str, to: str, clear_retries: bool, server: str) -> None:
    """Have GROUP go on at the first message kept, behind the last, at a time or at a sequence.

    What its consumers hold is dropped; their late acknowledgements are refused.
    """
    begin = start_of(to, "--to")
    assert begin is not None
    check_group(group)

    async def change() -> None:
        async with connect(server) as client:
            await client.admin.seek(group, begin, clear_retries=clear_retries)

    run(change())
    click.echo(f"{group} goes on at {to}")


@groups.command("delete", short_help="Forget a group.")
@click.argument("group")
@server_option
def delete(group: str, server: str) -> None:
    """Forget GROUP, with what it holds, what waits to be handed out again, and its dead letters."""
    check_group(group)

    async def change() -> None:
        async with connect(server) as client:
            await client.admin.delete_group(group)

    run(change())
    click.echo(f"{group} is deleted")


def setting_of(text: str) -> tuple[str, Any]:
    """What KEY=VALUE says. Raises InvalidOption."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(f"{text!r} is not KEY=VALUE")
    try:
        if name == "tags":
            return name, value.split(",") if value else []
        if name == "retry_delays":
            return name, [float(part) for part in value.split(",")]
        return name, float(value) if name in ("expire_after", "max_handling") else int(value)
    except ValueError:
        raise InvalidOption(f"{name}: {value!r} is not a number") from None


def shown_value(value: object) -> str:
    """As it can be given to ``groups set``."""
    if isinstance(value, list):
        return ",".join(map(shown_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _list(as_json: bool, server: str) -> None:
    async def load() -> tuple[list[GroupInfo], bool]:
        async with connect(server) as client:
            return await client.admin.groups(), not client.admin.missed

    found, is_whole = run(load())
    show(found, "," in server, _object if as_json else None, _fields, _table)
    end_where_lacking(is_whole)


def _object(info: GroupInfo) -> dict[str, Any]:
    fields = info._asdict()
    return {"group": fields.pop("name"), **fields, "oldest": iso(info.oldest)}


def _fields(info: GroupInfo) -> Sequence[object]:
    counts = info.in_flight, info.in_retry, info.dead, info.skipped, info.delayed
    return (
        info.name, info.mode, ",".join(info.prefixes), info.consumers, f"{_about(info)}{info.ready}", *counts,
        iso(info.oldest),
    )  # fmt: skip


def _about(info: GroupInfo) -> str:
    """There may be more than it says."""
    return "" if info.ready_exact else "~"


def _table(found: Sequence[GroupInfo]) -> Table:
    rare = [name for name in ("skipped", "delayed") if any(getattr(info, name) for info in found)]
    columns = ("online", "ready", "oldest", "in\nflight", "in\nretry", "dead", *rare)
    table = table_of("group\n  (mode)\n  follows", columns, number(len(found), "group"))
    several = are_several(found)
    for info in found:
        follows = "".join(f"\n  {prefix or '(all)'}" for prefix in info.prefixes)
        counts = (info.in_flight, info.in_retry, info.dead, *(getattr(info, name) for name in rare))
        ready = _about(info) + number(info.ready), age_of(info.oldest)
        row = [number(info.consumers), *ready, *map(number, counts)]
        table.add_row(f"[bold]{info.name}[/]\n  ({info.mode}){follows}{in_cell(info, several)}", *row)
    return table

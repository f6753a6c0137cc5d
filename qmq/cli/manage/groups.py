"""``qmq groups``: which groups there are; their settings, where they are, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.common.arguments import number_of, text_of, whole_number_of
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number
from qmq.cli.common.listing import are_several, end_where_lacking, in_cell, show, table_of
from qmq.cli.messages.consume import start_of
from qmq.errors import InvalidOption
from qmq.names import check_group_or_member
from qmq.net.client.admin import GroupInfo, checked_follows
from qmq.net.client.group_settings import check_setting, packed_settings

if TYPE_CHECKING:
    from rich.table import Table

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")


@click.group(invoke_without_command=True, short_help="List groups, set, seek and delete them.")
@click.pass_context
@_json_option
@admin_options
def groups(context: click.Context, as_json: bool, server: str, timeout: float) -> None:
    """List the groups: what each follows, how many of its consumers are online, and where its messages are.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (given to nobody yet; ~: or more), in flight (given to consumers), in retry (to be
    handed out again), dead, skipped, filtered and delayed, and when the oldest that is ready was stored.
    """
    if context.invoked_subcommand is None:
        _list(as_json, server, timeout)


@groups.command("list", short_help="List the groups.")
@_json_option
@admin_options
def list_groups(as_json: bool, server: str, timeout: float) -> None:
    """List the groups: what each follows, how many of its consumers are online, and where its messages are.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (given to nobody yet; ~: or more), in flight (given to consumers), in retry (to be
    handed out again), dead, skipped, filtered and delayed, and when the oldest that is ready was stored.
    """
    _list(as_json, server, timeout)


@groups.command("set", short_help="Change settings of a group.")
@click.argument("group")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@admin_options
def set_group(group: str, settings: tuple[str, ...], server: str, timeout: float) -> None:
    """Change settings of GROUP: max_attempts, retry_delays (seconds, comma separated), expire_after, ack_deadline
    (seconds, 0: never), max_session_expiries, max_unacked, max_unacked_bytes, tags (comma separated; none: all), and
    follows: the prefixes and subjects that it takes from now on and no others (comma separated; none: everything).

    A group follows all that its consumers ever asked for until follows= says otherwise. What is ready under other
    prefixes is not the group's any more; what is in flight may still be acknowledged, and is dead if it comes back.
    """
    given = dict(setting_of(text) for text in settings)
    packed_settings({name: value for name, value in given.items() if name != "follows"})  # what is wrong is said first
    if "follows" in given:
        checked_follows(given["follows"])
    check_group_or_member(group)

    async def change() -> dict[str, Any]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.set_group(group, **given)

    for name, value in run(change()).items():
        click.echo(f"{name}={shown_value(value)}")


@groups.command("seek", short_help="Have a group go on elsewhere.")
@click.argument("group")
@click.option("--to", required=True, metavar="first|last|TIME|SEQ", help="Where it goes on.")
@click.option("--clear-retries", is_flag=True, help="Drop what waits to be handed out again, too.")
@yes_option
@admin_options
def seek(group: str, to: str, clear_retries: bool, yes: bool, server: str, timeout: float) -> None:
    """Have GROUP go on at the first message kept, behind the last, at a time or at a sequence.

    What its consumers have in flight is dropped; their late acknowledgements are refused. It may hand out again what
    was acknowledged, or pass over what nobody got, so it asks on a terminal; elsewhere it needs --yes.
    """
    begin = start_of(to, "--to")
    assert begin is not None
    check_group_or_member(group)

    async def change() -> None:
        async with connect(server, admin_timeout=timeout) as client:
            await client.admin.seek(group, begin, clear_retries=clear_retries)

    does = f"have {group} go on at {to}" + (" and drop its retries" if clear_retries else "")
    confirm(yes, f"this will {does}", lambda: f"{does}? It has {run(_contents(group, server, timeout))}.")
    run(change())
    click.echo(f"{group} goes on at {to}")


@groups.command("delete", short_help="Forget a group.")
@click.argument("group")
@yes_option
@admin_options
def delete(group: str, yes: bool, server: str, timeout: float) -> None:
    """Forget GROUP, with what is in flight, what waits to be handed out again, and its dead letters.

    It asks on a terminal; elsewhere it needs --yes.
    """
    check_group_or_member(group)

    async def change() -> None:
        async with connect(server, admin_timeout=timeout) as client:
            await client.admin.delete_group(group)

    does = f"delete group {group}"
    confirm(yes, f"this will {does}", lambda: f"{does}? It has {run(_contents(group, server, timeout))}.")
    run(change())
    click.echo(f"{group} is deleted")


async def _contents(group: str, server: str, timeout: float) -> str:
    """What a group has now, as a question about it says."""
    async with connect(server, admin_timeout=timeout) as client:
        # The name of a broadcast stands for all of its members.
        rows = [row for row in await client.admin.groups() if row.name == group or row.name.startswith(f"{group}@")]
        if not rows:
            await client.admin.groups(group)  # says that there is none
    consumers, ready = sum(row.consumers for row in rows), sum(row.ready for row in rows)
    rest = ((sum(getattr(row, name) for row in rows), name) for name in ("in_flight", "in_retry", "dead"))
    counts = [f"{count:,} {name.replace('_', ' ')}" for count, name in ((ready, "ready"), *rest)]
    return f"{number(consumers, 'consumer')} online, {', '.join(counts)}"


def setting_of(text: str) -> tuple[str, Any]:
    """What KEY=VALUE says. Raises InvalidOption."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(f"{text!r} is not KEY=VALUE")
    if name == "follows":
        return name, text_of(value).split(",")
    check_setting(name)
    if name == "tags":
        return name, text_of(value).split(",") if value else []
    try:
        if name == "retry_delays":
            return name, [number_of(part) for part in value.split(",")]
        return name, number_of(value) if name in ("expire_after", "ack_deadline") else whole_number_of(value)
    except ValueError:
        kind = "whole number" if name.startswith("max_") and name != "ack_deadline" else "number of seconds"
        raise InvalidOption(f"{name}: {value!r:.80} is not a {kind}") from None


def shown_value(value: object) -> str:
    """As it can be given to ``groups set``."""
    if isinstance(value, list):
        return ",".join(map(shown_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _list(as_json: bool, server: str, timeout: float) -> None:
    async def load() -> tuple[list[GroupInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.groups(), not client.admin.missed

    found, is_whole = run(load())
    show(found, "," in server, _object if as_json else None, _fields, _table)
    end_where_lacking(is_whole)


def _object(info: GroupInfo) -> dict[str, Any]:
    fields = info._asdict()
    return {"group": fields.pop("name"), **fields, "oldest": iso(info.oldest)}


def _fields(info: GroupInfo) -> Sequence[object]:
    counts = info.in_flight, info.in_retry, info.dead, info.skipped, info.filtered, info.delayed
    return (
        info.name, info.mode, ",".join(info.follows), info.consumers, f"{_about(info)}{info.ready}", *counts,
        iso(info.oldest),
    )  # fmt: skip


def _about(info: GroupInfo) -> str:
    """There may be more than it says."""
    return "" if info.ready_exact else "~"


def _table(found: Sequence[GroupInfo]) -> Table:
    rare = [name for name in ("skipped", "filtered", "delayed") if any(getattr(info, name) for info in found)]
    columns = ("online", "ready", "oldest", "in\nflight", "in\nretry", "dead", *rare)
    table = table_of("group\n  (mode)\n  follows", columns, number(len(found), "group"))
    several = are_several(found)
    for info in found:
        follows = "".join(f"\n  {prefix or '(all)'}" for prefix in info.follows)
        counts = (info.in_flight, info.in_retry, info.dead, *(getattr(info, name) for name in rare))
        ready = _about(info) + number(info.ready), age_of(info.oldest)
        row = [number(info.consumers), *ready, *map(number, counts)]
        table.add_row(f"[bold]{info.name}[/]\n  ({info.mode}){follows}{in_cell(info, several)}", *row)
    return table

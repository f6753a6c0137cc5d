"""``qmq groups``: list groups, change their settings, seek and delete them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.common.arguments import number_of, text_of, whole_number_of
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number
from qmq.cli.common.listing import are_several, end_if_incomplete, in_cell, show, table_of
from qmq.cli.messages.consume import start_of
from qmq.errors import InvalidOption
from qmq.names import check_group_or_member
from qmq.net.client.admin.admin import checked_follows
from qmq.net.client.admin.results import GroupInfo
from qmq.net.client.group_settings import check_setting, packed_settings

if TYPE_CHECKING:
    from rich.table import Table

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")


@click.group(invoke_without_command=True, short_help="List groups; change, seek and delete one.")
@click.pass_context
@_json_option
@admin_options
def groups(context: click.Context, as_json: bool, server: str, timeout: float) -> None:
    """List the groups: what each follows, how many of its consumers are online, and the state of its messages.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (~: or more), in flight, in retry (to be delivered again), dead, skipped, filtered
    and delayed, and when the oldest ready message was stored.
    """
    if context.invoked_subcommand is None:
        _list(as_json, server, timeout)


@groups.command("list", short_help="List the groups.")
@_json_option
@admin_options
def list_groups(as_json: bool, server: str, timeout: float) -> None:
    """List the groups: what each follows, how many of its consumers are online, and the state of its messages.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between name, mode, what it follows,
    consumers online, messages ready (~: or more), in flight, in retry (to be delivered again), dead, skipped, filtered
    and delayed, and when the oldest ready message was stored.
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

    Until follows= is set, a group follows all that its consumers have asked for. Then it no longer gets what is ready
    under other prefixes; what is in flight may still be acknowledged, and else becomes a dead letter.
    """
    given = dict(setting_of(text) for text in settings)
    # Raises if a value is wrong, before a connection is made.
    packed_settings({name: value for name, value in given.items() if name != "follows"})
    if "follows" in given:
        checked_follows(given["follows"])
    check_group_or_member(group)

    async def change() -> dict[str, Any]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.set_group(group, **given)

    for name, value in run(change()).items():
        click.echo(f"{name}={shown_value(value)}")


@groups.command("seek", short_help="Move the cursors of a group.")
@click.argument("group")
@click.option("--to", required=True, metavar="first|new|TIME|SEQ", help="Where the group continues.")
@click.option("--clear-retries", is_flag=True, help="Also drop the retries of the group.")
@yes_option
@admin_options
def seek(group: str, to: str, clear_retries: bool, yes: bool, server: str, timeout: float) -> None:
    """Let GROUP continue at the first message stored, with new messages only, at a time or at a sequence.

    Messages in flight are dropped; later acknowledgements of them are refused. The group may get acknowledged messages
    again, or skip messages that nobody got, so it asks on a terminal; without one it needs --yes.
    """
    begin = start_of(to, "--to")
    assert begin is not None
    check_group_or_member(group)

    async def change() -> None:
        async with connect(server, admin_timeout=timeout) as client:
            await client.admin.seek(group, begin, clear_retries=clear_retries)

    does = f"let {group} continue at {to}" + (" and drop its retries" if clear_retries else "")
    confirm(yes, f"this will {does}", lambda: f"{does}? It has {run(_contents(group, server, timeout))}.")
    run(change())
    click.echo(f"{group} continues at {to}")


@groups.command("delete", short_help="Delete a group.")
@click.argument("group")
@yes_option
@admin_options
def delete(group: str, yes: bool, server: str, timeout: float) -> None:
    """Delete GROUP, with its cursors, messages in flight, retries and dead letters.

    It asks on a terminal; without one it needs --yes.
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
    """Return what a group has now, for the question that asks before a change."""
    async with connect(server, admin_timeout=timeout) as client:
        # The name of a broadcast group stands for all its members.
        rows = [row for row in await client.admin.groups() if row.name == group or row.name.startswith(f"{group}@")]
        if not rows:
            await client.admin.groups(group)  # raises for a group that does not exist
    consumers, ready = sum(row.consumers for row in rows), sum(row.ready for row in rows)
    rest = ((sum(getattr(row, name) for row in rows), name) for name in ("in_flight", "in_retry", "dead"))
    counts = [f"{count:,} {name.replace('_', ' ')}" for count, name in ((ready, "ready"), *rest)]
    return f"{number(consumers, 'consumer')} online, {', '.join(counts)}"


def setting_of(text: str) -> tuple[str, Any]:
    """Return the setting that KEY=VALUE says. Raises InvalidOption."""
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
    """Return a setting in the form that ``groups set`` takes."""
    if isinstance(value, list):
        return ",".join(map(shown_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _list(as_json: bool, server: str, timeout: float) -> None:
    async def load() -> tuple[list[GroupInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.groups(), not client.admin.missed

    found, is_whole = run(load())
    show(found, "," in server, _object if as_json else None, _fields, _table)
    end_if_incomplete(is_whole)


def _object(info: GroupInfo) -> dict[str, Any]:
    fields = asdict(info)
    return {"group": fields.pop("name"), **fields, "oldest": iso(info.oldest)}


def _fields(info: GroupInfo) -> Sequence[object]:
    counts = info.in_flight, info.in_retry, info.dead, info.skipped, info.filtered, info.delayed
    return (
        info.name, info.mode, ",".join(info.follows), info.consumers, f"{_about(info)}{info.ready}", *counts,
        iso(info.oldest),
    )  # fmt: skip


def _about(info: GroupInfo) -> str:
    """Return "~" if the count of ready messages is a lower bound, else ""."""
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

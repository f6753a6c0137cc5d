"""``qmq groups``: list and show groups, change their settings, seek and delete them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from qmq import connect
from qmq.cli.common.arguments import duration_of, start_of, text_of, whole_number_of
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.completion import complete_groups
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number
from qmq.cli.common.listing import (
    Fields,
    are_several,
    end_if_incomplete,
    in_cell,
    json_option,
    output_options,
    print_object,
    show,
    show_details,
)
from qmq.cli.manage.blocked import blocked_fields, blocked_text
from qmq.durations import duration_text
from qmq.errors import InvalidOption
from qmq.names import check_group_or_member

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import GroupInfo

FIELDS: Final[Fields[GroupInfo]] = {
    "group": lambda info: info.name,
    "mode": lambda info: info.mode,
    "follows": lambda info: info.follows,
    "consumers": lambda info: info.consumers,
    "ready": lambda info: info.ready,
    "ready_exact": lambda info: info.ready_exact,
    "oldest": lambda info: info.oldest,
    "in_flight": lambda info: info.in_flight,
    "in_retry": lambda info: info.in_retry,
    "dead": lambda info: info.dead,
    "skipped": lambda info: info.skipped,
    "filtered": lambda info: info.filtered,
    "delayed": lambda info: info.delayed,
    "broker": lambda info: info.broker,
}
NESTED: Final[Fields[GroupInfo]] = {
    "settings": lambda info: info.settings,
    "blocked": lambda info: [blocked_fields(one) for one in info.blocked],
}

#: Columns of a table that are left out where all are 0.
_RARE: Final = ("skipped", "filtered", "delayed")
#: The characters that a wide table leaves for names, of which prefixes may have the rest of the line.
_NAME_WIDTH: Final = 24


@click.group(cls=CommandGroup, lists="without arguments", short_help="List groups; show, change, seek and delete one.")
@output_options
@admin_options
def groups(as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List groups, or show, change, seek and delete one. Without a command it lists them all.

    \b
    Examples:
      qmq groups                               list them
      qmq groups show billing                  all about one, with its settings
      qmq groups set billing max_attempts=5    change a setting
      qmq groups seek billing --to 2h          get again what came in 2 hours
    """


@groups.command("list", short_help="List the groups.")
@output_options
@admin_options
def list_groups(as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List the groups: the prefixes that each follows, how many of its consumers are online, and the state of its
    messages: ready (~: or more), in flight, in retry (to be delivered again) and dead; where there are any, also
    skipped (dropped by retention before the group took them), filtered (without its tags) and delayed.

    \b
    Examples:
      qmq groups
      qmq groups --json | jq 'select(.dead > 0) | .group'
      qmq groups --header | column -t
    """

    async def load() -> tuple[list[GroupInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.groups(), not client.admin.missed

    found, is_whole = run(load())
    none = "no groups; a consumer makes one, such as `qmq consume PREFIX --group NAME`"
    caption = number(len(found), "group")
    show(found, FIELDS, _table, as_json=as_json, header=header, none=none, caption=caption, nested=NESTED)
    end_if_incomplete(is_whole)


@groups.command("show", short_help="Show all about a group.")
@click.argument("group", shell_complete=complete_groups)
@json_option
@admin_options
def show_group(group: str, as_json: bool, server: str, timeout: float) -> None:
    """Show GROUP: all that it follows, the state of its messages, which order keys hold messages up, by whom and since
    when, and its settings. Of a broadcast group it shows each member.

    \b
    Example:
      qmq groups show billing
    """
    check_group_or_member(group)

    async def load() -> tuple[list[GroupInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.groups(group), not client.admin.missed

    found, is_whole = run(load())
    show_details(found, FIELDS, _pairs, as_json=as_json, nested=NESTED)
    end_if_incomplete(is_whole)


@groups.command("set", short_help="Change settings of a group.")
@click.argument("group", shell_complete=complete_groups)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@json_option
@admin_options
def set_group(group: str, settings: tuple[str, ...], as_json: bool, server: str, timeout: float) -> None:
    """Change settings of GROUP, and print all of them. Durations are texts such as 30s, 5m or 1h 30m, or numbers of
    seconds.

    \b
    max_attempts          how often a message is delivered at most
    retry_delays          the pauses before the next attempts: 1s,10s,5m
    expire_after          a message that waits longer is dead; 0: never
    ack_deadline          how long a consumer may keep a message; 0: no limit
    reconnect_timeout     how long a client whose process ended, or was cut
                          off, has to come back before others get its
                          messages; none: as long as the broker says
    max_session_expiries  how many consumers may be lost with a message
    max_unacked           messages that a consumer has in flight at most
    max_unacked_bytes     and bytes
    priority_share        the share of what is handed out that goes to lower
                          priorities while they wait: 0.1; 0: none
    tags                  only messages with one of these: a,b; none: all
    follows               the prefixes and subjects that it takes from now on,
                          and no others: shop.order.,shop.mail; none: everything

    Until follows= is set, a group follows all that its consumers have asked for. Then it no longer gets what is ready
    under other prefixes; what is in flight may still be acknowledged, and else becomes a dead letter.

    \b
    Examples:
      qmq groups set billing max_attempts=5 retry_delays=1s,10s,5m
      qmq groups set billing follows=shop.order.,shop.mail
    """
    from qmq.net.client.admin.admin import checked_follows
    from qmq.net.client.group_settings import packed_settings

    given = dict(setting_of(text) for text in settings)
    # Raises if a value is wrong, before a connection is made.
    packed_settings({name: value for name, value in given.items() if name != "follows"})
    if "follows" in given:
        checked_follows(given["follows"])
    check_group_or_member(group)

    async def change() -> dict[str, Any]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.set_group(group, **given)

    changed = run(change())
    if as_json:
        print_object({"group": group, **changed})
        return
    for name, value in changed.items():
        click.echo(f"{name}={shown_value(name, value)}")


@groups.command("seek", short_help="Move the cursors of a group.")
@click.argument("group", shell_complete=complete_groups)
@click.option("--to", required=True, metavar="first|new|TIME|SEQ", help="Where the group continues.")
@click.option("--clear-retries", is_flag=True, help="Also drop the retries of the group.")
@yes_option
@json_option
@admin_options
def seek(group: str, to: str, clear_retries: bool, yes: bool, as_json: bool, server: str, timeout: float) -> None:
    """Let GROUP continue at the first message stored, with new messages only, at a time or at a sequence.

    Messages in flight are dropped; later acknowledgements of them are refused. The group may get acknowledged messages
    again, or skip messages that nobody got, so it asks on a terminal; without one it needs --yes.

    \b
    Examples:
      qmq groups seek billing --to first
      qmq groups seek billing --to 2026-01-31T12:00:00Z --yes
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
    if as_json:
        print_object({"group": group, "continues_at": to})
    else:
        click.echo(f"{group} continues at {to}")


@groups.command("delete", short_help="Delete a group.")
@click.argument("group", shell_complete=complete_groups)
@yes_option
@json_option
@admin_options
def delete(group: str, yes: bool, as_json: bool, server: str, timeout: float) -> None:
    """Delete GROUP, with its cursors, messages in flight, retries and dead letters.

    It asks on a terminal; without one it needs --yes.

    \b
    Example:
      qmq groups delete billing-test
    """
    check_group_or_member(group)

    async def change() -> None:
        async with connect(server, admin_timeout=timeout) as client:
            await client.admin.delete_group(group)

    does = f"delete group {group}"
    confirm(yes, f"this will {does}", lambda: f"{does}? It has {run(_contents(group, server, timeout))}.")
    run(change())
    if as_json:
        print_object({"group": group, "deleted": True})
    else:
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
    from qmq.net.client.group_settings import check_setting

    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidOption(f"{text!r} is not KEY=VALUE")
    if name == "follows":
        return name, text_of(value).split(",")
    check_setting(name)
    if name == "tags":
        return name, text_of(value).split(",") if value else []
    if name == "retry_delays":
        return name, [duration_of(name, part) for part in value.split(",")]
    if name == "reconnect_timeout" and not value:
        return name, None
    if name in ("expire_after", "ack_deadline", "reconnect_timeout"):
        return name, duration_of(name, value)
    if name == "priority_share":
        try:
            return name, float(value)
        except ValueError:
            raise InvalidOption(f"{name}: {value!r:.80} is not a number from 0 to 1") from None
    try:
        return name, whole_number_of(value)
    except ValueError:
        raise InvalidOption(f"{name}: {value!r:.80} is not a whole number") from None


def shown_value(name: str, value: object) -> str:
    """Return the value of a setting in the form that ``groups set`` takes."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(shown_value(name, one) for one in value)
    if name == "priority_share":
        return f"{value:g}"
    return duration_text(value) if value and isinstance(value, float) else f"{value:g}" if value == 0 else str(value)


def _about(info: GroupInfo) -> str:
    """Return "~" if the count of ready messages is a lower bound, else ""."""
    return "" if info.ready_exact else "~"


def _pairs(info: GroupInfo) -> list[tuple[str, str]]:
    from rich.markup import escape

    from qmq.cli.common.tables import alarming

    ready = f"{_about(info)}{info.ready:,}"
    if info.oldest is not None:
        ready += f", the oldest stored {age_of(info.oldest)} ago, at {iso(info.oldest)}"
    idle = not info.consumers and info.ready
    dead = f"{info.dead:,}" + (f"; see `qmq dead-letters list {info.name}`" if info.dead else "")
    online = f"{info.consumers:,} online" + ("; nobody takes what is ready" if idle else "")
    pairs = [
        ("group", f"[bold]{info.name}[/]"),
        ("broker", info.broker),
        ("mode", info.mode),
        ("follows", ", ".join(prefix or "(everything)" for prefix in info.follows)),
        ("consumers", alarming(online, idle, "yellow")),
        ("ready", ready),
        ("in flight", f"{info.in_flight:,}"),
        (
            "in retry",
            f"{info.in_retry:,}" + ("; each is delivered again when its delay is over" if info.in_retry else ""),
        ),
        ("dead", alarming(dead, info.dead)),
        ("skipped", alarming(f"{info.skipped:,}", info.skipped, "yellow")),
        ("filtered", f"{info.filtered:,}"),
        ("delayed", f"{info.delayed:,}"),
    ]
    pairs += [("blocked", alarming(escape(blocked_text(one)), True, "yellow")) for one in info.blocked]
    return pairs + [(name, shown_value(name, value)) for name, value in info.settings.items()]


def _table(found: Sequence[GroupInfo], width: int) -> Table:
    from qmq.cli.common.tables import WIDE, alarming, table_of

    is_wide, several = width >= WIDE, are_several(found)
    rare = [name for name in _RARE if any(getattr(info, name) for info in found)]
    modes = is_wide and any(info.mode != "reliable" for info in found)
    names = ("online", "ready", "oldest", "in flight", "in retry", "dead", *rare)
    taken = 15 * modes + 18 * several
    is_tight = width - taken - sum(len(name) + 2 for name in names) < 2 * _NAME_WIDTH
    names = tuple(name.replace(" ", "\n") for name in names) if is_tight or not is_wide else names
    table = table_of("group" if is_wide else "group\n  (mode)\n  follows")
    if not is_wide:
        brokers = [info.broker for info in found] if several else []
        table.columns[0].min_width = max(map(len, ["(at_most_once)", *brokers])) + 2
    if modes:
        table.add_column("mode", no_wrap=True)
    used = sum(max(map(len, name.split("\n"))) + 3 for name in names) + taken
    room = max(width - used - _NAME_WIDTH, _NAME_WIDTH)
    if is_wide:
        table.add_column("follows", no_wrap=all(len(_some(info.follows, room)) <= room for info in found))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if is_wide and several:
        table.add_column("broker", no_wrap=True)
    for info in found:
        idle = not info.consumers and info.ready
        cells = [
            alarming(number(info.consumers), idle, "yellow"),
            alarming(_about(info) + number(info.ready), idle, "yellow"),
            age_of(info.oldest),
            number(info.in_flight),
            number(info.in_retry),
            alarming(number(info.dead), info.dead),
            *(alarming(number(getattr(info, name)), name == "skipped" and info.skipped, "yellow") for name in rare),
        ]
        if is_wide:
            first = [f"[bold]{info.name}[/]", *([info.mode] if modes else []), _some(info.follows, room)]
            table.add_row(*first, *cells, *([info.broker] if several else []))
        else:
            follows = "".join(f"\n  {prefix or '(everything)'}" for prefix in info.follows)
            table.add_row(f"[bold]{info.name}[/]\n  ({info.mode}){follows}{in_cell(info, several)}", *cells)
    return table


def _some(follows: Sequence[str], room: int) -> str:
    """Return the prefixes that fit into so many characters, but at least one, and the count of the others."""
    names = [prefix or "(everything)" for prefix in follows]
    for count in range(len(names), 1, -1):
        left = len(names) - count
        text = ", ".join(names[:count]) + (f", {left:,} more" if left else "")
        if len(text) <= room:
            return text
    return f"{names[0]}, {len(names) - 1:,} more" if len(names) > 1 else names[0]

"""``qmq info``: what a broker is, and what it has."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age, age_of, iso, number, size, visible
from qmq.cli.common.listing import Fields, end_if_incomplete, json_option, plain, show_details

if TYPE_CHECKING:
    from qmq import BrokerInfo

FIELDS: Final[Fields[BrokerInfo]] = {
    "broker": lambda info: info.broker,
    "version": lambda info: info.version,
    "store_id": lambda info: info.store_id,
    "started_at": lambda info: info.started_at,
    "uptime": lambda info: round(info.uptime, 3),
    "subjects": lambda info: info.subjects,
    "groups": lambda info: info.groups,
    "consumers": lambda info: info.consumers,
    "log_bytes": lambda info: info.log_bytes,
    "checkpoint_age": lambda info: round(info.checkpoint_age, 3),
    "checkpoint_error": lambda info: info.checkpoint_error,
    "connection_count": lambda info: info.connection_count,
    "changed_settings": lambda info: info.changed_settings,
}
_NESTED: Final[Fields[BrokerInfo]] = {
    "settings": lambda info: info.settings,
    "disks": lambda info: [asdict(disk) for disk in info.disks],
    "connections": lambda info: [
        {name: plain(value) for name, value in asdict(connection).items()} for connection in info.connections
    ],
    "problems": lambda info: [asdict(problem) for problem in info.problems],
}
#: The most connections that are named on a terminal.
_MOST_NAMED: Final = 20


@click.command(short_help="Show version, settings, disks and connections of a broker.")
@json_option
@admin_options
def info(as_json: bool, server: str, timeout: float) -> None:
    """Show each broker: its version, for how long it has run, what it stores, its disks, the settings that differ from
    their defaults, who is connected, and what is wrong. In a pipe and with --json it has all settings.

    \b
    Examples:
      qmq info
      qmq info --json | jq .settings
    """

    async def load() -> tuple[list[BrokerInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.info(), not client.admin.missed

    found, is_whole = run(load())
    show_details(found, FIELDS, _pairs, as_json=as_json, nested=_NESTED)
    end_if_incomplete(is_whole)


def _pairs(info: BrokerInfo) -> list[tuple[str, str]]:
    from rich.markup import escape

    error = f", [red]the last one failed: {escape(info.checkpoint_error)}[/]" if info.checkpoint_error else ""
    pairs = [
        ("broker", f"[bold]{info.broker}[/]"),
        ("version", info.version),
        ("store", info.store_id),
        ("up", f"{age(info.uptime)}, since {iso(info.started_at)}"),
        ("stored", f"{size(info.log_bytes)} in {number(info.subjects, 'subject')}"),
        ("groups", f"{info.groups:,}, with {number(info.consumers, 'consumer')} online"),
        ("checkpoint", f"{age(info.checkpoint_age)} ago{error}"),
    ]
    for disk in info.disks:
        free = "[red]does not answer[/]"
        if disk.free_bytes is not None and disk.total_bytes is not None:
            share = 100 * disk.free_bytes / disk.total_bytes if disk.total_bytes else 0.0
            free = f"{size(disk.free_bytes)} of {size(disk.total_bytes)} free ({share:.0f}%)"
        pairs.append(("disk", f"{escape(disk.directory)}: {free}"))
    pairs += [("setting", escape(f"{key} = {_shown(info.settings.get(key))}")) for key in info.changed_settings]
    pairs.append(("settings", "all others have their defaults; `qmq info --json` has all"))
    pairs.append(("connections", f"{info.connection_count:,}"))
    for one in info.connections[:_MOST_NAMED]:
        name = one.name or one.app or one.client or "(no name)"
        app = f" ({one.app})" if one.app and one.app != name else ""
        waiting = f", {number(one.open_requests, 'open request')}" if one.open_requests else ""
        pairs.append(("", escape(visible(f"{name}{app} at {one.address}, for {age_of(one.since)}{waiting}"))))
    if info.connection_count > _MOST_NAMED:
        pairs.append(("", f"and {info.connection_count - _MOST_NAMED:,} more"))
    for problem in info.problems:
        colour = "red" if problem.level == "error" else "yellow"
        pairs.append(("problem", f"[{colour}]{escape(problem.message)}[/]"))
    return pairs


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

"""``qmq consumers``: the consumers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from qmq import connect
from qmq.cli.common.completion import complete_groups
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age, age_of, number, visible
from qmq.cli.common.listing import Fields, are_several, end_if_incomplete, in_cell, is_for_people, output_options, show
from qmq.cli.manage.blocked import blocked_fields, blocked_text
from qmq.names import check_group_or_member

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import BlockedSlot, ConsumerInfo, GroupInfo

FIELDS: Final[Fields[ConsumerInfo]] = {
    "consumer": lambda info: info.name,
    "online": lambda info: info.online,
    "in_flight": lambda info: info.in_flight,
    "in_flight_since": lambda info: info.in_flight_since,
    "last_pull": lambda info: info.last_pull,
    "silent": lambda info: round(info.silent, 3),
    "stalled": lambda info: round(info.stalled, 3),
    "order_slots": lambda info: info.order_slots,
    "epoch": lambda info: info.epoch,
    "program": lambda info: info.program,
    "broker": lambda info: info.broker,
}
#: An event loop that was blocked for longer, in seconds, delays acks and heartbeats.
_BLOCKED_S: Final = 1.0


@click.command(short_help="List the consumers of a group.")
@click.argument("group", shell_complete=complete_groups)
@output_options
@admin_options
def consumers(group: str, as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List the consumers of GROUP, or of one member of a broadcast group, GROUP@CONSUMER: the program that each is (the
    name that it gave, else its file), how many messages it has in flight and since when the oldest of them, when it
    last got messages, when the broker last heard from it, and for how long its event loop had been blocked then (silent
    and stalled, in seconds, in a pipe and in JSON). Below stand the order keys that hold messages up, at most 20: who
    has the earlier message, or when it comes again (in JSON "blocks" of each consumer).

    \b
    Example:
      qmq consumers billing
    """
    check_group_or_member(group)

    async def load() -> tuple[list[ConsumerInfo], list[GroupInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            infos = await client.admin.groups(group)
            missed = set(client.admin.missed)
            found = await client.admin.consumers(group)
            return found, infos, not missed.union(client.admin.missed)

    found, infos, is_whole = run(load())
    blocked = [(info.broker, slot) for info in infos for slot in info.blocked]
    nested: Fields[ConsumerInfo] = {
        "blocks": lambda info: [
            blocked_fields(slot) for broker, slot in blocked if (broker, slot.consumer) == (info.broker, info.name)
        ]
    }
    none, caption = f"{group} has no consumers now", number(len(found), "consumer")
    show(found, FIELDS, _table, as_json=as_json, header=header, none=none, caption=caption, nested=nested)
    if blocked and is_for_people(as_json):
        _print_blocked([slot for _, slot in blocked])
    end_if_incomplete(is_whole)


def _print_blocked(blocked: Sequence[BlockedSlot]) -> None:
    from rich.console import Console

    from qmq.cli.common.tables import folded

    width = Console().width
    click.echo("")
    for slot in blocked:
        click.echo(click.style(folded(blocked_text(slot), width), "yellow"))


def _table(found: Sequence[ConsumerInfo], width: int) -> Table:
    from qmq.cli.common.tables import WIDE, alarming, table_of

    is_wide, several = width >= WIDE, are_several(found)
    has_slots = any(info.order_slots for info in found)
    names = ("state", "in flight", *(("order keys",) if has_slots else ()), "oldest", "last pull", "last heard",
             "loop blocked")  # fmt: skip
    table = table_of("consumer", [name if is_wide else name.replace(" ", "\n") for name in names])
    if is_wide and several:
        table.add_column("broker", no_wrap=True)
    for info in found:
        lost = not info.online and info.in_flight
        cells = [
            f"[bold]{info.name}[/]" + _program_in_cell(info) + ("" if is_wide else in_cell(info, several)),
            alarming("online" if info.online else "offline", lost, "yellow"),
            alarming(number(info.in_flight), lost, "yellow"),
            *([number(info.order_slots)] if has_slots else []),
            age_of(info.in_flight_since),
            age_of(info.last_pull),
            age(info.silent),
            alarming(f"{info.stalled:.1f}s", info.stalled >= _BLOCKED_S, "yellow"),
        ]
        table.add_row(*cells, *([info.broker] if is_wide and several else []))
    return table


def _program_in_cell(info: ConsumerInfo) -> str:
    from rich.markup import escape

    return f"\n[dim]{escape(visible(info.program))}[/]" if info.program and info.program != info.name else ""

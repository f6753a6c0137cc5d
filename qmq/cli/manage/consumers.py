"""``qmq consumers``: the consumers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age, age_of, iso, number
from qmq.cli.common.listing import are_several, end_if_incomplete, in_cell, show, table_of
from qmq.names import check_group_or_member
from qmq.net.client.admin.results import ConsumerInfo

if TYPE_CHECKING:
    from rich.table import Table


@click.command(short_help="List the consumers of a group.")
@click.argument("group")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@admin_options
def consumers(group: str, as_json: bool, server: str, timeout: float) -> None:
    """List the consumers of GROUP, or of one member of a broadcast group, GROUP@CONSUMER: how many messages each has in
    flight, and when the broker last heard from it.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between id, online or offline,
    messages in flight, since when the oldest of them, time of the last pull that got messages, seconds since it was
    last heard from, and for how many seconds its event loop had been blocked then.
    """
    check_group_or_member(group)

    async def load() -> tuple[list[ConsumerInfo], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.consumers(group), not client.admin.missed

    found, is_whole = run(load())
    show(found, "," in server, _object if as_json else None, _fields, _table)
    end_if_incomplete(is_whole)


def _object(info: ConsumerInfo) -> dict[str, Any]:
    fields = asdict(info)
    times = {"in_flight_since": iso(info.in_flight_since), "last_pull": iso(info.last_pull)}
    return {"consumer": fields.pop("name"), **fields, **times}


def _fields(info: ConsumerInfo) -> Sequence[object]:
    times = iso(info.in_flight_since), iso(info.last_pull)
    return info.name, _state(info), info.in_flight, *times, f"{info.silent:.1f}", f"{info.stalled:.1f}"


def _state(info: ConsumerInfo) -> str:
    return "online" if info.online else "offline"


def _table(found: Sequence[ConsumerInfo]) -> Table:
    columns = ("state", "in\nflight", "oldest", "last\npull", "last\nheard", "loop\nblocked")
    table = table_of("consumer", columns, number(len(found), "consumer"))
    several = are_several(found)
    for info in found:
        counts = number(info.in_flight), age_of(info.in_flight_since), age_of(info.last_pull)
        name = f"[bold]{info.name}[/]{in_cell(info, several)}"
        table.add_row(name, _state(info), *counts, age(info.silent), f"{info.stalled:.1f} s")
    return table

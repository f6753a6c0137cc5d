"""``qmq consumers``: who consumes for a group."""

from __future__ import annotations

import json
import sys

import click

from qmq import connect
from qmq.cli.brief import age, age_of, iso, number
from qmq.cli.connecting import run, server_option
from qmq.cli.where import are_several, in_cell, in_line
from qmq.names import check_group
from qmq.net.admin import ConsumerInfo


@click.command(short_help="List the consumers of a group.")
@click.argument("group")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@server_option
def consumers(group: str, as_json: bool, server: str) -> None:
    """List the consumers of GROUP: what each holds, and when it was heard of last.

    On a terminal this is a table. In a pipe it is a line for each, with tabs between id, online or offline, messages
    held, since when the oldest of them, the last pull that brought something, seconds since it was heard of, and for
    how many seconds its event loop had not turned then.
    """
    check_group(group)

    async def load() -> list[ConsumerInfo]:
        async with connect(server) as client:
            return await client.admin.consumers(group)

    found = run(load())
    if not as_json and sys.stdout.isatty():
        _print_table(found)
        return
    several = "," in server
    for info in found:
        click.echo(_json_line(info) if as_json else _tab_line(info) + in_line(info, several))


def _json_line(info: ConsumerInfo) -> str:
    fields = info._asdict()
    times = {"held_since": iso(info.held_since), "last_pull": iso(info.last_pull)}
    return json.dumps({"consumer": fields.pop("name"), **fields, **times})


def _tab_line(info: ConsumerInfo) -> str:
    times = iso(info.held_since) or "", iso(info.last_pull) or ""
    return "\t".join([info.name, _state(info), str(info.held), *times, f"{info.silent:.1f}", f"{info.stalled:.1f}"])


def _state(info: ConsumerInfo) -> str:
    return "online" if info.online else "offline"


def _print_table(found: list[ConsumerInfo]) -> None:
    from rich.box import HORIZONTALS
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=number(len(found), "consumer"), caption_justify="left", box=HORIZONTALS)
    table.add_column("consumer", style="bold", overflow="fold")
    for name in ("state", "holds", "since", "last pull", "heard of", "loop stood"):
        table.add_column(name, justify="right", no_wrap=True)
    several = are_several(found)
    for info in found:
        held = number(info.held), age_of(info.held_since), age_of(info.last_pull)
        name = info.name + in_cell(info, several)
        table.add_row(name, _state(info), *held, age(info.silent), f"{info.stalled:.1f} s")
    Console().print(table)

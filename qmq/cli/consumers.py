"""``qmq consumers``: who consumes for a group."""

from __future__ import annotations

import json
import sys

import click

from qmq import connect
from qmq.cli.connecting import run, server_option
from qmq.names import check_group
from qmq.net.admin import ConsumerInfo


@click.command(short_help="List the consumers of a group.")
@click.argument("group")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@server_option
def consumers(group: str, as_json: bool, server: str) -> None:
    """List the consumers of GROUP: what each holds, when it was heard of last, for how long its loop stands still."""
    check_group(group)

    async def load() -> list[ConsumerInfo]:
        async with connect(server) as client:
            return await client.admin.consumers(group)

    found = run(load())
    if not as_json and sys.stdout.isatty():
        _print_table(found)
        return
    for info in found:
        held_since = info.held_since.isoformat() if info.held_since is not None else None
        if as_json:
            click.echo(json.dumps(info._asdict() | {"held_since": held_since}))
        else:
            state = "online" if info.online else "offline"
            click.echo(f"{info.name}\t{state}\t{info.held}\t{info.silent:.1f}\t{info.stalled:.1f}")


def _print_table(found: list[ConsumerInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=f"{len(found):,} consumers", caption_justify="left")
    table.add_column("consumer", style="bold", overflow="fold")
    for name in ("state", "holds", "since", "heard of (s)", "loop stands (s)"):
        table.add_column(name, justify="right", no_wrap=True)
    for info in found:
        since = info.held_since.strftime("%H:%M:%S") if info.held_since is not None else ""
        state = "online" if info.online else "offline"
        table.add_row(info.name, state, f"{info.held:,}", since, f"{info.silent:.1f}", f"{info.stalled:.1f}")
    Console().print(table)

"""``qmq subjects``: list subjects."""

from __future__ import annotations

import json
import sys

import click

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import number
from qmq.cli.common.listing import are_several, end_if_incomplete, in_cell, in_line
from qmq.names import check_prefix
from qmq.net.client.admin.results import SubjectInfo

#: The most rows of a table; programs use --json.
_MOST_ROWS = 1_000


@click.command(short_help="List subjects and how many messages each has.")
@click.argument("prefix", default="")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@admin_options
def subjects(prefix: str, as_json: bool, server: str, timeout: float) -> None:
    """List the subjects of PREFIX (without one, all) and how many stored messages each has.

    On a terminal this is a table, by name. In a pipe it is a line for each, in the order of creation, with tabs between
    name, messages, first sequence, next sequence and the number of delayed messages.
    """
    check_prefix(prefix)
    if not as_json and sys.stdout.isatty():
        found, is_whole = run(_all(server, timeout, prefix))
        _print_table(found)
    else:
        is_whole = run(_print_lines(server, timeout, prefix, as_json))
    end_if_incomplete(is_whole)


async def _all(server: str, timeout: float, prefix: str) -> tuple[list[SubjectInfo], bool]:
    async with connect(server, admin_timeout=timeout) as client:
        return [info async for info in client.subjects(prefix)], not client.admin.missed


async def _print_lines(server: str, timeout: float, prefix: str, as_json: bool) -> bool:
    async with connect(server, admin_timeout=timeout) as client:
        several = "," in server
        async for info in client.subjects(prefix):
            click.echo(_json_line(info) if as_json else _tab_line(info) + in_line(info, several))
        return not client.admin.missed


def _json_line(info: SubjectInfo) -> str:
    return json.dumps(
        {
            "subject": info.name,
            "messages": info.messages,
            "first_sequence": info.first_sequence,
            "next_sequence": info.next_sequence,
            "delayed": info.delayed,
            "broker": info.broker,
        }
    )


def _tab_line(info: SubjectInfo) -> str:
    return f"{info.name}\t{info.messages}\t{info.first_sequence}\t{info.next_sequence}\t{info.delayed}"


def _print_table(found: list[SubjectInfo]) -> None:
    from rich.table import Table

    from qmq.cli.common.tables import print_table

    shown = sorted(found, key=lambda info: (info.name, info.broker))[:_MOST_ROWS]
    caption = f"{number(len(found), 'subject')}, {number(sum(info.messages for info in found), 'message')}"
    if len(shown) < len(found):
        caption += f"; the first {len(shown):,} are shown, --json lists all"
    table = Table(caption=caption, caption_justify="left")
    table.add_column("subject", style="bold", overflow="fold")
    for name in ("messages", "first sequence", "next sequence", "delayed"):
        table.add_column(name, justify="right", no_wrap=True)
    several = are_several(found)
    for info in shown:
        counts = info.messages, info.first_sequence, info.next_sequence, info.delayed
        table.add_row(info.name + in_cell(info, several), *(f"{count:,}" for count in counts))
    print_table(table)

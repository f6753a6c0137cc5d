"""``qmq subjects``: list and show subjects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from qmq import connect
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.completion import complete_prefixes, complete_subjects
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.formatting import age_of, iso, number
from qmq.cli.common.listing import (
    Fields,
    RowWriter,
    are_several,
    end_if_incomplete,
    in_cell,
    is_for_people,
    json_option,
    output_options,
    show,
    show_details,
)
from qmq.cli.messages.stored import SubjectEnds, ends_of
from qmq.errors import InvalidOption
from qmq.names import check_prefix, check_subject

if TYPE_CHECKING:
    from rich.table import Table

    from qmq import SubjectInfo

FIELDS: Final[Fields[SubjectInfo]] = {
    "subject": lambda info: info.name,
    "messages": lambda info: info.messages,
    "first_sequence": lambda info: _of_plain(info, info.first_sequence),
    "next_sequence": lambda info: _of_plain(info, info.next_sequence),
    "delayed": lambda info: info.delayed,
    "high": lambda info: info.high,
    "low": lambda info: info.low,
    "ordered": lambda info: info.ordered,
    "broker": lambda info: info.broker,
}
_DETAILS: Final[Fields[SubjectEnds]] = {
    "subject": lambda ends: ends.info.name,
    "messages": lambda ends: ends.info.messages,
    "first_sequence": lambda ends: _of_plain(ends.info, ends.info.first_sequence),
    "next_sequence": lambda ends: _of_plain(ends.info, ends.info.next_sequence),
    "delayed": lambda ends: ends.info.delayed,
    "first_stored_at": lambda ends: ends.first_stored_at,
    "last_stored_at": lambda ends: ends.last_stored_at,
    "high": lambda ends: ends.info.high,
    "low": lambda ends: ends.info.low,
    "ordered": lambda ends: ends.info.ordered,
    "groups": lambda ends: ends.groups,
    "broker": lambda ends: ends.info.broker,
}


@click.group(cls=CommandGroup, lists="any argument", short_help="List subjects, or show one.")
@output_options
@admin_options
def subjects(as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List subjects, or show one. `qmq subjects PREFIX` is short for `qmq subjects list PREFIX`.

    \b
    Examples:
      qmq subjects                       list all
      qmq subjects shop.order.           those that begin so
      qmq subjects show shop.order.paid  all about one, and who follows it
    """


@subjects.command("list", short_help="List subjects and how many messages each has.")
@click.argument("prefix", default="", shell_complete=complete_prefixes)
@output_options
@admin_options
def list_subjects(prefix: str, as_json: bool, header: bool, server: str, timeout: float) -> None:
    """List the subjects of PREFIX (without one, all): how many stored messages each has, their first sequence, the
    sequence of the next one, and how many are delayed. Where there are any, also how many have high or low priority, or
    an order key (ordered). Each priority and each slot of order keys has sequences of its own, so none are
    shown of such a subject.

    On a terminal the table goes by name. In a pipe the lines come in the order in which the subjects were created.

    \b
    Examples:
      qmq subjects shop.
      qmq subjects --json | jq .subject
    """
    check_prefix(prefix)
    if is_for_people(as_json):
        found, is_whole = run(_all(server, timeout, prefix))
        none = f"no subject begins with {prefix}" if prefix else "no subjects; the first message of one makes it"
        found.sort(key=lambda info: (info.name, info.broker))
        caption = f"{number(len(found), 'subject')}, {number(sum(info.messages for info in found), 'message')}"
        show(found, FIELDS, _table, as_json=False, header=False, none=none, caption=caption)
    else:
        is_whole = run(_print(server, timeout, prefix, RowWriter(FIELDS, as_json, header)))
    end_if_incomplete(is_whole)


@subjects.command("show", short_help="Show all about a subject.")
@click.argument("subject", shell_complete=complete_subjects)
@json_option
@admin_options
def show_subject(subject: str, as_json: bool, server: str, timeout: float) -> None:
    """Show SUBJECT: its messages, when the first and the last of them were stored, and the groups that follow it.

    \b
    Example:
      qmq subjects show shop.order.paid
    """
    check_subject(subject)

    async def load() -> tuple[list[SubjectEnds], bool]:
        async with connect(server, admin_timeout=timeout) as client:
            groups = await client.admin.groups()
            found = [await ends_of(info, groups) async for info in client.subjects(subject)]
            return found, not client.admin.missed

    found, is_whole = run(load())
    if not found:
        raise InvalidOption(f"there is no subject {subject!r}; `qmq subjects` lists those there are")
    show_details(found, _DETAILS, _pairs, as_json=as_json)
    end_if_incomplete(is_whole)


async def _all(server: str, timeout: float, prefix: str) -> tuple[list[SubjectInfo], bool]:
    async with connect(server, admin_timeout=timeout) as client:
        return [info async for info in client.subjects(prefix)], not client.admin.missed


async def _print(server: str, timeout: float, prefix: str, writer: RowWriter[SubjectInfo]) -> bool:
    async with connect(server, admin_timeout=timeout) as client:
        async for info in client.subjects(prefix):
            writer.write(info)
        return not client.admin.missed


def _pairs(ends: SubjectEnds) -> list[tuple[str, str]]:
    info = ends.info
    first, last = (
        f"stored {age_of(time)} ago, at {iso(time)}" if time is not None else ""
        for time in (ends.first_stored_at, ends.last_stored_at)
    )
    none = "not shown: the token lacks the right to browse it" if info.messages else "none"
    if not any(lane_counts(info)):  # else each lane has sequences of its own
        first = first and f"sequence {info.first_sequence:,}, {first}"
        last = last and f"sequence {info.next_sequence - 1:,}, {last}"
    return [
        ("subject", f"[bold]{info.name}[/]"),
        ("broker", info.broker),
        ("messages", f"{info.messages:,}" + _of_lanes(info)),
        ("first", first or none),
        ("last", last or none),
        ("delayed", f"{info.delayed:,}"),
        ("groups", ", ".join(ends.groups) or "[yellow]no group follows it[/]"),
    ]


def lane_counts(info: SubjectInfo) -> tuple[int, int, int]:
    """Return how many messages of a subject have high and low priority, and an order key."""
    return info.high, info.low, info.ordered


def _of_plain(info: SubjectInfo, sequence: int) -> int | None:
    """Return a sequence of a subject; None where it has other lanes, since each lane has sequences of its own."""
    return None if any(lane_counts(info)) else sequence


def _of_lanes(info: SubjectInfo) -> str:
    """Return how many messages of a subject have which priority, or an order key; "" where all are plain."""
    if not any(lane_counts(info)):
        return ""
    kinds = (
        (info.high, "of high priority"), (info.messages - sum(lane_counts(info)), "of normal priority"),
        (info.low, "of low priority"), (info.ordered, "with an order key"),
    )  # fmt: skip
    return ": " + ", ".join(f"{count:,} {kind}" for count, kind in kinds if count)


def _table(found: Sequence[SubjectInfo], width: int) -> Table:
    from qmq.cli.common.tables import WIDE, table_of

    is_wide, several = width >= WIDE, are_several(found)
    kinds = [name for name in ("high", "low", "ordered") if any(getattr(info, name) for info in found)]
    names = ("messages", *kinds, "first sequence", "next sequence", "delayed")
    table = table_of("subject", [name if is_wide else name.replace(" ", "\n") for name in names])
    if is_wide and several:
        table.add_column("broker", no_wrap=True)
    for info in found:
        by_lanes = (getattr(info, kind) for kind in kinds)
        sequences = (_of_plain(info, sequence) for sequence in (info.first_sequence, info.next_sequence))
        counts = info.messages, *by_lanes, *sequences, info.delayed
        name = f"[bold]{info.name}[/]" + ("" if is_wide else in_cell(info, several))
        shown = ("-" if count is None else f"{count:,}" for count in counts)
        table.add_row(name, *shown, *([info.broker] if is_wide and several else []))
    return table

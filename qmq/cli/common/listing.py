"""Print rows: a table on a terminal, a line of fields with tabs between in a pipe, or a JSON object a line.

One form holds for every command, and docs/OPERATIONS.md describes it: a row is one JSON object on one line, and a list
is as many lines. A line for a pipe has the same fields in the same order. Times are texts such as
2026-01-31T12:00:00.000000Z, durations are numbers of seconds, and an absent value is null, or nothing in a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import click
from click.exceptions import Exit

from qmq.cli.common.arguments import inherited
from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import iso, visible

if TYPE_CHECKING:
    from rich.table import Table

#: The most rows of a table; programs read lines or JSON.
MOST_ROWS: Final = 1_000

R = TypeVar("R")

#: The fields of one kind of row by name, in order, each with the function that takes it from a row.
Fields = Mapping[str, Callable[[R], object]]

json_option = click.option("--json", "as_json", is_flag=True, callback=inherited, help="Print one JSON object a line.")
header_option = click.option(
    "--header", is_flag=True, callback=inherited, help="In a pipe, print the names of the fields first."
)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that prints rows the options --json and --header."""
    return json_option(header_option(command))


class FromBroker(Protocol):
    """A row that comes from one broker."""

    @property
    def broker(self) -> str: ...


def are_several(rows: Sequence[FromBroker]) -> bool:
    """Return whether the rows come from more than one broker."""
    return len({row.broker for row in rows}) > 1


def in_cell(row: FromBroker, shown: bool) -> str:
    """Return the line that names the broker in a cell of a table."""
    return f"\n  {row.broker}" if shown else ""


def is_for_people(as_json: bool) -> bool:
    """Return whether a command prints a table: stdout is a terminal, and nothing else was asked for."""
    return not as_json and sys.stdout.isatty()


class RowWriter(Generic[R]):
    """Prints rows for programs, each when it comes."""

    def __init__(self, fields: Fields[R], as_json: bool, header: bool = False, nested: Fields[R] | None = None) -> None:
        """Print the header, if it is wanted. *nested*: fields that are objects themselves, which only JSON has."""
        self._fields = {**fields, **(nested or {})} if as_json else fields
        self._as_json = as_json
        if header and not as_json:
            click.echo("\t".join(fields))

    def write(self, row: R) -> None:
        """Print a row."""
        values = {name: plain(take(row)) for name, take in self._fields.items()}
        click.echo(json_text(values) if self._as_json else "\t".join(map(in_line, values.values())))


def json_text(fields: Mapping[str, object]) -> str:
    """Return a JSON object on one line."""
    return json.dumps(fields, ensure_ascii=False)


def print_object(fields: Mapping[str, object]) -> None:
    """Print what a command has done as a JSON object."""
    click.echo(json_text({name: plain(value) for name, value in fields.items()}))


def show(
    rows: Sequence[R],
    fields: Fields[R],
    as_table: Callable[[Sequence[R], int], Table | str],
    *,
    as_json: bool,
    header: bool,
    none: str,
    caption: str,
    nested: Fields[R] | None = None,
) -> None:
    """Print rows. On a terminal *as_table* makes a table, or a text, for so many columns; *caption* is printed below,
    and *none* in its place if there are no rows.
    """
    if not is_for_people(as_json):
        writer = RowWriter(fields, as_json, header, nested)
        for row in rows:
            writer.write(row)
        return
    if not rows:
        click.echo(none)
        return
    from rich.console import Console

    from qmq.cli.common.tables import print_table

    console = Console()
    table = as_table(rows[:MOST_ROWS], console.width)
    if isinstance(table, str):
        click.echo(table)
    else:
        print_table(table, console)
    click.echo(caption + (f"; the first {MOST_ROWS:,} are shown, --json lists all" if len(rows) > MOST_ROWS else ""))


def show_details(
    rows: Sequence[R],
    fields: Fields[R],
    as_pairs: Callable[[R], Sequence[tuple[str, str]]],
    *,
    as_json: bool,
    nested: Fields[R] | None = None,
) -> None:
    """Print all about a few things: on a terminal the pairs of name and text that *as_pairs* makes of each, in markup;
    in a pipe a line for each field, with a tab between its name and its value.
    """
    if as_json:
        writer = RowWriter(fields, True, nested=nested)
        for row in rows:
            writer.write(row)
    elif is_for_people(as_json):
        from qmq.cli.common.tables import print_pairs

        for number, row in enumerate(rows):
            if number:
                click.echo()
            print_pairs(as_pairs(row))
    else:
        for row in rows:
            for name, take in {**fields, **(nested or {})}.items():
                for inner, one in _flat(name, take(row)):
                    click.echo(f"{inner}\t{in_line(plain(one))}")


def _flat(name: str, value: object) -> list[tuple[str, object]]:
    """Return the lines of a field: one, or one for each field of an object, or for each object of a list."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [(name, " ".join(f"{key}={in_line(plain(one))}" for key, one in row.items())) for row in value]
    return [(name, value)]


def plain(value: object) -> Any:
    """Return a value as JSON has it: a time as a text in UTC, all else as it is."""
    return iso(value) if isinstance(value, datetime) else value


def in_line(value: object) -> str:
    """Return a value as a line for a pipe has it: an absent one is nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(in_line, value))
    return visible(str(value))


def end_if_incomplete(is_whole: bool) -> None:
    """End with exit code 1 if the list lacks a broker; stderr has named it already."""
    if not is_whole:
        raise Exit(EXIT_FAILED)

"""Print lists as a table or one line a row; each row names its broker if the client knows several."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click
from click.exceptions import Exit

from qmq.cli.common.errors import EXIT_FAILED
from qmq.cli.common.formatting import visible

if TYPE_CHECKING:
    from rich.table import Table


class Row(Protocol):
    """A row of a list, which comes from one broker."""

    @property
    def broker(self) -> str: ...


def are_several(rows: Sequence[Row]) -> bool:
    """Return whether the rows come from more than one broker."""
    return len({row.broker for row in rows}) > 1


def in_cell(row: Row, shown: bool) -> str:
    """Return the line that names the broker in a cell of a table."""
    return f"\n  at {row.broker}" if shown else ""


def in_line(row: Row, shown: bool) -> str:
    """Return the field that names the broker in a line."""
    return f"\t{row.broker}" if shown else ""


R = TypeVar("R", bound=Row)


def show(
    rows: Sequence[R],
    several: bool,
    as_object: Callable[[R], Mapping[str, Any]] | None,
    as_fields: Callable[[R], Sequence[object]],
    as_table: Callable[[Sequence[R]], Table],
) -> None:
    """Print the rows: a JSON object each if there is *as_object*, else a table on a terminal, else fields with tabs
    between.

    *several*: the client knows more than one broker, so each row names its own.
    """
    if as_object is None and sys.stdout.isatty():
        from qmq.cli.common.tables import print_table

        print_table(as_table(rows))
        return
    for row in rows:
        if as_object is not None:
            click.echo(json.dumps(as_object(row)))
        else:
            click.echo(
                "\t".join("" if field is None else visible(str(field)) for field in as_fields(row))
                + in_line(row, several)
            )


def end_if_incomplete(is_whole: bool) -> None:
    """End with exit code 1 if the list lacks a broker; stderr has named it already."""
    if not is_whole:
        raise Exit(EXIT_FAILED)


def table_of(first: str, numbers: Sequence[str], caption: str) -> Table:
    """Return a table without rows: a column of names, then columns of numbers."""
    from rich.box import HORIZONTALS
    from rich.table import Table

    table = Table(caption=caption, caption_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column(first, overflow="fold", min_width=13)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table

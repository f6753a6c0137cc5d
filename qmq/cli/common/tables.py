"""Print tables on terminals of any width: numbers are never cut or broken, and no name is left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rich.box import HORIZONTALS
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

#: The least width of a column that folds. It is wider if one of its numbers is, since a number must not be broken.
_FOLDED_WIDTH: Final = 13
_WORD: Final = re.compile(r"(?:`[^`]*`|[^\s`])+|`")
_NUMBER: Final = re.compile(r"#?\b\d[\d,.]{0,30}\b", re.ASCII)


#: From this width on, a row of most tables is one line.
WIDE: Final = 120


def table_of(first: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table without rows: a column of names, then columns of numbers."""
    table = Table(box=HORIZONTALS, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold", min_width=_FOLDED_WIDTH)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_pairs(pairs: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """Print names and texts in two columns; long texts fold."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", min_width=_FOLDED_WIDTH)
    for name, text in pairs:
        table.add_row(name, text)
    print_table(table, console)


def folded(text: str, width: int) -> str:
    """Break a text into lines of *width* characters, only at spaces outside of backticks: commands can be copied, and
    names are not broken. A word that is longer has a line to itself, which the terminal folds.
    """
    lines = [""]
    for word in _WORD.findall(text):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def alarming(text: str, is_bad: object, colour: str = "red") -> str:
    """Return a cell, in *colour* if a person must act on it."""
    return f"[{colour}]{text}[/]" if is_bad else text


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table. It is wider than the terminal, which then wraps its lines, if the columns need more room.

    Columns with no_wrap are as wide as their contents; others fold.
    """
    console = Console() if console is None else console
    folded = list[tuple[Column, int]]()  # with its width if it did not fold
    for column in table.columns:
        lines = [line for cell in (column.header, *column.cells) for line in _plain(cell).split("\n")]
        column.width = longest = max(map(cell_len, lines))
        if not column.no_wrap:
            column.overflow = "fold"
            numbers = (len(number) for line in lines for number in _NUMBER.findall(line))
            least = max(column.min_width or 0, _FOLDED_WIDTH, *numbers)
            column.width = min(longest, least)
            folded.append((column, longest))
    least = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
    console.width = max(console.width, least)
    _widen(folded, console.width - least)
    console.print(table)


def _widen(folded: Sequence[tuple[Column, int]], room: int) -> None:
    """Share *room* among the columns that fold, as far as each can use it. Rich would cut other columns instead."""
    widths = {id(column): column.width or 0 for column, _ in folded}
    while room:
        narrow = [column for column, longest in folded if widths[id(column)] < longest]
        if not narrow:
            break
        column = min(narrow, key=lambda column: widths[id(column)])
        widths[id(column)] += 1
        room -= 1
    for column, _ in folded:
        column.width = widths[id(column)]


def _plain(cell: object) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)

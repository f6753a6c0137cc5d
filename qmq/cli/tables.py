"""Tables on terminals of any width: a number is never cut, for then it is another one, nor is a name away."""

from __future__ import annotations

from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: Columns that fold have at least so much.
_FOLDED_WIDTH: Final = 13


def print_table(table: Table, console: Console | None = None) -> None:
    """Print it; wider than the terminal, which then wraps its lines, where the columns need more. Those with no_wrap
    are as wide as what is in them, others fold.
    """
    console = Console() if console is None else console
    for column in table.columns:
        lines = [line for cell in (column.header, *column.cells) for line in _plain(cell).split("\n")]
        longest = max(map(cell_len, lines))
        column.min_width = longest if column.no_wrap else max(column.min_width or 0, min(longest, _FOLDED_WIDTH))
        column.width = column.min_width
    least = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
    for column in table.columns:
        column.width = None
    console.width = max(console.width, least)
    console.print(table)


def _plain(cell: object) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)

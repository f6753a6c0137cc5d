"""Which broker a row is of, shown where a client knows several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Row(Protocol):
    """A row of a list that is of one broker."""

    @property
    def broker(self) -> str: ...


def are_several(rows: Sequence[Row]) -> bool:
    """Whether the rows are of more brokers than one."""
    return len({row.broker for row in rows}) > 1


def in_cell(row: Row, shown: bool) -> str:
    """A further line of a table's cell."""
    return f"\n  at {row.broker}" if shown else ""


def in_line(row: Row, shown: bool) -> str:
    """A further field of a line."""
    return f"\t{row.broker}" if shown else ""

"""Work that takes several turns, so that it holds up nobody: a generator that yields after each piece how much it was.

The unit is about a microsecond. Whoever runs it goes on until a turn's part is done, and then waits for the next turn;
meanwhile everything may change.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

T = TypeVar("T")

#: A task in pieces; its return value is the result.
Work = Generator[int, None, T]

#: The work of one turn; a piece may go beyond it.
TURN_WORK: Final = 4_000
#: Subject numbers whose sequences are compared by columns, and names that are compared, for one unit.
NUMBERS_A_UNIT: Final = 16
#: Subject numbers of one piece.
PIECE: Final = 16_384


def whole(work: Work[T]) -> T:
    """Do all of a task at once, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result

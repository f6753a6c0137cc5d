"""How much tests try that could try for ever: a part of it by default, all of it with QMQ_EXAMPLES=100.

`make sim` and mutants ask for all of it.
"""

from __future__ import annotations

import os
from typing import Final

#: How many examples a generated test tries that names no number of its own.
EXAMPLES: Final = int(os.environ.get("QMQ_EXAMPLES", "20"))
_IS_ALL: Final = EXAMPLES >= 100


def part_of(count: int) -> int:
    """Return how many of *count* examples, or seeds, are tried: a quarter by default."""
    return count if _IS_ALL else -(-count // 4)


def every(step: int) -> int:
    """Return the step of a walk over bits or bytes that tries every *step*-th of them: twice as long by default."""
    return step if _IS_ALL else 2 * step

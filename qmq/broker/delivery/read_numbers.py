"""The numbers of reads, by which a ReadDone finds who has asked for it: whoever asks has a block of them."""

from __future__ import annotations

import enum
from typing import Final

_BLOCK_BITS: Final = 48


class Asker(enum.IntEnum):
    """Who asks for reads; the number of its block."""

    PULL_LOG = 0  # syncs of it
    PULLS = 1  # and commands that wait for what is to be looked up
    REPORTS = 2
    HISTORY = 3  # lists of batches
    DUE = 4  # what is due to be delivered
    CANCEL = 5  # what is to be cancelled
    RESTORE = 6  # what may have been restored before
    RETENTION = 7  # a look at a segment
    FORWARDING = 8  # what is to be copied out of one


def first_number(asker: Asker) -> int:
    """The first number of its block; the others count up from there."""
    return asker << _BLOCK_BITS


def asker_of(number: int) -> Asker:
    """Whose block that number is of."""
    return Asker(number >> _BLOCK_BITS)

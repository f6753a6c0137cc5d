"""An answer to a pull that is read while it comes: whole batches of it are verified before the rest is there.

So the time that this takes passes while the broker sends on, and bytes are verified while the processor has them.
"""

from __future__ import annotations

import struct
from typing import Final

from qmq.errors import BadBatch
from qmq.format.layout import PIECE_HEADER_SIZE
from qmq.format.pieces import SIZE_OFFSET, AnswerDamage, read_from, read_one
from qmq.format.run import Run

_SIZE: Final = struct.Struct("<I")


class PartialAnswer:
    """An answer of which not all bytes are there; *answer* is where they go."""

    __slots__ = ("_answer", "_damaged", "_offset", "_runs", "_stuck")

    def __init__(self, answer: memoryview) -> None:
        self._answer = answer
        self._offset = 0  # what lies before is read
        self._runs: list[Run] = []
        self._damaged: list[AnswerDamage] = []
        self._stuck = False  # nothing can be known of what lies there as long as not all has come

    def more(self, filled: int) -> None:
        """The first *filled* bytes are there: read what of them is whole."""
        while not self._stuck and self._is_whole(filled - self._offset):
            try:
                self._offset += read_one(self._answer[self._offset : filled], self._runs, self._damaged)
            except BadBatch:
                self._stuck = True

    def _is_whole(self, there: int) -> bool:
        """Whether what comes next lies within so many bytes, as far as its own size tells."""
        if there < PIECE_HEADER_SIZE:
            return False
        size: int = _SIZE.unpack_from(self._answer, self._offset + SIZE_OFFSET)[0]
        return 0 < size <= there

    def all(self) -> tuple[list[Run], list[AnswerDamage]]:
        """Everything is there: as `pieces.read_answer` says."""
        read_from(self._answer, self._offset, self._runs, self._damaged)
        self._offset = len(self._answer)
        return self._runs, self._damaged

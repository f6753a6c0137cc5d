"""The broker's own batches of what is delayed: due messages that were sent one by one are gathered for one."""

from __future__ import annotations

from typing import Final

from qmq.broker.delay.items import DelayedRange
from qmq.format.due import Due, Single, join_singles, single_of
from qmq.format.layout import DELAY_PARTITION

#: Messages and bytes of one batch, about; what is larger than the second by itself is a batch of its own.
_MOST: Final = 512
_MOST_BYTES: Final = 256 << 10


class DueBatch:
    """What is gathered by now, for a log whose segments have so many bytes."""

    def __init__(self, segment_bytes: int) -> None:
        self._most_bytes = min(_MOST_BYTES, segment_bytes // 3)  # what is full may be twice as large
        self.parts: list[DelayedRange] = []
        self._singles: list[Single] = []
        self._bytes = 0

    def add(self, batch: memoryview, part: DelayedRange) -> bool:
        """Take *part*, which is all of *batch*; False where it is more than one message, large, or rotten."""
        single = single_of(batch) if len(batch) <= self._most_bytes else None
        if single is None:
            return False
        self.parts.append(part)
        self._singles.append(single)
        self._bytes += len(batch)
        return True

    @property
    def is_full(self) -> bool:
        """It is enough for a batch."""
        return len(self.parts) >= _MOST or self._bytes >= self._most_bytes

    def made(self, store_id: bytes) -> tuple[list[DelayedRange], Due]:
        """What was gathered, and the batch of it."""
        return self.parts, join_singles(self._singles, store_id, DELAY_PARTITION)

    def clear(self) -> None:
        """That is appended."""
        self.parts, self._singles, self._bytes = [], [], 0

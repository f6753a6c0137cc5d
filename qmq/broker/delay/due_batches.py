"""Join messages that were sent one by one and are due together into one batch."""

from __future__ import annotations

from typing import Final

from qmq.broker.delay.items import DelayedRange
from qmq.format.copies.due import Due, SingleBatch, join_singles, single_of
from qmq.format.layout import DELAY_PARTITION

#: About the most messages and bytes of one batch; a message of more bytes is a batch of its own.
_MOST: Final = 512
_MOST_BYTES: Final = 256 << 10


class DueBatch:
    """A batch that collects single messages, for a log with segments of *segment_bytes*."""

    def __init__(self, segment_bytes: int) -> None:
        self._most_bytes = min(_MOST_BYTES, segment_bytes // 3)  # the last message may double it
        self.parts: list[DelayedRange] = []
        self._singles: list[SingleBatch] = []
        self._bytes = 0

    def add(self, batch: memoryview, part: DelayedRange) -> bool:
        """Add *part*, which is all of *batch*; return False when that has several messages, is large, or is damaged."""
        single = single_of(batch) if len(batch) <= self._most_bytes else None
        if single is None:
            return False
        self.parts.append(part)
        self._singles.append(single)
        self._bytes += len(batch)
        return True

    @property
    def is_full(self) -> bool:
        """Whether the batch is large enough to be written."""
        return len(self.parts) >= _MOST or self._bytes >= self._most_bytes

    def made(self, store_id: bytes) -> tuple[list[DelayedRange], Due]:
        """Return the collected ranges and the batch made of them."""
        return self.parts, join_singles(self._singles, store_id, DELAY_PARTITION)

    def clear(self) -> None:
        """Begin the next batch."""
        self.parts, self._singles, self._bytes = [], [], 0

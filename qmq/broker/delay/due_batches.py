"""Join messages that were sent one by one and are due together into one batch."""

from __future__ import annotations

from typing import Final

from qmq.broker.delay.items import DelayedRange
from qmq.format.copies.due import Due, SingleBatch, join_singles, single_of
from qmq.format.layout import DELAY_PARTITION
from qmq.format.source import MAX_RECORD_BYTES, MOST_SOURCE_BYTES

#: About the most messages and bytes of one batch; a message of more bytes is a batch of its own.
_MOST: Final = 512
_MOST_BYTES: Final = 256 << 10


class DueBatch:
    """A batch that collects single messages, for a log with segments of *segment_bytes*."""

    def __init__(self, segment_bytes: int) -> None:
        self._most_bytes = min(_MOST_BYTES, segment_bytes // 3)  # the last message may double it
        self.parts: list[DelayedRange] = []
        self._singles: list[SingleBatch] = []
        self._sources = set[bytes]()
        self._bytes = self._source_bytes = 0

    def add(self, batch: memoryview, part: DelayedRange) -> bool:
        """Add *part*, which is all of *batch*; return False when that has several messages, is large, or is damaged."""
        single = single_of(batch) if len(batch) <= self._most_bytes else None
        if single is None:
            return False
        self.parts.append(part)
        self._singles.append(single)
        self._bytes += len(batch)
        if single.source not in self._sources:
            self._sources.add(single.source)
            self._source_bytes += len(single.source)
        return True

    @property
    def is_full(self) -> bool:
        """Whether the batch is large enough to be written."""
        return (
            len(self.parts) >= _MOST
            or self._bytes >= self._most_bytes
            or self._source_bytes > MOST_SOURCE_BYTES - MAX_RECORD_BYTES
        )

    def made(self, store_id: bytes) -> tuple[list[DelayedRange], Due]:
        """Return the collected ranges and the batch made of them."""
        return self.parts, join_singles(self._singles, store_id, DELAY_PARTITION)

    def clear(self) -> None:
        """Begin the next batch."""
        self.parts, self._singles, self._sources, self._bytes, self._source_bytes = [], [], set(), 0, 0

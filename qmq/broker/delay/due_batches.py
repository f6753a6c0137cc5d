"""The broker's own batches of what is delayed: due messages that were sent one by one are gathered for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qmq.broker.delay.items import DelayedRange
from qmq.broker.ports.commands import Now
from qmq.broker.publish.staging import Staged
from qmq.errors import QmqError
from qmq.format.due import Due, Single, join_singles, single_of
from qmq.format.layout import DELAY_PARTITION

if TYPE_CHECKING:
    from qmq.broker.delay.delay import Delaying

#: Messages and bytes of one batch, about; what is larger than the second by itself is a batch of its own.
_MOST: Final = 512
_MOST_BYTES: Final = 256 << 10


class Joining:
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


class Cancelling:
    """The batch that cancels a message."""

    def __init__(self, delaying: Delaying, position: int, subject: str) -> None:
        self._delaying = delaying
        self._position = position
        self._subject = subject

    def stored(self, partition: int, batch: Staged) -> None:
        """It is written, and the message is not delivered any more."""
        self._delaying.cancelled(self._position, self._subject, batch.position)

    def refused(self, error: QmqError) -> None:
        """Who asked is told."""

    def unknown(self, error: QmqError) -> None:
        """Who asked is told."""


class Falling:
    """A batch of messages that are due."""

    def __init__(self, delaying: Delaying, parts: list[DelayedRange], due: Due, now: Now) -> None:
        self._delaying = delaying
        self._parts = parts
        self._due = due
        self._now = now

    def stored(self, partition: int, batch: Staged) -> None:
        """It is written."""
        self._delaying.delivered(self._parts, self._due.checked, partition, batch.end)

    def refused(self, error: QmqError) -> None:
        """It is not."""
        self._delaying.not_delivered(self._parts, self._now)

    def unknown(self, error: QmqError) -> None:
        """The next start may find it; else it delivers it."""
        self._delaying.delivered(self._parts, self._due.checked, partition=-1, end=1 << 63)

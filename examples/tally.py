"""What each group of the demo received, held against what the file says that it must receive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from examples.retail import InvoiceMessage


class ConsumerTally:
    """What one consumer received. Times are seconds of the monotonic clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received = 0
        self.started_at = 0.0
        self.ended_at = 0.0

    def count_one(self, now: float) -> None:
        if not self.received:
            self.started_at = now
        self.ended_at = now
        self.received += 1

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


class GroupTally:
    """What one group received of this run, invoice by invoice, and what earlier runs had left for it."""

    def __init__(self, name: str, expected: Iterable[InvoiceMessage], consumers: Iterable[str]) -> None:
        self.name = name
        self.consumers = {consumer: ConsumerTally(consumer) for consumer in consumers}
        #: When anything came last, in seconds of the monotonic clock.
        self.heard_at = time.monotonic()
        self.left_over = 0
        self.changed = 0
        self._expected = {message.key: message for message in expected}
        self._seen: Counter[str] = Counter()
        self._unexpected = 0

    def take(self, consumer: str, message: InvoiceMessage, this_run: bool) -> None:
        """Count one message that *consumer* received."""
        self.heard_at = time.monotonic()
        self.consumers[consumer].count_one(self.heard_at)
        if not this_run:
            self.left_over += 1
            return
        self._seen[message.key] += 1
        wanted = self._expected.get(message.key)
        if wanted is None:
            self._unexpected += 1
        elif wanted != message:
            self.changed += 1

    @property
    def expected(self) -> int:
        return len(self._expected)

    @property
    def received(self) -> int:
        """Messages of this run, and those of earlier runs."""
        return sum(consumer.received for consumer in self.consumers.values())

    @property
    def seconds(self) -> float:
        """From the first message to the last."""
        active = [consumer for consumer in self.consumers.values() if consumer.received]
        if not active:
            return 0.0
        return max(consumer.ended_at for consumer in active) - min(consumer.started_at for consumer in active)

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def missing(self) -> int:
        return len(self._expected.keys() - self._seen.keys())

    @property
    def doubled(self) -> int:
        """Messages that came once too often, or that the file does not have for this group."""
        return sum(count - 1 for count in self._seen.values()) + self._unexpected

    @property
    def verdict(self) -> Mapping[str, int]:
        """All 0 when the group received exactly what the file holds."""
        return {"missing": self.missing, "doubled": self.doubled, "changed": self.changed}

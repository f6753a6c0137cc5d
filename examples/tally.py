"""Compare what each group of the demo handled with the invoices of the file."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from examples.packer import digest
from examples.retail import InvoiceMessage


class ConsumerTally:
    """The counts of one consumer. Times are seconds of the monotonic clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handled = 0
        self.attempts = 0
        self.started_at = 0.0
        self.ended_at = 0.0

    def count_one(self, now: float) -> None:
        if not self.handled:
            self.started_at = now
        self.ended_at = now
        self.handled += 1

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


class GroupTally:
    """What one group handled of this run, invoice by invoice, and of earlier runs."""

    def __init__(self, name: str, expected: Iterable[InvoiceMessage], consumers: Iterable[str]) -> None:
        self.name = name
        self.consumers = {consumer: ConsumerTally(consumer) for consumer in consumers}
        #: The time of the last report, in seconds of the monotonic clock.
        self.heard_at = time.monotonic()
        self.left_over = 0
        self.changed = 0
        self.failed = 0
        #: Messages handled again because a kill came before the confirmed acknowledgement, which may happen.
        self.again = 0
        #: Messages handled again after a confirmed acknowledgement, or not in the file, which must not happen.
        self.doubled = 0
        #: The number of messages handled at attempt 1, 2, ...
        self.by_attempt: Counter[int] = Counter()
        self._expected = {message.key: (message.subject, digest(message.body)) for message in expected}
        self._seen: set[str] = set()
        self._confirmed: set[str] = set()
        self._progress = asyncio.Event()

    def hear(self, consumer: str, what: str, fields: Sequence[Any]) -> None:
        """Record a report of a consumer; examples/packer.py lists the reports."""
        self.heard_at = time.monotonic()
        if what == "began":
            self.consumers[consumer].attempts += 1
        elif what == "failed":
            self.failed += 1
        elif what == "handled":
            self._handled(consumer, *fields)
        elif what == "confirmed":
            self._confirmed.update(fields[0])

    def _handled(self, consumer: str, subject: str, key: str, body: str, attempt: int, this_run: bool) -> None:
        if this_run:
            wanted = self._expected.get(key)
            if key in self._confirmed or wanted is None:
                self.doubled += 1
                return
            if key in self._seen:
                self.again += 1
                return
            self._seen.add(key)
            self.changed += wanted != (subject, body)
        else:
            self.left_over += 1
        self.by_attempt[attempt] += 1
        self.consumers[consumer].count_one(self.heard_at)
        self._progress.set()

    async def handles(self, count: int) -> None:
        """Wait until *count* messages of this run are handled."""
        while len(self._seen) < count:
            self._progress.clear()
            await self._progress.wait()

    @property
    def expected(self) -> int:
        return len(self._expected)

    @property
    def handled(self) -> int:
        """Return how many messages of this run and earlier runs were handled."""
        return sum(consumer.handled for consumer in self.consumers.values())

    @property
    def attempts(self) -> int:
        """Return how often work on a message began."""
        return sum(consumer.attempts for consumer in self.consumers.values())

    @property
    def cut_short(self) -> int:
        """Return how many attempts ended because the consumer was killed or stopped."""
        return self.attempts - self.handled - self.failed - self.again - self.doubled

    @property
    def seconds(self) -> float:
        """Return the seconds from the first message to the last."""
        active = [consumer for consumer in self.consumers.values() if consumer.handled]
        if not active:
            return 0.0
        return max(consumer.ended_at for consumer in active) - min(consumer.started_at for consumer in active)

    @property
    def complete(self) -> bool:
        return self.missing == 0

    @property
    def missing(self) -> int:
        return len(self._expected.keys() - self._seen)

    @property
    def verdict(self) -> Mapping[str, int]:
        """Return the counts of wrong messages: all 0 if the group handled exactly the invoices of the file."""
        return {"missing": self.missing, "doubled": self.doubled, "changed": self.changed}

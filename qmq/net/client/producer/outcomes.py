"""What a client knows of its sends whichever broker they go to: their numbers, who waits for them, what has failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from qmq.errors import QmqError, SendFailed, SendFailure
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.batch import Outgoing, Waiter, failure_of

log = logging.getLogger("qmq.client")

#: Failures of messages that nobody awaits, kept for the next flush; more are only counted.
MAX_FAILURES: Final = 100_000


class _Flusher(NamedTuple):
    """Somebody who waits until these batches have ended."""

    batches: set[Outgoing]
    waiter: Waiter


class Outcomes:
    """Of all batches of one client. Not for several threads."""

    def __init__(self, producer_id: bytes, accumulator: Accumulator) -> None:
        self.producer_id = producer_id
        #: The producer sequence of the next message. No number is used at two brokers.
        self.next_sequence = 0
        #: When a batch was last stored, anywhere.
        self.progress_at = 0.0
        self._accumulator = accumulator
        self._flushers: list[_Flusher] = []
        self._failures: list[SendFailure] = []
        self._more_failures = 0

    def take_numbers(self, count: int) -> int:
        """The first of *count* producer sequences, which nothing else gets."""
        first = self.next_sequence
        self.next_sequence += count
        return first

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, batch: Outgoing, error: QmqError, unknown: bool) -> None:
        """A batch has failed for good; *unknown*: it may be stored at the broker that it was last written to."""
        unknown = unknown or batch.maybe_duplicate
        failures = batch.failed(error, unknown)
        if failures:
            outcome = "may not have been stored" if unknown else "were not stored"
            log.error("%d messages sent without waiting %s: %s", len(failures), outcome, error)
            room = MAX_FAILURES - len(self._failures)
            self._failures += failures[:room]
            self._more_failures += max(0, len(failures) - room)
        self.ended(batch)

    def replaced(self, batch: Outgoing, parts: Sequence[Outgoing]) -> None:
        """The messages of a batch go as these from now on: who waits for it waits for them."""
        self._accumulator.replaced(batch, parts)
        for flusher in self._flushers:
            if batch in flusher.batches:
                flusher.batches.discard(batch)
                flusher.batches.update(parts)

    def ended(self, batch: Outgoing) -> None:
        """A batch is stored, or has failed: it is not queued any more."""
        self._accumulator.ended(batch)
        if self._flushers:
            for flusher in self._flushers:
                flusher.batches.discard(batch)
            self._end_flushers()

    # --- flush -------------------------------------------------------------------------------------------------------

    @property
    def is_flushing(self) -> bool:
        """Somebody waits for all that is queued."""
        return bool(self._flushers)

    def flush(self, waiter: Waiter) -> None:
        """Give *waiter* None once all batches that there are now have ended."""
        self._flushers.append(_Flusher(set(self._accumulator.unfinished), waiter))
        self._end_flushers()

    def _end_flushers(self) -> None:
        waiting = []
        for flusher in self._flushers:
            if flusher.waiter.done():
                continue
            if flusher.batches:
                waiting.append(flusher)
            else:
                flusher.waiter.set_result(None)
        self._flushers = waiting

    def take_failure(self) -> SendFailed | None:
        """The failures of messages that nobody awaited since the last call, as one error."""
        if not self._failures:
            return None
        error = failure_of(self._failures, self._more_failures)
        self._failures, self._more_failures = [], 0
        return error

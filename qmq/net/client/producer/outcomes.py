"""The outcomes of a client's sends at all brokers: their producer sequences, waiting flushes, and failures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from qmq.errors import QmqError, SendFailed, SendFailure
from qmq.format.source import NO_SOURCE
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.batch import OutgoingBatch, Waiter, failure_of

log = logging.getLogger("qmq.client")

#: Failures of ``send_nowait`` that wait for the next flush; further ones are only counted.
MAX_FAILURES: Final = 100_000


class _Flusher(NamedTuple):
    """A flush that waits until these batches have ended."""

    batches: set[OutgoingBatch]
    waiter: Waiter


class Outcomes:
    """The outcomes of all batches of one client. One thread uses it."""

    def __init__(self, producer_id: bytes, accumulator: Accumulator, source: bytes = NO_SOURCE) -> None:
        self.producer_id = producer_id
        #: The source in the client's batches: the program's name, and room for what the broker stamps.
        self.source = source
        #: The producer sequence of the next message. No number is used at two brokers.
        self.next_sequence = 0
        #: When a batch was last stored, anywhere.
        self.progress_at = 0.0
        self._accumulator = accumulator
        self._flushers: list[_Flusher] = []
        self._failures: list[SendFailure] = []
        self._more_failures = 0

    def take_numbers(self, count: int) -> int:
        """Reserve *count* producer sequences, and return the first."""
        first = self.next_sequence
        self.next_sequence += count
        return first

    # --- ends --------------------------------------------------------------------------------------------------------

    def fail(self, batch: OutgoingBatch, error: QmqError, unknown: bool) -> None:
        """End a batch that has failed; *unknown*: its last broker may have stored it."""
        unknown = unknown or batch.maybe_duplicate
        failures = batch.failed(error, unknown)
        if failures:
            outcome = "may not have been stored" if unknown else "were not stored"
            log.error("%d messages of send_nowait %s: %s", len(failures), outcome, error)
            left = MAX_FAILURES - len(self._failures)
            self._failures += failures[:left]
            self._more_failures += max(0, len(failures) - left)
        self.ended(batch)

    def replaced(self, batch: OutgoingBatch, parts: Sequence[OutgoingBatch]) -> None:
        """Replace a batch by *parts*, which have its messages: flushes wait for them instead."""
        self._accumulator.replaced(batch, parts)
        for flusher in self._flushers:
            if batch in flusher.batches:
                flusher.batches.discard(batch)
                flusher.batches.update(parts)

    def ended(self, batch: OutgoingBatch) -> None:
        """End a batch that is stored or has failed: it is no longer queued."""
        self._accumulator.ended(batch)
        if self._flushers:
            for flusher in self._flushers:
                flusher.batches.discard(batch)
            self._end_flushers()

    # --- flush -------------------------------------------------------------------------------------------------------

    @property
    def is_flushing(self) -> bool:
        """Whether a flush waits."""
        return bool(self._flushers)

    def flush(self, waiter: Waiter) -> None:
        """Wake *waiter* with None once all present batches have ended."""
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
        """Return the failures of ``send_nowait`` since the last call as one error; None without any."""
        if not self._failures:
            return None
        error = failure_of(self._failures, self._more_failures)
        self._failures, self._more_failures = [], 0
        return error

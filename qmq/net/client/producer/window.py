"""The window of batches in flight to one broker, and their retries, without I/O. Time is an argument.

``next_batch`` returns the batch to write, oldest first; ``stored``, ``refused`` and ``disconnected`` take its outcome.
A batch has the same bytes in all tries. Times are seconds of one monotonic clock, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qmq.errors import (
    BadBatch,
    BadBytes,
    ConnectionLost,
    Forbidden,
    InternalError,
    InvalidName,
    InvalidOption,
    MessageTooLarge,
    ProtocolError,
    QmqError,
    RemoteError,
    SequenceForgotten,
    StorageError,
    SyncFailed,
    TooManySubjects,
)
from qmq.net.client.backoff import Backoff
from qmq.net.client.producer.accumulator import Accumulator, SendLimits
from qmq.net.client.producer.batch import ANY_BROKER, OutgoingBatch, Waiter
from qmq.net.client.producer.duplicates import no_unique_texts, read_duplicates
from qmq.net.client.producer.halving import halves_of
from qmq.net.client.producer.outcomes import Outcomes

#: Refusals after which the batch may be stored or not; docs/PROTOCOL.md lists them.
_OUTCOME_UNKNOWN: Final = (BadBytes, InternalError, RemoteError, SequenceForgotten, SyncFailed)

#: Refusals because of one message, or of one subject: the rest of the batch is sent without it.
_OF_A_SUBJECT: Final = (InvalidName, TooManySubjects, Forbidden)
_OF_A_MESSAGE: Final = (InvalidOption, MessageTooLarge)

#: While this many batches are in flight, messages collect until an answer comes, or until they fill a batch: a busy
#: broker gets fewer and larger batches, an idle one gets each message at once.
AT_ONCE: Final = 2
#: A batch whose bytes have moved for this long is large for its link.
SLOW_S: Final = 2.0


class SendWindow:
    """The batches of a client for one broker. One thread uses it."""

    def __init__(self, outcomes: Outcomes, accumulator: Accumulator, send_timeout: float, number: int = 0) -> None:
        """*number* is that of the broker among the addresses of the client."""
        self._number = number
        #: The reason why no batch is sent now.
        self.last_error: QmqError | None = None
        #: Whether new batches go to this broker.
        self.takes_new = True
        self.is_connected = False
        self._outcomes = outcomes
        self._accumulator = accumulator
        self._send_timeout = send_timeout
        self._limits = SendLimits()
        self._store_id = b""
        self._retries: list[OutgoingBatch] = []  # by producer sequence
        self._in_flight: dict[int, OutgoingBatch] = {}  # by request, as written
        self._given_up: set[int] = set()  # requests whose batch has failed, but that may still be answered
        # Batches with a retryable refusal, and those that were in flight with them. Until all of these have ended,
        # batches go one at a time: this keeps their order, and the broker does not take so many others meanwhile that
        # it forgets whether it has these.
        self._careful: set[OutgoingBatch] = set()
        self._backoff = Backoff()
        self._retry_at = 0.0
        #: The time at which this broker last stored a batch, and that at which bytes of batches last moved.
        self.progress_at = self._moved_at = 0.0

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, store_id: bytes, limits: SendLimits) -> None:
        """Send to a broker that is connected now. Batches that another store may have stored fail as unknown."""
        self._store_id = store_id
        self._limits = limits
        self.is_connected = True
        if self.takes_new:
            self._accumulator.set_limits(limits)
        self.last_error = None
        self._retry_at = 0.0
        self._backoff.reset()
        for batch in [batch for batch in self._retries if batch.answer_lost and batch.store_id != store_id]:
            self._retries.remove(batch)
            self._fail(batch, batch.last_error or ConnectionLost("the connection was lost"), unknown=True)

    def continue_after(self, last_sequence: int | None) -> None:
        """Continue behind the last producer sequence that another store knows. Call it after ``connected``."""
        numbers = self._outcomes
        lowest = self._retries[0].producer_sequence if self._retries else numbers.next_sequence
        if last_sequence is None or last_sequence < lowest:
            return
        numbers.next_sequence = max(numbers.next_sequence, last_sequence + 1)
        for batch in self._retries:  # none of them can be stored: see connected
            batch.renumber(numbers.take_numbers(batch.count))

    def disconnected(self, error: QmqError, now: float) -> None:
        """Send the batches in flight again, in order, on the next connection: this one is lost."""
        self.last_error = error
        self.is_connected = False
        self._given_up.clear()
        for batch in self._in_flight.values():
            if not batch.answer_lost:
                batch.answer_lost = True
                batch.unknown_since = now
            batch.last_error = error
            self._retries.append(batch)
        self._in_flight.clear()
        self._retries.sort(key=_by_sequence)

    def unanswered(self, now: float) -> tuple[bytes, int, int] | None:
        """Return what a broker is told of the batches whose answers were lost: the producer id, the sequence behind the
        last of them, and the milliseconds since the first was written. None where there are none.
        """
        lost = [batch for batch in self._retries if batch.answer_lost]
        if not lost:
            return None
        end = max(batch.producer_sequence + batch.count for batch in lost)
        age = now - min(batch.first_written_at for batch in lost)
        return self._outcomes.producer_id, end, max(0, int(age * 1_000))

    # --- other brokers -----------------------------------------------------------------------------------------------

    def take_new(self, does: bool) -> None:
        """Choose whether new batches go to this broker."""
        if does and not self.takes_new:
            self._accumulator.set_limits(self._limits)
        self.takes_new = does

    def is_fit(self, now: float) -> bool:
        """Return whether the broker is connected and has refused nothing just now."""
        return self.is_connected and now >= self._retry_at

    def give_away(self, now: float, failover_after: float | None) -> list[OutgoingBatch]:
        """Remove and return the batches that another broker may get now: those that this one cannot have stored, and
        those without an answer for *failover_after* seconds (None: these stay). A broker that is fit gives none away.
        """
        if self.is_fit(now):
            return []
        given = []
        for batch in self._retries:
            if batch.broker != ANY_BROKER:  # another broker could not keep the order of its order keys
                continue
            if not batch.answer_lost:
                given.append(batch)
            elif failover_after is not None and now >= batch.unknown_since + failover_after:
                batch.answer_lost = False
                batch.maybe_duplicate = True
                given.append(batch)
        for batch in given:
            self._retries.remove(batch)
            self._careful.discard(batch)
        return given

    def take_over(self, batches: Sequence[OutgoingBatch]) -> None:
        """Send batches of another broker here, under new producer sequences."""
        for batch in batches:
            batch.renumber(self._outcomes.take_numbers(batch.count))
        self._retries += batches
        self._retries.sort(key=_by_sequence)

    # --- out ---------------------------------------------------------------------------------------------------------

    def next_batch(self, request: int, now: float, wall_us: int) -> OutgoingBatch | None:
        """Return the built batch to write now as *request*; None if there is none, or it has to wait."""
        if len(self._in_flight) + len(self._given_up) >= self._limits.producer_window:
            return None
        if self._careful and self._in_flight:
            return None
        if self._retries:
            if now < self._retry_at:
                return None
            batch = self._retries.pop(0)
        else:
            new = self._take_new_batch(now)
            if new is None:
                return None
            batch = new
        if batch.has_unique and not self._limits.takes_unique:  # it would store a repeat
            self._fail(batch, no_unique_texts(), batch.answer_lost)
            return self.next_batch(request, now, wall_us)
        if batch.buffers is None:
            outcomes = self._outcomes
            batch.build(wall_us, outcomes.producer_id, outcomes.next_sequence, outcomes.source)
            self._outcomes.take_numbers(batch.count)
            batch.first_written_at = now
        self._begin(batch, request, now)
        return batch

    def single(
        self, request: int, subject: str, body: bytes, waiter: Waiter, now: float, wall_us: int, unique: bytes = b""
    ) -> OutgoingBatch | None:
        """Return a built batch of one plain message of the usual durability, to write now as *request*; None if it has
        to queue, as others are queued or in flight, or as it has to be checked. *unique* is the hash of its unique
        text.
        """
        if self._given_up or not self.takes_new:
            return None
        batch = self._accumulator.take_single(subject, body, waiter, now)
        if batch is not None:
            outcomes = self._outcomes
            if unique:
                batch.build_single_unique(
                    unique, wall_us, outcomes.producer_id, outcomes.next_sequence, outcomes.source
                )
            else:
                batch.build_single(wall_us, outcomes.producer_id, outcomes.next_sequence, outcomes.source)
            outcomes.next_sequence += 1
            batch.first_written_at = now
            self._begin(batch, request, now)
        return batch

    def _begin(self, batch: OutgoingBatch, request: int, now: float) -> None:
        """Put a built batch in flight as *request*."""
        batch.written_at = now
        batch.store_id = self._store_id
        self._in_flight[request] = batch

    def _take_new_batch(self, now: float) -> OutgoingBatch | None:
        if len(self._in_flight) >= AT_ONCE and not self._accumulator.has_sealed(self._takes):
            return None
        return self._accumulator.take(now, self._outcomes.is_flushing, self._takes)

    def _takes(self, broker: int) -> bool:
        """Return whether new batches for that broker go here."""
        return self.takes_new if broker == ANY_BROKER else broker == self._number

    def wake_at(self) -> float | None:
        """Return the time from which ``next_batch`` has a batch; None: only after an answer or a new message."""
        if len(self._in_flight) + len(self._given_up) >= self._limits.producer_window or (
            self._careful and self._in_flight
        ):
            return None
        if self._retries:
            return self._retry_at
        if len(self._in_flight) >= AT_ONCE and not self._accumulator.has_sealed(self._takes):
            return None
        return self._accumulator.next_at(self._takes)

    def has_waiting(self) -> bool:
        """Return whether there is a batch to write, now or later."""
        return bool(self._retries) or self._accumulator.has_any(self._takes)

    def silent_since(self) -> float | None:
        """Return the time since which the broker owes an answer and no bytes have moved; None if it owes none."""
        if not self._in_flight:
            return None
        return max(min(batch.written_at for batch in self._in_flight.values()), self.progress_at, self._moved_at)

    def moved(self, now: float, seconds: float) -> None:
        """Give the batches in flight more time: their bytes, or those before them, have moved in the last *seconds*."""
        if self._in_flight:
            self._moved_at = now
            for batch in self._in_flight.values():
                batch.moved_s += min(seconds, now - batch.written_at)

    @property
    def was_slow(self) -> bool:
        """Whether bytes of a batch in flight have been on their way for long."""
        return any(batch.moved_s >= SLOW_S for batch in self._in_flight.values())

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def stored(
        self,
        request: int,
        position: int,
        stored_at_us: int,
        partition: int,
        store_id: bytes,
        first_sequences: Sequence[int],
        now: float,
        duplicates: bytes = b"",
    ) -> None:
        """End a batch that the broker has stored, but for *duplicates*. Raises ProtocolError if the answer does not fit
        the batch.
        """
        batch = self._in_flight.get(request)
        if batch is None:
            self._given_up.discard(request)
            return
        if len(first_sequences) != (batch.built_runs or len(batch.runs)):
            raise ProtocolError(f"SENT for a batch of {len(batch.runs)} runs has {len(first_sequences)} sequences")
        left_out = read_duplicates(duplicates, batch.count) if duplicates else None
        del self._in_flight[request]
        self.progress_at = self._outcomes.progress_at = now
        if self._backoff.tries:
            self._backoff.reset()
        if left_out is None:
            batch.stored(position, stored_at_us, partition, store_id, first_sequences)
        else:
            batch.stored_without(left_out, position, stored_at_us, partition, store_id, first_sequences)
        if self._careful:
            self._careful.discard(batch)
        self._outcomes.ended(batch)

    def refused(self, request: int, error: QmqError, now: float) -> None:
        """Take the refusal of a batch: send it again later, or in halves; else it has failed."""
        batch = self._in_flight.pop(request, None)
        if batch is None:
            self._given_up.discard(request)
            return
        batch.last_error = error
        was_doubted, batch.is_doubted = batch.is_doubted, isinstance(error, BadBatch)
        if not error.retryable and (was_doubted or not batch.is_doubted):
            if _may_spare_others(batch, error):
                self._halve(batch)
                return
            is_unknown = isinstance(error, _OUTCOME_UNKNOWN) or type(error) is StorageError
            self._fail(batch, error, batch.answer_lost or is_unknown)
            return
        self._retries.append(batch)
        self._retries.sort(key=_by_sequence)
        self._careful.update(self._retries, self._in_flight.values())
        if now >= self._retry_at:  # else it was in flight together with one that was refused just now
            self._retry_at = now + self._backoff.next_delay()

    def _halve(self, batch: OutgoingBatch) -> None:
        """Send both halves of a batch that was refused because of a message: in the end only this message fails.

        The halves keep its producer sequences: a batch whose answer was lost may still be on its way, and those behind
        it, which the broker refuses for now, come after them.
        """
        halves = halves_of(batch)
        self._outcomes.replaced(batch, halves)
        self._careful.discard(batch)
        self._careful.update(halves)
        self._retries += halves
        self._retries.sort(key=_by_sequence)

    def expire(self, now: float) -> None:
        """Fail batches that were tried for ``send_timeout``, or waited that long while no batch was stored. Call it now
        and then: what joins a batch between two calls waits together.
        """
        for request, batch in list(self._in_flight.items()):
            if now >= self._expires_at(batch):
                del self._in_flight[request]
                self._given_up.add(request)
                self._fail(batch, self._timed_out(batch), unknown=True)
        for batch in [b for b in self._retries if now >= self._expires_at(b)]:
            self._retries.remove(batch)
            self._fail(batch, self._timed_out(batch), batch.answer_lost)
        timeout = self._send_timeout
        for broker, progress_at in ((ANY_BROKER, self._outcomes.progress_at), (self._number, self.progress_at)):
            progress_at = max(progress_at, self._moved_at)
            if self._takes(broker):
                for batch in self._accumulator.remove(
                    lambda since, last=progress_at: now >= max(since, last) + timeout,  # type: ignore[misc]
                    broker.__eq__,
                ):
                    self._fail(batch, self._timed_out(batch), unknown=False)
        self._accumulator.seal_due(now, self._takes)

    def _expires_at(self, batch: OutgoingBatch) -> float:
        return batch.first_written_at + self._send_timeout + min(batch.moved_s, self._limits.most_moved_s)

    def _timed_out(self, batch: OutgoingBatch) -> QmqError:
        cause = batch.last_error or self.last_error
        if cause is None:
            return ConnectionLost(f"the broker did not answer within the send_timeout of {self._send_timeout:g} s")
        bound = ""
        if batch.broker != ANY_BROKER:
            bound = "; no other broker could keep the order of these order keys"
            if batch.has_unique:
                bound = "; no other broker knows what was sent before with these unique texts"
        return type(cause)(f"tried for the send_timeout of {self._send_timeout:g} s, last: {cause}{bound}")

    def abandon(self, error: QmqError) -> None:
        """Fail all batches with *error*."""
        in_flight, self._in_flight = self._in_flight, {}
        retries, self._retries = self._retries, []
        for batch in in_flight.values():
            self._fail(batch, error, unknown=True)
        for batch in retries:
            self._fail(batch, error, batch.answer_lost)
        for batch in self._accumulator.remove(lambda since: True, self._takes):
            self._fail(batch, error, unknown=False)

    def _fail(self, batch: OutgoingBatch, error: QmqError, unknown: bool) -> None:
        self._careful.discard(batch)
        self._outcomes.fail(batch, error, unknown)


def _may_spare_others(batch: OutgoingBatch, error: QmqError) -> bool:
    """Return whether the broker may take some messages of a refused batch without the others."""
    is_of_a_subject = isinstance(error, _OF_A_SUBJECT)
    return len(batch.runs) > 1 if is_of_a_subject else batch.count > 1 and isinstance(error, _OF_A_MESSAGE)


def _by_sequence(batch: OutgoingBatch) -> int:
    return batch.producer_sequence

"""Sends to one broker, without I/O: the window in flight, retries, giving up. Time is an argument.

``next_batch`` hands out what is to be written, oldest first; ``stored``, ``refused`` and ``disconnected`` say what
became of it. A batch keeps its bytes and bounds over all tries. Times are seconds of one monotonic clock, but where a
name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qmq.errors import (
    BadBatch,
    BadBytes,
    ConnectionLost,
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
from qmq.net.client.producer.batch import Outgoing
from qmq.net.client.producer.halving import halves_of
from qmq.net.client.producer.outcomes import Outcomes

#: Refusals that do not say whether the batch is stored: docs/PROTOCOL.md has them all.
_SAY_NOTHING: Final = (BadBytes, InternalError, RemoteError, SequenceForgotten, SyncFailed)


#: Refusals because of one message, or of one subject: what else is in the batch is sent without it.
_OF_A_SUBJECT: Final = (InvalidName, TooManySubjects)
_OF_A_MESSAGE: Final = (InvalidOption, MessageTooLarge)

#: While so many batches wait for their answers, messages gather until one comes, or until they fill a batch: a busy
#: broker gets fewer and larger batches, an idle one gets each at once.
AT_ONCE: Final = 2


class Sending:
    """What becomes of the batches that one broker gets. Not for several threads."""

    def __init__(self, outcomes: Outcomes, accumulator: Accumulator, send_timeout: float) -> None:
        #: Why nothing goes out at the moment.
        self.last_error: QmqError | None = None
        #: New batches go to this broker.
        self.takes_new = True
        self.is_connected = False
        self._outcomes = outcomes
        self._accumulator = accumulator
        self._send_timeout = send_timeout
        self._limits = SendLimits()
        self._store_id = b""
        self._retries: list[Outgoing] = []  # by producer sequence
        self._in_flight: dict[int, Outgoing] = {}  # by request, as written
        self._given_up: set[int] = set()  # requests whose batch has failed, and may still be answered
        # What was refused for a while, and what was written with it. Until all of these have ended batches go one at a
        # time: so the order holds, and the broker does not take so many others that it forgets whether it has these.
        self._careful: set[Outgoing] = set()
        self._backoff = Backoff()
        self._retry_at = 0.0
        self._progress_at = 0.0  # when a batch was last stored here

    # --- connections -------------------------------------------------------------------------------------------------

    def connected(self, store_id: bytes, limits: SendLimits) -> None:
        """A broker is there. What another store may have stored already is not sent to this one: it is unknown."""
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
        """Another store than before knows this producer up to there: go on behind it. Call it after ``connected``."""
        numbers = self._outcomes
        lowest = self._retries[0].producer_sequence if self._retries else numbers.next_sequence
        if last_sequence is None or last_sequence < lowest:
            return
        numbers.next_sequence = max(numbers.next_sequence, last_sequence + 1)
        for batch in self._retries:  # refused, all of them: see connected
            batch.renumber(numbers.take_numbers(batch.count))

    def disconnected(self, error: QmqError, now: float) -> None:
        """The connection is gone: what is in flight goes out again, in order, once there is another."""
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

    # --- other brokers -----------------------------------------------------------------------------------------------

    def take_new(self, does: bool) -> None:
        """New batches go to this broker from now on, or to another one."""
        if does and not self.takes_new:
            self._accumulator.set_limits(self._limits)
        self.takes_new = does

    def is_fit(self, now: float) -> bool:
        """It is connected, and has not refused anything just now."""
        return self.is_connected and now >= self._retry_at

    def give_away(self, now: float, failover_after: float | None) -> list[Outgoing]:
        """What may go to another broker now: what this one does not have, and what it may have had for too long.

        *failover_after*: how long, in seconds; None: for ever. While the broker is well it gets all of it itself.
        """
        if self.is_fit(now):
            return []
        given = []
        for batch in self._retries:
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

    def take_over(self, batches: Sequence[Outgoing]) -> None:
        """Send these here, under other numbers than they had at another broker."""
        for batch in batches:
            batch.renumber(self._outcomes.take_numbers(batch.count))
        self._retries += batches
        self._retries.sort(key=_by_sequence)

    # --- out ---------------------------------------------------------------------------------------------------------

    def next_batch(self, request: int, now: float, wall_us: int) -> Outgoing | None:
        """What is to be written now as *request*, built; None when there is nothing, or it has to wait."""
        if len(self._in_flight) + len(self._given_up) >= self._limits.producer_window:
            return None
        if self._careful and self._in_flight:
            return None
        if self._retries:
            if now < self._retry_at:
                return None
            batch = self._retries.pop(0)
        else:
            gathered = self._gather(now) if self.takes_new else None
            if gathered is None:
                return None
            batch = gathered
        if batch.buffers is None:
            batch.build(wall_us, self._outcomes.producer_id, self._outcomes.next_sequence)
            self._outcomes.take_numbers(batch.count)
            batch.first_written_at = now
        batch.written_at = now
        batch.store_id = self._store_id
        self._in_flight[request] = batch
        return batch

    def _gather(self, now: float) -> Outgoing | None:
        if len(self._in_flight) >= AT_ONCE and not self._accumulator.has_sealed():
            return None
        return self._accumulator.take(now, self._outcomes.is_flushing)

    def wake_at(self) -> float | None:
        """When ``next_batch`` has something (maybe in the past); None: only after an answer or a new message."""
        if len(self._in_flight) + len(self._given_up) >= self._limits.producer_window or (
            self._careful and self._in_flight
        ):
            return None
        if self._retries:
            return self._retry_at
        if len(self._in_flight) >= AT_ONCE and not self._accumulator.has_sealed():
            return None
        return self._accumulator.next_at() if self.takes_new else None

    def has_waiting(self) -> bool:
        """There is something to write, now or later."""
        return bool(self._retries) or (self.takes_new and self._accumulator.has_any())

    def silent_since(self) -> float | None:
        """Since when the broker owes an answer; None when it does not."""
        if not self._in_flight:
            return None
        return max(min(batch.written_at for batch in self._in_flight.values()), self._progress_at)

    # --- what came of it ---------------------------------------------------------------------------------------------

    def stored(
        self,
        request: int,
        position: int,
        stored_at_us: int,
        partition: int,
        store_id: bytes,
        first_sequences: Sequence[int],
        now: float,
    ) -> None:
        """The broker acknowledged that batch. Raises ProtocolError when it speaks of another one."""
        batch = self._in_flight.get(request)
        if batch is None:
            self._given_up.discard(request)
            return
        if len(first_sequences) != len(batch.runs):
            raise ProtocolError(f"the answer to a batch of {len(batch.runs)} runs speaks of {len(first_sequences)}")
        del self._in_flight[request]
        self._progress_at = self._outcomes.progress_at = now
        self._backoff.reset()
        batch.stored(position, stored_at_us, partition, store_id, first_sequences)
        self._careful.discard(batch)
        self._outcomes.ended(batch)

    def refused(self, request: int, error: QmqError, now: float) -> None:
        """The broker did not take that batch: another try later when that can help, else it has failed."""
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
            nobody_knows = isinstance(error, _SAY_NOTHING) or type(error) is StorageError
            self._fail(batch, error, batch.answer_lost or nobody_knows)
            return
        self._retries.append(batch)
        self._retries.sort(key=_by_sequence)
        self._careful.update(self._retries, self._in_flight.values())
        if now >= self._retry_at:  # else it was in flight together with one that was refused just now
            self._retry_at = now + self._backoff.next_delay()

    def _halve(self, batch: Outgoing) -> None:
        """Send both halves of a batch that was refused because of some message: in the end only that one has failed.

        What may be on its way still, as an answer was lost, keeps its numbers: then it is not stored beside its halves.
        """
        halves = halves_of(batch, None if batch.answer_lost else self._outcomes.take_numbers)
        self._outcomes.replaced(batch, halves)
        self._careful.discard(batch)
        if batch.answer_lost:
            self._careful.update(halves)
        self._retries += halves
        self._retries.sort(key=_by_sequence)

    def expire(self, now: float) -> None:
        """Give up what has been tried for ``send_timeout``, or has waited so long while nothing was acknowledged."""
        for request, batch in list(self._in_flight.items()):
            if now >= batch.first_written_at + self._send_timeout:
                del self._in_flight[request]
                self._given_up.add(request)
                self._fail(batch, self._timed_out(batch), unknown=True)
        for batch in [b for b in self._retries if now >= b.first_written_at + self._send_timeout]:
            self._retries.remove(batch)
            self._fail(batch, self._timed_out(batch), batch.answer_lost)
        if self.takes_new:
            progress_at, timeout = self._outcomes.progress_at, self._send_timeout
            for batch in self._accumulator.remove(lambda since: now >= max(since, progress_at) + timeout):
                self._fail(batch, self._timed_out(batch), unknown=False)

    def _timed_out(self, batch: Outgoing) -> QmqError:
        cause = batch.last_error or self.last_error
        if cause is None:
            return ConnectionLost(f"the broker did not answer within the send_timeout of {self._send_timeout:g} s")
        return type(cause)(f"tried for the send_timeout of {self._send_timeout:g} s, last: {cause}")

    def abandon(self, error: QmqError) -> None:
        """Trying again cannot help any more: all that has not ended fails with *error*."""
        in_flight, self._in_flight = self._in_flight, {}
        retries, self._retries = self._retries, []
        for batch in in_flight.values():
            self._fail(batch, error, unknown=True)
        for batch in retries:
            self._fail(batch, error, batch.answer_lost)
        if self.takes_new:
            for batch in self._accumulator.remove(lambda since: True):
                self._fail(batch, error, unknown=False)

    def _fail(self, batch: Outgoing, error: QmqError, unknown: bool) -> None:
        self._careful.discard(batch)
        self._outcomes.fail(batch, error, unknown)


def _may_spare_others(batch: Outgoing, error: QmqError) -> bool:
    """Whether some messages of a refused batch may be taken without the others."""
    is_of_a_subject = isinstance(error, _OF_A_SUBJECT)
    return len(batch.runs) > 1 if is_of_a_subject else batch.count > 1 and isinstance(error, _OF_A_MESSAGE)


def _by_sequence(batch: Outgoing) -> int:
    return batch.producer_sequence

"""What pulls for a consumer: runs of messages, over reconnects, without losing what a cancelled pull brought.

Messages that were received and not handed out yet. Without I/O.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from qmq.errors import (
    BadBatch,
    ConnectionLost,
    Fenced,
    InvalidOption,
    ProtocolError,
    QmqError,
    UnknownSubscription,
)
from qmq.format.pieces import AnswerDamage
from qmq.format.run import Run
from qmq.net.client.backoff import Backoff, RefusalLog
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.acks import AckSender
from qmq.net.client.consumer.corrupt_reads import error_of, pack_report, read_checked, sequences_of
from qmq.net.client.consumer.in_flight import InFlightWindow, PendingDisposition
from qmq.net.client.consumer.message import tags_of, with_tags
from qmq.net.client.consumer.pull_request import PullRequest, message_ranges_of
from qmq.net.client.consumer.subscribe import MAX_DOUBTS, ConsumerSubscription
from qmq.net.client.group_settings import DEFAULT_TERMS, Terms
from qmq.net.client.options import PULL_BYTES, Start, check_pull
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition, ReportOutcome


class ReceivedRuns:
    """Runs in order, of which the first may be handed out in part."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._skip = 0  # messages of the first of them that were handed out
        #: How many messages there are.
        self.count = 0

    def add(self, runs: Sequence[Run]) -> int:
        """Put them behind the others; returns how many messages they have."""
        count = sum(run.count for run in runs)
        self._runs.extend(runs)
        self.count += count
        return count

    def put_back(self, runs: Sequence[Run]) -> None:
        """These were not handed out after all: they are first again."""
        if self._skip:
            self._runs[0] = self._runs[0].slice(self._skip, self._runs[0].count)
            self._skip = 0
        self._runs.extendleft(reversed(runs))
        self.count += sum(run.count for run in runs)

    def take(self, max_count: int) -> list[Run]:
        """Hand out up to so many messages."""
        kept, taken = self._runs, list[Run]()
        if self.count <= max_count and not self._skip:
            taken += kept
            self.clear()
            return taken
        left = min(max_count, self.count)
        self.count -= left
        while left:
            run, skip = kept[0], self._skip
            count = min(run.count - skip, left)
            if skip + count == run.count:
                kept.popleft()
                self._skip = 0
            else:
                self._skip += count
            taken.append(run if count == run.count else run.slice(skip, skip + count))
            left -= count
        return taken

    def clear(self) -> None:
        """They are of no use any more."""
        self._runs.clear()
        self.count = self._skip = 0


def release(runs: Sequence[Run]) -> None:
    """Hand messages of a group back, of which nobody has begun with any."""
    sequence_ranges = list[tuple[InFlightWindow, int, int]]()
    for run in runs:
        start, end = run.delivery_sequence, run.delivery_sequence + run.count
        if sequence_ranges and sequence_ranges[-1][0] is run.in_flight and sequence_ranges[-1][2] == start:
            start = sequence_ranges.pop()[1]
        sequence_ranges.append((run.in_flight, start, end))
    for in_flight, start, end in sequence_ranges:
        in_flight.owner.release(in_flight, start, end)


log = logging.getLogger("qmq.client")

#: A pull without end asks anew so often: an answer that stays out tells that nobody is there any more.
ROUND: Final = 20.0
#: How much later than asked for an answer may come until then.
LATE: Final = 10.0
#: How long past its time a pull waits for an answer that is on its way.
GRACE: Final = 0.5
#: What came and nobody took for so long is handed back.
UNUSED_AFTER: Final = 1.0
#: Leaving waits so long for acknowledgements to be confirmed.
FLUSH_TIMEOUT: Final = 5.0
#: Reports of one answer: more of it is reported when it comes again.
MAX_REPORTS: Final = 64
#: A message is given up that came damaged so often though the broker finds it sound.
MAX_SOUND_REPORTS: Final = 3
#: Leaving waits so long for the broker.
LEAVE_TIMEOUT: Final = 2.0
_WARN_EVERY: Final = 10.0
_DOUBTFUL: Final = (InvalidOption, ProtocolError, UnknownSubscription)


class Puller:
    """A consumer's message at the broker. Pulls of several tasks go one after another."""

    def __init__(
        self,
        link: Link,
        prefixes: Sequence[str],
        group: str | None,
        consumer: str | None,
        start: Start,
        terms: Terms = DEFAULT_TERMS,
        is_transient: bool | None = None,
    ) -> None:
        """*is_transient*: the broker forgets the consumer once it has left; None: unless it was given an id."""
        self._link = link
        self._subscription = ConsumerSubscription(link, prefixes, group, consumer, start, terms, is_transient)
        #: The consumer's id.
        self.id = self._subscription.id
        #: What is held, and dispositions on it; None for who follows alone.
        self.ack_sender = self._subscription.ack_sender
        #: Pieces of answers that were left out because nobody can read them; and who is told of each.
        self.damaged = 0
        self._on_error: Callable[[Exception], object] | None = None
        self._solo_cursor = self._subscription.solo_cursor
        self._warned_at = -_WARN_EVERY
        self._inside = False
        self._backoff = Backoff()
        self._refusals = RefusalLog(f"consumer {self.id} can't pull for now")
        self._doubts = 0
        self._received = ReceivedRuns()
        self._capped = self._full = False  # its answer had as many, or as many bytes: there may be more
        self._passed = False  # its answer had messages with none of the group's tags
        self._max_bytes = PULL_BYTES
        self._request = PullRequest(self._answered)
        self._checks = False  # its answer was damaged: the broker checks headers before it sends it again
        self._reporting: asyncio.Future[Answer | QmqError] | None = None
        #: How often the broker found messages sound that were damaged in an answer: partition, position, ordinal.
        self._sound = Counter[tuple[int, int, int]]()
        self._lock = asyncio.Lock()
        self._unused: asyncio.TimerHandle | None = None
        if self.ack_sender is not None:
            self.ack_sender.on_dropped.append(self._received.clear)

    @property
    def on_error(self) -> Callable[[Exception], object] | None:
        """Called with the error for each such piece, and with what handlers raise but Retry, when it is set."""
        return self._on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._on_error = call
        if self.ack_sender is not None:
            self.ack_sender.on_error = call

    @property
    def ack_senders(self) -> list[AckSender]:
        """Who takes dispositions."""
        return [self.ack_sender] if self.ack_sender is not None else []

    @property
    def is_solo(self) -> bool:
        """Nothing is held of what it is given."""
        return self.ack_sender is None

    @property
    def has_received(self) -> bool:
        """There is something that was received and not handed out."""
        return bool(self._received.count)

    # --- life --------------------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Subscribe; waits while no broker can be reached. Raises what the broker refuses it with; then, and when it is
        cancelled, nothing is left of it there.
        """
        try:
            await self._subscription.enter()
        except BaseException:
            self.leave_now()
            raise
        self._inside = True

    async def leave(self, error: BaseException | None = None) -> None:
        """Unsubscribe, which hands back what is held; whoever waits for messages gets UnknownSubscription.

        Acknowledgements are brought to the broker before, as far as there is time. An Exception as *error* fails what
        was handed out and has no disposition. Who cancels this ends that, and the wait for the broker, and no more:
        ``part`` is done in any case.
        """
        self._stop()
        if self.ack_sender is not None and isinstance(error, Exception):
            release(self._received.take(self._received.count))
            self.ack_sender.fail_open(error)
        try:
            if self.ack_sender is not None:
                await self.ack_sender.settle(FLUSH_TIMEOUT)
        finally:
            unsubscribed = self.leave_now()
        await asyncio.wait({unsubscribed}, timeout=LEAVE_TIMEOUT)

    def leave_now(self) -> asyncio.Future[None]:
        """Leave, without waiting for anything: send the acknowledgements that are there, let go of what is held, and
        unsubscribe. May be called again. What it returns is done once the broker has answered.
        """
        self._stop()
        known = None
        if self.ack_sender is not None:
            current = self._subscription.current
            if current is not None and not current[0].closed:
                self.ack_sender.send(current)
            known, _ = self.ack_sender.snapshot()
            self.ack_sender.close()
            self._link.remove_session(self.ack_sender)
        return self._subscription.leave(known)

    def _stop(self) -> None:
        """Nobody pulls any more."""
        if self._inside:
            self._inside = False
            self._request.withdraw()
            self._request.wake()
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None
        if self._reporting is not None:
            _settle(self._reporting, self._subscription.not_subscribed())

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced with how many were not."""
        if self.ack_sender is not None:
            await self.ack_sender.flush()

    def _check_inside(self) -> None:
        if not self._inside:
            raise self._subscription.not_subscribed()

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def pull(
        self, max_count: int, min_count: int, timeout: float | None, max_bytes: int = PULL_BYTES
    ) -> list[Run]:
        """Up to *max_count* messages, once *min_count* are there; what is there after *timeout* seconds (None: ever).
        At most *max_bytes* come at a time, but for one message.

        Raises InvalidOption, and what trying again can't help.
        """
        check_pull(max_count, min_count, timeout)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        if self._lock.locked():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._lock.acquire()
            except TimeoutError:
                return []
        else:
            await self._lock.acquire()
        if self._unused is not None:
            self._unused.cancel()
            self._unused = None
        try:
            self._max_bytes = max_bytes
            return await self._pull_alone(max_count, min_count, deadline)
        finally:
            self._lock.release()
            if self._received.count or self._request.answer is not None:
                self._watch_unused()

    def put_back(self, runs: Sequence[Run]) -> None:
        """These were not handed out after all: they come first in the next pull."""
        self._received.put_back([run for run in runs if run.in_flight is None or run.in_flight.fenced is None])
        if not self._lock.locked():
            self._watch_unused()

    # --- what nobody took --------------------------------------------------------------------------------------------

    def _watch_unused(self) -> None:
        """What came and nobody took is for the next pull; when none comes soon, it is for others."""
        if self.ack_sender is not None and self._unused is None and self._inside:
            self._unused = asyncio.get_running_loop().call_later(UNUSED_AFTER, self._release_unused)

    def _release_unused(self) -> None:
        self._unused = None
        if self._lock.locked():
            return
        answer = self._request.answer
        if isinstance(answer, Answer):
            runs, damaged = read_checked(answer.payload, answer.begun)
            if not damaged:
                self._request.take()
                with suppress(ProtocolError):  # the same comes again
                    self._accept(answer, runs)
        release(self._received.take(self._received.count))

    async def _pull_alone(self, max_count: int, min_count: int, deadline: float | None) -> list[Run]:
        clock = asyncio.get_running_loop().time
        while True:
            self._check_inside()
            asked_until = None
            if not self._request.is_pending and self._request.answer is None:
                enough = self._received.count >= min_count
                if enough and (self._received.count >= max_count or not self._capped):
                    break
                subscribed = await self._subscription.subscribed_by(deadline)
                if subscribed is None:
                    break
                # Of an earlier pull that was for fewer there is enough, and there may be more: no waiting for that.
                asked_until = self._ask(subscribed, max_count, min_count, clock() if enough else deadline, clock())
            if self._request.answer is None and not await self._answered_by(deadline):
                self._request.withdraw()
                break
            came = await self._take_answer(deadline)
            if asked_until is None:
                continue  # it was an earlier pull's: see whether it is enough
            now = clock()
            if deadline is not None and now >= deadline:
                if self._passed and self._received.count < min_count and now < deadline + GRACE:
                    continue  # what is there may lie behind what was passed
                break
            if came and now < asked_until:
                break  # fewer than min_count, because they are many bytes
        taken = self._received.take(max_count)
        if self._full and self._solo_cursor is not None:
            self._ask_ahead(max_count, clock())
        return taken

    def _ask(
        self,
        subscribed: tuple[BrokerConnection, int],
        max_count: int,
        min_count: int,
        deadline: float | None,
        now: float,
    ) -> float:
        """Send a pull; returns until when the broker may wait."""
        connection, subscription = subscribed
        welcome = self._link.welcome
        assert welcome is not None
        timeout = ROUND if deadline is None else min(max(deadline - now, 0.0), ROUND)
        most = min(max_count - self._received.count, welcome.max_pull_count)
        least = max(min(min_count - self._received.count, most), 1)
        in_flight, expected = None, frames.NOT_EXPECTED
        if self.ack_sender is not None:
            self.ack_sender.send(subscribed, with_pull=True)  # what is handled makes room for more
            in_flight = self.ack_sender.in_flight
            assert in_flight is not None
            expected = in_flight.expected
        size = min(self._max_bytes, welcome.max_pull_bytes)
        payload = frames.PULL.pack(subscription, most, least, size, int(timeout * 1_000 + 0.999), expected)
        flags = frames.CHECK if self._checks else 0
        self._request.send(connection, payload, most, in_flight, now + timeout + LATE, flags)
        self._capped = self._full = False
        return now + timeout

    def _ask_ahead(self, max_count: int, now: float) -> None:
        """For one who follows alone and is behind: get the next messages while the last ones are handled."""
        subscribed = self._subscription.current
        if (
            subscribed is not None
            and self._subscription.is_current
            and not (self._request.is_pending or self._received.count)
        ):
            self._ask(subscribed, max_count, 1, now, now)

    def _answered(self) -> None:
        if not self._lock.locked():
            self._watch_unused()

    async def _answered_by(self, deadline: float | None) -> bool:
        """Wait for the pull in flight; False when the time is well over."""
        await self._request.wait(None if deadline is None else deadline + GRACE)
        self._check_inside()
        return self._request.answer is not None

    async def _take_answer(self, deadline: float | None) -> bool:
        """Keep what the last pull brought; False when that is nothing. Raises what trying again can't help."""
        answer, self._passed = self._request.take(), False
        if isinstance(answer, QmqError):
            if isinstance(answer, Fenced) and self.ack_sender is not None:
                self.ack_sender.fence(answer)  # and subscribe again: unless another has taken over, it goes on
                self._subscription.forget()
                return False
            if not answer.retryable:
                self._doubt(answer)
                return False
            if not isinstance(answer, ConnectionLost):  # that one is waited for where the next pull starts
                self._refusals.came(answer)
                delay = self._backoff.next_delay()
                left = delay if deadline is None else deadline - asyncio.get_running_loop().time()
                await asyncio.sleep(min(delay, left))
            return False
        if not isinstance(answer.meta.get("left_us", 0), int):
            assert self._subscription.current is not None  # which asked
            self._subscription.current[0].abort(
                ConnectionLost("an answer says what it cannot mean; it is asked for again")
            )
            return False
        self._backoff.reset()
        runs, damaged = read_checked(answer.payload, answer.begun)
        if damaged:
            return await self._take_damaged(answer, runs, damaged, deadline)
        self._checks = False
        self._sound.clear()
        return self._accept(answer, runs)

    def _doubt(self, refusal: QmqError) -> None:
        """The broker has refused a pull as no pull is made: it was damaged on the way, or another request was, which
        ended the connection. Raises it when that comes again and again.
        """
        self._doubts += 1
        if type(refusal) not in _DOUBTFUL or self._doubts >= MAX_DOUBTS:
            raise refusal
        if type(refusal) is UnknownSubscription:
            self._subscription.forget()

    def _accept(self, answer: Answer, runs: list[Run]) -> bool:
        if self._solo_cursor is not None:
            runs = self._solo_cursor.take(runs, answer.meta.get("left_us"))
        elif self.ack_sender is not None:
            in_flight = self._request.in_flight
            if in_flight is None or in_flight.fenced is not None:
                return False  # what it brought went to others, or comes again
            try:
                runs = in_flight.number(runs, message_ranges_of(answer.meta))
            except ProtocolError as error:  # damaged on the way: the same is pulled again
                self._doubt(error)
                return False
        whole = sum(run.count for run in runs)
        if "tags" in answer.meta:
            try:
                runs = with_tags(runs, tags_of(answer.meta))
            except ProtocolError as error:
                self._doubt(error)
                return False
        self._doubts = 0
        kept = self._received.add(runs)
        self._passed = kept < whole
        self._capped = kept >= self._request.max_count
        self._full = self._capped or len(answer.payload) > self._max_bytes // 2
        return bool(runs) and kept == whole  # more may come where some were not wanted

    # --- damage ------------------------------------------------------------------------------------------------------

    async def _take_damaged(
        self, answer: Answer, runs: list[Run], damaged: list[AnswerDamage], deadline: float | None
    ) -> bool:
        """Report what is bad in an answer, and drop the answer: the same is pulled again, without what is bad on disk.

        An at_most_once group gets nothing again: what can be read is kept. False when nothing is.
        """
        connection = self._request.connection
        assert connection is not None
        comes_again = self.ack_sender is not None or self._solo_cursor is not None
        came = not comes_again and self._accept(answer, runs)
        self._checks = comes_again
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline + GRACE):
                given_up = await self._report(connection, damaged)
            if not comes_again:
                for damage in damaged:
                    self._report_unreadable(error_of(damage))
            elif len(given_up) == len(damaged) and self._solo_cursor is not None:
                came, comes_again = self._accept(answer, runs), False
                for damage in damaged:
                    self._report_unreadable(error_of(damage))
            elif given_up and not any(damage.size for damage in damaged):
                self._nack(answer, runs, damaged, given_up)
        except TimeoutError:
            pass  # the same is reported again when it has come again
        finally:
            # Only a new subscription begins again for who follows alone; and a frame with a bad header in it may have
            # said a wrong size: what comes behind it on that connection is not understood then.
            if (self._solo_cursor is not None and comes_again) or any(damage.size for damage in damaged):
                connection.abort(ConnectionLost("an answer was damaged on its way; it is asked for again"))
        return came

    async def _report(self, connection: BrokerConnection, damaged: list[AnswerDamage]) -> list[int]:
        """Have the broker read again what is bad, and count what it finds bad on disk.

        Returns the numbers of those that are given up, since the broker finds them sound again and again.
        """
        given_up, reports = list[int](), MAX_REPORTS
        for number, damage in enumerate(damaged):
            message = damage.partition, damage.position, damage.first
            if self._sound[message] >= MAX_SOUND_REPORTS:
                given_up.append(number)
            elif not damage.size and reports:
                reports -= 1
                self._reporting = waiter = asyncio.get_running_loop().create_future()
                connection.ask(
                    FrameKind.REPORT, partial(_settle, waiter), *pack_report(damage)
                )  # a slow disk is not dead
                try:
                    reported = await waiter
                finally:
                    self._reporting = None
                self._check_inside()
                found = None if isinstance(reported, QmqError) else reported.meta.get("found")
                log.debug("consumer %s: the broker says of a bad piece: %s", self.id, found or reported)
                self._sound[message] += found == ReportOutcome.SOUND
                if found == ReportOutcome.BAD and (self.ack_sender is not None or self._solo_cursor is not None):
                    self._report_unreadable(error_of(damage))
        return given_up

    def _nack(self, answer: Answer, runs: list[Run], damaged: list[AnswerDamage], given_up: list[int]) -> None:
        """Fail the messages that nobody here can read, though the broker finds them sound."""
        in_flight = self._request.in_flight
        assert self.ack_sender is not None
        assert in_flight is not None
        try:
            ranges = message_ranges_of(answer.meta)
            for number in given_up:
                for start, end in sequences_of(runs, damaged, number, ranges):
                    back = PendingDisposition(start, end, Disposition.NACK, None, damaged[number].reason)
                    self.ack_sender.nack_sender.hand_back_soon(in_flight, back)
        except ProtocolError as error:
            self._doubt(error)
            return
        for number in given_up:
            self._report_unreadable(error_of(damaged[number]))

    def _report_unreadable(self, error: BadBatch) -> None:
        """Tell of messages that nobody can read."""
        self.damaged += 1
        now = time.monotonic()
        if now >= self._warned_at + _WARN_EVERY:
            self._warned_at = now
            log.warning("consumer %s: %s (%d pieces so far)", self.id, error, self.damaged)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                log.exception("consumer %s: on_error has failed", self.id)


def _settle(waiter: asyncio.Future[Answer | QmqError], answer: Answer | QmqError) -> None:
    if not waiter.done():
        waiter.set_result(answer)

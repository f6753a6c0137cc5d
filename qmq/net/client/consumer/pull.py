"""Pulling for one consumer at one broker, over reconnects. An answer to a cancelled pull is not lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from qmq.durations import Duration
from qmq.errors import (
    BadBatch,
    ConnectionLost,
    Fenced,
    InvalidOption,
    ProtocolError,
    QmqError,
    UnknownSubscription,
)
from qmq.format.layout import LANE_ORDERED
from qmq.format.pieces import AnswerDamage, read_single
from qmq.format.run import Run, messages_in
from qmq.net.client.backoff import Backoff, RefusalLog
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.acks import AckSender
from qmq.net.client.consumer.answer_size import AnswerSize
from qmq.net.client.consumer.corrupt_reads import error_of, pack_report, read_checked, sequences_of
from qmq.net.client.consumer.in_flight import InFlightWindow, PendingDisposition
from qmq.net.client.consumer.message import with_tags
from qmq.net.client.consumer.nacks import FailureLog
from qmq.net.client.consumer.pull_request import PullRequest
from qmq.net.client.consumer.subscribe import MAX_DOUBTS, ConsumerSubscription
from qmq.net.client.group_settings import DEFAULT_TERMS, SubscriptionTerms
from qmq.net.client.options import PULL_BYTES, Start, check_pull
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition, ReportOutcome


class ReceivedRuns:
    """Runs that were received and not handed out, in order; the first may be handed out in part. No I/O."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._skip = 0  # how many messages of the first run were handed out
        #: How many messages there are.
        self.count = 0

    def add(self, runs: Sequence[Run]) -> int:
        """Append *runs*; return how many messages they have."""
        count = messages_in(runs)
        self._runs.extend(runs)
        self.count += count
        return count

    def add_one(self, run: Run) -> None:
        """Append *run*, of one message."""
        self._runs.append(run)
        self.count += 1

    @property
    def size(self) -> int:
        """How many bytes the runs have."""
        return sum(len(run.data) for run in self._runs)

    def put_back(self, runs: Sequence[Run]) -> None:
        """Insert *runs* in front: they were not handed out after all."""
        if self._skip:
            self._runs[0] = self._runs[0].slice(self._skip, self._runs[0].count)
            self._skip = 0
        self._runs.extendleft(reversed(runs))
        self.count += messages_in(runs)

    def take(self, max_count: int) -> list[Run]:
        """Remove and return up to *max_count* messages."""
        runs, taken = self._runs, list[Run]()
        if self.count <= max_count and not self._skip:
            taken += runs
            self.clear()
            return taken
        left = min(max_count, self.count)
        self.count -= left
        while left:
            run, skip = runs[0], self._skip
            count = min(run.count - skip, left)
            if skip + count == run.count:
                runs.popleft()
                self._skip = 0
            else:
                self._skip += count
            taken.append(run if count == run.count else run.slice(skip, skip + count))
            left -= count
        return taken

    def keep_open(self) -> None:
        """Drop the messages with order keys that go back because of an earlier one."""
        self.add(open_runs(self.take(self.count)))

    def clear(self) -> None:
        """Drop all runs."""
        self._runs.clear()
        self.count = self._skip = 0


def open_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs without the messages with order keys that go back because of an earlier one."""
    left = list[Run]()
    for run in runs:
        if run.lane < LANE_ORDERED or run.in_flight is None or run.in_flight.fenced is not None:
            left.append(run)
            continue
        first = run.delivery_sequence
        for start, end in run.in_flight.open_within(first, first + run.count):
            left.append(run if end - start == run.count else run.slice(start - first, end - first))
    return left


def release(runs: Sequence[Run]) -> None:
    """Release messages of a group that the program has not started to handle."""
    sequence_ranges = list[tuple[InFlightWindow, int, int]]()
    for run in runs:
        start, end = run.delivery_sequence, run.delivery_sequence + run.count
        if sequence_ranges and sequence_ranges[-1][0] is run.in_flight and sequence_ranges[-1][2] == start:
            start = sequence_ranges.pop()[1]
        sequence_ranges.append((run.in_flight, start, end))
    for in_flight, start, end in sequence_ranges:
        in_flight.owner.hand_back_soon(in_flight, PendingDisposition(start, end, Disposition.RELEASE))


log = logging.getLogger("qmq.client")

#: Seconds after which a pull without a limit is sent again, so that a dead broker is noticed.
ROUND: Final = 20.0
#: Seconds that the answer may come later than requested.
LATE: Final = 10.0
#: Seconds that a pull waits past its deadline for an answer that is on the way.
GRACE: Final = 0.5
#: Seconds after which messages that no pull took are released.
UNUSED_AFTER: Final = 1.0
#: Seconds that leaving waits for acks to be confirmed.
FLUSH_TIMEOUT: Final = 5.0
#: How many damages of one answer are reported; more are reported when the answer comes again.
MAX_REPORTS: Final = 64
#: The consumer gives up a message that has arrived damaged this often although the broker finds it sound.
MAX_SOUND_REPORTS: Final = 3
#: Seconds that leaving waits for the broker's answer.
LEAVE_TIMEOUT: Final = 2.0
_WARN_EVERY: Final = 10.0
_DOUBTFUL: Final = (InvalidOption, ProtocolError, UnknownSubscription)


class Puller:
    """Pulls for a consumer at one broker. Pulls of several tasks run one after another."""

    def __init__(
        self,
        link: Link,
        prefixes: Sequence[str],
        group: str | None,
        consumer: str | None,
        start: Start,
        terms: SubscriptionTerms = DEFAULT_TERMS,
        is_transient: bool | None = None,
    ) -> None:
        """Make it without subscribing. *is_transient*: the broker forgets the consumer once it has left; None: forget
        it if it was not given an id.
        """
        self._link = link
        self._subscription = ConsumerSubscription(link, prefixes, group, consumer, start, terms, is_transient)
        #: The consumer's id.
        self.id = self._subscription.id
        #: Sends acks and nacks; None for solo consumers and at_most_once groups.
        self.ack_sender = self._subscription.ack_sender
        #: How many pieces of answers were left out because they are damaged.
        self.damaged = 0
        #: A function to call with each BadBatch that ``damaged`` counts, or None.
        self.on_unreadable: Callable[[BadBatch], object] | None = None
        #: Logs the failures of messages.
        self.failures = FailureLog(self.id, comes_again=False) if self.ack_sender is None else self.ack_sender.failures
        self.failures.group, self.failures.program = group, link.program
        self._solo_cursor = self._subscription.solo_cursor
        self._is_at_most_once = terms.mode == "at_most_once"
        self._warned_at = -_WARN_EVERY
        self._inside = False
        self._loop: asyncio.AbstractEventLoop | None = None  # once it was entered
        self._backoff = Backoff()
        self._refusals = RefusalLog(f"consumer {self.id} cannot pull now")
        self._doubts = 0
        self._received = ReceivedRuns()
        self._capped = self._full = False  # the answer reached its limit of messages, or of bytes: there may be more
        self._filtered = False  # the answer had messages without any of the group's tags
        self._max_bytes = PULL_BYTES
        self._size = AnswerSize(comes_once=self._is_at_most_once)
        self._request = PullRequest(self._answered)
        self._checks = False  # the last answer was damaged: have the broker check headers before it sends it again
        self._reporting: asyncio.Future[Answer | QmqError] | None = None
        #: How often the broker found messages sound that arrived damaged, by (partition, position, ordinal).
        self._sound = Counter[tuple[int, int, int]]()
        self._lock = asyncio.Lock()
        self._unused: asyncio.TimerHandle | None = None
        if self.ack_sender is not None:
            self.ack_sender.on_dropped.append(self._received.clear)

    @property
    def pullers(self) -> list[Puller]:
        """The pullers of the consumer, one for each broker: this one."""
        return [self]

    @property
    def ack_senders(self) -> list[AckSender]:
        """The sender of acks, if dispositions exist."""
        return [self.ack_sender] if self.ack_sender is not None else []

    @property
    def is_solo(self) -> bool:
        """Whether the consumer sends no dispositions."""
        return self.ack_sender is None

    @property
    def is_at_most_once(self) -> bool:
        """Whether the broker hands out each message once, so that no other consumer gets those that are left over."""
        return self._is_at_most_once

    @property
    def has_received(self) -> bool:
        """Whether messages were received and not handed out."""
        return bool(self._received.count) or isinstance(self._request.answer, Answer)

    @property
    def is_waiting(self) -> bool:
        """Whether the broker has not answered the last pull, which may have been withdrawn."""
        return self._request.is_pending

    # --- life --------------------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Subscribe; wait while no broker can be reached. Raises the broker's refusal.

        On an error or a cancellation no subscription is left behind.
        """
        try:
            await self._subscription.enter()
        except BaseException:
            self.leave_now()
            raise
        self._loop = asyncio.get_running_loop()
        self._inside = True

    async def leave(self, error: BaseException | None = None, *, closes: bool = False) -> None:
        """Unsubscribe, which releases the messages in flight; pulls that wait raise UnknownSubscription.

        Acks are sent and confirmed first, as far as there is time. When *error* is an Exception, messages that were
        handed out without a disposition fail. *closes*: the client closes its connections next, and pulls that wait
        raise UsageError. Cancelling this call ends the waiting only: ``leave_now`` runs in any case.
        """
        self._subscription.client_closes = closes
        self._stop()
        if self.ack_sender is not None and isinstance(error, Exception):
            release(self._received.take(self._received.count))
            self.ack_sender.fail_open(error)
        try:
            if self.ack_sender is not None:
                await self.ack_sender.settle(FLUSH_TIMEOUT)
        finally:
            unsubscribed = self.leave_now()
        if not closes:
            await asyncio.wait({unsubscribed}, timeout=LEAVE_TIMEOUT)

    def leave_now(self) -> asyncio.Future[None]:
        """Leave without waiting: send the pending acks, drop the messages in flight, and unsubscribe.

        May be called again. The future is done once the broker has answered.
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
        self._received.clear()  # a message that the program keeps leads here
        self._request.answer = None
        return self._subscription.leave(known)

    def _stop(self) -> None:
        """End the pull and the report that wait."""
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
        """Wait until every ack so far is confirmed or refused."""
        if self.ack_sender is not None:
            await self.ack_sender.flush()

    def _check_inside(self) -> None:
        if not self._inside:
            raise self._subscription.not_subscribed()

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def pull(
        self, max_count: int, min_count: int, timeout: Duration | None, max_bytes: int = PULL_BYTES
    ) -> list[Run]:
        """Return up to *max_count* messages once there are *min_count*, or those there are after *timeout* seconds
        (None: no limit). An answer has at most *max_bytes*, or one larger message.

        Raises InvalidOption, and errors that a retry cannot mend.
        """
        timeout = check_pull(max_count, min_count, timeout)
        loop = self._loop
        if loop is None:
            raise self._subscription.not_subscribed()
        deadline = None if timeout is None else loop.time() + timeout
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
            return await self._pull_alone(max_count, min_count, deadline, loop)
        finally:
            self._lock.release()
            if self._request.answer is not None:  # it came when the pull was cancelled
                self._answered()
            elif self._received.count:
                self._watch_unused()

    async def settle(self, timeout: float) -> None:
        """Wait up to *timeout* seconds for the answer to a pull that was withdrawn; the next pull gets its messages."""
        async with self._lock:
            if self._request.is_pending:
                loop = asyncio.get_running_loop()
                await self._request.wait(loop.time() + timeout, loop)
        if self.has_received:
            self._watch_unused()

    def put_back(self, runs: Sequence[Run]) -> None:
        """Return *runs* to the puller, which hands them out first in the next pull."""
        self._received.put_back([run for run in runs if run.in_flight is None or run.in_flight.fenced is None])
        for run in runs:
            if run.lane >= LANE_ORDERED and run.in_flight is not None:
                run.in_flight.has_early_returns = True  # while the program had them, maybe
        if not self._lock.locked():
            self._watch_unused()

    # --- messages that no pull took ----------------------------------------------------------------------------------

    def _watch_unused(self) -> None:
        """Keep undelivered messages for the next pull; release them after UNUSED_AFTER."""
        if self.ack_sender is not None and self._unused is None and self._inside:
            self._unused = asyncio.get_running_loop().call_later(UNUSED_AFTER, self._release_unused)

    def _release_unused(self) -> None:
        self._unused = None
        if self._lock.locked():
            return
        self._accept_unwaited()
        release(self._received.take(self._received.count))

    def _accept_unwaited(self) -> None:
        """Take the messages of an answer that no pull waits for, unless they are damaged."""
        answer = self._request.answer
        if not isinstance(answer, Answer):
            return
        runs, damaged = read_checked(answer.payload, answer.begun)
        if not damaged:
            self._request.take()
            with suppress(ProtocolError):  # the broker sends the same messages again
                self._accept(answer, runs)

    async def _pull_alone(
        self, max_count: int, min_count: int, deadline: float | None, loop: asyncio.AbstractEventLoop
    ) -> list[Run]:
        clock, request = loop.time, self._request
        while True:
            if not self._inside:
                raise self._subscription.not_subscribed()
            self._drop_early_returns()
            asked_until = None
            if not request.is_pending and request.answer is None:
                enough = self._received.count >= min_count
                if enough and (self._received.count >= max_count or not self._capped):
                    break
                subscribed = self._subscription.current
                if subscribed is None or subscribed[0] is not self._link.connection:
                    subscribed = await self._subscription.subscribed_by(deadline)
                    if subscribed is None:
                        break
                if self.ack_sender is not None and (unsure := self.ack_sender.nack_sender.unsure):
                    await asyncio.wait(unsure, timeout=None if deadline is None else max(deadline - clock(), 0.0))
                    if unsure and deadline is not None and clock() >= deadline:
                        break
                    continue
                # An earlier pull for fewer messages left enough, and there may be more: ask without waiting.
                asked_until = self._ask(subscribed, max_count, min_count, clock() if enough else deadline, clock())
            if request.answer is None:
                await request.wait(None if deadline is None else deadline + GRACE, loop)
                if request.answer is None:
                    await request.wait_while_arriving(loop)
                self._check_inside()
                if request.answer is None:
                    request.withdraw()
                    break
            has_messages = self._take_single() or await self._take_answer(deadline)
            has_messages = not self._drop_early_returns() and has_messages
            if asked_until is None:
                continue  # the answer is an earlier pull's: check whether it is enough
            now = clock()
            if deadline is not None and now >= deadline:
                if self._filtered and self._received.count < min_count and now < deadline + GRACE:
                    continue  # messages may follow those that were filtered out
                break
            is_small = self._size.most < self._max_bytes and self._received.size < self._max_bytes
            if has_messages and now < asked_until and is_small:
                continue  # the link is slow, so the answer had fewer bytes than the program takes
            if has_messages and now < asked_until:
                break  # fewer than min_count, because they have many bytes
        taken = self._received.take(max_count)
        if self._full and self._solo_cursor is not None:
            self._ask_ahead(max_count, clock())
        return taken

    def _drop_early_returns(self) -> bool:
        """Keep messages from the program that go back because of an earlier one of their order key; return whether
        there may have been some.
        """
        in_flight = None if self.ack_sender is None else self.ack_sender.in_flight
        if in_flight is None or not in_flight.has_early_returns:
            return False
        in_flight.has_early_returns = False
        self._received.keep_open()
        return True

    def _ask(
        self,
        subscribed: tuple[BrokerConnection, int],
        max_count: int,
        min_count: int,
        deadline: float | None,
        now: float,
    ) -> float:
        """Send a PULL; return until when the broker may wait."""
        connection, subscription = subscribed
        welcome = self._link.welcome
        assert welcome is not None
        timeout = ROUND if deadline is None else min(max(deadline - now, 0.0), ROUND)
        most = min(max_count - self._received.count, welcome.max_pull_count)
        least = max(min(min_count - self._received.count, most), 1)
        in_flight, expected = None, frames.NOT_EXPECTED
        if self.ack_sender is not None:
            self.ack_sender.send(subscribed, with_pull=True)  # acks make room for more messages
            in_flight = self.ack_sender.in_flight
            assert in_flight is not None
            expected = in_flight.expected
        size = min(self._max_bytes, welcome.max_pull_bytes, self._size.most)
        payload = frames.PULL.pack(subscription, most, least, size, int(timeout * 1_000 + 0.999), expected)
        flags = frames.CHECK if self._checks else 0
        self._request.send(connection, payload, most, in_flight, now + timeout + LATE, flags)
        self._capped = self._full = False
        return now + timeout

    def _ask_ahead(self, max_count: int, now: float) -> None:
        """Pull the next messages of a solo consumer that lags while the program handles the last ones."""
        subscribed = self._subscription.current
        if (
            subscribed is not None
            and self._subscription.is_current
            and not (self._request.is_pending or self._received.count)
        ):
            self._ask(subscribed, max_count, 1, now, now)

    def _answered(self) -> None:
        if self._lock.locked():
            return
        in_flight = None if self.ack_sender is None else self.ack_sender.in_flight
        if in_flight is not None and in_flight.has_ordered and self._inside:
            self._accept_unwaited()  # dispositions of earlier messages of their order keys have to know of them
        self._watch_unused()

    def _take_single(self) -> bool:
        """Take an answer that brings a group one message without a header, as most do while messages come one by one;
        return False and leave any other answer.
        """
        answer, in_flight = self._request.answer, self._request.in_flight
        if type(answer) is not Answer or answer.begun is not None or answer.head.tags:
            return False
        if in_flight is None or in_flight.fenced is not None:
            return False
        run = read_single(answer.payload)
        if run is None or not in_flight.number_range([run], answer.head.ranges):
            return False
        self._request.answer = None
        if self._backoff.tries:
            self._backoff.reset()
        if self._sound:
            self._sound.clear()
        self._doubts = 0
        self._checks = self._filtered = False
        self._received.add_one(run)
        self._full = self._capped = self._request.max_count == 1
        return True

    async def _take_answer(self, deadline: float | None) -> bool:
        """Take the answer to the last pull; return False if it brings no messages. Raises errors that a retry cannot
        mend.
        """
        answer, self._filtered = self._request.take(), False
        if isinstance(answer, QmqError):
            if isinstance(answer, Fenced) and self.ack_sender is not None:
                self.ack_sender.fence(answer)  # subscribing again succeeds unless another consumer took over
                self._subscription.forget()
                return False
            if not answer.retryable:
                self._doubt(answer)
                return False
            if isinstance(answer, ConnectionLost):  # the next round waits for a new connection
                self._size.lost(self._max_bytes)
            else:
                self._refusals.came(answer)
                delay = self._backoff.next_delay()
                left = delay if deadline is None else deadline - asyncio.get_running_loop().time()
                await asyncio.sleep(min(delay, left))
            return False
        self._backoff.reset()
        runs, damaged = read_checked(answer.payload, answer.begun)
        if damaged:
            return await self._take_damaged(answer, runs, damaged, deadline)
        self._checks = False
        self._sound.clear()
        return self._accept(answer, runs)

    def _doubt(self, refusal: QmqError) -> None:
        """Repeat a valid pull that the broker refused as invalid: this or another request was damaged on the way.

        Raises *refusal* when it comes MAX_DOUBTS times in a row.
        """
        self._doubts += 1
        if type(refusal) not in _DOUBTFUL or self._doubts >= MAX_DOUBTS:
            raise refusal
        if type(refusal) is UnknownSubscription:
            self._subscription.forget()

    def _accept(self, answer: Answer, runs: list[Run]) -> bool:
        if self._solo_cursor is not None:
            runs = self._solo_cursor.take(runs, answer.head.left_us)
        elif self.ack_sender is not None:
            in_flight = self._request.in_flight
            if in_flight is None or in_flight.fenced is not None:
                return False  # these messages went to other consumers, or come again
            try:
                runs = in_flight.number(runs, answer.head.ranges)
            except ProtocolError as error:  # damaged on the way: pull the same again
                self._doubt(error)
                return False
        whole = messages_in(runs)
        if answer.head.tags:
            runs = with_tags(runs, frozenset(answer.head.tags))
        self._doubts = 0
        accepted = self._received.add(runs)
        self._filtered = accepted < whole
        self._capped = accepted >= self._request.max_count
        self._full = self._capped or len(answer.payload) > min(self._max_bytes, self._size.most) // 2
        self._size.came(len(answer.payload), answer.seconds)
        return bool(runs) and accepted == whole  # more may follow messages that were filtered out

    # --- damage ------------------------------------------------------------------------------------------------------

    async def _take_damaged(
        self, answer: Answer, runs: list[Run], damaged: list[AnswerDamage], deadline: float | None
    ) -> bool:
        """Report the damage in an answer and drop the answer: the next pull returns it again, without damage that is on
        disk.

        An at_most_once group receives nothing twice, so its readable messages are accepted. Returns False if there are
        none.
        """
        connection = self._request.connection
        assert connection is not None
        comes_again = self.ack_sender is not None or self._solo_cursor is not None
        accepted = not comes_again and self._accept(answer, runs)
        self._checks = comes_again
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline + GRACE):
                given_up = await self._report(connection, damaged)
            if not comes_again:
                for damage in damaged:
                    self._report_unreadable(error_of(damage))
            elif len(given_up) == len(damaged) and self._solo_cursor is not None:
                accepted, comes_again = self._accept(answer, runs), False
                for damage in damaged:
                    self._report_unreadable(error_of(damage))
            elif given_up and not any(damage.size for damage in damaged):
                self._nack(answer, runs, damaged, given_up)
        except TimeoutError:
            pass  # the damage is reported when it arrives again
        finally:
            # A solo consumer starts again only with a new subscription. A frame with a damaged header may have
            # announced a wrong size, so the rest of its connection cannot be parsed.
            if (self._solo_cursor is not None and comes_again) or any(damage.size for damage in damaged):
                connection.abort(ConnectionLost("an answer was damaged on its way; the pull is repeated"))
        return accepted

    async def _report(self, connection: BrokerConnection, damaged: list[AnswerDamage]) -> list[int]:
        """Have the broker check the damaged messages, and count those that are bad on disk.

        Returns the numbers of the damages to give up, because the broker keeps finding them sound.
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
                )  # no deadline: a slow disk does not mean a dead broker
                try:
                    reported = await waiter
                finally:
                    self._reporting = None
                self._check_inside()
                found = None if isinstance(reported, QmqError) else reported.meta.get("found")
                log.debug("consumer %s: the broker answered a report of damage: %s", self.id, found or reported)
                self._sound[message] += found == ReportOutcome.SOUND
                if found == ReportOutcome.BAD and (self.ack_sender is not None or self._solo_cursor is not None):
                    self._report_unreadable(error_of(damage))
        return given_up

    def _nack(self, answer: Answer, runs: list[Run], damaged: list[AnswerDamage], given_up: list[int]) -> None:
        """Nack the messages that this client cannot read although the broker finds them sound."""
        in_flight = self._request.in_flight
        assert self.ack_sender is not None
        assert in_flight is not None
        try:
            for number in given_up:
                for start, end in sequences_of(runs, damaged, number, answer.head.ranges):
                    back = PendingDisposition(start, end, Disposition.NACK, None, damaged[number].reason)
                    self.ack_sender.nack_sender.hand_back_soon(in_flight, back)
        except ProtocolError as error:
            self._doubt(error)
            return
        for number in given_up:
            self._report_unreadable(error_of(damaged[number]))

    def _report_unreadable(self, error: BadBatch) -> None:
        """Count, log and report messages that cannot be read."""
        self.damaged += 1
        now = time.monotonic()
        if now >= self._warned_at + _WARN_EVERY:
            self._warned_at = now
            log.warning("consumer %s: %s (%d pieces so far)", self.id, error, self.damaged)
        if self.on_unreadable is not None:
            try:
                self.on_unreadable(error)
            except Exception:
                log.exception("consumer %s: on_unreadable raised an error", self.id)


def _settle(waiter: asyncio.Future[Answer | QmqError], answer: Answer | QmqError) -> None:
    if not waiter.done():
        waiter.set_result(answer)

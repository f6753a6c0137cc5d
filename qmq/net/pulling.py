"""What pulls for a consumer: runs of messages, over reconnects, without losing what a cancelled pull brought."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from qmq.errors import (
    BadBatch,
    ConnectionLost,
    InvalidName,
    InvalidOption,
    ProtocolError,
    QmqError,
    UnknownSubscription,
)
from qmq.format.pieces import Damage, Run
from qmq.names import check_consumer, check_group, check_prefix
from qmq.net import wire
from qmq.net.backoff import Backoff
from qmq.net.connection import Answer, Connection
from qmq.net.group_settings import DEFAULT_TERMS, Terms, shown_settings
from qmq.net.holder import Holder
from qmq.net.holding import Place
from qmq.net.link import Link
from qmq.net.mending import Mending, error_of, read_checked
from qmq.net.resume import Progress, without_covered
from qmq.net.wire import Kind

log = logging.getLogger("qmq.client")

Start = Literal["first", "last"] | datetime | int | None

#: What one pull may bring.
PULL_BYTES: Final = 4 << 20
#: A pull without end asks anew so often: an answer that stays out tells that nobody is there any more.
ROUND: Final = 20.0
#: How much later than asked for an answer may come until then.
LATE: Final = 10.0
#: How long past its time a pull waits for an answer that is on its way.
GRACE: Final = 0.5
#: Leaving waits so long for acknowledgements to be confirmed.
FLUSH_TIMEOUT: Final = 5.0
#: Leaving waits so long for the broker.
LEAVE_TIMEOUT: Final = 2.0
_WARN_EVERY: Final = 10.0
#: So often in a row a request is made that the broker finds fault with, though it was made well.
_MOST_DOUBTS: Final = 3
_DOUBTFUL: Final = (InvalidOption, ProtocolError, UnknownSubscription)


class Puller:
    """A consumer's place at the broker. Pulls of several tasks go one after another."""

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
        if not prefixes:
            raise InvalidName('subscribe needs at least one subject or prefix; "" is everything')
        names = [check_prefix(prefix) for prefix in prefixes]
        #: The consumer's id.
        self.id = check_consumer(consumer) if consumer is not None else make_consumer_id()
        #: Pieces of answers that were left out because nobody can read them; and who is told of each.
        self.damaged = 0
        self._on_error: Callable[[Exception], object] | None = None
        self._link = link
        self._group = check_group(group) if group is not None else None
        self._start = start_of(start)
        self._terms = terms
        self._prefixes = names if group is not None else without_covered(names)
        self._progress = Progress(self._prefixes, None) if group is None else None
        self._transient = consumer is None if is_transient is None else is_transient
        self._nonce = secrets.token_bytes(16)  # who we are over reconnects
        #: What is held, and verdicts on it; None for who has nothing to hand back.
        self.holder = None
        if group is not None and terms.mode != "most_once":
            self.holder = Holder(self.id, self._subscribed_now)
        self._store_id: bytes | None = None
        self._warned_at = -_WARN_EVERY
        self._warned_of_settings = False
        self._inside = False
        self._subscribed: tuple[Connection, int] | None = None
        self._subscribing: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._doubts = 0
        self._kept: deque[Run] = deque()  # received and not handed out
        self._kept_count = 0
        self._skip = 0  # messages of the first of them that were
        self._most = 0  # that the last pull asked for
        self._capped = self._full = False  # its answer had as many, or as many bytes: there may be more
        self._pulling: tuple[Connection, int] | None = None  # the pull that is not answered yet: connection, request
        self._answer: Answer | QmqError | None = None  # what the last one brought, not looked at yet
        self._mending: asyncio.Task[None] | None = None  # it had damage, and is kept when that is mended
        self._waiter: asyncio.Future[None] | None = None
        self._lock = asyncio.Lock()

    @property
    def on_error(self) -> Callable[[Exception], object] | None:
        """Called with the error for each such piece, and with what handlers raise, when it is set."""
        return self._on_error

    @on_error.setter
    def on_error(self, call: Callable[[Exception], object] | None) -> None:
        self._on_error = call
        if self.holder is not None:
            self.holder.on_error = call

    @property
    def is_alone(self) -> bool:
        """Nothing is held of what it is given."""
        return self.holder is None

    @property
    def has_kept(self) -> bool:
        """There is something that was received and not handed out."""
        return bool(self._kept)

    # --- life --------------------------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Subscribe; waits while no broker can be reached. Raises what the broker refuses it with."""
        await self._subscribe()
        self._inside = True

    async def leave(self) -> None:
        """Unsubscribe; whoever waits for messages gets UnknownSubscription."""
        self._inside = False
        self._withdraw()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._subscribing is not None and not self._subscribing.cancel() and not self._subscribing.cancelled():
            self._subscribing.exception()  # it is over, and nobody will ask
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait({self._mending})
        if self._subscribed is None or self._subscribed[0].closed:
            return
        if self.holder is not None:
            await self.holder.close(FLUSH_TIMEOUT)
            self._link.let_go(self.holder)
        connection, subscription = self._subscribed
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await connection.request(Kind.UNSUBSCRIBE, payload=wire.UNSUBSCRIBE.pack(subscription))
        except (QmqError, TimeoutError) as failure:
            log.debug("consumer %s could not unsubscribe: %r", self.id, failure)

    async def flush(self) -> None:
        """Wait until every acknowledgement so far is confirmed. Raises Fenced with how many were not."""
        if self.holder is not None:
            await self.holder.flush()

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def pull(self, max_count: int, min_count: int, timeout: float | None) -> list[Run]:
        """Up to *max_count* messages, once *min_count* are there; what is there after *timeout* seconds (None: ever).

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
        try:
            return await self._pull_alone(max_count, min_count, deadline)
        finally:
            self._lock.release()

    def put_back(self, runs: Sequence[Run]) -> None:
        """These were not handed out after all: they come first in the next pull."""
        if self._skip:
            self._kept[0] = self._kept[0].slice(self._skip, self._kept[0].count)
            self._skip = 0
        self._kept.extendleft(reversed(runs))
        self._kept_count += sum(run.count for run in runs)

    async def _pull_alone(self, max_count: int, min_count: int, deadline: float | None) -> list[Run]:
        clock = asyncio.get_running_loop().time
        while True:
            self._check_inside()
            if self.holder is not None and self.holder.fenced is not None:
                self._drop_held()
            if self._mending is not None:
                if not await self._mended_by(deadline):
                    break
                if self._kept_count >= min_count:
                    break
            asked_until = None
            if self._pulling is None and self._answer is None:
                enough = self._kept_count >= min_count
                if enough and (self._kept_count >= max_count or not self._capped):
                    break
                subscribed = await self._subscribed_by(deadline)
                if subscribed is None:
                    break
                # Of an earlier pull that was for fewer there is enough, and there may be more: no waiting for that.
                asked_until = self._ask(subscribed, max_count, min_count, clock() if enough else deadline, clock())
            if self._answer is None and not await self._answered_by(deadline):
                self._withdraw()
                break
            came = await self._take_answer(deadline)
            if asked_until is None or self._mending is not None:
                continue  # it was an earlier pull's: see whether it is enough
            now = clock()
            if deadline is not None and now >= deadline:
                break
            if came and now < asked_until:
                break  # fewer than min_count, because they are many bytes
        taken = self._take_kept(max_count)
        if self._full and self._progress is not None:
            self._ask_ahead(max_count, clock())
        return taken

    def _ask(
        self, subscribed: tuple[Connection, int], max_count: int, min_count: int, deadline: float | None, now: float
    ) -> float:
        """Send a pull; returns until when the broker may wait."""
        connection, subscription = subscribed
        welcome = self._link.welcome
        assert welcome is not None
        timeout = ROUND if deadline is None else min(max(deadline - now, 0.0), ROUND)
        most = min(max_count - self._kept_count, welcome.max_pull_count)
        least = max(min(min_count - self._kept_count, most), 1)
        expected = wire.NOT_EXPECTED
        if self.holder is not None:
            self.holder.send(subscribed)  # what is handled makes room for more
            expected = self.holder.expected
        size = min(PULL_BYTES, welcome.max_pull_bytes)
        payload = wire.PULL.pack(subscription, most, least, size, int(timeout * 1_000 + 0.999), expected)
        request = connection.ask(Kind.PULL, self._pull_answered, payload=payload, due=now + timeout + LATE)
        self._pulling = connection, request
        self._most = most
        self._capped = self._full = False
        return now + timeout

    def _ask_ahead(self, max_count: int, now: float) -> None:
        """For one who follows alone and is behind: get the next messages while the last ones are handled."""
        subscribed = self._subscribed
        if (
            subscribed is not None
            and subscribed[0] is self._link.connection
            and not (self._pulling or self._kept or self._mending)
        ):
            self._ask(subscribed, max_count, 1, now, now)

    def _pull_answered(self, answer: Answer | QmqError) -> None:
        self._pulling = None
        self._answer = answer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _answered_by(self, deadline: float | None) -> bool:
        """Wait for the pull in flight; False when the time is well over. A cancelled wait withdraws the pull."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if deadline is None else loop.call_at(deadline + GRACE, _wake, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._withdraw()
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        self._check_inside()
        return self._answer is not None

    def _withdraw(self) -> None:
        """Have the pull in flight answered now: what it brings is for the next pull."""
        if self._pulling is not None:
            connection, request = self._pulling
            connection.tell(Kind.WITHDRAW, wire.WITHDRAW.pack(request))

    async def _take_answer(self, deadline: float | None) -> bool:
        """Keep what the last pull brought; False when that is nothing. Raises what trying again can't help."""
        answer, self._answer = self._answer, None
        assert answer is not None
        if isinstance(answer, QmqError):
            if not answer.retryable:
                self._doubt(answer)
                return False
            if not isinstance(answer, ConnectionLost):  # that one is waited for where the next pull starts
                delay = self._backoff.next_delay()
                left = delay if deadline is None else deadline - asyncio.get_running_loop().time()
                await asyncio.sleep(min(delay, left))
            return False
        if not isinstance(answer.meta.get("left_us", 0), int):
            assert self._subscribed is not None
            self._subscribed[0].abort(ConnectionLost("an answer says what it cannot mean; it is asked for again"))
            return False
        self._backoff.reset()
        runs, damaged = read_checked(answer.payload)
        if damaged:
            self._mending = asyncio.get_running_loop().create_task(self._mend(answer, runs, damaged), name="qmq-mend")
            return True
        return self._keep(answer, runs)

    def _doubt(self, refusal: QmqError) -> None:
        """The broker has refused a pull as no pull is made: it was damaged on the way, or another request was, which
        ended the connection. Raises it when that comes again and again.
        """
        self._doubts += 1
        if type(refusal) not in _DOUBTFUL or self._doubts >= _MOST_DOUBTS:
            raise refusal
        if type(refusal) is UnknownSubscription:
            self._subscribed = None

    def _keep(self, answer: Answer, runs: list[Run]) -> bool:
        if self._progress is not None:
            runs = self._progress.take(runs, answer.meta.get("left_us"))
        elif self.holder is not None:
            try:
                runs = self.holder.number(runs, numbers_of(answer.meta))
            except ProtocolError as error:  # damaged on the way: the same is pulled again
                self._doubt(error)
                return False
        self._doubts = 0
        count = sum(run.count for run in runs)
        self._capped = count >= self._most
        self._full = self._capped or len(answer.payload) > PULL_BYTES // 2
        self._kept.extend(runs)
        self._kept_count += count
        return bool(runs)

    # --- damage ------------------------------------------------------------------------------------------------------

    async def _mend(self, answer: Answer, runs: list[Run], damaged: list[Damage]) -> None:
        """Report what is bad in an answer, and keep the answer with what could be had again."""
        assert self._store_id is not None
        mending = Mending(answer.payload, self._link, self._store_id)
        runs = await mending.mend(runs, damaged)
        log.debug("consumer %s got %d of %d bad pieces again", self.id, len(damaged) - len(mending.lost), len(damaged))
        if self.holder is None or not mending.lost:
            self._keep(answer, runs)
        # else the same is pulled again: the broker gives what can be read of it
        for lost in mending.lost:
            self._lose(error_of(lost))

    async def _mended_by(self, deadline: float | None) -> bool:
        """Wait until the damage of the last answer is mended, as far as it can be; False when the time is over before.

        It goes on when the wait is cancelled: what it brings is for the next pull.
        """
        mending = self._mending
        assert mending is not None
        left = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.0) + GRACE
        done, _ = await asyncio.wait({mending}, timeout=left)
        self._check_inside()
        if not done:
            return False
        self._mending = None
        mending.result()
        return True

    def _lose(self, error: BadBatch) -> None:
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

    def _take_kept(self, max_count: int) -> list[Run]:
        """Hand out up to *max_count* messages of those received."""
        kept, taken = self._kept, list[Run]()
        if self._kept_count <= max_count and not self._skip:
            taken += kept
            kept.clear()
            self._kept_count = 0
            return taken
        left = min(max_count, self._kept_count)
        self._kept_count -= left
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

    def _check_inside(self) -> None:
        if not self._inside:
            raise UnknownSubscription(
                f"consumer {self.id} is not subscribed; use it inside `async with client.subscribe(...) as consumer`"
            )

    # --- subscribing -------------------------------------------------------------------------------------------------

    async def _subscribed_by(self, deadline: float | None) -> tuple[Connection, int] | None:
        """Connection and subscription, made anew when the connection is; None when the time is over before."""
        connection = self._link.connection
        if self._subscribed is not None and self._subscribed[0] is connection:
            return self._subscribed
        loop = asyncio.get_running_loop()
        if self._subscribing is None:
            self._subscribing = loop.create_task(self._subscribe(), name="qmq-subscribe")
        subscribing = self._subscribing  # which verdicts may wait for as well
        left = None if deadline is None else max(deadline - loop.time(), 0.0)
        done, _ = await asyncio.wait({subscribing}, timeout=left)
        if not done:
            return None
        if self._subscribing is subscribing:
            self._subscribing = None
        self._check_inside()
        subscribing.result()
        return self._subscribed

    async def _subscribe(self) -> None:
        """Subscribe at the broker, as soon as there is one. Raises what trying again can't help."""
        doubts = 0
        while True:
            connection = await self._link.connected()
            try:
                await self._subscribe_on(connection)
                return
            except QmqError as error:
                # It was damaged on the way, or the fault is another request's.
                is_doubtful = type(error) is ProtocolError
                doubts += is_doubtful
                if not error.retryable and not (is_doubtful and doubts < _MOST_DOUBTS):
                    raise
            await asyncio.sleep(self._backoff.next_delay())

    async def _subscribe_on(self, connection: Connection) -> None:
        start, progress = self._start, self._progress
        store_id = self._link.store_id
        if progress is not None:
            if self._store_id is not None:
                progress.resume(store_id == self._store_id)
            if progress.floor_us is not None:
                start = ["time", progress.floor_us]
        meta: dict[str, Any] = {
            "group": self._group, "prefixes": self._prefixes, "consumer": self.id, "start": start
        }  # fmt: skip
        if self._group is not None:
            meta |= {"mode": self._terms.mode, "settings": dict(self._terms.settings)}
        if self.holder is not None:
            meta |= {"nonce": self._nonce, "client": self._link.client_id, "transient": self._transient}
        answer = await connection.request(Kind.SUBSCRIBE, meta)
        subscription = answer.meta.get("subscription")
        if type(subscription) is not int or not 0 <= subscription < 1 << 32:
            connection.abort(
                ConnectionLost(f"the connection to {connection.address} is of no use: no subscription came")
            )
            raise connection.end_error()
        self._subscribed = connection, subscription
        self._warn_of(answer.meta.get("differing", {}))
        if self.holder is not None:
            self._joined(Place(*answer.meta["place"]))
            self._link.hold(self.holder)
        self._store_id = store_id
        start_us = answer.meta.get("start_us")
        if progress is not None and progress.floor_us is None and isinstance(start_us, int):
            progress.begin_at(start_us)

    def _warn_of(self, differing: dict[str, Any]) -> None:
        """The group is not new, and has other settings: say so once."""
        if differing and not self._warned_of_settings:
            self._warned_of_settings = True
            shown = ", ".join(f"{name}={value!r}" for name, value in shown_settings(differing).items())
            log.warning(
                "consumer %s: group %s keeps its settings, which are not as asked for: %s; "
                "`qmq groups set` changes them", self.id, self._group, shown,
            )  # fmt: skip

    def _joined(self, place: Place) -> None:
        assert self.holder is not None
        before, fenced = self.holder.place, self.holder.fenced
        self.holder.joined(place)
        if fenced is not None or (before is not None and before.incarnation != place.incarnation):
            self._kept.clear()
            self._kept_count = self._skip = 0

    def _drop_held(self) -> None:
        """Nothing that came before is held any more: subscribe again, and see what is."""
        self._withdraw()
        self._answer = None
        self._kept.clear()
        self._kept_count = self._skip = 0
        self._subscribed = None

    async def _subscribed_now(self) -> tuple[Connection, int]:
        """Connection and subscription, as soon as there are any. Raises what trying again can't help."""
        subscribed = await self._subscribed_by(None)
        assert subscribed is not None
        return subscribed


def numbers_of(meta: dict[str, Any]) -> list[int]:
    """What an answer says of its messages: first pull sequence, count, attempt; again and again. Raises ProtocolError
    when that is not what the broker has said.
    """
    ranges = meta.get("ranges", [])
    if type(ranges) is not list or not all(type(number) is int and 0 <= number < 1 << 64 for number in ranges):
        raise ProtocolError("the broker's answer does not say what its messages are")
    if ranges and wire.pack_numbers(ranges)[1] != meta.get("ranges_crc"):
        raise ProtocolError("what the broker's answer says of its messages does not fit its checksum")
    return ranges


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def check_pull(max_count: int, min_count: int, timeout: float | None) -> None:
    """Raise InvalidOption for what a pull can't be asked for."""
    if type(max_count) is not int or type(min_count) is not int or not 1 <= min_count <= max_count:
        raise InvalidOption(
            f"a pull needs 1 <= min_count <= max_count, not min_count={min_count!r}, max_count={max_count!r}"
        )
    if timeout is not None and (not isinstance(timeout, int | float) or not 0 <= timeout < 1e9):
        raise InvalidOption(f"timeout must be a number of seconds from 0, or None to wait without end, not {timeout!r}")


def start_of(start: object) -> Any:
    """What SUBSCRIBE says for *start*. Raises InvalidOption."""
    if start is None or start in ("first", "last"):
        return start
    if isinstance(start, datetime):
        if start.utcoffset() is None:
            raise InvalidOption(f"start {start!r} has no time zone; use datetime(..., tzinfo=UTC)")
        since = start.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
        return ["time", max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)]
    if type(start) is int and 0 <= start < 1 << 63:
        return ["sequence", start]
    raise InvalidOption(f'start must be "first", "last", an aware datetime, a sequence from 0 or None, not {start!r}')


def make_consumer_id() -> str:
    """An id for a consumer that was given none: host, process id and a random part."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:100] or "host"
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"

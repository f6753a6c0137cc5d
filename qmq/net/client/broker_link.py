"""The link of a client to one broker: one connection at a time, connected again when it is lost, and what it sends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from qmq.errors import (
    ConnectionLost,
    Fenced,
    InvalidOption,
    ProducerInUse,
    ProtocolError,
    QmqError,
    TlsFailed,
    Unauthorized,
    UsageError,
)
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.net.client.address import Address
from qmq.net.client.backoff import Backoff
from qmq.net.client.connection import ANSWER_TIMEOUT, Answer, BrokerConnection, Welcome, timeout_while_still
from qmq.net.client.dial import Routes
from qmq.net.client.heartbeat import HeartbeatSender, HeartbeatTarget
from qmq.net.client.in_thread import going_on, in_thread
from qmq.net.client.options import ClientOptions, producer_id_of
from qmq.net.client.producer.accumulator import BATCH_BYTES, SendLimits
from qmq.net.client.producer.receipts import Receipt
from qmq.net.client.producer.window import SendWindow
from qmq.net.client.tasks import begin_task
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import KnownConsumer
from qmq.version import VERSION

log = logging.getLogger("qmq.client")

#: Connecting and HELLO may take this long. All times here are seconds.
CONNECT_TIMEOUT: Final = 5.0
#: A broker that is reached, and does not answer, gets twice as long each time, up to so many times as long.
_MOST_CONNECT_TIMEOUTS: Final = 4
#: The broker may take this long to notice that the last client of a producer's name has ended.
CLAIM_TIMEOUT: Final = 2.0
#: A broker that owes an answer for this long, while no bytes move, counts as dead; the link connects again. Where a
#: relay holds the bytes, nobody sees them move: so each further connection without a stored batch gets twice as long.
SILENCE: Final = 10.0
_MOST_SILENCES: Final = 8
#: The size of batches, after connections that have ended while batches were long on their way.
_LEAST_BATCH_BYTES: Final = 64 << 10
#: After a connection that lasted this long, the link connects again without a delay.
GOOD_AFTER: Final = 2.0
#: While connections keep ending soon, one warning in this time reports all of them.
WARN_EVERY: Final = 30.0
#: Departures that await an answer at once: a part of the requests that a broker takes of one connection.
DEPARTURES_AT_ONCE: Final = 100
#: This many invalid welcomes in a row end a link: a single one may have been damaged on the way.
_MAX_INVALID_WELCOMES: Final = 3
#: A link that was connected before tries on for so long after TlsFailed: a certificate may be half renewed.
TLS_TRIES_S: Final = 60.0
#: A link that its broker lets in no more waits so long for another token in the file of its token.
TOKEN_WAIT_S: Final = 60.0
LOGIN_EVERY_S: Final = 5.0
_TICK: Final = 1.0


#: The name that HELLO gives this client.
CLIENT_NAME: Final = f"qmq-python/{VERSION}"


class Session(Protocol):
    """A consumer of a group as its link knows it: it subscribes on each connection, and loses its messages in time."""

    def fence(self, error: Fenced, *, for_good: bool = True) -> None:
        """Give up all messages in flight; *for_good*: the broker refuses their acknowledgements."""

    def resume(self) -> None:
        """Subscribe again, as there is a new connection."""

    def __hash__(self) -> int: ...


class Departure(NamedTuple):
    """A consumer that has left, with its acks and its group (a member of a broadcast has a group of its own)."""

    store_id: bytes
    group: str
    consumer: str
    nonce: bytes
    known: KnownConsumer | None


class Departures:
    """Consumers of one link that left without a connection: the broker learns of them on the next one.

    Until then the heartbeats of the client's other consumers keep such a consumer alive, and its messages from others.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, Departure] = {}  # by nonce
        self._sent: set[bytes] = set()  # nonces of those that the present connection has sent

    def add(self, departure: Departure, connection: BrokerConnection | None) -> None:
        """Tell the broker at once on *connection*; on the next one, if it is None."""
        self._waiting[departure.nonce] = departure
        if connection is not None:
            self._send_some(connection)

    def connected(self, connection: BrokerConnection, store_id: bytes) -> None:
        """Tell the broker of that store on a new connection; forget consumers of any other store."""
        self._waiting = {nonce: one for nonce, one in self._waiting.items() if one.store_id == store_id}
        self._sent.clear()
        self._send_some(connection)

    def _send_some(self, connection: BrokerConnection) -> None:
        unsent = (one for one in self._waiting.values() if one.nonce not in self._sent)
        for departure in list(islice(unsent, max(DEPARTURES_AT_ONCE - len(self._sent), 0))):
            self._sent.add(departure.nonce)
            self._send(departure, connection)

    def _send(self, departure: Departure, connection: BrokerConnection) -> None:
        consumer = {"group": departure.group, "consumer": departure.consumer}
        known = departure.known
        if known is not None and known.handled:
            handled = {"since_us": known.since_us, "generation": known.generation, "handled": list(known.handled)}
            _administer(connection, {"action": "handled", **consumer, **handled}, lambda answer: None)
        leave = {"action": "leave", **consumer, "nonce": departure.nonce}
        _administer(connection, leave, partial(self._answered, departure, connection))

    def _answered(self, departure: Departure, connection: BrokerConnection, answer: Answer | QmqError) -> None:
        if isinstance(answer, QmqError):
            if answer.retryable:
                return  # sent again on the next connection
            log.debug("the broker refused to let consumer %s leave: %s", departure.consumer, answer)
        self._waiting.pop(departure.nonce, None)
        self._sent.discard(departure.nonce)
        if not connection.closed:
            self._send_some(connection)


def _administer(
    connection: BrokerConnection, meta: dict[str, Any], callback: Callable[[Answer | QmqError], None]
) -> None:
    due = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
    connection.ask(FrameKind.ADMINISTER, callback, frames.pack_meta(meta), due=due)


class LinkOwner(Protocol):
    """The owner of links, and the calls by which they report to it."""

    def adopting(self, link: Link, welcome: Welcome) -> None:
        """Check the store of a new connection before the link uses it. Raises InvalidOption to refuse it."""

    def changed(self) -> None:
        """Choose brokers again: a connection came or went, or a broker refused a batch."""

    def batch_ended(self) -> None:
        """Wake those that wait for a batch to be stored or to fail."""

    def is_hopeless(self, link: Link, error: QmqError) -> bool:
        """Return whether the link gives up after its broker refused the client for good."""

    def several_brokers(self, error: InvalidOption) -> None:
        """End the client: the address of a link leads to several brokers."""

    def left_open(self) -> None:
        """[any thread] Warn that the loop was closed before the client."""


class Link:
    """The link to one broker. It belongs to one event loop; call ``open`` first."""

    def __init__(
        self, address: Address, options: ClientOptions, sending: SendWindow, owner: LinkOwner, client_id: bytes
    ) -> None:
        self.address = address
        self._routes = Routes()
        #: The connection; None while there is none.
        self.connection: BrokerConnection | None = None
        #: The broker knows this client's process by it.
        self.client_id = client_id
        #: Numbers the sessions of its consumers.
        self.session_numbers = itertools.count(1)
        #: The name of the program.
        self.program = options.name or options.app
        self._heartbeat: HeartbeatSender | None = None
        self._sessions: set[Session] = set()
        self._departures = Departures()
        self.welcome: Welcome | None = None
        self._options = options
        self._sending = sending
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: QmqError | None = UsageError(
            "the client is not connected; use it inside `async with qmq.connect(...) as client`, or await it"
        )
        self._connected_at = 0.0
        self._silences = 1
        self._batch_bytes = BATCH_BYTES
        self._warned_at = 0.0
        self._let_out: Unauthorized | None = None  # the end of the last connection
        self._refused_at: float | None = None  # the first refusal of a login since the last connection
        self._unreported = 0  # connections that have ended since the last warning
        self._backoff = Backoff()
        self._slow_tries = 0  # those in a row that reached the broker and got no answer in time
        self._reconnecting: asyncio.Task[None] | None = None
        self._turn_wanted = False
        self._tick: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []  # for a connection

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Try to connect once. Raises QmqError when that fails; call ``keep_trying`` or ``close`` then."""
        self._loop = asyncio.get_running_loop()
        await self._connect()
        self._ended = None
        self._start_tick()

    def keep_trying(self, error: QmqError) -> None:
        """Connect in the background, until it succeeds; *error* is the cause of the first failure."""
        assert self._loop is not None
        self._ended = None
        self._sending.last_error = error
        self._backoff.next_delay()
        self._start_tick()
        self._reconnecting = begin_task(self._reconnect_until_done(), self._loop, "qmq-reconnect")

    def close(self, error: QmqError, later: QmqError | None = None) -> None:
        """Close the link; everything that waits for it raises *error*, and so do later calls, or *later*."""
        self._ended = later or error
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for handle in (self._tick, self._wake):
            if handle is not None:
                handle.cancel()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            self._reconnecting = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._sending.abandon(error)
        self._wake_all(self._waiters)
        self._owner.batch_ended()

    @property
    def is_open(self) -> bool:
        """Whether the link was opened and has not ended."""
        return self._ended is None

    def ready(self) -> asyncio.AbstractEventLoop:
        """Return the event loop. Raises the error that ended the link."""
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert self._loop is not None
        return self._loop

    @property
    def store_id(self) -> bytes:
        """The id of the broker's store, of this connection or the last one; empty before the first."""
        return self.welcome.store_id if self.welcome is not None else b""

    # --- consumers of groups -----------------------------------------------------------------------------------------

    def add_session(self, session: Session, asked_at: float) -> None:
        """Send heartbeats for a consumer of a group that asked to subscribe at *asked_at*; fence it when they fail."""
        assert self._loop is not None
        assert self.welcome is not None
        self._sessions.add(session)
        if self._heartbeat is None:
            session_timeout_s = self.welcome.session_timeout_ms / 1_000
            self._heartbeat = HeartbeatSender(
                self.client_id,
                self._heartbeat_target,
                session_timeout_s,
                self._out_of_touch,
                self._owner.left_open,
                self._other_store_answered,
            )
            self._heartbeat.start(self._loop)
        self._heartbeat.heard(self._loop.time() - asked_at)

    def remove_session(self, session: Session) -> None:
        """Forget a consumer that has left; stop the heartbeats after the last one."""
        self._sessions.discard(session)
        if not self._sessions and self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def depart(self, departure: Departure) -> None:
        """Tell the broker that a consumer has left, as soon as there is a connection."""
        self._departures.add(departure, self.connection)

    def _heartbeat_target(self) -> HeartbeatTarget:
        connection = self.connection
        return HeartbeatTarget(self.address, None if connection is None else connection.peer, self.store_id)

    def _other_store_answered(self, store_id: bytes) -> None:
        """End the client if two brokers serve at its address: another one than its own has answered a heartbeat. A
        broker that was replaced does not answer any more.
        """
        connection, own = self.connection, self.store_id
        if connection is None or own == store_id:
            return

        def answered(answer: Answer | QmqError) -> None:
            if isinstance(answer, Answer) and self.connection is connection:
                self._owner.several_brokers(
                    InvalidOption(
                        f"{self.address} leads to several brokers, with the stores {own.hex()} and {store_id.hex()}, "
                        "so heartbeats of consumers reach the wrong one: give the address of each, separated by commas"
                    )
                )

        due = asyncio.get_running_loop().time() + ANSWER_TIMEOUT
        connection.ask(FrameKind.LAST_SEQUENCE, answered, payload=os.urandom(PRODUCER_ID_SIZE), due=due)

    def _out_of_touch(self) -> None:
        error = Fenced(
            "the broker was out of reach for longer than the session timeout, so it may have handed the messages in "
            "flight here to other consumers"
        )
        for session in self._sessions:
            session.fence(error, for_good=False)

    def give_up_sockets(self) -> None:
        """[in the child of a fork] Give up the copies of the parent's sockets."""
        if self.connection is not None:
            self.connection.give_up_socket()
        if self._heartbeat is not None:
            self._heartbeat.give_up_socket()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def connected(self) -> BrokerConnection:
        """Return the connection, as soon as there is one. Raises the error that ended the link."""
        while True:
            loop = self.ready()
            if self.connection is not None:
                return self.connection
            future: asyncio.Future[None] = loop.create_future()
            self._waiters.append(future)
            try:
                await future
            finally:
                if future in self._waiters:
                    self._waiters.remove(future)

    async def ask(self, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b"") -> Answer:
        """Send a request and return the answer; repeat it after retryable errors. Raises any other QmqError."""
        backoff = Backoff()
        while True:
            connection = await self.connected()
            try:
                return await connection.request(kind, meta, payload)
            except QmqError as error:
                if not error.retryable:
                    raise
            await asyncio.sleep(backoff.next_delay())

    async def answer(self, kind: FrameKind, meta: dict[str, Any] | None = None) -> Answer:
        """Do as ``ask``, but for ``admin_timeout`` seconds at most in which no bytes move. Raises TimeoutError."""
        async with timeout_while_still(self._options.admin_timeout, self.moved_at):
            return await self.ask(kind, meta)

    def moved_at(self) -> float:
        """Return when bytes of an unfinished transfer have moved last."""
        return -math.inf if self.connection is None else self.connection.moved_at

    @staticmethod
    def _wake_all(futures: list[asyncio.Future[None]]) -> None:
        waiting = futures.copy()
        futures.clear()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # --- turns of the loop -------------------------------------------------------------------------------------------

    def want_turn(self) -> None:
        """Look for a batch to write in the next turn of the loop."""
        if not self._turn_wanted and self.connection is not None:
            assert self._loop is not None
            self._loop.call_soon(self._turn)  # raises in a wrong thread, where asyncio is in its debug mode
            self._turn_wanted = True

    def send_now(self, subject: str, body: bytes, unique: bytes = b"") -> asyncio.Future[Receipt] | None:
        """Write a plain message of the usual durability, and return the future of its receipt; None if it has to queue,
        as others are queued or on their way. *unique* is the hash of its unique text.
        """
        connection, sending, loop = self.connection, self._sending, self._loop
        if connection is None or connection.closed or not connection.writable or loop is None or loop.get_debug():
            return None  # in its debug mode asyncio looks for wrong threads when the send queues
        waiter: asyncio.Future[Receipt] = loop.create_future()
        request = connection.next_request()
        batch = sending.single(request, subject, body, waiter, loop.time(), time.time_ns() // 1_000, unique)
        if batch is None:
            return None
        assert batch.buffers is not None
        connection.send_batch(request, batch.buffers, batch.flush)
        return waiter

    def _turn(self) -> None:
        """Write one batch. The next one goes in another turn, so that the broker works while it is built."""
        self._turn_wanted = False
        connection, sending = self.connection, self._sending
        if connection is None or connection.closed or not connection.writable:
            return
        assert self._loop is not None
        now = self._loop.time()
        request = connection.next_request()
        batch = sending.next_batch(request, now, time.time_ns() // 1_000)
        if batch is not None:
            assert batch.buffers is not None
            connection.send_batch(request, batch.buffers, batch.flush)
        wake_at = sending.wake_at()
        if wake_at is None:
            return
        if wake_at <= now:
            self.want_turn()
        else:
            if self._wake is not None:
                self._wake.cancel()
            self._wake = self._loop.call_at(wake_at, self.want_turn)

    def _start_tick(self) -> None:
        assert self._loop is not None
        self._tick = self._loop.call_later(min(_TICK, self._options.send_timeout / 8), self._ticked)

    def _ticked(self) -> None:
        """Give up sends that are too old, and a broker that does not answer."""
        assert self._loop is not None
        self._start_tick()  # first, so that nothing unexpected ends the ticks
        now, connection, sending = self._loop.time(), self.connection, self._sending
        if connection is not None and (seconds := connection.look(now)):
            sending.moved(now, seconds)
            if connection.arrived and self._heartbeat is not None:
                self._heartbeat.heard(0.0)  # the broker knows, as the system tells it that its bytes arrive
        sending.expire(now)
        self._owner.batch_ended()
        if connection is not None:
            silent_since = sending.silent_since()
            is_silent = silent_since is not None and now > silent_since + SILENCE * self._silences
            if is_silent:
                stored = sending.progress_at > self._connected_at
                self._silences = 1 if stored else min(2 * self._silences, _MOST_SILENCES)
            if is_silent or connection.is_overdue(now):
                connection.abort(ConnectionLost(f"the broker at {connection.address} did not answer in time"))
            else:
                self.want_turn()

    # --- called by the connection ------------------------------------------------------------------------------------

    def batch_stored(
        self, request: int, position: int, stored_at_us: int, partition: int, store_id: bytes, firsts: Sequence[int],
        duplicates: bytes = b"",
    ) -> None:  # fmt: skip
        """Hand in the fields of SENT: the broker has stored the batch of that request."""
        assert self._loop is not None
        self._sending.stored(
            request, position, stored_at_us, partition, store_id, firsts, self._loop.time(), duplicates
        )
        self._batch_ended()

    def batch_refused(self, request: int, error: QmqError) -> None:
        """Hand in the error with which the broker refused the batch of that request."""
        assert self._loop is not None
        self._sending.refused(request, error, self._loop.time())
        self._owner.changed()
        self._batch_ended()

    def _batch_ended(self) -> None:
        self._owner.batch_ended()
        if not self._turn_wanted and self._sending.has_waiting():
            self.want_turn()

    def writable(self) -> None:
        """Write on, as the connection takes more again."""
        self.want_turn()

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        """Connect again, as this connection has ended."""
        if connection is not self.connection:
            return
        assert self._loop is not None
        self.connection = None
        now = self._loop.time()
        if now > self._connected_at + GOOD_AFTER:
            self._backoff.reset()
        else:
            self._backoff.next_delay()  # it did connect, but counts as a failed try
        is_let_out = type(error) is Unauthorized  # a login would fail as well, and brokers let failed ones wait
        if not is_let_out:
            self._warn(error, now)
        self._batch_bytes = max(self._batch_bytes >> 1, _LEAST_BATCH_BYTES) if self._sending.was_slow else BATCH_BYTES
        self._sending.disconnected(error, now)
        self._owner.changed()
        if isinstance(error, Unauthorized) and self.address.token_file:
            self._let_out = error
        elif is_let_out and self._owner.is_hopeless(self, error):
            return
        self._reconnecting = begin_task(self._reconnect_until_done(), self._loop, "qmq-reconnect")

    def _warn(self, error: QmqError, now: float) -> None:
        if self._backoff.tries > 1 and now < self._warned_at + WARN_EVERY:
            self._unreported += 1
            return
        others = f" ({self._unreported} connections before it ended soon, too)" if self._unreported else ""
        log.warning("%s; connecting again%s", error, others)
        self._warned_at, self._unreported = now, 0

    # --- connecting --------------------------------------------------------------------------------------------------

    async def _reconnect_until_done(self) -> None:
        """Do as ``_reconnect``, also after unexpected errors."""
        await going_on(self._reconnect, f"connecting to {self.address}")

    async def _reconnect(self) -> None:
        """Try to connect until it succeeds, or the owner gives up."""
        assert self._loop is not None
        invalid, is_told = 0, False
        tls_until = self._loop.time() + (TLS_TRIES_S if self.welcome is not None else 0)
        let_out, self._let_out = self._let_out, None
        if let_out is not None and not await self._may_log_in(let_out) and self._gives_up(let_out):
            return
        if self._backoff.tries:
            await asyncio.sleep(self._backoff.next_delay())
        while True:
            try:
                await self._connect()
            except QmqError as error:
                self._sending.last_error = error
                if isinstance(error, Unauthorized) and await self._may_log_in(error):
                    continue
                invalid += 1
                is_final = not error.retryable and (
                    type(error) is not ProtocolError or invalid >= _MAX_INVALID_WELCOMES
                )
                if type(error) is TlsFailed and self._loop.time() < tls_until:
                    is_final = False
                    if not is_told:
                        is_told = True
                        log.warning("%s; trying for %g s more", error, tls_until - self._loop.time())
                if is_final and self._gives_up(error):
                    return
            else:
                log.info("connected again, to %s", self.address)
                self._reconnecting = None
                return
            await asyncio.sleep(self._backoff.next_delay())

    def _gives_up(self, error: QmqError) -> bool:
        """Return whether the owner gives up this link, because the broker refuses the client for good."""
        this, self._reconnecting = self._reconnecting, None  # the owner closes the link
        if self._owner.is_hopeless(self, error):
            return True
        self._reconnecting = this
        return False

    async def _may_log_in(self, error: Unauthorized) -> bool:
        """Wait until a login may succeed after a refusal: the file of the token has another one, or LOGIN_EVERY_S have
        passed, as the broker may learn of a new one late. Return False TOKEN_WAIT_S after the first refusal, and where
        there is no file.
        """
        if not self.address.token_file:
            return False
        assert self._loop is not None
        now = self._loop.time()
        if self._refused_at is None:
            self._refused_at = now
            log.warning(
                "%s: %s; waiting up to %g s for another token in %s", self.address, error, TOKEN_WAIT_S,
                self.address.token_file,
            )  # fmt: skip
        until, again_at = self._refused_at + TOKEN_WAIT_S, now + LOGIN_EVERY_S
        while (await in_thread(self.address.refreshed, daemon=True)).token == self.address.token:
            if (now := self._loop.time()) >= until:
                return False
            if now >= again_at:
                break
            await asyncio.sleep(min(_TICK, max(until - now, 0.01)))
        return True

    async def _connect(self) -> None:
        """Connect. Raises QmqError."""
        if self.address.token_file:
            self.address = await in_thread(self.address.refreshed, daemon=True)
        while True:
            assert self._loop is not None
            connection = BrokerConnection(self, str(self.address), self._loop)
            try:
                await self._connect_by(connection)
            except ConnectionLost:
                if not self._routes.is_silent(connection.peer):
                    raise
            else:
                self._routes.is_good(connection.peer)
                return

    async def _connect_by(self, connection: BrokerConnection) -> None:
        """Connect to one address of the broker's host. Raises QmqError."""
        address = self.address
        # A broker to which all clients come back at once may need longer for its handshakes.
        timeout_s = CONNECT_TIMEOUT * min(1 << self._slow_tries, _MOST_CONNECT_TIMEOUTS)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.open(address, self._routes)
                await self._adopt(
                    connection,
                    await connection.hello(
                        CLIENT_NAME,
                        self._options.name,
                        self._options.app,
                        address.token,
                        self._sending.unanswered(asyncio.get_running_loop().time()),
                    ),
                )
        except BaseException as error:
            connection.abort(ConnectionLost("given up"))
            if isinstance(error, TimeoutError):
                self._slow_tries += connection.peer is not None
                raise ConnectionLost(f"{address} did not answer within {timeout_s:g} s") from None
            if isinstance(error, QmqError) or not isinstance(error, Exception):
                raise
            self._sending.last_error = ConnectionLost(f"{address}: {error!r}")
            if self.connection is not connection:
                raise
            log.exception("the connection to %s could not be used", address)  # ``lost`` follows, and connects again
        else:
            self._slow_tries = 0

    async def _adopt(self, connection: BrokerConnection, welcome: Welcome) -> None:
        """Check a new connection, then send and pull on it."""
        assert self._loop is not None
        if self._options.send_timeout >= welcome.producer_ttl_ms / 2_000:
            raise InvalidOption(
                f"send_timeout is {self._options.send_timeout:g} s; it must be below half of the time for which the "
                f"broker remembers a producer (producer_ttl_ms {welcome.producer_ttl_ms}), else a batch could be "
                "stored twice"
            )
        last = None
        if self._options.producer is not None:
            await self._claim(connection, self._options.producer)
            if welcome.store_id != self.store_id:
                answer = await connection.request(
                    FrameKind.LAST_SEQUENCE, payload=producer_id_of(self._options.producer)
                )
                last = sequence_in(answer)
        if connection.closed:
            raise connection.end_error()
        self._owner.adopting(self, welcome)
        if self.store_id and welcome.store_id != self.store_id:
            log.warning(
                "%s serves store %s now, and served %s before: if both are in use, give the address of each broker",
                self.address, welcome.store_id.hex(), self.store_id.hex(),
            )  # fmt: skip
        self.welcome = welcome
        self._sending.connected(
            welcome.store_id,
            SendLimits(
                welcome.max_frame_bytes,
                welcome.max_message_bytes,
                welcome.producer_window,
                welcome.producer_ttl_ms / 4_000,
                self._batch_bytes,
                welcome.unique_for_ms > 0,
            ),
        )
        self._sending.continue_after(last)
        self._connected_at, self._refused_at = self._loop.time(), None
        self.connection = connection
        self._departures.connected(connection, welcome.store_id)
        self._wake_all(self._waiters)
        self._owner.changed()
        for session in self._sessions:
            session.resume()
        self.want_turn()

    async def _claim(self, connection: BrokerConnection, producer: str) -> None:
        """Claim the producer's name, so that the broker refuses every other client of that name. Raises ProducerInUse
        if another client still has it after CLAIM_TIMEOUT: the broker may need a moment to see that one has ended.
        """
        assert self._loop is not None
        until, backoff = self._loop.time() + CLAIM_TIMEOUT, Backoff()
        payload = frames.CLAIM.pack(producer_id_of(producer), self.client_id)
        while True:
            try:
                await connection.request(FrameKind.CLAIM, payload=payload)
                return
            except ProducerInUse as error:
                if self._loop.time() >= until:
                    raise ProducerInUse(f"producer {producer!r} at {self.address}: {error}") from None
            await asyncio.sleep(backoff.next_delay())


def sequence_in(answer: Answer) -> int | None:
    """Return the sequence in LAST_SEQUENCE_IS. Raises ProtocolError."""
    sequence = answer.meta.get("sequence")
    if sequence is not None and not isinstance(sequence, int):
        raise ProtocolError(f"LAST_SEQUENCE_IS has a sequence of {sequence!r:.40}; it must be a whole number")
    return sequence

"""The brokers of a client: a link to each, and the failover of sends from one to another.

New batches go to one broker until it is lost or refuses one with a retryable error; then to the next, in the order of
the addresses.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import math
import os
import secrets
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Protocol

from qmq.errors import ConnectionLost, InvalidOption, QmqError, UsageError
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.format.source import new_source
from qmq.net.client.address import Address
from qmq.net.client.backoff import Backoff
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import CLOSE_TIMEOUT, Answer, BrokerConnection, Welcome
from qmq.net.client.failover.handover import HandoverClient
from qmq.net.client.options import ClientOptions, producer_id_of
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.outcomes import Outcomes
from qmq.net.client.producer.receipts import Receipt
from qmq.net.client.producer.window import SendWindow
from qmq.net.client.tasks import begin_task
from qmq.net.protocol.frames import FrameKind

#: Order keys whose brokers are remembered.
_ORDER_KEYS_KEPT: Final = 16_384


class Failover:
    """Moves batches between ``lanes``, the windows of the brokers, without I/O. Time is an argument, in seconds."""

    def __init__(self, lanes: Sequence[SendWindow], failover_after: float | None) -> None:
        """*failover_after*: seconds for which a batch that its broker may have stored waits for it; None: no limit."""
        self._lanes = lanes
        self._failover_after = failover_after
        #: The number of the lane to which new batches go.
        self.active = 0
        for number, lane in enumerate(lanes):
            lane.takes_new = number == 0

    def rebalance(self, now: float) -> None:
        """Choose a broker and move batches, after a broker came, went or refused a batch, or after some time."""
        if len(self._lanes) == 1:
            return
        self._choose(now)
        active = self._lanes[self.active]
        if not active.is_connected:
            return
        for lane in self._lanes:
            if lane is not active:
                given = lane.give_away(now, self._failover_after)
                if given:
                    active.take_over(given)

    def _choose(self, now: float) -> None:
        count = len(self._lanes)
        order = [(self.active + step) % count for step in range(count)]
        fit = [number for number in order if self._lanes[number].is_fit(now)]
        connected = [number for number in order if self._lanes[number].is_connected]
        chosen = (fit or connected or order)[0]
        if chosen != self.active:
            self._lanes[self.active].take_new(False)
            self.active = chosen
            self._lanes[chosen].take_new(True)


class OrderKeyBrokers:
    """Says which of several brokers has the messages of an order key: by rendezvous hashing over the addresses, so that
    all clients that name the brokers alike agree, whatever the order in which they name them.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._names = [f"{address.host.lower()}:{address.port}" for address in addresses]
        self.broker_of = lru_cache(_ORDER_KEYS_KEPT)(self._broker_of)

    def _broker_of(self, order_key: str) -> int:
        """Return the number of the broker among the addresses: the one with the highest hash, of equal ones the one
        with the lowest name.
        """
        rest = f"\0{order_key}"
        hashes = [
            (-int.from_bytes(blake2b((name + rest).encode(), digest_size=8).digest(), "big"), name, number)
            for number, name in enumerate(self._names)
        ]
        return min(hashes)[2]


log = logging.getLogger("qmq.client")

#: Once one broker has answered, the others have this long, in seconds, before a client begins without them.
OTHERS_WAIT: Final = 0.5
#: A client that the program left open sends what it has for this long, in seconds, when the program or its loop ends.
LEFT_OPEN_FLUSH: Final = 2.0
_LEFT_OPEN: Final = (
    "the program ended, or dropped the client, without closing it; use the client inside a block, or call its close()"
)
#: After so many seconds without a connection a broker counts as away: a list of the others waits OTHERS_WAIT for it.
AWAY_AFTER: Final = 5.0


class OpenConsumer(Protocol):
    """A consumer that has subscribed."""

    async def leave(self, error: BaseException | None, *, closes: bool = False) -> None:
        """Have acks confirmed, as far as there is time, and unsubscribe."""


class Brokers:
    """All brokers of a client, in the order of its addresses. It belongs to one event loop; call ``open`` first."""

    def __init__(self, options: ClientOptions, accumulator: Accumulator) -> None:
        producer_id = os.urandom(PRODUCER_ID_SIZE) if options.producer is None else producer_id_of(options.producer)
        self.options = options
        sender_bytes = max(address.sender_bytes for address in options.addresses)
        self._sender_bytes = sender_bytes
        self.outcomes = Outcomes(producer_id, accumulator, new_source(options.app, sender_bytes))
        #: The brokers know this client's process by it.
        self.client_id = secrets.token_bytes(16)
        self._accumulator = accumulator
        if len(options.addresses) > 1:
            accumulator.broker_of = OrderKeyBrokers(options.addresses).broker_of
        lanes = [
            SendWindow(self.outcomes, accumulator, options.send_timeout, number)
            for number in range(len(options.addresses))
        ]
        self.links = [
            Link(address, options, lane, self, self.client_id)
            for address, lane in zip(options.addresses, lanes, strict=True)
        ]
        self._failover = Failover(lanes, options.failover_after)
        self._active = self.links[0]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: QmqError | None = UsageError(
            "the client is not connected; use it inside `async with qmq.connect(...) as client`, or await it"
        )
        self._listeners: list[asyncio.Future[None]] = []  # that wait for a batch to end
        self._moving: asyncio.TimerHandle | None = None
        #: The consumers that are subscribed.
        self.consumers: set[OpenConsumer] = set()
        #: Hands failed messages to another broker when their own is lost.
        self.handover = HandoverClient(self.links, options.failover_after)
        self._unconnected_since: dict[Link, float] = {}
        self._refused: set[Link] = set()  # links whose brokers refuse the client for good
        self._warned_of_left_open = False
        #: Whether the client was closed because the program, or its loop, ended without.
        self.was_left_open = False
        self._life: AsyncGenerator[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to all brokers; return once one has answered. Raises the first refusal that is not retryable, or
        ConnectionLost.
        """
        if self._loop is not None:
            raise UsageError(
                "a client can be used in one `async with` block only; call connect again for another client"
            )
        self._loop = loop = asyncio.get_running_loop()
        until, backoff = loop.time() + self.options.wait, Backoff()
        try:
            while (error := await self._try_to_open(loop)) is not None:
                left = until - loop.time()
                if left <= 0:
                    raise error
                if not backoff.tries:
                    log.info("%s; waiting for one for up to %g s", error, self.options.wait)
                await asyncio.sleep(min(backoff.next_delay(), left))
        except BaseException as error:
            for link in self.links:
                link.close(error if isinstance(error, QmqError) else ConnectionLost("given up"))
            raise
        self._ended = None
        self._life = self._until_left()
        await anext(self._life)
        _open.add(self)
        _close_at_exit_of_worker()
        self.changed()

    async def _try_to_open(self, loop: asyncio.AbstractEventLoop) -> QmqError | None:
        """Connect to all brokers; return the error if none has answered. Raises a refusal that is not retryable."""
        tasks = [begin_task(link.open(), loop, "qmq-connect") for link in self.links]
        try:
            await self._opened(tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if isinstance(error, ConnectionLost):
                return error
            raise
        return None

    async def _opened(self, tasks: list[asyncio.Task[None]]) -> None:
        waiting, found = set(tasks), False
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=OTHERS_WAIT if found else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            found = found or any(task.exception() is None for task in done)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        errors = [_error_of(link, task) for link, task in zip(self.links, tasks, strict=True)]
        for error in errors:
            if error is not None and not error.retryable:
                raise error
        if all(errors):
            causes = "; ".join(map(str, errors))
            wait = self.options.wait
            within = f" within {wait:g} s" if wait else ""
            lost = ConnectionLost(
                f"no broker can be reached{within}: {causes}; start one there with `qmq serve`, and see its log; "
                "`qmq ping --wait 30` waits until it answers"
            )
            if not wait:
                lost.add_note("`qmq.connect(..., wait=30)` waits for a broker as well")
            raise lost
        for link, error in zip(self.links, errors, strict=True):
            if error is not None:
                log.warning("%s; connecting again", error)
                link.keep_trying(error)

    def close(self, error: QmqError, later: QmqError | None = None) -> None:
        """Close all links; everything that waits for them raises *error*, and so do later calls, or *later*."""
        _open.discard(self)
        self._ended = later or error
        self.handover.close()
        if self._moving is not None:
            self._moving.cancel()
        for link in self.links:
            link.close(error, later)

    async def leave_consumers(self, error: BaseException | None) -> None:
        """Leave the consumers that the program has left open, so that their acks arrive."""
        await asyncio.gather(*(consumer.leave(error, closes=True) for consumer in tuple(self.consumers)))

    async def aclose(self) -> None:
        """Close all links, as the program wants it, and wait for the connections to end."""
        connections = [link.connection for link in self.links if link.connection is not None]
        # before the wait, which may be cancelled
        self.close(ConnectionLost("the client is closed"), UsageError("the client is closed; call connect for another"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))
        if self._life is not None:
            await self._life.aclose()

    async def _until_left(self) -> AsyncGenerator[None]:
        """Close a client that the program has left open, once its loop ends: ``asyncio.run`` closes generators last,
        when all tasks have ended.
        """
        try:
            yield
        finally:
            await self.close_left_open()

    async def close_left_open(self) -> None:
        """Send what is queued for LEFT_OPEN_FLUSH seconds at most, then close; the log says what could not be sent. A
        cancellation does not shorten it. Do nothing for a client that has ended.
        """
        if self._ended is not None or self._loop is None:
            return
        self.left_open()
        sent = self._loop.create_future()
        self.outcomes.flush(sent)
        self.want_turn()
        leaving = begin_task(self.leave_consumers(None), self._loop, "qmq-leave")
        until = self._loop.time() + LEFT_OPEN_FLUSH
        while not (sent.done() and leaving.done()) and (left := until - self._loop.time()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait([sent, leaving], timeout=left)
        leaving.cancel()
        connections = [link.connection for link in self.links if link.connection is not None]
        self.was_left_open = True
        self.close(ConnectionLost(_LEFT_OPEN), UsageError("the client is closed; call connect for another"))
        await asyncio.gather(*(connection.wait_closed() for connection in connections))

    def leave(self) -> None:
        """Close a client that the program dropped, as the end of the loop would."""
        if self._life is not None and self._loop is not None and self._leaving is None:
            self._leaving = begin_task(self._leave(self._life), self._loop, "qmq-leave")

    @staticmethod
    async def _leave(life: AsyncGenerator[None]) -> None:
        await life.aclose()

    def end_with_program(self) -> concurrent.futures.Future[None] | None:
        """[any thread] Have the loop close a client that the program has left open; log what it has not sent if its
        loop has ended.
        """
        if self._loop is not None and self._loop.is_running():
            return asyncio.run_coroutine_threadsafe(self.close_left_open(), self._loop)
        self.log_unsent()
        return None

    def log_unsent(self) -> None:
        """Log how many messages of ``send_nowait`` have no outcome, and will have none, as the loop has ended."""
        if count := self._accumulator.unawaited():
            log.error("%d messages of send_nowait were not sent, or not answered: %s", count, _LEFT_OPEN)

    @property
    def is_open(self) -> bool:
        """Whether the client was opened and has not ended."""
        return self._ended is None

    def ready(self) -> asyncio.AbstractEventLoop:
        """Return the event loop. Raises the error that ended the client."""
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert self._loop is not None
        return self._loop

    # --- sends -------------------------------------------------------------------------------------------------------

    def want_turn(self) -> None:
        """Look for a batch to send in the next turn of the loop."""
        self._active.want_turn()
        if self._accumulator.has_bound():
            for link in self.links:
                link.want_turn()

    def send_now(self, subject: str, body: bytes) -> asyncio.Future[Receipt] | None:
        """Write a plain message of the usual durability at once; None if it has to queue."""
        return self._active.send_now(subject, body)

    def send_unique_now(self, subject: str, body: bytes, unique: bytes) -> asyncio.Future[Receipt] | None:
        """As ``send_now``, with the hash of a unique text; None as well where the text may go to another broker."""
        return self._active.send_now(subject, body, unique) if len(self.links) == 1 else None

    async def batch_end(self) -> None:
        """Wait until any batch is stored or has failed."""
        future: asyncio.Future[None] = self.ready().create_future()
        self._listeners.append(future)
        await future

    async def ask(self, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b"") -> Answer:
        """Send a request to the broker of new batches; repeat it after retryable errors. Raises any other QmqError."""
        return await self._active.ask(kind, meta, payload)

    @property
    def connection(self) -> BrokerConnection | None:
        """The connection to the broker of new batches; None while there is none."""
        return self._active.connection

    async def reached(self) -> list[Link]:
        """Return the connected links; wait for one while there is none. Raises the error that ended the client."""
        while True:
            self.ready()
            found = [link for link in self.links if link.connection is not None]
            if found:
                return found
            waits = [begin_task(link.connected(), self.ready(), "qmq-reached") for link in self.links]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def reached_within(self, timeout: float, *, leaves_out_away: bool = False) -> list[Link]:
        """Return all links once they are connected, or after *timeout* seconds those that are, maybe none. Raises the
        error that ended the client.

        With *leaves_out_away*, once one link is connected, those of brokers that are away (see AWAY_AFTER) have
        OTHERS_WAIT seconds.
        """
        loop = self.ready()
        if all(link.connection is not None for link in self.links):
            return self.links
        waits = [begin_task(link.connected(), loop, "qmq-reached") for link in self.links]
        try:
            if leaves_out_away:
                until = loop.time() + timeout
                await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                timeout = min(until - loop.time(), self.patience())
            await asyncio.wait(waits, timeout=timeout)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self.ready()
        return [link for link in self.links if link.connection is not None]

    def patience(self) -> float:
        """Return the seconds that a list waits for links without a connection: until all of them count as away, and
        OTHERS_WAIT at least; infinity while none is connected.
        """
        now = self.ready().time()
        if all(link.connection is None for link in self.links):
            return math.inf
        since = [self._unconnected_since.get(link, now) for link in self.links if link.connection is None]
        return max(OTHERS_WAIT, max(since, default=now) + AWAY_AFTER - now)

    # --- called by links ---------------------------------------------------------------------------------------------

    def adopting(self, link: Link, welcome: Welcome) -> None:
        """Refuse a second link to one store: each consumer would subscribe there twice. Raises InvalidOption."""
        for other in self.links:
            if other is not link and other.connection is not None and other.store_id == welcome.store_id:
                raise InvalidOption(
                    f"{other.address} and {link.address} lead to the same broker, store {welcome.store_id.hex()}; give "
                    "one of them. If they are two brokers, the data directory of one is a copy of the other's: stop "
                    "that broker, and run qmq repair --new-id on its directory"
                )
        self._refused.discard(link)
        if link.address.sender_bytes > self._sender_bytes:  # its token has another name by now
            self._sender_bytes = link.address.sender_bytes
            self.outcomes.source = new_source(self.options.app, self._sender_bytes)

    def changed(self) -> None:
        """Move batches to brokers that are fit, and look again later while a broker is lost."""
        if self._ended is not None:
            return
        if any(link.connection is not None for link in self.links):
            self.handover.broker_came()
        if len(self.links) == 1:
            return
        assert self._loop is not None
        self._note_unconnected(self._loop.time())
        self._failover.rebalance(self._loop.time())
        self._active = self.links[self._failover.active]
        self._active.want_turn()
        after = self.options.failover_after
        if after is not None and self._moving is None and any(link.connection is None for link in self.links):
            self._moving = self._loop.call_later(min(max(after / 10, 0.01), 0.5), self._moved)

    def _note_unconnected(self, now: float) -> None:
        for link in self.links:
            if link.connection is None:
                self._unconnected_since.setdefault(link, now)
            else:
                self._unconnected_since.pop(link, None)

    def _moved(self) -> None:
        self._moving = None
        self.changed()

    def batch_ended(self) -> None:
        """Wake those that wait for a batch to end."""
        if self._listeners:
            waiting, self._listeners = self._listeners, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def is_hopeless(self, link: Link, error: QmqError) -> bool:
        """Return whether a link gives up after its broker refused the client for good. This ends the client, unless
        another broker is connected; then the link tries again.
        """
        if any(other.connection is not None for other in self.links):
            if link not in self._refused:
                self._refused.add(link)
                log.error("%s refuses this client; it is tried again now and then: %s", link.address, error)
            return False
        log.error("%s refuses this client, and there is no other broker: %s", link.address, error)
        self.close(error)
        return True

    def several_brokers(self, error: InvalidOption) -> None:
        """End the client: the address of a link leads to several brokers."""
        log.error("the client ends: %s", error)
        self.close(error)

    def left_open(self) -> None:
        """[any thread] Warn, once, that the program dropped the client, or closed its loop, without closing it."""
        if self.is_open and not self._warned_of_left_open:
            self._warned_of_left_open = True
            addresses = ", ".join(str(link.address) for link in self.links)
            warnings.warn(
                f"a client of {addresses} was left open; use it inside `async with qmq.connect(...) as client`, or "
                "call `await client.close()`",
                ResourceWarning,
                stacklevel=2,
            )


def _error_of(link: Link, task: asyncio.Task[None]) -> QmqError | None:
    if task.cancelled():
        return ConnectionLost(f"{link.address} did not answer within {OTHERS_WAIT:g} s")
    error = task.exception()
    if error is None or isinstance(error, QmqError):
        return error
    raise error


#: The brokers of connected clients of this process.
_open: weakref.WeakSet[Brokers] = weakref.WeakSet()
_worker: int | None = None  # the process for which the hook of multiprocessing is set


def _close_left_open() -> None:
    """Close the clients that the program has left open, all at the same time."""
    ends = [brokers.end_with_program() for brokers in list(_open)]
    concurrent.futures.wait([end for end in ends if end is not None], LEFT_OPEN_FLUSH + CLOSE_TIMEOUT + 1)


def _close_at_exit_of_worker() -> None:
    """Do as ``_close_left_open`` at the end of this process, if multiprocessing has started it: it calls no atexit."""
    global _worker
    util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None and _worker != os.getpid():
        _worker = os.getpid()
        util.Finalize(None, _close_left_open, exitpriority=0)


atexit.register(_close_left_open)
os.register_at_fork(after_in_child=_open.clear)

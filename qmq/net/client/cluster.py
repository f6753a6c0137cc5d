"""The brokers of a client: a link to each, and sends that move from one to another.

Which of several brokers gets what a client sends. Without I/O; time is an argument, in seconds.

New batches go to one broker until it is lost or refuses for the moment; then to the next in the order of the addresses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import warnings
from collections.abc import Sequence
from typing import Any, Final

from qmq.errors import ConnectionLost, InvalidOption, QmqError
from qmq.format.layout import PRODUCER_ID_SIZE
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import Answer, BrokerConnection, Welcome
from qmq.net.client.failover.handover import HandoverClient
from qmq.net.client.options import ClientOptions, producer_id_of
from qmq.net.client.producer.accumulator import Accumulator
from qmq.net.client.producer.outcomes import Outcomes
from qmq.net.client.producer.window import Sending
from qmq.net.protocol.frames import FrameKind


class Failover:
    """Moves batches between ``lanes``, the sends to each broker."""

    def __init__(self, lanes: Sequence[Sending], failover_after: float | None) -> None:
        """*failover_after*: how long what may be stored waits for its own broker; None: as long as it is tried."""
        self._lanes = lanes
        self._failover_after = failover_after
        #: The number of the lane that new batches go to.
        self.active = 0
        for number, lane in enumerate(lanes):
            lane.takes_new = number == 0

    def rebalance(self, now: float) -> None:
        """Something has changed: a broker came, went, or refused; or time has passed."""
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


log = logging.getLogger("qmq.client")

#: Once one broker is there, the others get so long (seconds) to answer before a client begins without them.
OTHERS_WAIT: Final = 0.5


class Brokers:
    """All brokers that a client knows, in the order of their addresses. In one loop; ``open`` before anything else."""

    def __init__(self, options: ClientOptions, accumulator: Accumulator) -> None:
        producer_id = os.urandom(PRODUCER_ID_SIZE) if options.producer is None else producer_id_of(options.producer)
        self.options = options
        self.outcomes = Outcomes(producer_id, accumulator)
        #: Names this client's process to every broker.
        self.client_id = secrets.token_bytes(16)
        lanes = [Sending(self.outcomes, accumulator, options.send_timeout) for _ in options.addresses]
        self.links = [
            Link(address, options, lane, self, self.client_id)
            for address, lane in zip(options.addresses, lanes, strict=True)
        ]
        self._failover = Failover(lanes, options.failover_after)
        self._active = self.links[0]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: QmqError | None = ConnectionLost(
            "the client is not connected; use it inside `async with qmq.connect(...) as client`"
        )
        self._listeners: list[asyncio.Future[None]] = []  # for batches to end
        self._moving: asyncio.TimerHandle | None = None
        #: What takes messages that failed whose broker is gone.
        self.handover = HandoverClient(self.links, options.failover_after)
        self._refused: set[Link] = set()  # by their brokers, for good, as far as these know
        self._warned_of_left_open = False

    # --- life --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to all; returns once one is there. Raises the first refusal that trying again can't help, or
        ConnectionLost.
        """
        if self._loop is not None:
            raise InvalidOption("this client was used already; call connect again")
        self._loop = asyncio.get_running_loop()
        tasks = [self._loop.create_task(link.open(), name="qmq-connect") for link in self.links]
        try:
            await self._opened(tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.wait(tasks)
            finally:
                for link in self.links:
                    link.close(error if isinstance(error, QmqError) else ConnectionLost("given up"))
            raise
        self._ended = None
        self.changed()

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
            raise ConnectionLost(f"no broker can be reached: {causes}; is `qmq serve` running there?")
        for link, error in zip(self.links, errors, strict=True):
            if error is not None:
                log.warning("%s; connecting again", error)
                link.keep_trying(error)

    def close(self, error: QmqError) -> None:
        """End it: whatever is waited for raises *error*."""
        self._ended = error
        self.handover.close()
        if self._moving is not None:
            self._moving.cancel()
        for link in self.links:
            link.close(error)

    async def aclose(self, error: QmqError) -> None:
        """As ``close``, and wait for the connections to end."""
        connections = [link.connection for link in self.links if link.connection is not None]
        self.close(error)  # before anything is waited for, which may be cancelled
        await asyncio.gather(*(connection.wait_closed() for connection in connections))

    @property
    def is_open(self) -> bool:
        """It was opened, and nothing has ended it."""
        return self._ended is None

    def ready(self) -> asyncio.AbstractEventLoop:
        """The loop. Raises what ended the client."""
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert self._loop is not None
        return self._loop

    # --- sends -------------------------------------------------------------------------------------------------------

    def want_turn(self) -> None:
        """There may be something new to send: see to it in the next turn of the loop."""
        self._active.want_turn()

    async def batch_end(self) -> None:
        """Wait until some batch is stored or has failed."""
        future: asyncio.Future[None] = self.ready().create_future()
        self._listeners.append(future)
        await future

    async def ask(self, kind: FrameKind, meta: dict[str, Any] | None = None, payload: bytes = b"") -> Answer:
        """Ask the broker that sends go to, again while that can help. Raises what it can't help."""
        return await self._active.ask(kind, meta, payload)

    @property
    def connection(self) -> BrokerConnection | None:
        """To the broker that sends go to, while it is good."""
        return self._active.connection

    async def reached(self) -> list[Link]:
        """The links that lead to a broker now; waits for one while there is none. Raises what ended the client."""
        while True:
            self.ready()
            found = [link for link in self.links if link.connection is not None]
            if found:
                return found
            waits = [asyncio.ensure_future(link.connected()) for link in self.links]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def reached_within(self, timeout: float) -> list[Link]:
        """The links that lead to a broker once all do, or after so long (seconds); maybe none. Raises what ended the
        client.
        """
        self.ready()
        if all(link.connection is not None for link in self.links):
            return self.links
        waits = [asyncio.ensure_future(link.connected()) for link in self.links]
        try:
            await asyncio.wait(waits, timeout=timeout)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self.ready()
        return [link for link in self.links if link.connection is not None]

    # --- told by links -----------------------------------------------------------------------------------------------

    def adopting(self, link: Link, welcome: Welcome) -> None:
        """Two ways to one store would be two consumers that are one."""
        for other in self.links:
            if other is not link and other.connection is not None and other.store_id == welcome.store_id:
                raise InvalidOption(f"{other.address} and {link.address} lead to the same broker; give one of them")
        self._refused.discard(link)

    def changed(self) -> None:
        """Have every batch at a broker that may have it, and see to it again when that may be another one by time."""
        if self._ended is not None:
            return
        if any(link.connection is not None for link in self.links):
            self.handover.broker_came()
        if len(self.links) == 1:
            return
        assert self._loop is not None
        self._failover.rebalance(self._loop.time())
        self._active = self.links[self._failover.active]
        self._active.want_turn()
        after = self.options.failover_after
        if after is not None and self._moving is None and any(link.connection is None for link in self.links):
            self._moving = self._loop.call_later(min(max(after / 10, 0.01), 0.5), self._moved)

    def _moved(self) -> None:
        self._moving = None
        self.changed()

    def batch_ended(self) -> None:
        """Tell who waits for that."""
        if self._listeners:
            waiting, self._listeners = self._listeners, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def is_hopeless(self, link: Link, error: QmqError) -> bool:
        """One broker that wants us no more ends the client where no other is there."""
        if any(other.connection is not None for other in self.links):
            if link not in self._refused:
                self._refused.add(link)
                log.error("%s takes us no more until something changes there: %s", link.address, error)
            return False
        log.error("connecting again can't help: %s", error)
        self.close(error)
        return True

    def left_open(self) -> None:
        """[any thread] The program has let go of the client, or closed its loop, without closing the client: warn it,
        once.
        """
        if self.is_open and not self._warned_of_left_open:
            self._warned_of_left_open = True
            addresses = ", ".join(str(link.address) for link in self.links)
            warnings.warn(
                f"a client of {addresses} was left open; use it inside `async with qmq.connect(...) as client`",
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

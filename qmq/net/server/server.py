"""The server: frames become commands, effects become answers, one turn of the loop at a time. It has no rules.

All frames that arrive in one turn of the loop are handled as they come; then one ``turn`` of the broker writes their
batches together, and every connection gets its answers in one write. docs/PROTOCOL.md says what the bytes mean.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any, Final, NamedTuple, Protocol

from qmq.broker import commands
from qmq.broker.commands import Command, Effect, Now
from qmq.errors import BrokerStopping, InternalError, Overloaded, ProtocolError, QmqError
from qmq.net import wire
from qmq.net.server import answers
from qmq.net.server.arena import Arena
from qmq.net.server.connection import SLOW_DISK, STOPPING, Connection
from qmq.net.server.requests import decode_hello, decode_request
from qmq.net.wire import Frame, Kind

log = logging.getLogger("qmq.server")

#: Requests, beside parked pulls, that a connection may have without an answer; a client's window keeps it far below.
MAX_REQUESTS: Final = 8_192
#: Lists of subjects that one connection may ask for at once: they are what a small request can make large.
MAX_LISTINGS: Final = 16
#: Connections that the system holds until they are taken.
_BACKLOG: Final = 1_024


class Rules(Protocol):
    """The broker as the server sees it: qmq.broker.core.Broker."""

    def handle(self, command: Command, now: Now) -> None: ...
    def turn(self, now: Now) -> None: ...
    def tick(self, now: Now) -> int | None: ...
    def take_effects(self) -> list[Effect]: ...


class ServerOptions(NamedTuple):
    """What the server announces of its store, and its own bounds."""

    store_id: bytes
    version: str
    max_frame_bytes: int
    max_message_bytes: int
    producer_window: int
    producer_ttl_ms: int
    max_pull_count: int
    max_pull_bytes: int
    max_parked_pulls: int
    max_connections: int
    max_inflight_bytes: int
    first_frame_timeout_ms: int

    def welcome(self) -> bytes:
        """The meta of WELCOME."""
        fields = {"protocol": wire.PROTOCOL_VERSION, **self._asdict()}
        for own in ("max_parked_pulls", "max_connections", "max_inflight_bytes", "first_frame_timeout_ms"):
            del fields[own]
        return wire.pack_meta(fields)


def clock() -> Now:
    """The time of this machine."""
    return Now(time.monotonic_ns() // 1_000, time.time_ns() // 1_000)


class Server:
    """Connections to a broker. Single-threaded: everything is called in the loop that it was made in.

    *work* is told what to sync and to read; the outcome comes back through ``submit``. *turned* is called after each
    turn.
    """

    def __init__(
        self,
        broker: Rules,
        options: ServerOptions,
        work: Callable[[commands.SyncWanted | commands.ReadWanted], None],
        turned: Callable[[], None],
        now: Callable[[], Now] = clock,
    ) -> None:
        self._broker = broker
        self._options = options
        self._turned = turned
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._welcome = options.welcome()
        self._max_requests = MAX_REQUESTS + options.max_parked_pulls
        self.arena = Arena()
        self.max_frame_bytes = options.max_frame_bytes
        self.max_inflight_bytes = options.max_inflight_bytes
        self.first_frame_timeout_s = options.first_frame_timeout_ms / 1_000
        self._listeners: list[asyncio.Server] = []
        self._last_number = 0
        self._open: set[Connection] = set()  # with a socket, also those that only linger
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._connections: dict[int, Connection] = {}  # those that the broker knows
        self._senders: set[Connection] = set()  # with batches in this turn
        self._answered: list[Connection] = []  # with answers in this turn
        self._time = now()
        self._due = False  # a turn is scheduled
        self._running = False  # a turn runs
        self._sends_held = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        #: Effects so far that changed what a checkpoint keeps.
        self.changes = 0
        self._carry_out: dict[type, Callable[[Any], None]] = {
            commands.Sent: self._sent,
            commands.Messages: self._messages,
            commands.Subscribed: self._subscribed,
            commands.Unsubscribed: lambda effect: self._answer(effect, answers.unsubscribed),
            commands.LastSequenceIs: lambda effect: self._answer(effect, answers.last_sequence),
            commands.SubjectList: lambda effect: self._answer(effect, answers.subject_list),
            commands.Refused: self._refused,
            commands.SyncWanted: work,
            commands.ReadWanted: work,
        }

    # --- from outside ------------------------------------------------------------------------------------------------

    async def listen(self, sockets: Sequence[socket]) -> None:
        """Take connections on sockets that are bound. Raises OSError."""
        for sock in sockets:
            sock.listen(_BACKLOG)  # the loop would keep to itself that another process listens there by now
        for sock in sockets:
            self._listeners.append(await self._loop.create_server(self._connect, sock=sock, backlog=_BACKLOG))

    def submit(self, command: commands.Synced | commands.SyncBroken | commands.ReadDone) -> None:
        """Hand in the outcome of a sync or a read."""
        self._handle(command)
        self.turn()

    def hold_sends(self, hold: bool) -> None:
        """While held, connections that send are not read from: the disk has to catch up first."""
        if hold == self._sends_held:
            return
        self._sends_held = hold
        for connection in self._connections.values():
            if connection.sends and hold:
                connection.stop_reading(SLOW_DISK)
            elif connection.sends:
                connection.read_on(SLOW_DISK)

    def turn(self) -> None:
        """Let the broker write and answer what has come, and write the answers."""
        if self._running:
            return
        self._running, self._due = True, False
        now = self._now()
        try:
            deadline = self._run_rules(now)
            self._write_answers()
        finally:
            self._running = False
        self.arena.reset()
        self._arm(deadline, now)
        self._turned()

    def _run_rules(self, now: Now) -> int | None:
        """One turn of the broker and its effects; returns when it wants to be called again."""
        deadline: int | None = None
        try:
            self._broker.turn(now)
            deadline = self._broker.tick(now)
        except Exception:
            log.exception("the broker failed in a turn")
            # Nobody knows which batches of the turn are stored: who sent them has to ask again.
            for connection in list(self._senders):
                connection.end(_internal_error())
        self._senders.clear()
        for effect in self._broker.take_effects():
            try:
                self._carry_out[type(effect)](effect)
            except Exception:
                log.exception("could not carry out %s", type(effect).__name__)
        return deadline

    def _write_answers(self) -> None:
        answered, self._answered = self._answered, []
        for connection in answered:
            try:
                connection.write()
            except Exception:
                log.exception("could not write to connection %d", connection.number)
                connection.abort()

    def stop_reading(self) -> None:
        """Take no more connections and no more requests; those that are in go on."""
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in self._connections.values():
            connection.stop_reading(STOPPING)
        self.turn()

    async def close(self, patience_s: float) -> None:
        """Say goodbye on every connection and close it, at the latest after *patience_s*."""
        for connection in list(self._connections.values()):
            connection.end(_stopping())
        try:
            async with asyncio.timeout(patience_s):
                await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._open):
                connection.abort()
            await asyncio.sleep(0)  # the loop tells of their end now
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- from connections --------------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        self._last_number += 1
        return Connection(self, self._last_number, self._loop)

    def admit(self, connection: Connection) -> None:
        """Count it in; raises Overloaded and BrokerStopping."""
        self._open.add(connection)
        self._all_closed.clear()
        if self._stopping:
            raise _stopping()
        if len(self._open) > self._options.max_connections:
            raise Overloaded(f"the broker has its {self._options.max_connections} connections (max_connections)")
        self._connections[connection.number] = connection
        log.debug("connection %d of %s opened", connection.number, connection.peer)

    def frames_begin(self) -> None:
        """Read the clock once for all frames that came together."""
        self._time = self._now()

    def frames_end(self) -> None:
        """Have a turn follow, at once when there is no room for more frames."""
        if self.arena.short:
            self.turn()
        elif not self._due:
            self._due = True
            self._loop.call_soon(self._turn_if_due)

    def _turn_if_due(self) -> None:
        if self._due:
            self.turn()

    def frame(self, connection: Connection, frame: Frame) -> None:
        """Hand one frame to the broker. Raises the QmqError that ends the connection."""
        if not connection.greeted:
            connection.client = decode_hello(frame)
            connection.greeted = True
            log.debug("connection %d of %s is client %r", connection.number, connection.peer, connection.client)
            self._put(connection, wire.encode_frame(Kind.WELCOME, frame.request, self._welcome))
            return
        try:
            command = decode_request(connection.number, frame)
        except ProtocolError:
            raise
        except QmqError as error:
            connection.in_flight += 1  # the refusal is its answer
            self._refused(commands.Refused(connection.number, frame.request, error))
            return
        if frame.kind == Kind.SEND:
            self._senders.add(connection)
            if not connection.sends:
                connection.sends = True
                if self._sends_held:
                    connection.stop_reading(SLOW_DISK)
        elif frame.kind == Kind.SUBJECTS:
            if len(connection.listings) >= MAX_LISTINGS:
                raise Overloaded(f"more than {MAX_LISTINGS} lists of subjects are on their way to this connection")
            connection.listings.add(frame.request)
        if frame.kind != Kind.WITHDRAW:
            connection.in_flight += 1
            if connection.in_flight > self._max_requests:
                raise Overloaded(f"more than {self._max_requests} requests of this connection wait for an answer")
        try:
            self._broker.handle(command, self._time)
        except QmqError as error:
            self._refused(commands.Refused(connection.number, frame.request, error))
        except Exception:
            log.exception("the broker failed to handle %s of %s", type(command).__name__, connection.peer)
            self._refused(commands.Refused(connection.number, frame.request, _internal_error()))
            connection.end(_internal_error())

    def leave(self, connection: Connection) -> None:
        """Let the broker forget it."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._handle(commands.Disconnected(connection.number))
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn_if_due)

    def closed(self, connection: Connection) -> None:
        """Its place is free."""
        self._open.discard(connection)
        self._senders.discard(connection)
        if not self._open:
            self._all_closed.set()

    def _handle(self, command: Command) -> None:
        """Hand in what no client waits for."""
        try:
            self._broker.handle(command, self._now())
        except Exception:
            log.exception("the broker failed to handle %s", type(command).__name__)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _put(self, connection: Connection, answer: bytes) -> None:
        if not connection.answers:
            self._answered.append(connection)
        connection.answers.append(answer)

    def _sent(self, effect: commands.Sent) -> None:
        self.changes += 1
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.in_flight -= 1
            self._put(connection, answers.sent(effect, self._options.store_id))

    def _messages(self, effect: commands.Messages) -> None:
        if effect.messages:
            self.changes += 1
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.in_flight -= 1
            self._put(connection, answers.messages(effect))
            connection.answers += effect.buffers

    def _subscribed(self, effect: commands.Subscribed) -> None:
        self.changes += 1
        self._answer(effect, answers.subscribed)

    def _refused(self, effect: commands.Refused) -> None:
        self._answer(effect, lambda refused: wire.encode_error(refused.request, refused.error))

    def _answer(self, effect: Any, encode: Callable[[Any], bytes]) -> None:
        connection = self._connections.get(effect.connection)
        if connection is not None:
            connection.in_flight -= 1
            connection.listings.discard(effect.request)
            self._put(connection, encode(effect))

    # --- the rest of a turn ------------------------------------------------------------------------------------------

    def _arm(self, deadline_us: int | None, now: Now) -> None:
        """Have a turn at *deadline_us*. A timer that is set for an earlier time stays: it only looks once too often."""
        if deadline_us is None or (self._timer is not None and self._timer_us <= deadline_us):
            return
        if deadline_us <= now.monotonic_us:
            if not self._due:
                self._due = True
                self._loop.call_soon(self._turn_if_due)
            return
        if self._timer is not None:
            self._timer.cancel()
        # Timers of the loop tick in whole milliseconds: rounded up, or it would come too early and spin.
        delay_ms = math.ceil((deadline_us - now.monotonic_us) / 1_000)
        self._timer_us = deadline_us
        self._timer = self._loop.call_later(delay_ms / 1_000, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.turn()


def _internal_error() -> InternalError:
    return InternalError("the broker failed to handle this; its log has the details")


def _stopping() -> BrokerStopping:
    return BrokerStopping("the broker is shutting down; connect again in a moment, or to another broker")

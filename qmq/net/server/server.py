"""The server: decodes frames, hands commands to the broker, and writes answers, one turn of the loop at a time.

The frames that arrive in one turn of the loop are handled as they arrive. Then one ``turn`` of the broker writes their
batches together, and each connection gets its answers in one write. docs/PROTOCOL.md defines the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from socket import socket
from ssl import SSLContext
from typing import Any, Final

from qmq.broker.ports import commands, effects
from qmq.broker.ports.commands import QUIET_US, Command, Now
from qmq.broker.ports.metrics import Times
from qmq.errors import Overloaded, ProtocolError, QmqError, Unauthorized
from qmq.format.source import stamp_of
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind, made
from qmq.net.server.accept import Acceptor, ConnectionWarnings
from qmq.net.server.admission import END_S, Admission, DeferredRequests, Throttle
from qmq.net.server.connection import LINGER_S, NOT_LET_IN, SLOW_DISK, STOPPING, ClientConnection
from qmq.net.server.login.audit import Audit
from qmq.net.server.login.failed_logins import FailedLogins
from qmq.net.server.login.logins import Login, Logins, Token
from qmq.net.server.options import BrokerRules, ClientInfo, ServerOptions, internal_error, stopping
from qmq.net.server.receive_buffer import ReceiveBuffer
from qmq.net.server.replies import DiskWork, ReplyWriter
from qmq.net.server.requests import decode_hello, decode_request
from qmq.net.server.slow_transfers import LEAST_BYTES, SlowTransfers
from qmq.net.server.small_frames import SmallFrames
from qmq.net.server.timeouts import ConnectionTimeouts
from qmq.net.server.tls import Handshakes, TlsChannel
from qmq.net.server.write_queue import WriteQueue

log = logging.getLogger("qmq.server")

#: Requests without an answer, besides waiting pulls, that a connection may have; a client's window stays far below.
MAX_REQUESTS: Final = 8_192
#: Lists of subjects that a connection may request at once: a small request can have a large answer.
MAX_LISTINGS: Final = 16
#: Connections beyond max_connections that get an error; beyond these, connections are closed without one.
SPARE_CONNECTIONS: Final = 500
#: Connections that the system queues until they are accepted.
_BACKLOG: Final = 1_024
#: How often timers are checked while other work keeps the broker busy.
_TICK_US: Final = 5_000
_NEVER_US: Final = 1 << 62
#: Plain integers: reading a member of an enum looks it up by name.
_SENDS: Final = frozenset((int(FrameKind.SEND), int(FrameKind.RESTORE)))
_SUBJECTS: Final = int(FrameKind.SUBJECTS)
_ADMINISTER: Final = int(FrameKind.ADMINISTER)
_WITHDRAW: Final = int(FrameKind.WITHDRAW)


def clock() -> Now:
    """Return the time of this machine."""
    return made(Now, (time.monotonic_ns() // 1_000, time.time_ns() // 1_000))


class Server:
    """Serves a broker to connections. Single-threaded: all methods are called in the loop that made it.

    *work* is called with the syncs and reads to do; their results come back through ``submit``. *turned* is called
    after each turn, with whether the broker's timers were checked. *timer* returns seconds, to measure the cost of
    frames. *tls* returns the TLS context of a new connection; without it connections are plain.
    """

    def __init__(
        self,
        broker: BrokerRules,
        options: ServerOptions,
        work: Callable[[DiskWork], None],
        turned: Callable[[bool], None],
        now: Callable[[], Now] = clock,
        loop: asyncio.AbstractEventLoop | None = None,
        timer: Callable[[], float] = time.perf_counter,
        tls: Callable[[], SSLContext] | None = None,
    ) -> None:
        self._broker = broker
        self._options = options
        self._turned = turned
        self._now = now
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._welcome = options.welcome()
        self._max_requests = MAX_REQUESTS + options.max_waiting_pulls
        self.receive_buffer = ReceiveBuffer()
        self.timer = timer
        self.max_frame_bytes = options.max_frame_bytes
        self.max_inflight_bytes = options.max_inflight_bytes
        self._acceptors: list[Acceptor] = []
        self._silent = ConnectionTimeouts(self._loop, options.first_frame_timeout_ms / 1_000, self._no_first_frame)
        self._lingering = ConnectionTimeouts(self._loop, LINGER_S, self._lingered)
        self._admission = Admission(options.max_buffered_bytes, ClientConnection.unread_bytes)
        self._slow_transfers = SlowTransfers(self._loop, self._admission, self._bytes_moved)
        self._served = 0  # frames of clients
        self._deferred = DeferredRequests(self._hand_in)
        self._write_queue = WriteQueue(self._loop.call_soon)
        self._last_number = 0
        self._open: set[ClientConnection] = set()  # those with a socket, also while they linger
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._throttle = Throttle(self._loop)
        self._warnings = ConnectionWarnings(self._loop)
        self._handshakes: Handshakes | None = None
        if tls is not None:
            self._handshakes = Handshakes(
                self._loop, tls, options.max_handshakes, options.first_frame_timeout_ms / 1_000, self._throttle,
                self._warnings, timer, self._frames_served,
            )  # fmt: skip
        self._replies = ReplyWriter(options.store_id, self._admission, self._throttle, work)
        self._connections = self._replies.connections  # those that the broker knows
        self._half = options.max_buffered_bytes >> 1  # beyond it, requests may be refused
        #: How long turns and sends took; the daemon adds syncs.
        self.times = Times()
        self._sends_since = 0.0  # by the timer: when the first batch of this turn came
        self._small_frames: SmallFrames | None = None
        if broker.short_way is not None:
            self._small_frames = SmallFrames(broker.short_way, self._replies, self._admission, self._max_requests)
        self._logins = Logins()
        self._expiry_us: int | None = None  # of the token that expires next
        self._failed_logins = FailedLogins()
        self._audit = Audit()
        self._senders: set[ClientConnection] = set()  # connections that sent batches in this turn
        self._time = now()
        self._due = False  # a turn is wanted
        self._called = False  # the loop will call _turn_if_due: once, or each turn that comes before would add a call
        self._running = False  # a turn is running
        self._sends_held = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_us = 0
        self._tick_us = 0
        #: When the broker's timers are to be looked at, as far as turns know; simple frames add what they make due, but
        #: nothing before ``_quiet_us``.
        self._deadline_us = _NEVER_US
        self._quiet_us = 0

    @property
    def changes(self) -> int:
        """How many effects so far changed the state that a checkpoint saves."""
        return self._replies.changes

    # --- from outside ------------------------------------------------------------------------------------------------

    def clients(self, most: int) -> tuple[list[ClientInfo], int]:
        """Return the connected clients, the first *most* of them, and the count of all."""
        first = islice(self._connections.values(), most)
        return [
            ClientInfo(one.name, one.app, one.client, one.peer, one.opened_us, one.in_flight) for one in first
        ], len(self._connections)

    def traffic(self) -> dict[str, Any]:
        """Return the counts of connections, of messages that were handed out since the start, and of refusals."""
        replies = self._replies
        return {
            "connections": len(self._connections),
            "requests": self._frames_served(),
            "handed_messages": replies.handed_messages,
            "handed_bytes": replies.handed_bytes,
            "refused": dict(replies.refusals),
        }

    def listen(self, sockets: Sequence[socket]) -> None:
        """Accept connections on bound sockets. Raises OSError."""
        for sock in sockets:
            sock.listen(_BACKLOG)  # here, because the loop would hide that another process listens there by now
        for sock in sockets:
            served, slowly = self._frames_served, lambda: self._throttle.much
            self._acceptors.append(Acceptor(self._loop, sock, self.accepted, served, slowly))

    def _frames_served(self) -> int:
        return self._served + (0 if self._small_frames is None else self._small_frames.served)

    def submit(
        self,
        command: commands.Synced
        | commands.SyncBroken
        | commands.ReadDone
        | commands.Checked
        | commands.Fetched
        | commands.InfoFound,
    ) -> None:
        """Hand in the result of work that the broker wanted."""
        self._handle(command)
        self._replies.carry_out(self._broker.take_syncs())  # the disk starts before the turn
        self.turn()

    @property
    def has_tokens(self) -> bool:
        """Whether clients need a token."""
        return self._logins.has_tokens

    @property
    def token_names(self) -> frozenset[str]:
        """The names of the tokens that let clients in."""
        return self._logins.names

    def set_tokens(self, tokens: Mapping[str, Token]) -> None:
        """Let in clients with one of these tokens only; end the connections that the change touches."""
        self._logins.replace(tokens)
        self._look_at_connections()

    def look_at_logins(self) -> dict[str, int]:
        """End the connections whose tokens have expired; return when each token was last in use, in microseconds since
        1970. Called again and again, it takes next to no time.
        """
        now_us = self._now().wall_us
        if self._expiry_us is not None and self._expiry_us <= now_us:
            self._look_at_connections()
        return self._logins.used

    def tokens_in_use(self) -> set[str]:
        """Return the names of the tokens of the connections that are open now."""
        return {one.login.rights.name for one in self._connections.values() if one.login is not None}

    def _look_at_connections(self) -> None:
        """End the connections whose tokens do not hold any more, and give the others the rights of now."""
        now_us = self._now().wall_us
        self._expiry_us = self._logins.next_expiry_us(now_us)
        for connection in list(self._connections.values()):
            if not connection.greeted:
                continue
            login = self._logins.look_at(connection.login, now_us)
            if isinstance(login, QmqError):
                connection.for_good = True
                connection.end(login)
            elif login != connection.login:
                connection.login = login
                self._connected(connection, login)

    def hold_sends(self, hold: bool) -> None:
        """Stop reading from connections that send batches while *hold* is true, so that the disk can catch up."""
        if hold == self._sends_held:
            return
        self._sends_held = hold
        for connection in self._connections.values():
            if connection.sends and hold:
                connection.stop_reading(SLOW_DISK)
            elif connection.sends:
                connection.read_on(SLOW_DISK)

    def turn(self) -> None:
        """Have the broker write and answer the requests so far, and write the answers."""
        if self._running:
            return
        self._running, self._due = True, False
        began, had_sends = self.timer(), bool(self._senders)
        now = self._now()
        looks = now.monotonic_us >= self._tick_us  # not in every turn of a busy broker
        try:
            if self._deferred.turn():
                self._turn_soon()
            self._run(self._broker.turn, now)
            self._replies.write()  # before the timers
            deadline = self._tick(now) if looks else self._tick_us
            if not looks:
                self._deadline_us = min(self._deadline_us, self._tick_us)
        finally:
            self._running = False
        self.receive_buffer.reset()
        ended = self.timer()
        self.times.turn.add(int((ended - began) * 1e6))
        if had_sends:
            self.times.send.add(int((ended - self._sends_since) * 1e6))
        if self._admission.total > self._options.max_buffered_bytes:
            self._make_room()
        if deadline is not None and (self._timer is None or deadline < self._timer_us):
            self._arm(deadline, now)
        self._turned(looks)

    def _tick(self, now: Now) -> int | None:
        """Check the broker's timers; return when the next turn is due."""
        deadline = self._run(self._broker.tick, now)
        self._replies.write()
        self._deadline_us = _NEVER_US if deadline is None else deadline
        self._tick_us = min(self._deadline_us, now.monotonic_us + _TICK_US)
        self._quiet_us = min(self._deadline_us, now.monotonic_us + QUIET_US)
        return deadline

    def _make_room(self) -> None:
        """End the connections that have been behind for longest, until all hold no more than max_buffered_bytes."""
        while (connection := self._admission.over()) is not None:
            log.debug("connection %d of %s is ended to make room", connection.number, connection.shown)
            if connection.unread_bytes():
                connection.abort()  # it would not read an error either
            else:
                connection.end(self._behind())
                connection.forget_frame()
            self._admission.forget(connection)

    def _behind(self) -> Overloaded:
        return Overloaded(
            f"the broker has {self._options.max_buffered_bytes} bytes for all connections (max_buffered_bytes), and "
            "this one has been behind for longest: send frames without pauses, and read answers"
        )

    def _run(self, rules: Callable[[Now], int | None], now: Now) -> int | None:
        """Call the broker's turn or tick and carry out its effects; return when it is to be called again."""
        deadline: int | None = None
        try:
            deadline = rules(now)
        except Exception:
            log.exception("the broker failed in a turn")
            # It is unknown which batches of the turn are stored, so their senders have to ask again.
            for connection in list(self._senders):
                connection.end(internal_error())
        self._senders.clear()
        self._replies.carry_out(self._broker.take_effects())
        return deadline

    def clock_moved(self) -> bool:
        """Do what is due, as the clock was set; return whether more is due at once."""
        if self._timer is not None:  # it waits for a time by the clock before
            self._timer.cancel()
            self._timer = None
        self._tick_us = 0
        self.turn()
        return self._tick_us <= self._now().monotonic_us

    def stop_reading(self) -> None:
        """Accept no more connections and read no more requests; requests that were read are still answered."""
        self._stopping = True
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        for connection in self._connections.values():
            connection.stop_reading(STOPPING)
        self.turn()

    async def close(self, timeout_s: float) -> None:
        """Tell every client that the broker stops, and close all connections within *timeout_s*."""
        for connection in list(self._connections.values()):
            connection.end(stopping())
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._open):
                connection.abort()
            await asyncio.sleep(0)  # lets the loop report that they are closed
        if self._handshakes is not None:
            self._handshakes.close()
        self._silent.close()
        self._lingering.close()
        self._slow_transfers.close()
        self._throttle.close()
        self._cancel_timer()

    def end_turns(self) -> None:
        """Have no turn from now on, also none that a timer or a connection that was lost has asked for: the store
        closes.
        """
        self._running = True  # as within a turn: no other one begins
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- from connections --------------------------------------------------------------------------------------------

    def accepted(self) -> ClientConnection | TlsChannel:
        """Return the protocol of a socket that was accepted: a new connection, or the TLS of one."""
        connection = self.connection()
        return connection if self._handshakes is None else TlsChannel(self._handshakes, connection)

    def connection(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        self._last_number += 1
        return ClientConnection(self, self._last_number)

    def admit(self, connection: ClientConnection) -> None:
        """Register a new connection. Raises Overloaded and BrokerStopping."""
        self._open.add(connection)
        self._all_closed.clear()
        if self._stopping:
            raise stopping()
        most = self._options.max_connections
        if len(self._open) > most:
            if len(self._open) > most + SPARE_CONNECTIONS:
                connection.abort()
            raise Overloaded(f"the broker has its {most} connections (max_connections)")
        self._connections[connection.number] = connection
        self._silent.add(connection)
        log.debug("connection %d of %s opened", connection.number, connection.peer)

    def small_frames(self, connection: ClientConnection, size: int) -> int:
        """Handle the simple frames at the start of a read, before any turn; return how many bytes they are. The read is
        all that is in the receive buffer.
        """
        small = self._small_frames
        if small is None or self._due or self._running or connection.deferred or self._admission.total > self._half:
            return 0
        now, began = self._now(), self.timer()
        try:
            done = small.take(connection, self.receive_buffer.bytes, size, now)
        except Exception:
            log.exception("the broker failed to handle a small frame of %s", connection.peer)
            connection.end(internal_error())
            self._turn_soon()
            return size
        if done:
            self.times.send.add(int((self.timer() - began) * 1e6))
            if done < size:
                self.receive_buffer.drop_front(done, size)
            if small.rules.is_unfinished:
                self._turn_soon()
            elif now[0] >= self._quiet_us:
                self._look(now)
            elif self._timer is None or self._timer_us > self._quiet_us:
                self._arm(self._quiet_us, now)
        return done

    def _look(self, now: Now) -> None:
        """Have a turn if something is due by time; otherwise set a timer for it. A turn that only looks at all timers
        would delay the simple frames that come meanwhile.
        """
        deadline = self._deadline_us
        if self._small_frames is not None:
            due = self._small_frames.rules.next_deadline_us(now.monotonic_us)
            if due is not None and due < deadline:
                deadline = due
        if deadline <= now.monotonic_us:
            self._tick_us = deadline
            self._turn_soon()
            return
        self._quiet_us = min(deadline, now.monotonic_us + QUIET_US)
        self._turned(False)
        if deadline < _NEVER_US and (self._timer is None or deadline < self._timer_us):
            self._arm(deadline, now)

    def frames_begin(self) -> None:
        """Read the clock once for all frames that were received together."""
        self._time = self._now()

    def frames_end(self) -> None:
        """Schedule a turn, or run it at once when the receive buffer is short."""
        if self.receive_buffer.short:
            self.turn()
        else:
            self._turn_soon()

    def no_frames(self) -> None:
        """Run a turn only if the receive buffer is short; end connections if they hold too much."""
        if self.receive_buffer.short:
            self.turn()
        elif self._admission.total > self._options.max_buffered_bytes:
            self._make_room()

    def buffered(self, connection: ClientConnection, size: int) -> None:
        """Record how many bytes of an incomplete frame *connection* holds."""
        self._admission.frame(connection, size, self._loop.time())
        if size:
            self._slow_transfers.watch(connection)

    def unread(self, connection: ClientConnection, size: int) -> None:
        """Record how many bytes of answers *connection* has not read; at 0, continue with its deferred requests."""
        self._admission.answers(connection, size, self._loop.time())
        if size:
            self._slow_transfers.watch(connection)
        if not size and self._deferred.resume(connection):
            self._turn_soon()

    def large_answer(self, connection: ClientConnection) -> None:
        """Watch whether *connection* reads an answer that the system may take at once."""
        self._slow_transfers.watch(connection)

    def _bytes_moved(self, connection: ClientConnection) -> None:
        if connection.number in self._connections:
            self._handle(commands.Moved(connection.number))

    def write_soon(self, connection: ClientConnection) -> None:
        """Have *connection* write its next piece in turn with others."""
        self._write_queue.add(connection)

    def greeted(self, connection: ClientConnection) -> None:
        """Record that its first frame came in time."""
        self._silent.discard(connection)

    def broke_protocol(self, connection: ClientConnection) -> None:
        """Charge the cost of a connection that is ended for a protocol error."""
        self._throttle.charge(connection.took_s + END_S)

    def warn(self, connection: ClientConnection, why: str) -> None:
        """Log that *connection* is refused, at a limited rate."""
        self._warnings.add(connection.peer, why)

    def lingers(self, connection: ClientConnection) -> None:
        """Close *connection* after LINGER_S."""
        self._lingering.add(connection)

    def _lingered(self, connection: ClientConnection) -> None:
        """Close a connection once its client has read the last frame, or reads no more."""
        if (connection.moved_bytes() or 0) >= LEAST_BYTES:
            self._lingering.add(connection)
        else:
            connection.abort()

    def _no_first_frame(self, connection: ClientConnection) -> None:
        limit = self._options.first_frame_timeout_ms / 1_000
        connection.end(ProtocolError(f"no HELLO within {limit:g} s of connecting (first_frame_timeout_ms)"))

    def _turn_soon(self) -> None:
        self._due = True
        if not self._called:
            self._called = True
            self._loop.call_soon(self._turn_if_due)

    def _turn_if_due(self) -> None:
        self._called = False
        if self._due:
            self.turn()

    def frame(self, connection: ClientConnection, frame: Frame) -> None:
        """Hand one frame to the broker. Raises the QmqError that ends the connection."""
        if not connection.greeted:
            connection.client, connection.name, connection.app, token, unanswered = decode_hello(frame)
            try:
                connection.login = self._logins.log_in(token, connection.certificate_name, self._time.wall_us)
            except Unauthorized as error:
                self._refuse_login(connection, error, is_tried=bool(token or connection.certificate_name))
                return
            connection.greeted = True
            connection.opened_us = self._time.wall_us
            self._connected(connection, connection.login, unanswered)
            log.debug("connection %d of %s is client %r", connection.number, connection.shown, connection.client)
            self._replies.put(connection, frames.encode_frame(FrameKind.WELCOME, frame.request, self._welcome))
            return
        try:
            command = decode_request(connection.number, frame)
        except ProtocolError:
            raise
        except QmqError as error:
            self._count_request(connection)  # the refusal counts it off
            self._replies.refused(effects.Refused(connection.number, frame.request, error))
            return
        kind = frame.kind
        if kind in _SENDS:
            if not self._senders:
                self._sends_since = self.timer()
            self._senders.add(connection)
            if not connection.sends:
                connection.sends = True
                if self._sends_held:
                    connection.stop_reading(SLOW_DISK)
        elif kind == _SUBJECTS:
            if len(connection.listings) >= MAX_LISTINGS:
                raise Overloaded(f"more than {MAX_LISTINGS} lists of subjects of this connection wait for an answer")
            connection.listings.add(frame.request)
        elif kind == _ADMINISTER:
            assert isinstance(command, commands.Administer)
            self._audit.asked(connection, command)
        self._served += 1
        if kind != _WITHDRAW:
            self._count_request(connection)
            if self._admission.crowded and not self._admission.may_ask(connection.in_flight, len(self._connections)):
                self._replies.refused(effects.Refused(connection.number, frame.request, _too_many_requests()))
                return
        if not self._deferred.take(connection, command):
            self._hand_in(connection, command)

    def _connected(
        self, connection: ClientConnection, login: Login | None, unanswered: commands.Unanswered | None = None
    ) -> None:
        """Tell the broker of a connection, or of its new rights."""
        rights = None if login is None else login.rights
        stamp = stamp_of(*connection.address, sender="" if rights is None else rights.name)
        program = connection.name or connection.app
        self._handle(commands.Connected(connection.number, stamp, rights, program, unanswered))

    def _refuse_login(self, connection: ClientConnection, error: Unauthorized, *, is_tried: bool) -> None:
        """End a connection whose login has failed; later, when many from its address have failed. *is_tried*: it gave a
        token or a certificate; a health check gives none.
        """
        delay_us, is_logged = self._failed_logins.failed(connection.address[0], self._time.monotonic_us)
        if is_logged:
            level = logging.WARNING if is_tried else logging.DEBUG
            log.log(level, "a login from %s failed: %s", connection.peer, error)
        self._throttle.charge(END_S)
        connection.stop_reading(NOT_LET_IN)
        self._loop.call_later(delay_us / 1e6, connection.end, error)

    def _count_request(self, connection: ClientConnection) -> None:
        connection.in_flight += 1
        self._admission.requests(1)
        if connection.in_flight > self._max_requests:
            raise Overloaded(f"more than {self._max_requests} requests of this connection wait for an answer")

    def _hand_in(self, connection: ClientConnection, command: Command) -> None:
        request = getattr(command, "request", 0)  # a WITHDRAW has no answer
        try:
            self._broker.handle(command, self._time)
        except QmqError as error:
            self._replies.refused(effects.Refused(connection.number, request, error))
        except Exception:
            log.exception("the broker failed to handle %s of %s", type(command).__name__, connection.shown)
            if request:
                self._replies.refused(effects.Refused(connection.number, request, internal_error()))
            connection.end(internal_error())

    def leave(self, connection: ClientConnection) -> None:
        """Tell the broker that the connection is gone."""
        if self._connections.pop(connection.number, None) is None:
            return
        self._silent.discard(connection)
        connection.deferred.clear()
        self._audit.left(connection)
        self._admission.requests(-connection.in_flight)
        how = connection.for_good, connection.by_client, connection.has_read_all
        self._handle(commands.Disconnected(connection.number, *how))
        self._turn_soon()

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection whose socket is closed."""
        self._open.discard(connection)
        self._senders.discard(connection)
        self._lingering.discard(connection)
        self._admission.forget(connection)
        if not self._open:
            self._all_closed.set()

    def _handle(self, command: Command) -> None:
        """Hand in a command that no client waits for."""
        try:
            self._broker.handle(command, self._now())
        except Exception:
            log.exception("the broker failed to handle %s", type(command).__name__)

    # --- timers ------------------------------------------------------------------------------------------------------

    def _arm(self, deadline_us: int, now: Now) -> None:
        """Schedule a turn at *deadline_us*. An earlier timer stays: it runs one turn more than needed."""
        if deadline_us <= now.monotonic_us:
            self._turn_soon()
            return
        if self._timer is not None:
            self._timer.cancel()
        # The loop's timers tick in whole milliseconds: rounded up, or the timer would fire early, again and again.
        delay_ms = math.ceil((deadline_us - now.monotonic_us) / 1_000)
        self._timer_us = deadline_us
        self._timer = self._loop.call_later(delay_ms / 1_000, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._look(self._now())


def _too_many_requests() -> Overloaded:
    return Overloaded(
        "more requests wait for an answer than the broker has room for (max_buffered_bytes), and this connection has "
        "its share of them; wait for some answers"
    )

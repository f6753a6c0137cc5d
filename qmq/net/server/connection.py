"""One connection of the server: splits received bytes into frames, writes answers, and pauses reading."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from qmq.broker.ports.commands import Command
from qmq.errors import ProtocolError, QmqError, TlsFailed
from qmq.net.protocol.frames import FRAME_SIZE, MAX_HELLO_BYTES, Frame, encode_error, split_frames
from qmq.net.server.login.logins import Login
from qmq.net.server.options import internal_error
from qmq.net.server.receive_buffer import RECEIVE_BUFFER_BYTES, PartialFrame, ReceiveBuffer
from qmq.net.server.write_queue import PIECE_BYTES, Buffer, UnsentBytes
from qmq.net.transfer import Transfer, end_when_gone

log = logging.getLogger("qmq.server")

#: Reasons not to read from a connection: it does not read its answers; the disk is behind; the broker stops; it has
#: sent invalid frames.
SLOW_READER: Final = 1
SLOW_DISK: Final = 2
STOPPING: Final = 4
THROTTLED: Final = 8
#: Its login has failed, and is answered later.
NOT_LET_IN: Final = 16

#: Seconds to read on after the last frame: closing with unread bytes would make the system send a TCP reset, which
#: drops what the client has not read yet.
LINGER_S: Final = 1.0
#: The first read of a connection, and the first after an invalid frame, is this small; each further one is twice as
#: large. Reads shrink again beyond _MANY frames, or other connections would wait for them.
_LITTLE: Final = 4 << 10
#: Larger reads are not looked at for simple frames: a turn writes many batches with one call.
MOST_BYTES: Final = 32 << 10
#: Seconds that a read costs outside of get_buffer, buffer_updated and the time between them.
READ_S: Final = 10e-6
_MANY: Final = 512
#: Answers smaller than this on average are joined: copying them costs less than separate buffers.
_JOIN_BELOW: Final = 1_024
#: The address of a client that has none.
NO_ADDRESS: Final = bytes(16), 0
_JOIN_ALL_BELOW: Final = 64 << 10
#: The first bytes of a client that speaks TLS.
_TLS: Final = b"\x16\x03"


class Hub(Protocol):
    """The part of the server that a connection uses."""

    receive_buffer: ReceiveBuffer
    max_frame_bytes: int
    max_inflight_bytes: int
    timer: Callable[[], float]

    def admit(self, connection: ClientConnection) -> None:
        """Register a connection that was made. Raises QmqError to turn it away."""

    def small_frames(self, connection: ClientConnection, size: int) -> int:
        """Handle the simple frames at the start of a read of *size* bytes; return how many bytes they are."""

    def frames_begin(self) -> None:
        """Prepare for frames that were received together."""

    def frame(self, connection: ClientConnection, frame: Frame) -> None:
        """Take one frame. A QmqError ends the connection."""

    def frames_end(self) -> None:
        """Schedule a turn after the frames."""

    def no_frames(self) -> None:
        """Bytes were received that complete no frame."""

    def buffered(self, connection: ClientConnection, size: int) -> None:
        """Record how many bytes of an incomplete frame *connection* holds."""

    def unread(self, connection: ClientConnection, size: int) -> None:
        """Record how many bytes of answers *connection* has not read."""

    def large_answer(self, connection: ClientConnection) -> None:
        """Watch whether the client reads an answer that the system may take at once."""

    def write_soon(self, connection: ClientConnection) -> None:
        """Call the connection's ``write_on`` in turn with others."""

    def greeted(self, connection: ClientConnection) -> None:
        """Record that the first frame was valid."""

    def broke_protocol(self, connection: ClientConnection) -> None:
        """Charge the cost of a connection that is ended for a protocol error."""

    def warn(self, connection: ClientConnection, why: str) -> None:
        """Log that a connection is refused, at a limited rate."""

    def lingers(self, connection: ClientConnection) -> None:
        """Close the connection once the client had time to read the last frame."""

    def leave(self, connection: ClientConnection) -> None:
        """Forget a connection that neither sends nor receives any more."""

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection whose socket is closed."""


class ClientConnection(asyncio.BufferedProtocol):
    """One client's socket. ``number`` is the broker's name for it."""

    __slots__ = (
        "_began", "_costs_s", "_hub", "_is_aborted", "_most", "_unsent", "_stops", "_transport", "partial_frame",
        "_unread", "acked", "address", "answers", "app", "audits", "by_client", "certificate_name", "client", "ended",
        "for_good", "greeted", "in_flight", "listings", "login", "name", "number", "opened_us", "peer", "deferred",
        "_transfer", "has_read_all", "pulls", "sends", "took_s",
    )  # fmt: skip

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self.partial_frame = PartialFrame(lambda size: hub.buffered(self, size))
        self._stops = 0
        self._most = _LITTLE
        self._unread = False  # the system has not taken all of the answers
        self._transfer = Transfer()
        self._unsent = UnsentBytes()  # answers that were not given to the system yet
        self._transport: asyncio.Transport | None = None
        self.number = number
        self.peer = ""
        #: The client's IP address, packed, and its port.
        self.address = NO_ADDRESS
        #: The name in the client's certificate; "" without one.
        self.certificate_name = ""
        self.client = ""
        self.name = ""
        self.app = ""
        self.opened_us = 0
        self.greeted = False
        #: None where no token is needed
        self.login: Login | None = None
        #: its token has ended: what it has in flight goes to others
        self.for_good = False
        #: the client or its system closed the connection
        self.by_client = False
        self._is_aborted = False
        #: changes of an administrator that wait for their answers, by request
        self.audits: dict[int, str] = {}
        #: its client's system has taken all answers but the error that ends it
        self.has_read_all = False
        #: the last frame was sent, or the client is gone
        self.ended = False
        #: requests without an answer, and the numbers of those that list subjects
        self.in_flight = 0
        self.listings: set[int] = set()
        #: pulls of this turn, and requests that wait for the next turn
        self.pulls = 0
        self.deferred: deque[Command] = deque()
        #: the cost of the last complete frames, and the cost so far of the incomplete one
        self.took_s = 0.0
        self._costs_s = 0.0
        self._began = 0.0
        #: whether it has sent a batch
        self.sends = False
        #: answers of the turn, and requests of acks that the next MESSAGES confirms
        self.answers: list[Buffer] = []
        self.acked: list[int] = []

    # --- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # pause_writing follows each answer that the system does not take
        peer = self._transport.get_extra_info("peername")
        self.peer = shown_peer(peer)
        self.address = _packed_peer(peer)
        end_when_gone(self._transport.get_extra_info("socket"))
        try:
            self._hub.admit(self)
        except QmqError as error:
            self.end(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        hub, partial = self._hub, self.partial_frame
        self._began = hub.timer()
        buffer = hub.receive_buffer
        if buffer.tail or partial.part or partial.whole is not None:
            return buffer.room(partial)[: self._most]
        return buffer.bytes[: self._most]

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended:
            return  # it lingers: further bytes are ignored
        hub, partial = self._hub, self.partial_frame
        buffer = hub.receive_buffer
        if nbytes <= MOST_BYTES and nbytes < self._most and self.greeted and not buffer.tail and partial.whole is None:
            done = hub.small_frames(self, nbytes)
            if done == nbytes or self.ended:
                return
            nbytes -= done
        view = buffer.received(partial, nbytes)
        if view is not None:
            self._take(view, nbytes)
        else:
            self._costs_s = self._cost_s()

    def _take(self, view: memoryview, nbytes: int) -> None:
        """Hand the complete frames at the start of *view* to the server."""
        hub = self._hub
        used = frames = 0
        hub.frames_begin()
        try:
            if not self.greeted:
                used = self._first(view)
                view = view[used:]
            if self.greeted:
                for frame in split_frames(view, hub.max_frame_bytes):
                    used += FRAME_SIZE + len(frame.meta) + len(frame.payload)
                    frames += 1
                    hub.frame(self, frame)
                    if self.ended:
                        break
        except QmqError as error:
            self.took_s = self._cost_s()
            hub.broke_protocol(self)
            if type(error) is TlsFailed:
                hub.warn(self, str(error))
            self.end(error)
        except Exception:
            log.exception("the broker failed to read a frame of %s", self.shown)
            self.end(internal_error())
        self._costs_s = self._cost_s()
        if used:
            self.took_s, self._costs_s = self._costs_s, 0.0
        # Also when the connection has ended: frames that were taken stay in the buffer until the end of the turn.
        hub.receive_buffer.consume(self.partial_frame, used)
        if frames > _MANY and self._most > _LITTLE:
            self._most >>= 1
        elif nbytes == self._most < RECEIVE_BUFFER_BYTES and frames < _MANY // 2:
            self._most <<= 1
        if self.ended:
            hub.receive_buffer.forget(self.partial_frame)
        if used or self.ended:
            hub.frames_end()
        else:
            hub.no_frames()

    def _cost_s(self) -> float:
        """Return the loop's time spent on the connection since its last complete frame."""
        return self._costs_s + self._hub.timer() - self._began + READ_S

    def eof_received(self) -> bool:
        return False  # a client that sends no more reads no more: the transport closes

    def connection_lost(self, exc: BaseException | None) -> None:
        self._hub.receive_buffer.forget(self.partial_frame)
        self.partial_frame = PartialFrame()  # the old one refers to this connection, which would be a cycle
        if not self.ended:
            self.ended = True
            # A process that is killed closes its connections; of a lost network the system says something else.
            self.by_client = not self._is_aborted and (exc is None or isinstance(exc, ConnectionError))
            self._hub.leave(self)
        self.answers.clear()
        self._unsent.clear()
        log.debug("connection %d of %s closed%s", self.number, self.shown, f": {exc}" if exc else "")
        self._transport = None
        self._hub.closed(self)

    def pause_writing(self) -> None:
        self._unread = True
        self._tell_unread()

    def resume_writing(self) -> None:
        self._unread = False
        if self._unsent.size:
            self._hub.write_soon(self)
        else:
            self._has_read()

    def _has_read(self) -> None:
        self.read_on(SLOW_READER)
        self._hub.unread(self, 0)

    def _tell_unread(self) -> None:
        size = self.unread_bytes()
        self._hub.unread(self, size)
        if size > self._hub.max_inflight_bytes:
            self.stop_reading(SLOW_READER)

    # --- called by the server ----------------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """The client for the log: its address, and its name if it gave one."""
        return f"{self.name!r} at {self.peer}" if self.name else self.peer

    @property
    def read_bytes(self) -> int:
        """The most bytes that it reads at once."""
        return self._most

    def unread_bytes(self) -> int:
        """Return how many bytes of its answers the system has not taken."""
        return self._transport.get_write_buffer_size() + self._unsent.size if self._transport is not None else 0

    def moved_bytes(self) -> int | None:
        """Return how many bytes of unread answers and of an incomplete frame have moved since the last call; None if
        there are none to move.
        """
        moved = self._transfer.moved(self._transport, self.partial_frame.arrived)
        return moved if self._transfer.is_under_way else None

    def read_little(self) -> None:
        """Read in small parts until many frames were valid."""
        self._most = _LITTLE

    def slow(self) -> bool:
        """Return whether reading is paused because the client does not read its answers."""
        return bool(self._stops & SLOW_READER)

    def stop_reading(self, why: int) -> None:
        """Pause reading for the reason *why*, until ``read_on`` was called for every reason given."""
        if not self._stops and self._transport is not None and not self.ended:
            self._transport.pause_reading()
        self._stops |= why

    def read_on(self, why: int) -> None:
        """Resume reading if *why* was the last reason against it."""
        if not self._stops & why:
            return
        self._stops &= ~why
        if not self._stops and self._transport is not None:
            self._transport.resume_reading()

    def write(self) -> None:
        """Write the answers of the turn; large ones in pieces."""
        answers, self.answers = self.answers, []
        if self.ended or self._transport is None:
            return
        size = sum(map(len, answers))
        if size > _JOIN_ALL_BELOW:
            self._hub.large_answer(self)
        if self._unsent.size or size > PIECE_BYTES:
            self._unsent.add(answers, size)
            if not self._unread:
                self._hub.write_soon(self)
        else:
            self._send(answers, size)
        if self._unread:
            self._tell_unread()

    def write_now(self, answer: bytes) -> None:
        """Write one small answer, behind those that are still to be written."""
        if self.ended or self._transport is None:
            return
        if self.answers or self._unsent.size:
            self.answers.append(answer)
            self.write()
            return
        self._transport.write(answer)
        if self._unread:
            self._tell_unread()

    def write_on(self) -> None:
        """Write the next piece. If the system does not take all of it, the following piece waits until it has."""
        if not self._unsent.size:
            return  # the connection was ended meanwhile
        size = min(self._unsent.size, PIECE_BYTES)
        self._send(self._unsent.take(size), size)
        if self._unread:
            self._tell_unread()
        elif self._unsent.size:
            self._hub.write_soon(self)
        else:
            self._has_read()

    def _send(self, buffers: list[Buffer], size: int) -> None:
        assert self._transport is not None
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif size <= _JOIN_ALL_BELOW or size < _JOIN_BELOW * len(buffers):
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    def end(self, error: QmqError) -> None:
        """Send *error*, then close. The socket lingers for a moment so that the client can read it."""
        if self.ended or self._transport is None:
            return
        log.debug("connection %d of %s ends: %s", self.number, self.shown, error)
        if not self._transport.is_closing():
            self.has_read_all = self.moved_bytes() is None
            self.answers.append(encode_error(0, error))
            self.write()
            if size := self._unsent.size:
                self._send(self._unsent.take(size), size)
        self.ended = True
        self._hub.leave(self)
        if self._transport.is_closing():
            return
        self._stops = 0
        self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:  # the client has left, and the transport does not know yet
            self.abort()
            return
        self._hub.lingers(self)

    def forget_frame(self) -> None:
        """Drop the bytes of an incomplete frame. Not to be called while frames are being taken."""
        self._hub.receive_buffer.forget(self.partial_frame)

    def abort(self) -> None:
        """Close at once."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    # --- the first frame ---------------------------------------------------------------------------------------------

    def _is_plain(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is None

    def _first(self, view: memoryview) -> int:
        """Take the first frame, a small hello; return the bytes used."""
        try:
            frame = next(split_frames(view, MAX_HELLO_BYTES), None)
        except ProtocolError:
            if bytes(view[:2]) == _TLS and self._is_plain():
                raise TlsFailed(
                    "it speaks TLS, and this broker does not: connect with qmq://, or give the broker tls_cert and "
                    "tls_key"
                ) from None
            raise ProtocolError(f"this is a QMQ broker, and {bytes(view[:FRAME_SIZE])!r} is no HELLO frame") from None
        if frame is None:
            return 0
        self._hub.frame(self, frame)
        self._hub.greeted(self)
        return FRAME_SIZE + len(frame.meta) + len(frame.payload)


def shown_peer(peer: object) -> str:
    """Return the address of a client for the log."""
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)


def _packed_peer(peer: object) -> tuple[bytes, int]:
    if not isinstance(peer, tuple):
        return NO_ADDRESS
    host, port = peer[:2]
    try:
        return socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host.partition("%")[0]), port
    except OSError:
        return NO_ADDRESS

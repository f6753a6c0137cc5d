"""One connection of the server: bytes to frames, answers to bytes, and when it is not read from. No rules."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

from qmq.broker.ports.commands import Command
from qmq.errors import ProtocolError, QmqError
from qmq.net.protocol.frames import FRAME_SIZE, MAX_HELLO_BYTES, Frame, encode_error, split_frames
from qmq.net.server.options import internal_error
from qmq.net.server.receive_buffer import RECEIVE_BUFFER_BYTES, PartialFrame, ReceiveBuffer
from qmq.net.server.write_queue import PIECE_BYTES, Buffer, UnsentBytes

log = logging.getLogger("qmq.server")

#: Why a connection is not read from: it does not read its answers; the disk is behind; the broker stops; it has sent
#: what was wrong.
SLOW_READER: Final = 1
SLOW_DISK: Final = 2
STOPPING: Final = 4
THROTTLED: Final = 8

#: After its last word the broker reads on for so long, or a close with bytes unread would make the system take that
#: word back (a TCP reset drops what the other side has not read yet).
LINGER_S: Final = 1.0
#: Who is new, or sent what was wrong, is read from in so small parts, then in twice as large ones each time; but not
#: so many frames at a time that others would have to wait for them.
_LITTLE: Final = 4 << 10
#: What a read costs beside the time from asking for room to the end of what is done with it.
READ_S: Final = 10e-6
_MANY: Final = 512
#: Answers smaller than this on average are joined: a buffer of its own costs more than copying so little.
_JOIN_BELOW: Final = 1_024
_JOIN_ALL_BELOW: Final = 64 << 10


class Hub(Protocol):
    """What a connection needs of its server."""

    receive_buffer: ReceiveBuffer
    max_frame_bytes: int
    max_inflight_bytes: int
    timer: Callable[[], float]

    def admit(self, connection: ClientConnection) -> None:
        """A connection was made. Raises QmqError to turn it away."""

    def frames_begin(self) -> None:
        """Frames follow: what they share is made ready."""

    def frame(self, connection: ClientConnection, frame: Frame) -> None:
        """Take one frame. A QmqError that is raised breaks the connection."""

    def frames_end(self) -> None:
        """No more frames for now."""

    def no_frames(self) -> None:
        """Bytes came that complete no frame."""

    def buffered(self, connection: ClientConnection, size: int) -> None:
        """So many bytes are kept for a frame that is not complete."""

    def unread(self, connection: ClientConnection, size: int) -> None:
        """It has so many bytes of answers to read."""

    def write_soon(self, connection: ClientConnection) -> None:
        """Call its ``write_on`` when it is its turn."""

    def greeted(self, connection: ClientConnection) -> None:
        """Its first frame was right."""

    def broke_protocol(self, connection: ClientConnection) -> None:
        """It is about to be ended for that."""

    def lingers(self, connection: ClientConnection) -> None:
        """Its last word is said: it is to be closed when the other side had time to read that."""

    def leave(self, connection: ClientConnection) -> None:
        """Nothing more comes from this connection, and nothing more goes to it."""

    def closed(self, connection: ClientConnection) -> None:
        """Its socket is closed."""


class ClientConnection(asyncio.BufferedProtocol):
    """Bytes in both directions. ``number`` is what the broker knows it by."""

    __slots__ = (
        "_began", "_costs_s", "_hub", "_most", "_unsent", "_stops", "_transport", "_partial_frame", "_unread", "acked",
        "answers", "client", "ended", "greeted", "in_flight", "listings", "number", "peer", "deferred", "pulls",
        "sends", "took_s",
    )  # fmt: skip

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub = hub
        self._partial_frame = PartialFrame(lambda size: hub.buffered(self, size))
        self._stops = 0
        self._most = _LITTLE
        self._unread = False  # the system took not all of its answers
        self._unsent = UnsentBytes()  # what it was not given yet
        self._transport: asyncio.Transport | None = None
        self.number = number
        self.peer = ""
        self.client = ""
        self.greeted = False
        #: the last word is said, or the other side is gone
        self.ended = False
        #: requests without an answer, and the numbers of those that ask for a list of subjects
        self.in_flight = 0
        self.listings: set[int] = set()
        #: pulls of this turn, and what waits for the next one because they are many
        self.pulls = 0
        self.deferred: deque[Command] = deque()
        #: what the frames that came last have cost, and what those cost so far that are not complete
        self.took_s = 0.0
        self._costs_s = 0.0
        self._began = 0.0
        #: it has sent a batch
        self.sends = False
        #: what the turn has to write, and acknowledgements that are still to be part of it
        self.answers: list[Buffer] = []
        self.acked: list[int] = []

    # --- of asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # tells of every answer that the system does not take at once
        self.peer = _peer_of(self._transport)
        _keep_alive(self._transport)
        try:
            self._hub.admit(self)
        except QmqError as error:
            self.end(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._began = self._hub.timer()
        return self._hub.receive_buffer.room(self._partial_frame)[: self._most]

    def buffer_updated(self, nbytes: int) -> None:
        if self.ended:
            return  # it lingers: what comes is not looked at
        view = self._hub.receive_buffer.received(self._partial_frame, nbytes)
        if view is not None:
            self._take(view, nbytes)
        else:
            self._costs_s = self._cost_s()

    def _take(self, view: memoryview, nbytes: int) -> None:
        """Hand the frames that *view* begins with to the server."""
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
            self.end(error)
        except Exception:
            log.exception("the broker failed to read a frame of %s", self.peer)
            self.end(internal_error())
        self._costs_s = self._cost_s()
        if used:
            self.took_s, self._costs_s = self._costs_s, 0.0
        # Also when the connection has ended: the frames that were taken must stay until the turn is over.
        hub.receive_buffer.consume(self._partial_frame, used)
        if frames > _MANY and self._most > _LITTLE:
            self._most >>= 1
        elif nbytes == self._most < RECEIVE_BUFFER_BYTES and frames < _MANY // 2:
            self._most <<= 1
        if self.ended:
            hub.receive_buffer.forget(self._partial_frame)
        if used or self.ended:
            hub.frames_end()
        else:
            hub.no_frames()

    def _cost_s(self) -> float:
        """Of the loop's time, since the last frame that was complete."""
        return self._costs_s + self._hub.timer() - self._began + READ_S

    def eof_received(self) -> bool:
        return False  # who sends no more reads no more: the transport closes

    def connection_lost(self, exc: BaseException | None) -> None:
        self._hub.receive_buffer.forget(self._partial_frame)
        self._partial_frame = PartialFrame()  # the other one knows this connection, which would be a circle
        if not self.ended:
            self.ended = True
            self._hub.leave(self)
        self.answers.clear()
        self._unsent.clear()
        log.debug("connection %d of %s closed%s", self.number, self.peer, f": {exc}" if exc else "")
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

    # --- of the server -----------------------------------------------------------------------------------------------

    def unread_bytes(self) -> int:
        """Bytes of its answers that the system has not taken."""
        return self._transport.get_write_buffer_size() + self._unsent.size if self._transport is not None else 0

    def read_little(self) -> None:
        """Read few bytes in one go until many were right."""
        self._most = _LITTLE

    def slow(self) -> bool:
        """It is not read from, because it does not read its answers."""
        return bool(self._stops & SLOW_READER)

    def stop_reading(self, why: int) -> None:
        """Read nothing more until ``read_on`` was called for every reason given."""
        if not self._stops and self._transport is not None and not self.ended:
            self._transport.pause_reading()
        self._stops |= why

    def read_on(self, why: int) -> None:
        """That reason is gone."""
        if not self._stops & why:
            return
        self._stops &= ~why
        if not self._stops and self._transport is not None:
            self._transport.resume_reading()

    def write(self) -> None:
        """Send the answers that were gathered; when they are large, piece by piece."""
        answers, self.answers = self.answers, []
        if self.ended or self._transport is None:
            return
        size = sum(map(len, answers))
        if self._unsent.size or size > PIECE_BYTES:
            self._unsent.add(answers, size)
            if not self._unread:
                self._hub.write_soon(self)
        else:
            self._send(answers, size)
        if self._unread:
            self._tell_unread()

    def write_on(self) -> None:
        """Send the next piece. When the system does not take all of it, the one after that waits until it has."""
        if not self._unsent.size:
            return  # it was ended meanwhile
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
        """Say why, then close; the socket stays open a little so that the other side can read it."""
        if self.ended or self._transport is None:
            return
        log.debug("connection %d of %s ends: %s", self.number, self.peer, error)
        if not self._transport.is_closing():
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
        except OSError:  # the other side has left, and nobody has told the transport yet
            self.abort()
            return
        self._hub.lingers(self)

    def forget_frame(self) -> None:
        """What came of a frame that is not complete is not kept any more. Not while frames are being taken."""
        self._hub.receive_buffer.forget(self._partial_frame)

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- its beginning -----------------------------------------------------------------------------------------------

    def _first(self, view: memoryview) -> int:
        """Take the first frame, which is a hello and small; returns the bytes used."""
        try:
            frame = next(split_frames(view, MAX_HELLO_BYTES), None)
        except ProtocolError:
            raise ProtocolError(
                f"this is a QMQ broker, and {bytes(view[:FRAME_SIZE])!r} does not begin a hello of its protocol"
            ) from None
        if frame is None:
            return 0
        self._hub.frame(self, frame)
        self._hub.greeted(self)
        return FRAME_SIZE + len(frame.meta) + len(frame.payload)


def _peer_of(transport: asyncio.Transport) -> str:
    address = transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


def _keep_alive(transport: asyncio.Transport) -> None:
    """Let the system find out about clients whose machine is gone: within two minutes."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

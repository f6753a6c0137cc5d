"""One connection of a client to a broker: frames in and out of an asyncio transport.

Each request has a callback, which gets its answer; callers know what the answers mean. Frames up to 64 KiB are received
into one buffer that is used again, larger ones into a buffer for the frame alone. Such a buffer is used again once no
view leads to it: to touch fresh memory for the first time costs more than to receive into it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from qmq.errors import ConnectionLost, ProtocolError, QmqError, Unauthorized
from qmq.format.pieces import PartialAnswer
from qmq.net.client.address import Address, TlsFiles
from qmq.net.client.blocking import give_up_socket
from qmq.net.client.dial import Route, Routes, SocketAddress
from qmq.net.client.dial_in_loop import dial_in_loop, routes_to
from qmq.net.client.in_thread import in_thread
from qmq.net.client.tasks import begin_task
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, Frame, FrameKind, made
from qmq.net.protocol.messages import EMPTY_HEAD, MessagesHead, decode_head
from qmq.net.transfer import Transfer, end_when_gone

log = logging.getLogger("qmq.client")

#: Large buffers of a connection: for the answer that is handled, and for the next one.
_MAX_BUFFERS: Final = 2
_STEP_BYTES: Final = 1 << 20
#: References to an array to which no view leads: the list's, and the call's own.
_REFERENCES: Final = 2


class ReceiveBuffers:
    """The buffers into which one connection receives large frames."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[np.uint8]] = []

    def buffer(self, size: int) -> memoryview:
        """Return *size* bytes with any content. They are not used again while the view, or any view of it, exists."""
        for number in range(len(self._arrays)):
            if len(self._arrays[number]) >= size and sys.getrefcount(self._arrays[number]) == _REFERENCES:
                return self._arrays[number][:size].data
        del self._arrays[: len(self._arrays) + 1 - _MAX_BUFFERS]
        # np.empty does not fill with zeros, which costs as much as receiving
        self._arrays.append(np.empty(-(-size // _STEP_BYTES) * _STEP_BYTES, np.uint8))
        return self._arrays[-1][:size].data

    def clear(self) -> None:
        """Free the memory, as no large answers follow one another any more."""
        self._arrays.clear()


#: Frames up to this size are read in place.
SMALL_BYTES: Final = 64 << 10
_BUFFER_BYTES: Final = 128 << 10
#: Bytes written that the kernel has not taken: above the first a connection is not writable, until below the second.
WRITE_HIGH_BYTES: Final = 4 << 20
WRITE_LOW_BYTES: Final = 1 << 20
#: A broker that lets a request wait this long, in seconds, counts as dead.
ANSWER_TIMEOUT: Final = 20.0
#: Bytes on their way that have not moved for this long, in seconds, do not move any more.
STILL_AFTER: Final = 10.0
#: Closing waits this long, in seconds, for the broker to read the remaining bytes.
CLOSE_TIMEOUT: Final = 1.0
#: The largest frame before WELCOME has said how large frames may be.
_MAX_WELCOME_BYTES: Final = 64 << 10
#: As plain numbers: looking up a member of an enum costs more.
_SEND, _PULL, _ACK, _SENT, _MESSAGES, _ERROR = map(
    int, (FrameKind.SEND, FrameKind.PULL, FrameKind.ACK, FrameKind.SENT, FrameKind.MESSAGES, FrameKind.ERROR)
)
#: A whole SENT frame of a batch with one run.
_SENT_ONE: Final = struct.Struct("<IBBHQQQH6sIQ")
_MAX_EXTRA_BYTES: Final = 1 << 20  # the size of an answer beside the messages in it


class Answer(NamedTuple):
    """The broker's answer to a request. The receiver may keep ``payload``."""

    kind: int
    meta: dict[str, Any]
    payload: memoryview
    #: The part of a large answer to a pull that was decoded while it came.
    begun: PartialAnswer | None = None
    #: The head of an answer to a pull.
    head: MessagesHead = EMPTY_HEAD
    #: How long a large answer to a pull came in.
    seconds: float = 0.0


_NO_META: Final[dict[str, Any]] = {}
#: The answer to acks that came within MESSAGES: none was refused.
_NONE_REFUSED: Final = Answer(int(FrameKind.ACKED), _NO_META, memoryview(frames.ACKED.pack(0)))


class Welcome(NamedTuple):
    """A broker's answer to HELLO: its store, its version, and its limits."""

    store_id: bytes
    version: str
    max_frame_bytes: int
    max_batch_bytes: int
    max_message_bytes: int
    producer_window: int
    producer_ttl_ms: int
    max_pull_count: int
    max_pull_bytes: int
    session_timeout_ms: int
    #: How long a unique text is remembered; 0: by a broker of an older version, which knows none.
    unique_for_ms: int = 0


@asynccontextmanager
async def timeout_while_still(seconds: float, moved_at: Callable[[], float]) -> AsyncIterator[None]:
    """Limit what is done within, as ``asyncio.timeout`` does, to *seconds* in which no bytes move. *moved_at* returns
    when they have moved last.
    """
    loop = asyncio.get_running_loop()

    async def look() -> None:
        until = loop.time() + seconds
        while (now := loop.time()) < until:
            await asyncio.sleep(until - now)
            until = max(until, moved_at() + seconds)
        timeout.reschedule(now)

    looking = begin_task(look(), loop, "qmq-timeout")
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        looking.cancel()


class ConnectionOwner(Protocol):
    """The owner of a connection, and the calls by which it learns what happens there."""

    def batch_stored(
        self, request: int, position: int, stored_at_us: int, partition: int, store_id: bytes, firsts: Sequence[int],
        duplicates: bytes = b"",
    ) -> None:  # fmt: skip
        """Take the fields of a SENT frame; *firsts* are the first sequences of the runs, *duplicates* the rows of the
        messages that were left out.
        """

    def batch_refused(self, request: int, error: QmqError) -> None:
        """Take the error with which the broker refused a batch."""

    def writable(self) -> None:
        """Write on: the connection takes more again."""

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        """Learn that the connection has ended; all its requests got *error* before."""


class RequestsOnly:
    """The owner of a connection that has requests only: their callbacks learn all that happens."""

    def batch_stored(
        self,
        request: int,
        position: int,
        stored_at_us: int,
        partition: int,
        store_id: bytes,
        firsts: Sequence[int],
        duplicates: bytes = b"",
    ) -> None:
        """Never called, as no batch is sent."""

    def batch_refused(self, request: int, error: QmqError) -> None:
        """Never called, as no batch is sent."""

    def writable(self) -> None:
        """Do nothing: one frame at a time is on its way."""

    def lost(self, connection: BrokerConnection, error: QmqError) -> None:
        """Do nothing: the requests got *error*."""


Callback = Callable[[Answer | QmqError], None]


class _Asked(NamedTuple):
    kind: int
    callback: Callback
    due: float | None


class BrokerConnection(asyncio.BufferedProtocol):
    """One connection. ``writable`` says whether it takes batches now; small requests may always be written."""

    def __init__(self, owner: ConnectionOwner, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        #: The address that it was made to; None before.
        self.peer: SocketAddress | None = None
        self.writable = True
        self.closed = False
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._max_frame_bytes = _MAX_WELCOME_BYTES
        self._greeted = False
        self._tls: TlsFiles | None = None
        self._token_file = ""
        self._counted = 0
        self._asked: dict[int, _Asked] = {}
        self._unwritten = b""  # a frame that leaves together with the next one
        self._lost = False
        self._end_waiter: asyncio.Future[None] | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._error: QmqError | None = None  # the cause of the end, if known before the transport reports it
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0
        self._large: memoryview | None = None  # the frame that is being received, if it is over SMALL_BYTES
        self._large_filled = 0
        self._large_began = 0.0
        self._buffers = ReceiveBuffers()
        self._arriving: PartialAnswer | None = None  # decodes the large frame, if it is an answer to a pull
        self._payload_at = 0  # in the large frame
        self._transfer = Transfer()
        #: When bytes of an unfinished transfer have moved last, by the loop's clock, as far as ``look`` has seen.
        self.moved_at = -math.inf

    async def open(self, address: Address, routes: Routes | None = None) -> None:
        """Connect to a broker, by TLS if its address says so; *routes* knows earlier connections. Raises QmqError."""
        tls: dict[str, Any] = {}
        self._tls, self._token_file = address.tls, address.token_file
        if address.tls is not None:
            from qmq.net.client.tls.context import context_of

            # CLOSE_TIMEOUT bounds the end of a connection, and the caller the handshake
            tls = {"ssl": context_of(address.tls), "server_hostname": address.tls_name}
        found: list[Route] = []
        try:
            found = await routes_to(address, routes or Routes(), self._loop)
            if len(found) == 1 and not any(found[0][3][3:]):  # without a scope of IPv6
                self.peer = found[0][3]
                await self._loop.create_connection(lambda: self, self.peer[0], self.peer[1], **tls)
            else:
                sock = await dial_in_loop(found, self._loop)
                self.peer = sock.getpeername()
                await self._loop.create_connection(lambda: self, sock=sock, **tls)
        except TimeoutError:
            raise
        except OSError as error:
            names: list[str] = []
            if address.tls is not None:
                from qmq.net.client.tls.context import names_after

                names = await in_thread(partial(names_after, error, address, found))
            raise self._connect_error(error, names) from error

    def _connect_error(self, error: OSError, names: Sequence[str] = ()) -> QmqError:
        """Return the error for one that ended the connection before WELCOME came; *names* are those of the broker's
        certificate, where it was refused for them.
        """
        if self._tls is None:
            return ConnectionLost(f"{self.address}: {error.strerror or error}")
        from qmq.net.client.tls.failures import connect_error

        return connect_error(error, self.address, self._tls, names)

    # --- requests ----------------------------------------------------------------------------------------------------

    def next_request(self) -> int:
        """Return a new request number. All have an even number of 1 bits, so one flipped bit gives no valid number."""
        self._counted += 1
        return self._counted << 1 | self._counted.bit_count() & 1

    async def hello(
        self, client: str, name: str = "", app: str = "", token: str = "",
        unanswered: tuple[bytes, int, int] | None = None,
    ) -> Welcome:  # fmt: skip
        """Send HELLO and return WELCOME; *name*, *app* and *token* are those of ``qmq.connect``, *unanswered* is of
        ``SendWindow.unanswered``. Raises QmqError if the broker refuses the client or its answer is invalid.
        """
        names = {key: value for key, value in (("name", name), ("app", app), ("token", token)) if value}
        fields = {"protocol": frames.PROTOCOL_VERSION, "client": client, **names}
        if unanswered is not None:
            fields["unanswered"] = unanswered
        answer = await self.request(FrameKind.HELLO, fields)
        try:
            announced: dict[str, Any] = Welcome._field_defaults | answer.meta
            welcome = Welcome(*(announced[name] for name in Welcome._fields))
        except KeyError as error:
            raise ProtocolError(f"WELCOME of the broker at {self.address} lacks {error}") from None
        if type(welcome.store_id) is not bytes or not all(type(number) is int for number in welcome[2:]):
            raise ProtocolError(f"WELCOME of the broker at {self.address} has fields of a wrong type")
        self._max_frame_bytes = max(welcome.max_batch_bytes, welcome.max_pull_bytes) + _MAX_EXTRA_BYTES
        self._greeted = True
        return welcome

    async def request(self, kind: int, meta: dict[str, Any] | None = None, payload: bytes = b"") -> Answer:
        """Send a request and return its answer. Raises the QmqError that came instead."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def answered(answer: Answer | QmqError) -> None:
            if future.done():
                return
            if isinstance(answer, QmqError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        due = self._loop.time() + ANSWER_TIMEOUT
        self.ask(kind, answered, frames.pack_meta(meta) if meta else b"", payload, due)
        return await future

    def ask(
        self, kind: int, callback: Callback, meta: bytes = b"", payload: bytes = b"", due: float | None = None,
        flags: int = 0, joins: bool = False,
    ) -> int:  # fmt: skip
        """Send a request and return its number; *callback* is called once, with the answer or the error.

        If no answer has come at *due*, in seconds of the loop's clock, the broker counts as dead. A request that
        *joins* leaves in one write with the next frame, which must follow at once: the broker reads both together.
        """
        request = self.next_request()
        if self.closed:
            self._loop.call_soon(callback, self.end_error())
            return request
        self._asked[request] = made(_Asked, (kind, callback, due))
        size = len(meta)
        frame = FRAME.pack(FRAME_SIZE + size + len(payload), kind, flags, size, request) + meta + payload
        if joins:
            self._unwritten += frame
        else:
            self._write(frame)
        return request

    def tell(self, kind: int, payload: bytes) -> None:
        """Send a frame that has no answer."""
        if not self.closed:
            self._write(frames.encode_frame(kind, self.next_request(), b"", len(payload)) + payload)

    def send_batch(self, request: int, buffers: Sequence[bytes], flush: bool) -> None:
        """Write a SEND frame; its answer goes to the owner."""
        size = sum(map(len, buffers))
        head = FRAME.pack(FRAME_SIZE + size, _SEND, frames.FLUSH if flush else 0, 0, request)
        assert self._transport is not None
        if size <= SMALL_BYTES:
            self._transport.write(b"".join((head, *buffers)))
        else:
            self._transport.writelines((head, *buffers))

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None
        if self._unwritten:
            frame, self._unwritten = self._unwritten + frame, b""
        self._transport.write(frame)

    def look(self, now: float) -> float:
        """Return for how many seconds bytes on their way have moved, since it was seen last; 0.0: they stand still."""
        if not self._transfer.moved(self._transport, self.arrived):
            return 0.0
        before, self.moved_at = self.moved_at, now
        return now - before if now - before <= STILL_AFTER else 0.001

    @property
    def arrived(self) -> int:
        """The bytes of an incomplete frame that have come."""
        return self._large_filled if self._large is not None else self._filled

    def arrived_of(self, request: int) -> int:
        """Return how many bytes of an incomplete answer to that request have come."""
        frame = self._buffer if self._large is None else self._large
        arrived = self.arrived
        return arrived if arrived >= FRAME_SIZE and FRAME.unpack_from(frame)[4] == request else 0

    def is_overdue(self, now: float) -> bool:
        """Return whether an answer is overdue, and no bytes are on their way that move."""
        if now <= self.moved_at + STILL_AFTER:
            return False
        return any(asked.due is not None and now > asked.due for asked in self._asked.values())

    def close(self) -> None:
        """Write the remaining bytes, then end; after CLOSE_TIMEOUT end without a broker that does not read them."""
        self.closed = True
        if self._transport is not None and not self._lost:
            self._transport.close()
            if self._end_timer is None:
                self._end_timer = self._loop.call_later(CLOSE_TIMEOUT, self._transport.abort)

    async def wait_closed(self) -> None:
        """Wait until a closed connection has ended."""
        if self._transport is None or self._lost:
            return
        if self._end_waiter is None:
            self._end_waiter = self._loop.create_future()
        await asyncio.shield(self._end_waiter)

    def abort(self, error: QmqError) -> None:
        """End the connection now, because of *error*."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    def give_up_socket(self) -> None:
        """[in the child of a fork] Give up the copy of the parent's socket: the broker would not see the parent's end
        while the child lives.
        """
        if self._transport is not None and not self._lost:
            give_up_socket(self._transport.get_extra_info("socket"))

    def end_error(self) -> QmqError:
        """Return the error that ended the connection."""
        return self._error or ConnectionLost(f"the connection to {self.address} was lost")

    # --- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_gone(sock)
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = self._lost = True
        self._buffers.clear()  # a message that the program keeps leads here
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._end_waiter is not None:
            self._end_waiter.set_result(None)
        if self._error is None and exc is not None:
            # With TLS 1.3 a broker that refuses the client's certificate says so after the handshake.
            is_refusal = self._tls is not None and not self._greeted and isinstance(exc, OSError)
            lost = ConnectionLost(f"the connection to {self.address} was lost: {exc}")
            self._error = self._connect_error(cast(OSError, exc)) if is_refusal else lost
        error = of_requests = self.end_error()
        if self._token_file and self._greeted and isinstance(error, Unauthorized):  # another token may do
            of_requests = ConnectionLost(f"the connection to {self.address} ended: {error}")
        asked, self._asked = self._asked, {}
        for request in asked.values():
            try:
                request.callback(of_requests)
            except Exception:  # the others, and the owner, have to learn of the end all the same
                log.exception("the end of the connection to %s could not be handled", self.address)
        self._owner.lost(self, error)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        self._owner.writable()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_filled :]
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if nbytes == _SENT_ONE.size and not self._filled and self._large is None:
                found = _SENT_ONE.unpack_from(self._buffer)
                size, kind, _, meta_size, request, position, stored_at_us, partition, store_id, runs, first = found
                if kind == _SENT and size == nbytes and runs == 1 and not meta_size:  # the answer to a send alone
                    self._owner.batch_stored(request, position, stored_at_us, partition, store_id, (first,))
                    return
            if self._large is not None:
                self._large_filled += nbytes
                if self._large_filled == len(self._large):
                    self._take_large()
                elif self._arriving is not None:
                    self._arriving.more(self._large_filled - self._payload_at)
            else:
                self._filled += nbytes
                self._take_small()
        except QmqError as error:
            # A broker whose welcome was valid sends valid frames: they were damaged on the way, so connect again.
            self.abort(
                ConnectionLost(f"the connection to {self.address} delivered invalid bytes: {error}")
                if self._greeted
                else error
            )

    # --- frames in ---------------------------------------------------------------------------------------------------

    def _take_small(self) -> None:
        """Handle the complete frames in the buffer. A large one that is incomplete moves into a buffer of its own."""
        buffer, filled, used = self._buffer, self._filled, 0
        while filled - used >= FRAME_SIZE:
            size, kind, _, meta_size, request = FRAME.unpack_from(buffer, used)
            if not FRAME_SIZE + meta_size <= size <= self._max_frame_bytes:
                raise frames.wrong_sizes(size, meta_size, self._max_frame_bytes)
            payload_at, end = used + FRAME_SIZE + meta_size, used + size
            if end > filled:
                if size > SMALL_BYTES:
                    self._begin_large(size, kind, meta_size, used)
                    return
                break
            self._take(kind, request, buffer[used + FRAME_SIZE : payload_at], buffer[payload_at:end], False)
            used = end
        self._filled = left = filled - used
        if used and left:
            buffer[:left] = bytes(buffer[used:filled])

    def _begin_large(self, size: int, kind: int, meta_size: int, used: int) -> None:
        """Receive the rest of a large frame, whose beginning is in the buffer from *used* on, in a buffer for it."""
        left = self._filled - used
        self._large = self._buffers.buffer(size)
        self._large[:left] = self._buffer[used : used + left]
        self._large_filled, self._large_began = left, self._loop.time()
        self._filled = 0
        self._payload_at = FRAME_SIZE + meta_size
        self._arriving = PartialAnswer(self._large[self._payload_at :]) if kind == _MESSAGES else None

    def _take_large(self) -> None:
        frame, self._large = self._large, None
        assert frame is not None
        _, kind, _, _, request = FRAME.unpack_from(frame)
        self._take(kind, request, frame[FRAME_SIZE : self._payload_at], frame[self._payload_at :], True)
        self._arriving = None

    def _take(self, kind: int, request: int, meta: memoryview, payload: memoryview, keeps: bool) -> None:
        """Handle a frame. *keeps*: its views stay valid."""
        if kind == _MESSAGES:
            self._take_messages(request, meta, payload, keeps)
        elif kind == _SENT:
            self._take_sent(request, payload)
        elif kind == _ERROR:
            self._take_error(Frame(kind, 0, request, meta, payload))
        else:
            asked = self._asked.get(request)
            if asked is None or kind != asked.kind + 128:
                raise self._unasked(kind, request)
            answer = Answer(kind, frames.unpack_meta(meta), payload if keeps else memoryview(bytes(payload)))
            del self._asked[request]
            asked.callback(answer)

    def _take_sent(self, request: int, payload: memoryview) -> None:
        """Hand an answer to a batch to the owner."""
        try:
            position, stored_at_us, partition, store_id, runs = frames.SENT.unpack_from(payload)
            firsts = struct.unpack_from(f"<{runs}Q", payload, frames.SENT.size)
            duplicates = bytes(payload[frames.SENT.size + 8 * runs :])
        except struct.error:
            raise ProtocolError(f"SENT has a payload of {len(payload)} bytes: some are missing") from None
        self._owner.batch_stored(request, position, stored_at_us, partition, store_id, firsts, duplicates)

    def _take_messages(self, request: int, meta: memoryview, payload: memoryview, keeps: bool) -> None:
        """Hand an answer to a pull to the puller. The ACKs that it answers, too, are confirmed before."""
        asked = self._asked.get(request)
        if asked is None or asked.kind != _PULL:
            raise self._unasked(_MESSAGES, request)
        head = decode_head(meta)
        for ack in head.acked:
            acked = self._asked.get(ack)
            if acked is None or acked.kind != _ACK:
                raise ProtocolError(f"acked of MESSAGES names request {ack}, which is no ACK that waits")
            del self._asked[ack]
            acked.callback(_NONE_REFUSED)
        if not keeps:
            self._buffers.clear()
            payload = memoryview(bytes(payload))
        del self._asked[request]
        begun, seconds = (self._arriving, self._loop.time() - self._large_began) if keeps else (None, 0.0)
        asked.callback(made(Answer, (_MESSAGES, _NO_META, payload, begun, head, seconds)))

    def _unasked(self, kind: int, request: int) -> ProtocolError:
        return ProtocolError(
            f"the broker at {self.address} sent a frame of kind {kind} that answers no request (number {request})"
        )

    def _take_error(self, frame: Frame) -> None:
        error = frames.decode_error(frame)
        if not frame.request:
            self.abort(error)
            return
        asked = self._asked.pop(frame.request, None)
        if asked is None:
            self._owner.batch_refused(frame.request, error)
        else:
            asked.callback(error)

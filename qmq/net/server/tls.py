"""TLS of the server: the layer between a socket and its ClientConnection, and the bounds on handshakes.

A connection sees the layer as its transport. Bytes are encrypted when they are written, and then are the socket's own:
so pieces of large answers, bounds on unread answers and the end of a connection are as without TLS, which the transport
of the loop's own TLS does not offer (it hides what the socket has not sent, and cannot close one direction). A
connection that has sent nothing costs no TLS object; one that stays idle holds no buffers.
"""

from __future__ import annotations

import asyncio
import logging
import select
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from qmq.errors import TlsFailed
from qmq.net.protocol.frames import encode_error
from qmq.net.server.accept import ConnectionWarnings
from qmq.net.server.admission import END_S, Throttle
from qmq.net.server.connection import LINGER_S, ClientConnection, shown_peer
from qmq.net.server.timeouts import ConnectionTimeouts
from qmq.net.server.write_queue import Buffer

log = logging.getLogger("qmq.server")

#: The first byte of a client's TLS: a record of its handshake.
HANDSHAKE_RECORD: Final = 0x16
#: Bytes that are read at once, and encrypted at once (a record). OpenSSL keeps buffers of this size for each connection
#: that had as many; larger ones are not faster.
_READ_BYTES: Final = 64 << 10
_RECORD_BYTES: Final = 16 << 10
#: Bytes that encryption adds to a small read.
_RECORD_EXTRA: Final = 512
#: Seconds that pass for others, while clients are served, for each second of handshakes that are not done, and of those
#: that are: they get an eighth of the loop, or half of it. When most get done, clients come back after a restart.
_PAUSED_FOR: Final = 7
_PAUSED_FOR_DONE: Final = 1
#: The longest pause that handshakes which were not done cause, and seconds until it is looked at again.
_MOST_PAUSE_S: Final = 1.0
_LOOK_S: Final = 0.02
#: Seconds of handshakes in one turn of the loop: then the loop hears which clients have gone.
_TURN_S: Final = 0.01
#: Seconds after a client's last frame during which clients count as being served.
_SERVED_S: Final = 0.1
_PLAIN: Final = "this broker takes connections by TLS only: connect with qmqs:// instead of qmq://"


class Handshakes:
    """The handshakes that are not done yet: bounded in number, in time and in their share of the loop.

    A flood of half-open ones ends the oldest, which a correct client never is for long. With an RSA key of 4,096 bits
    one takes 5 ms or more: when all clients come at once, those that have waited longest are about to give up. So the
    newest has its turn first, and one whose client has gone has none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: Callable[[], ssl.SSLContext],
        most: int,
        timeout_s: float,
        throttle: Throttle,
        warnings: ConnectionWarnings,
        timer: Callable[[], float],
        served: Callable[[], int],
    ) -> None:
        """*context* returns the context of a new connection. *timer* returns seconds, to measure the cost. *served*
        counts the frames of clients, which tells whether clients are being served.
        """
        self.context = context
        self.throttle = throttle
        self.warnings = warnings
        self.timer = timer
        self.loop = loop
        #: All connections receive into it.
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._most = most
        self._timeout_s = timeout_s
        self._begun: dict[TlsChannel, None] = {}  # in the order of time
        self._ready: dict[TlsChannel, None] = {}  # those whose client has sent its hello, in the order of time
        self._turn: asyncio.Handle | None = None
        self._paid_at = 0.0
        self._served = served
        self._last_served, self._busy_until = 0, 0.0
        self._timeouts: ConnectionTimeouts[TlsChannel] = ConnectionTimeouts(loop, timeout_s, self._too_long)
        self._lingering: ConnectionTimeouts[TlsChannel] = ConnectionTimeouts(loop, LINGER_S, TlsChannel.abort)

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, channel: TlsChannel) -> None:
        """Take a new connection; end the oldest one if there are too many."""
        self._begun[channel] = None
        self._timeouts.add(channel)
        if len(self._begun) > self._most:
            oldest = next(iter(self._begun))
            why = f"its TLS handshake is the oldest of more than {self._most} unfinished ones (max_handshakes)"
            self.warnings.add(oldest.peer, why)
            self.forget(oldest)
            oldest.abort()

    def ready(self, channel: TlsChannel) -> None:
        """Answer a client's hello soon."""
        self._ready[channel] = None
        if self._turn is None:
            self._turn = self.loop.call_soon(self._answer)

    def _answer(self) -> None:
        """Answer the newest hellos, as many as fit into a turn, unless handshakes have to wait for others."""
        self._turn, now = None, self.loop.time()
        served = self._served()
        if served != self._last_served:
            self._last_served, self._busy_until = served, now + _SERVED_S
        if now < min(self._paid_at, self._busy_until):
            self._turn = self.loop.call_later(min(self._paid_at - now, _LOOK_S), self._answer)
            return
        began = self.timer()
        while self._ready and self.timer() - began < _TURN_S:
            channel, _ = self._ready.popitem()
            if channel.is_gone():
                channel.abort()
            else:
                channel.shake_hands()
        if self._ready:
            self._turn = self.loop.call_soon(self._answer)

    def spent(self, cost_s: float) -> None:
        """Note the time that a handshake has cost so far, and have others their share for it."""
        now = self.loop.time()
        self._paid_at = min(max(self._paid_at, now) + cost_s * _PAUSED_FOR, now + _MOST_PAUSE_S)

    def done(self, channel: TlsChannel, cost_s: float) -> None:
        """Note that a handshake is done, and what it has cost in all."""
        self._paid_at -= cost_s * (_PAUSED_FOR - _PAUSED_FOR_DONE)
        self.forget(channel)

    def forget(self, channel: TlsChannel) -> None:
        """Forget a connection whose handshake is done, or which is gone."""
        self._begun.pop(channel, None)
        self._ready.pop(channel, None)
        self._timeouts.discard(channel)
        self._lingering.discard(channel)

    def failed(self, channel: TlsChannel, why: str) -> None:
        """Log that a connection is refused, and close it once the client had time to read why."""
        self.warnings.add(channel.peer, why)
        self.throttle.charge(END_S)
        self._timeouts.discard(channel)
        self._lingering.add(channel)

    def close(self) -> None:
        """End all connections whose handshake is not done."""
        if self._turn is not None:
            self._turn.cancel()
        self._timeouts.close()
        self._lingering.close()
        for channel in list(self._begun):
            channel.abort()

    def _too_long(self, channel: TlsChannel) -> None:
        self.warnings.add(channel.peer, f"no TLS handshake within {self._timeout_s:g} s (first_frame_timeout_ms)")
        channel.abort()


class TlsChannel(asyncio.BufferedProtocol):
    """The TLS of one connection: a protocol for the socket's transport, and a transport for the ClientConnection."""

    __slots__ = (
        "_connection", "_cost_s", "_handshakes", "_has_answered", "_incoming", "_is_open", "_is_over", "_is_paused",
        "_outgoing", "_raw", "_tls", "peer",
    )  # fmt: skip

    def __init__(self, handshakes: Handshakes, connection: ClientConnection) -> None:
        self._handshakes = handshakes
        self._connection = connection
        self._raw: asyncio.Transport | None = None
        self._tls: ssl.SSLObject | None = None
        self._cost_s = 0.0
        self._has_answered = False  # the client has got the broker's part of the handshake
        self._is_open = False  # the handshake is done
        self._is_over = False  # nothing is read or written any more
        self._is_paused = False
        self.peer = ""

    # --- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self.peer = shown_peer(transport.get_extra_info("peername"))
        self._handshakes.begin(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        wanted = self._connection.read_bytes + _RECORD_EXTRA
        return self._handshakes.buffer[:wanted] if wanted < _READ_BYTES else self._handshakes.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over:
            return
        received = self._handshakes.buffer[:nbytes]
        if self._tls is None:
            if received[0] != HANDSHAKE_RECORD:
                self._refuse_plain()
                return
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = self._handshakes.context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(received)
        if self._is_open:
            self._read()
        elif self._has_answered:
            self.shake_hands()  # what is left costs little
        else:
            self._handshakes.ready(self)

    def eof_received(self) -> bool:
        return False  # the transport closes, as without TLS

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_over = True
        self._raw = self._tls = None
        if self._is_open:
            self._connection.connection_lost(exc)
        else:
            self._handshakes.forget(self)

    def pause_writing(self) -> None:
        if self._is_open:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._is_open:
            self._connection.resume_writing()

    # --- the handshake -----------------------------------------------------------------------------------------------

    def is_gone(self) -> bool:
        """Return whether the client has closed the connection; the loop may not have heard of it."""
        if self._raw is None or self._is_over:
            return True
        poller = select.poll()
        poller.register(self._raw.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poller.poll(0))

    def shake_hands(self) -> None:
        """Go on with the handshake, as far as the client has sent its part."""
        assert self._tls is not None
        handshakes, why = self._handshakes, ""
        began = handshakes.timer()
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is refused: {error.verify_message}"
        except ssl.SSLError as error:
            why = _in_words(error)
        else:
            self._is_open = True
        cost_s = handshakes.timer() - began
        self._cost_s += cost_s
        self._has_answered = self._has_answered or bool(self._outgoing.pending)
        self._flush()
        handshakes.spent(cost_s)
        if not self._is_open:
            if why:
                self._end()
                handshakes.failed(self, why)
            return
        handshakes.done(self, self._cost_s)
        self._connection.certificate_name = name_in(self._tls.getpeercert())
        self._connection.connection_made(cast(asyncio.Transport, self))
        self._read()

    def _refuse_plain(self) -> None:
        assert self._raw is not None
        self._raw.write(encode_error(0, TlsFailed(_PLAIN)))
        self._end()
        self._handshakes.failed(self, "it does not speak TLS, and this broker takes nothing else")

    def _end(self) -> None:
        """Send nothing more. The socket lingers: closed with unread bytes it would drop what the client should read."""
        assert self._raw is not None
        self._is_over = True
        try:
            self._raw.write_eof()
        except OSError:
            self._raw.abort()

    # --- frames in ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Decrypt what was received, and give it to the connection, as much as it reads at once, again and again."""
        connection, tls = self._connection, self._tls
        while tls is not None and not self._is_over and not self._is_paused:
            if not self._incoming.pending and not tls.pending():
                return
            room = connection.get_buffer(-1)
            size, filled, is_end = len(room), 0, False
            failure: ssl.SSLError | None = None
            try:
                while filled < size and (self._incoming.pending or tls.pending()):
                    count = cast(int, tls.read(size - filled, cast(bytearray, room[filled:])))
                    if not count:
                        is_end = True
                        break
                    filled += count
            except ssl.SSLWantReadError:
                size = filled + 1  # a record is not complete
            except ssl.SSLZeroReturnError:
                is_end = True
            except ssl.SSLError as error:
                failure = error
            if filled:
                connection.buffer_updated(filled)
            if failure is not None:
                log.debug("connection of %s breaks TLS: %s", self.peer, _in_words(failure))
                self.abort()
                return
            if is_end:
                self.close()
                return
            self._flush()  # an answer to a new key, which is rare
            if filled < size:
                return
            tls = self._tls

    # --- the transport of the connection -----------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        """Encrypt and send *data*."""
        tls, raw = self._tls, self._raw
        if tls is None or raw is None or self._is_over or not len(data):
            return
        try:
            if len(data) <= _RECORD_BYTES:
                tls.write(data)
                raw.write(self._outgoing.read())
            else:
                raw.writelines(self._encrypted(tls, memoryview(data)))
        except ssl.SSLError as error:
            log.debug("connection of %s breaks TLS: %s", self.peer, _in_words(error))
            self.abort()

    def writelines(self, buffers: list[Buffer]) -> None:
        """Encrypt and send *buffers*. They are joined: a record for each would cost more than to copy them."""
        self.write(b"".join(buffers))

    def _encrypted(self, tls: ssl.SSLObject, view: memoryview) -> list[bytes]:
        encrypted: list[bytes] = []
        while len(view):
            view = view[tls.write(view[:_RECORD_BYTES]) :]
            encrypted.append(self._outgoing.read())
        return encrypted

    def _flush(self) -> None:
        if self._outgoing.pending and self._raw is not None:
            self._raw.write(self._outgoing.read())

    def write_eof(self) -> None:
        """Say that nothing more follows; what the client still sends is dropped."""
        self._close_tls()
        if self._raw is not None:
            self._raw.write_eof()

    def close(self) -> None:
        """Send what is written, then close."""
        self._close_tls()
        if self._raw is not None:
            self._raw.close()

    def _close_tls(self) -> None:
        if self._is_over or self._tls is None:
            return
        self._is_over = True
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # the client's own goodbye is not waited for
        self._flush()

    def abort(self) -> None:
        """Close at once."""
        self._is_over = True
        if self._raw is not None:
            self._raw.abort()

    def pause_reading(self) -> None:
        """Read no more; what is decrypted already stays."""
        self._is_paused = True
        if self._raw is not None:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._is_paused = False
        if self._raw is not None:
            self._raw.resume_reading()
        if self._tls is not None and (self._incoming.pending or self._tls.pending()):
            self._handshakes.loop.call_soon(self._read)

    def is_closing(self) -> bool:
        """Return whether the socket is closed, or closes."""
        return self._raw is None or self._raw.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the socket's transport."""
        if self._raw is not None:
            self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the system has not taken."""
        return self._raw.get_write_buffer_size() if self._raw is not None else 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the socket's transport knows, or the TLS object as ``ssl_object``."""
        if name == "ssl_object":
            return self._tls
        return self._raw.get_extra_info(name, default) if self._raw is not None else default


def name_in(certificate: dict[str, Any] | None) -> str:
    """Return the name of a client certificate: its common name, else its first alternative name; "" without one."""
    if not certificate:
        return ""
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    for _, value in certificate.get("subjectAltName", ()):
        return str(value)
    return ""


def _in_words(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no client certificate, and tls_client_ca asks for one"
    if reason.startswith(("TLSV1_ALERT", "TLSV13_ALERT", "SSLV3_ALERT")):
        return f"it refuses the TLS handshake: {reason.partition('ALERT_')[2].replace('_', ' ').lower()}"
    return f"the TLS handshake failed: {reason.replace('_', ' ').lower()}"

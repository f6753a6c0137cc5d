"""Heartbeats: a thread with a connection of its own tells the broker that this process lives.

So a handler that blocks the event loop for minutes keeps its messages; one that blocks the interpreter does not. Each
beat says for how long the loop has not turned. The session timeout counts from the sending of the last beat that was
answered. The thread ends with the client or its loop; if the loop is closed first, the client's owner gets a warning.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

import msgpack

from qmq.errors import ProtocolError, QmqError
from qmq.net.client.address import Address
from qmq.net.client.blocking import give_up_socket, open_socket
from qmq.net.client.dial import SocketAddress
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, FrameKind

log = logging.getLogger("qmq.client")

#: Beats in one session timeout.
BEATS: Final = 6
#: The part of the session timeout after which a client gives up its messages in flight: before the broker does.
GIVE_UP: Final = 0.8
_MAX_ANSWER: Final = 64 << 10


class HeartbeatTarget(NamedTuple):
    """Where heartbeats go: the broker's address, the address of the socket that reached it, and the id of its store."""

    address: Address
    peer: SocketAddress | None
    store_id: bytes


class _OtherStore(Exception):
    """Another broker has answered than the one that the client is connected to; with the id of its store."""


class HeartbeatSender:
    """Sends the heartbeats of a client. Call ``start`` and ``stop`` in its event loop."""

    def __init__(
        self,
        client_id: bytes,
        target: Callable[[], HeartbeatTarget],
        session_timeout_s: float,
        out_of_touch: Callable[[], None],
        left_open: Callable[[], None],
        other_store: Callable[[bytes], None],
    ) -> None:
        """*target* returns where the client's own connection goes. *other_store* is called in the loop with the id of
        the store that answered there instead. *out_of_touch* is called in the loop, repeatedly while the session
        may expire soon; *left_open* is called in the thread if the loop was closed before the client.
        """
        self._client_id = client_id
        self._target = target
        self._other_store = other_store
        self._out_of_touch = out_of_touch
        self._left_open = left_open
        self._session_timeout_s = session_timeout_s
        self._interval_s = session_timeout_s / BEATS
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._turned_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = time.monotonic()  # the sending of the last beat that was answered

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to send; do nothing if it has begun."""
        if self._thread is None:
            self._begin(loop, self._interval_s)  # SUBSCRIBE was the first sign of life
            self._turned(loop)

    def _begin(self, loop: asyncio.AbstractEventLoop, first_after_s: float) -> None:
        self._thread = threading.Thread(
            target=self._beat, args=(loop, first_after_s), name="qmq-heartbeat", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads; ``_turned`` tries again
            log.error("heartbeats cannot be sent to %s: %s; trying again", self._target().address, error)

    def give_up_socket(self) -> None:
        """[in the child of a fork] Give up the copy of the parent's socket."""
        give_up_socket(self._socket)

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def heard(self, ago_s: float) -> None:
        """Note that the broker has answered a request of *ago_s* seconds ago that was a sign of life."""
        self._heard_at = max(self._heard_at, time.monotonic() - ago_s)

    def _turned(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._interval_s / 4, self._turned, loop)
        self._turned_at = time.monotonic()
        if self._turned_at - self._heard_at > GIVE_UP * self._session_timeout_s:
            self._out_of_touch()
        if self._thread is not None and not self._thread.is_alive():  # the loop had stopped for a while
            self._begin(loop, 0.0)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _beat(self, loop: asyncio.AbstractEventLoop, first_after_s: float) -> None:
        self._ended.wait(first_after_s)
        while self._goes_on(loop):
            try:
                target = self._target()
                with self._connected(target) as connection:
                    self._socket = connection
                    while self._goes_on(loop) and self._target().store_id == target.store_id:
                        self._beat_once(connection)
                        self._ended.wait(self._interval_s)
            except _OtherStore as error:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._other_store, *error.args)
                self._ended.wait(self._interval_s)
            except Exception as error:
                is_expected = isinstance(error, OSError | QmqError | ValueError)
                log.log(
                    logging.DEBUG if is_expected else logging.ERROR, "heartbeat: %r", error, exc_info=not is_expected
                )
                self._ended.wait(min(self._interval_s / 4, 0.5))
        if loop.is_closed() and not self._ended.is_set():
            self._left_open()

    def _goes_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the client is open and its loop runs; a handler may block it."""
        return not self._ended.is_set() and loop.is_running()

    def _connected(self, target: HeartbeatTarget) -> socket.socket:
        address = target.address
        connection = open_socket(address, self._interval_s, target.peer)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fields = {"protocol": frames.PROTOCOL_VERSION, "client": "qmq heartbeat"}
            if address.token:
                fields["token"] = str(address.token)
            hello = msgpack.packb(fields)
            connection.sendall(frames.encode_frame(FrameKind.HELLO, 1, hello))
            meta = self._expect(connection, FrameKind.WELCOME)
            if (store_id := msgpack.unpackb(meta).get("store_id")) != target.store_id and target.store_id:
                raise _OtherStore(store_id)
        except BaseException:
            connection.close()
            raise
        return connection

    def _beat_once(self, connection: socket.socket) -> None:
        now = time.monotonic()
        stalled_us = max(0, int((now - self._turned_at - self._interval_s / 4) * 1_000_000))
        payload = frames.HEARTBEAT.pack(self._client_id, stalled_us)
        connection.sendall(frames.encode_frame(FrameKind.HEARTBEAT, 2, b"", len(payload)) + payload)
        self._expect(connection, FrameKind.HEARTBEAT_SEEN)
        self._heard_at = max(self._heard_at, now)

    def _expect(self, connection: socket.socket, kind: FrameKind) -> bytes:
        """Receive an answer of this *kind*, and return its meta. Raises ProtocolError and OSError."""
        size, found, _, meta_size, _ = FRAME.unpack(_receive(connection, FRAME_SIZE))
        if not FRAME_SIZE <= size <= _MAX_ANSWER:
            raise ProtocolError(f"the broker answered a heartbeat with a frame of {size} bytes")
        body = _receive(connection, size - FRAME_SIZE)
        if found != kind:
            raise ProtocolError(f"the broker answered a heartbeat with a frame of kind {found}")
        return body[:meta_size]


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(size)
        if not part:
            raise OSError("the broker closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

"""A connection to one broker without asyncio: requests and answers in turn. Archives, Spark and quick commands use it.

It imports neither asyncio nor numpy, which take longer to load than a broker takes to answer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from qmq import ping_socket
from qmq.errors import ConnectionLost, ProtocolError, StorageFailed
from qmq.net.client.address import Address
from qmq.net.client.dial import Routes, SocketAddress, dial, look_up, route_to
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, Frame, FrameKind
from qmq.version import VERSION

_MAX_ANSWER_BYTES: Final = 64 << 20
#: The last bytes of a frame, which have to come within the time that there is.
_SMALL_BYTES: Final = 16 << 10
#: As in format/layout.py, which needs numpy.
_PRODUCER_ID_SIZE: Final = 16


def give_up_socket(sock: socket.socket | None) -> None:
    """[in the child of a fork] Put another file in the place of a socket of the parent. The number stays in use, as
    objects of the parent, which nobody may close here, have it.
    """
    if sock is not None and (number := sock.fileno()) >= 0:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, number, inheritable=False)
        os.close(null)


def open_socket(address: Address, timeout: float | None, peer: SocketAddress | None = None) -> socket.socket:
    """Return a socket that is connected to a broker, by TLS if its address says so; at *peer*, where another connection
    goes, if that is known. *timeout*, in seconds, is for each wait; None: no limit. Raises OSError, and with TLS
    QmqError.
    """
    routes = Routes().of(look_up(address)) if peer is None else [route_to(peer)]
    return _secured(dial(routes, timeout), address)


def _secured(sock: socket.socket, address: Address) -> socket.socket:
    if address.tls is None:
        return sock
    from qmq.net.client.tls.context import wrap

    return wrap(sock, address)


class BlockingConnection:
    """A connection of one thread. Calls raise OSError and ConnectionLost when it breaks; it is of no use then."""

    def __init__(
        self, address: Address, client: str, timeout: float, *, clock: Callable[[], float] | None = None
    ) -> None:
        """Connect, and send HELLO with *client* as the name of the program.

        *timeout* is for each wait for the broker, in seconds; with *clock* it is for all calls together, and begins
        anew while the bytes of a large frame move. Raises OSError, and the error with which the broker refuses the
        client.
        """
        self._address = address = address.refreshed()
        self._timeout = timeout
        self._clock = clock
        self._due = clock() + timeout if clock is not None else 0.0
        self._request = 0
        self._hello = {"protocol": frames.PROTOCOL_VERSION, "client": client}
        if address.token:
            self._hello["token"] = str(address.token)
        due, routes, reached = self._due, Routes(), None
        while True:
            try:
                found = routes.of(look_up(address))
                sock = dial(found, timeout)
                reached = sock.getpeername()
                self._greet(sock, timeout / len(found))
                break
            except (OSError, ConnectionLost):
                if not routes.is_silent(reached):
                    raise
        self._due = due
        self._socket.settimeout(timeout)

    def _greet(self, sock: socket.socket, timeout: float) -> None:
        """Say HELLO on a new socket; the broker has *timeout* seconds. Raises OSError and QmqError."""
        address = self._address
        sock.settimeout(timeout)
        if self._clock is not None:
            self._due = self._clock() + timeout
        self._socket = _secured(sock, address)
        try:
            with suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            #: The fields of WELCOME.
            self.welcome = frames.unpack_meta(self.ask(FrameKind.HELLO, meta=frames.pack_meta(self._hello)).meta)
        except BaseException as error:
            self._socket.close()
            if address.tls is not None and isinstance(error, OSError) and not isinstance(error, TimeoutError):
                from qmq.net.client.tls.failures import connect_error

                # With TLS 1.3 a broker that refuses the client's certificate says so after the handshake.
                raise connect_error(error, str(address), address.tls) from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def ask(self, kind: FrameKind, payload: bytes = b"", meta: bytes = b"") -> Frame:
        """Send a request, and return its answer. Raises the QmqError that came instead."""
        number = self.send(kind, payload, meta)
        size, answer, _, meta_size, request = FRAME.unpack(self.exactly(FRAME_SIZE))
        left = size - FRAME_SIZE
        if request not in (number, 0) or not meta_size <= left <= _MAX_ANSWER_BYTES:
            raise ProtocolError(f"the broker at {self._address} sent a frame that answers no request")
        body = self.exactly(left)
        frame = Frame(answer, 0, request, body[:meta_size], body[meta_size:])
        if answer == FrameKind.ERROR:
            raise frames.decode_error(frame)
        if answer != kind + 128:
            raise ProtocolError(f"the broker at {self._address} answered with a frame of kind {answer}")
        return frame

    def send(self, kind: FrameKind, payload: bytes = b"", meta: bytes = b"") -> int:
        """Send a request, and return its number."""
        self._request += 1
        view = memoryview(frames.encode_frame(kind, self._request, meta, len(payload)) + payload)
        while len(view):  # the time limit of sendall would be for all of it
            self._limit()
            view = view[self._socket.send(view) :]
            self._moved(view)
        return self._request

    def exactly(self, size: int) -> memoryview:
        """Receive this many bytes."""
        view = memoryview(bytearray(size))
        self.fill(view)
        return view

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as *view* has."""
        while len(view):
            self._limit()
            got = self._socket.recv_into(view)
            if not got:
                raise ConnectionLost(f"the broker at {self._address} closed the connection")
            view = view[got:]
            self._moved(view)

    def _moved(self, left: memoryview) -> None:
        if self._clock is not None and len(left) > _SMALL_BYTES:
            self._due = self._clock() + self._timeout

    def _limit(self) -> None:
        if self._clock is not None:
            left = self._due - self._clock()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)


@contextmanager
def answering_within(timeout: float, address: Address) -> Iterator[BlockingConnection]:
    """Yield a connection that must have given all answers after *timeout* seconds in which no bytes moved. Raises
    ConnectionLost if it did not, and the error with which the broker refuses a request.
    """
    try:
        client = f"qmq-python/{VERSION}"
        with BlockingConnection(address, client, timeout, clock=time.monotonic) as connection:
            yield connection
    except TimeoutError:
        raise ConnectionLost(f"{address} did not answer within {timeout:g} s") from None
    except OSError as error:
        raise ConnectionLost(f"{address}: {error.strerror or error}") from error


class Pong(NamedTuple):
    """A broker has answered: its version, and the seconds from the request to its answer."""

    version: str
    round_trip: float


def ping_directory(directory: Path, timeout: float) -> Pong:
    """Ask the broker that serves a data directory on this machine, at the directory's socket. Raises ConnectionLost if
    none answers within *timeout* seconds, and StorageFailed if this user may not ask.
    """
    asked = time.perf_counter()
    try:
        version = ping_socket.ask(directory, timeout)
    except (TimeoutError, BlockingIOError):
        raise ConnectionLost(f"{directory}: the broker did not answer within {timeout:g} s") from None
    except PermissionError as error:
        raise StorageFailed(f"{directory}: {error.strerror}; ask as the user of the broker, or as root") from error
    except (FileNotFoundError, ConnectionError) as error:
        why = "no broker serves this directory, or it still reads its files"
        raise ConnectionLost(f"{directory}: {why if directory.is_dir() else error.strerror}") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConnectionLost(f"{directory}: {getattr(error, 'strerror', None) or 'this is no broker'}") from error
    return Pong(version, time.perf_counter() - asked)


def ping(address: Address, timeout: float) -> Pong:
    """Send a broker a request that costs it next to nothing. Raises QmqError if it does not answer within *timeout*
    seconds, or is not a broker that this client can talk to.
    """
    with answering_within(timeout, address) as connection:
        version = connection.welcome.get("version")
        if type(version) is not str:
            raise ProtocolError(f"WELCOME of the broker at {address} lacks its version")
        asked = time.perf_counter()
        connection.ask(FrameKind.LAST_SEQUENCE, os.urandom(_PRODUCER_ID_SIZE))
        return Pong(version, time.perf_counter() - asked)

"""Listening sockets: bind them, and accept connections, a few at a time while clients are being served.

The loop's own server would accept all waiting connections at once, and would stop listening for good when the system is
out of descriptors. Sockets are bound before anything else is opened, and listen only once the broker serves.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from qmq.errors import QmqError

log = logging.getLogger("qmq.server")

#: Connections accepted at once while no client is served, and while clients are. One costs about 0.1 ms with its end,
#: so clients that connect again and again get about a twentieth of the loop.
_AT_ONCE: Final = 64
_AT_ONCE_BUSY: Final = 2
_PAUSE_BUSY_S: Final = 0.004
#: The pause after each connection while invalid frames have cost much time.
_PAUSE_SLOW_S: Final = 0.01
#: Seconds after a client's last frame during which clients count as being served.
_SERVED_S: Final = 0.1
#: The pause after the system has refused a connection, for want of descriptors or memory.
_PAUSE_REFUSED_S: Final = 0.1
#: Seconds between two log lines about refused connections.
WARN_EVERY_S: Final = 1.0
#: The address of a bound socket.
_Bound = tuple[Any, ...]
_ADVICE: Final = {
    errno.EADDRINUSE: "stop the process that listens there, or give another address to --listen",
    errno.EADDRNOTAVAIL: "give --listen an address that this machine has",
    errno.EACCES: "ports below 1024 are reserved for the system: give a higher one to --listen",
}


class CannotListen(QmqError):
    """The broker cannot listen on the address."""

    code = "cannot_listen"


def bind_all(addresses: Sequence[tuple[str, int]]) -> tuple[list[socket.socket], list[tuple[str, int]]]:
    """Return bound sockets for *addresses*, and the host and port of each. One address that two of them name has one
    socket. Raises CannotListen.
    """
    sockets, bound = list[socket.socket](), list[tuple[str, int]]()
    try:
        for host, port in addresses:
            has = {sock.getsockname() for sock in sockets}
            more, address = bind(host, port, has)
            sockets += more
            bound.append(address)
    except CannotListen:
        for sock in sockets:
            sock.close()
        raise
    return sockets, bound


def bind(host: str, port: int, bound: Collection[_Bound] = ()) -> tuple[list[socket.socket], tuple[str, int]]:
    """Return bound sockets for all addresses of *host* that are not *bound*, and the host and port that they have. The
    host ``::`` has all addresses of both families, a socket for each. Raises CannotListen.
    """
    sockets, at = list[socket.socket](), host
    chosen = port
    try:
        for at in (host, "0.0.0.0") if host == "::" else (host,):
            found = socket.getaddrinfo(at, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                full = (address[0], chosen, *address[2:])
                if full in bound:
                    continue
                sock = socket.socket(family, kind, protocol)
                sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(full)
                chosen = sock.getsockname()[1]  # for port 0: all sockets get the port of the first one
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise cannot_listen(at, port, error) from error
    return sockets, (host, chosen)


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    """Return the error that says why the broker cannot listen there, and what to do."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = _ADVICE.get(error.errno or 0, "give another address to --listen")
    return CannotListen(f"cannot listen on {address}: {error.strerror or error}; {advice}")


class ConnectionWarnings:
    """Logs why connections are refused, at most one line in WARN_EVERY_S seconds: strangers may cause any number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next_at = 0.0
        self._unlogged = 0

    def add(self, peer: str, why: str) -> None:
        """Log that the connection of *peer* is refused, or only count it."""
        now = self._loop.time()
        if now < self._next_at:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more were refused before)" if self._unlogged else ""
        self._next_at, self._unlogged = now + WARN_EVERY_S, 0
        log.warning("the connection of %s is refused: %s%s", peer, why, others)


class Acceptor:
    """Accepts connections on one listening socket.

    *served* counts the frames of clients, which tells whether clients are being served. *slowly* returns whether
    invalid frames have cost much time lately.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        connection: Callable[[], asyncio.BaseProtocol],
        served: Callable[[], int],
        slowly: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._connection = connection
        self._served = served
        self._slowly = slowly
        self._last_served = served()
        self._busy_until = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._refused = ""
        sock.setblocking(False)
        loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more, and close the socket."""
        if self._pause is None:
            self._loop.remove_reader(self._sock)
        else:
            self._pause.cancel()
        self._sock.close()

    def _accept(self) -> None:
        served = self._served()
        now = self._loop.time()
        if served != self._last_served:
            self._last_served, self._busy_until = served, now + _SERVED_S
        busy = now < self._busy_until
        slowly = busy and self._slowly()
        for _ in range(1 if slowly else _AT_ONCE_BUSY if busy else _AT_ONCE):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                self._refused = ""
                return
            except ConnectionError:
                continue  # it has closed already
            except OSError as error:
                self._tell(error)
                self._stop_for(_PAUSE_REFUSED_S)
                return
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._connection, sock))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
        if busy:
            self._stop_for(_PAUSE_SLOW_S if slowly else _PAUSE_BUSY_S)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and opening.exception() is not None:
            log.debug("a connection ended before it was open: %r", opening.exception())

    def _tell(self, error: OSError) -> None:
        """Log *error* once, not for each attempt."""
        if str(error) != self._refused:
            self._refused = str(error)
            log.error("the system refuses new connections, trying again (see ulimit -n): %s", error)

    def _stop_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

"""Connect to a host of several addresses, as RFC 8305 (happy eyeballs) says: where one does not answer soon, the next
is tried beside it. Imports no asyncio; ``dial_in_loop`` does the same in an event loop.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from qmq.net.client.address import Address

#: Seconds after which the next address is tried as well.
NEXT_AFTER_S: Final = 0.25

#: An address of a socket: host and port, with IPv6 flow and scope too.
SocketAddress = tuple[Any, ...]


class Route(tuple[socket.AddressFamily, socket.SocketKind, int, SocketAddress]):
    """One address of a host: family, kind and protocol of a socket for it, and the address."""

    __slots__ = ()

    def new_socket(self) -> socket.socket:
        """Return a socket for it that does not block."""
        sock = socket.socket(*self[:3])
        sock.setblocking(False)
        return sock


class Routes:
    """The addresses of one broker, in the order in which they are tried: first that of the last good connection, and
    last those where nobody answered.
    """

    def __init__(self) -> None:
        self._good: SocketAddress | None = None
        self._silent: list[SocketAddress] = []
        self._known: set[SocketAddress] = set()

    def of(self, found: Sequence[tuple[Any, ...]]) -> list[Route]:
        """Return what a look-up has *found* in the order in which to try it; families take turns."""
        routes = [Route((*one[:3], one[4])) for one in dict.fromkeys(found)]
        self._known = {route[3] for route in routes}
        first = [route for route in routes if route[0] == routes[0][0]]
        others = [route for route in routes if route[0] != routes[0][0]]
        in_turn = [route for pair in zip(first, others, strict=False) for route in pair]
        in_turn += [route for route in routes if route not in in_turn]
        return sorted(in_turn, key=lambda route: (route[3] in self._silent, route[3] != self._good))

    def is_good(self, reached: SocketAddress | None) -> None:
        """Begin with this address the next time: a broker has answered there."""
        self._good = reached
        self._silent.clear()

    def is_silent(self, reached: SocketAddress | None) -> bool:
        """Try this address last: it took a connection, and no broker answered. Return whether there is another one;
        once there is none, all are as good as each other again.
        """
        if reached is not None and reached in self._known:
            self._silent.append(reached)
        is_other_left = reached is not None and not self._known <= set(self._silent)
        if not is_other_left:
            self._silent.clear()
        return is_other_left


def look_up(address: Address, flags: int = 0) -> Sequence[tuple[Any, ...]]:
    """Return what the system knows of the host. Raises OSError."""
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)


def route_to(peer: SocketAddress) -> Route:
    """Return the route to an address of a socket."""
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    return Route((family, socket.SOCK_STREAM, 0, peer))


def dial(routes: Sequence[Route], timeout: float | None) -> socket.socket:
    """Return a socket that is connected to the first of *routes* that answers within *timeout* seconds (None: no
    limit); it has that timeout. Raises OSError.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    waiting, errors, next_at = deque(routes), list[OSError](), 0.0
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                now = time.monotonic()
                if now >= until:
                    raise TimeoutError("timed out")
                if waiting and now >= next_at:
                    error = _begin(waiting.popleft(), selector)
                    next_at = now + NEXT_AFTER_S
                    if error is not None:
                        errors.append(error)
                        next_at = now
                    continue
                limit = min(until, next_at if waiting else math.inf)
                for key, _ in selector.select(None if limit == math.inf else limit - now):
                    sock = cast(socket.socket, key.fileobj)
                    selector.unregister(sock)
                    number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not number:
                        sock.settimeout(timeout)
                        return sock
                    sock.close()
                    errors.append(OSError(number, os.strerror(number)))
                    next_at = now
        finally:
            for key in list(selector.get_map().values()):
                cast(socket.socket, key.fileobj).close()
    raise joined(errors)


def _begin(route: Route, selector: selectors.BaseSelector) -> OSError | None:
    """Begin to connect a socket, and watch it; return the error where it fails at once."""
    try:
        sock = route.new_socket()
    except OSError as error:
        return error
    try:
        sock.connect(route[3])
    except BlockingIOError:
        pass
    except OSError as error:
        sock.close()
        return error
    selector.register(sock, selectors.EVENT_WRITE)
    return None


def joined(errors: Sequence[OSError]) -> OSError:
    """Return one error for those of all routes."""
    if not errors:
        return OSError("the host has no address")
    return errors[0] if len({str(error) for error in errors}) == 1 else OSError("; ".join(map(str, errors)))

"""Sockets to listen on. They are bound before anything else is done, and listen only once there is who serves."""

from __future__ import annotations

import errno
import socket
from typing import Final

from qmq.errors import QmqError

_ADVICE: Final = {
    errno.EADDRINUSE: "stop what listens there, or give another address to --listen",
    errno.EADDRNOTAVAIL: "give --listen an address that this machine has",
    errno.EACCES: "ports below 1024 are kept for the system: give a higher one to --listen",
}


class CannotListen(QmqError):
    """The address to listen on cannot be had."""

    code = "cannot_listen"


def bind(host: str, port: int) -> tuple[list[socket.socket], tuple[str, int]]:
    """Sockets for all addresses of *host*, bound, and the host and port that they have. Raises CannotListen."""
    sockets: list[socket.socket] = []
    bound = port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], bound, *address[2:]))
            bound = sock.getsockname()[1]  # for port 0: all get the one that the first one got
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise cannot_listen(host, port, error) from error
    return sockets, (host, bound)


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    """Why that address cannot be listened on, and what to do."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = _ADVICE.get(error.errno or 0, "give another address to --listen")
    return CannotListen(f"cannot listen on {address}: {error.strerror or error}; {advice}")

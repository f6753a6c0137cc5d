"""Whether the bytes of a connection move. On a slow link a large frame takes longer than any fixed limit, and while its
bytes move, neither side is dead.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import Final

_INFO_BYTES: Final = 160
#: Of Linux's tcp_info: segments that the other side has not acknowledged, bytes that it has, and bytes not yet sent.
_UNACKED: Final = struct.Struct("=24xI")
_ACKED: Final = struct.Struct("=120xQ")
_NOT_SENT: Final = struct.Struct("=144xI")


#: Options of TCP and their values: an idle connection is asked after 60 s; one whose other side acknowledges nothing
#: for 120 s (in ms), be it bytes or such a question, has ended.
_OPTIONS: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6), ("TCP_USER_TIMEOUT", 120_000))


def end_when_gone(sock: socket.socket | None) -> None:
    """Have the system end a TCP connection within two minutes after the machine of the other side is gone."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Transfer:
    """Watches the bytes of one connection in both directions, by the counts that its owner has, and by the system's."""

    __slots__ = ("_arrived", "_sent", "is_under_way")

    def __init__(self) -> None:
        #: Whether there was anything to move at the last call.
        self.is_under_way = False
        self._arrived = self._sent = 0

    def moved(self, transport: asyncio.Transport | None, arrived: int) -> int:
        """Return how many bytes of transfers that are not done have moved since the last call. *arrived*: those of an
        incomplete frame that are there.
        """
        sent, is_sending = _sent_of(transport) if transport is not None else (0, False)
        moved = abs(sent - self._sent) if is_sending else 0
        moved += abs(arrived - self._arrived) if arrived else 0
        self._sent, self._arrived = sent, arrived
        self.is_under_way = is_sending or arrived > 0
        return moved


def _sent_of(transport: asyncio.Transport) -> tuple[int, bool]:
    """Return a number that changes with the bytes that the other side has taken, and whether it is to take more."""
    unwritten = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sys.platform == "linux" and sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return 0, False  # it is closed
        if len(info) >= _INFO_BYTES:
            is_sending = bool(unwritten or _UNACKED.unpack_from(info)[0] or _NOT_SENT.unpack_from(info)[0])
            return _ACKED.unpack_from(info)[0], is_sending
    return -unwritten, unwritten > 0

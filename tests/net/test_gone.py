"""Connections end by themselves when the other side's machine is gone without a word."""

from __future__ import annotations

import socket

import pytest

from qmq.net.transfer import end_when_gone


def test_both_sides_of_a_connection_are_watched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        end_when_gone(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        idle_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s + 6 * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 120


@pytest.mark.parametrize("family", [socket.AF_UNIX, None])
def test_other_sockets_are_left_alone(family: socket.AddressFamily | None) -> None:
    if family is None:
        end_when_gone(None)
        return
    with socket.socket(family) as sock:
        end_when_gone(sock)
        assert not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

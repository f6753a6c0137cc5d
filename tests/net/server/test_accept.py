"""Binding the addresses to listen on, and the errors for those that cannot be bound."""

from __future__ import annotations

import socket

import pytest

from qmq.net.server.accept import CannotListen, bind


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_0_picks_one_that_is_free_on_all_addresses_of_the_host(host: str) -> None:
    sockets, (bound_host, port) = bind(host, 0)
    assert bound_host == host
    assert port > 0
    assert {sock.getsockname()[1] for sock in sockets} == {port}
    for sock in sockets:
        sock.close()


def test_a_bound_socket_does_not_listen() -> None:
    (sock,), address = bind("127.0.0.1", 0)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(address):
        pass
    sock.listen()
    socket.create_connection(address).close()
    sock.close()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        (
            "192.0.2.1",
            r"cannot listen on 192\.0\.2\.1:0: .*; give --listen an address that this machine has",
        ),
        ("2001:db8::1", r"cannot listen on \[2001:db8::1\]:0: "),
        ("no.such.host.invalid", r"cannot listen on no\.such\.host\.invalid:0: .*; give another address"),
    ],
)
def test_addresses_that_cannot_be_bound(host: str, says: str) -> None:
    with pytest.raises(CannotListen, match=says):
        bind(host, 0)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use; stop the process"):
            bind("127.0.0.1", port)

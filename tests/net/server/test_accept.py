"""Binding the addresses to listen on, and the errors for those that cannot be bound."""

from __future__ import annotations

import socket

import pytest

from qmq.net.server.accept import CannotListen, bind, bind_all


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_port_0_picks_one_that_is_free_on_all_addresses_of_the_host(host: str) -> None:
    sockets, (bound_host, port) = bind(host, 0)
    assert bound_host == host
    assert port > 0
    assert {sock.getsockname()[1] for sock in sockets} == {port}
    for sock in sockets:
        sock.close()


def test_the_host_of_all_addresses_is_that_of_both_families() -> None:
    sockets, (host, port) = bind("::", 0)
    assert host == "::"
    assert [sock.getsockname()[:2] for sock in sockets] == [("::", port), ("0.0.0.0", port)]
    for sock in sockets:
        sock.listen()
    for address in (("::1", port), ("127.0.0.1", port)):
        socket.create_connection(address).close()
    for sock in sockets:
        sock.close()


def test_several_addresses_and_one_that_two_of_them_name() -> None:
    sockets, addresses = bind_all([("127.0.0.1", 0), ("127.0.0.2", 0)])
    assert [sock.getsockname() for sock in sockets] == addresses
    port = addresses[0][1]
    for sock in sockets:
        sock.close()
    sockets, addresses = bind_all([("::", port), ("0.0.0.0", port)])
    assert addresses == [("::", port), ("0.0.0.0", port)]
    assert len(sockets) == 2
    for sock in sockets:
        sock.close()


def test_where_one_of_several_is_in_use_none_stays_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use"):
            bind_all([("127.0.0.2", port), ("127.0.0.1", port)])
        socket.create_server(("127.0.0.2", port)).close()
        with pytest.raises(CannotListen, match=rf"0\.0\.0\.0:{port}: Address already in use"):
            bind("::", port)


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

"""A host with several addresses: one that is silent, or where nobody listens, holds nobody up."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import qmq
from qmq.errors import ConnectionLost
from qmq.net.client import broker_link
from qmq.net.client.address import Address, parse_url
from qmq.net.client.blocking import ping
from qmq.net.client.dial import Route, Routes, dial, route_to
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import BrokerProcess, broker_process
from tests.net.scripted import scripted_broker

NAME: Final = "brokers.test"
#: What a connection by a name with a silent address may take: less than any limit that a silent one would reach.
SOON_S: Final = 3.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("dial") / "data") as started:
        yield started


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[str, int]]], None]:
    """Returns a function that gives NAME these addresses, whatever port is asked for."""
    real = socket.getaddrinfo

    def name(addresses: list[tuple[str, int]]) -> None:
        def look_up(host: Any, port: Any, *others: Any, **named: Any) -> Any:
            if host != NAME or named.get("flags", 0) & socket.AI_NUMERICHOST:
                return real(host, port, *others, **named)
            return [found for address in addresses for found in real(*address, type=socket.SOCK_STREAM)]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return name


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address whose system answers no SYN: the queue of the socket that listens there is full."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.2", 0))
        listening.listen(0)
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            assert sock.connect_ex(listening.getsockname()) in (0, errno.EINPROGRESS)
        yield listening.getsockname()


@pytest.fixture
def mute() -> Iterator[tuple[str, int]]:
    """An address where connections are taken, and nobody answers."""
    with socket.create_server(("127.0.0.2", 0)) as listening:
        yield listening.getsockname()


def address_of(broker: BrokerProcess) -> tuple[str, int]:
    address = parse_url(broker.url)[0]
    return address.host, address.port


def unused() -> tuple[str, int]:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        address: tuple[str, int] = listening.getsockname()
        return address


@pytest.mark.parametrize("first", ["silent", "unused"])
async def test_an_asyncio_client_takes_the_address_that_answers(
    broker: BrokerProcess, named: Any, silent: tuple[str, int], first: str
) -> None:
    named([silent if first == "silent" else unused(), address_of(broker)])
    began = time.monotonic()
    async with qmq.connect(f"qmq://{NAME}") as client:
        await client.send("a", b"1")
        async with client.subscribe("a", group="dial") as consumer:
            (message,) = await consumer.pull()
            message.ack()
    assert time.monotonic() - began < SOON_S


def test_a_client_without_asyncio_and_ping_take_it_too(
    broker: BrokerProcess, named: Any, silent: tuple[str, int]
) -> None:
    named([silent, address_of(broker)])
    began = time.monotonic()
    with qmq.connect_sync(f"qmq://{NAME}") as client:
        client.send("a", b"1")
    assert ping(Address(NAME, 1), 60).round_trip > 0
    assert time.monotonic() - began < SOON_S


async def test_an_address_that_takes_connections_and_does_not_answer_is_left(
    broker: BrokerProcess, named: Any, mute: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_link, "CONNECT_TIMEOUT", 0.5)
    named([mute, address_of(broker)])
    async with qmq.connect(f"qmq://{NAME}") as client:
        await client.send("a", b"1")
    await asyncio.to_thread(lambda: ping(Address(NAME, 1), 2.0))


def test_each_address_has_its_limit_and_all_together_theirs(named: Any, mute: tuple[str, int]) -> None:
    named([mute, mute])
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.4 s"):
        ping(Address(NAME, 1), 0.4)
    assert time.monotonic() - began < SOON_S


def test_no_address_answers(silent: tuple[str, int]) -> None:
    with pytest.raises(TimeoutError):
        dial([route_to(silent)], 0.1)
    with pytest.raises(ConnectionRefusedError):
        dial([route_to(unused())], 0.1)
    with pytest.raises(OSError, match="no address"):
        dial([], 0.1)


def test_families_take_turns_and_what_was_good_comes_first() -> None:
    four = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{number}", 1)) for number in (1, 2)]
    six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"::{number}", 1, 0, 0)) for number in (1, 2, 3)]
    routes = Routes()

    def hosts() -> list[str]:
        found: list[Route] = routes.of([*six, *four])
        return [route[3][0] for route in found]

    assert hosts() == ["::1", "10.0.0.1", "::2", "10.0.0.2", "::3"]
    routes.is_good(("10.0.0.2", 1))
    assert hosts() == ["10.0.0.2", "::1", "10.0.0.1", "::2", "::3"]
    assert routes.is_silent(("10.0.0.2", 1))
    assert hosts() == ["::1", "10.0.0.1", "::2", "::3", "10.0.0.2"]
    for host in ("::1", "::2", "::3"):
        assert routes.is_silent((host, 1, 0, 0))
    assert hosts()[0] == "10.0.0.1"
    assert not routes.is_silent(("10.0.0.1", 1))
    assert hosts() == ["10.0.0.2", "::1", "10.0.0.1", "::2", "::3"]


async def test_a_name_that_leads_to_two_brokers_ends_the_client(named: Any) -> None:
    """The relay in front of both hands each connection to another broker."""
    async with (
        scripted_broker(session_timeout_ms=600) as one,
        scripted_broker(session_timeout_ms=600, store_id=b"store2") as other,
    ):
        ports = [parse_url(one.url)[0].port, parse_url(other.url)[0].port]
        turn = iter(range(1_000))

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", ports[next(turn) % 2])

            async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while some := await source.read(65_536):
                    target.write(some)
                target.close()

            await asyncio.gather(pump(reader, to_broker), pump(from_broker, writer))

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with server:
            url = f"qmq://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            client = await qmq.connect(url)
            peer = await one.peer()
            consumer = client.subscribe("a", group="g")
            entering = asyncio.ensure_future(consumer.__aenter__())
            await peer.subscribed()
            await entering
            pulling = asyncio.ensure_future(consumer.pull())
            await other.peer()  # the heartbeat
            while (frame := await peer.any_frame()) is not None:
                if frame.kind == FrameKind.LAST_SEQUENCE:
                    peer.answer(FrameKind.LAST_SEQUENCE_IS, frame.request, {})
            with pytest.raises(qmq.InvalidOption, match=r"several brokers.*73746f726531.*73746f726532"):
                await pulling
            with pytest.raises(qmq.InvalidOption, match="several brokers"):
                await client.send("a", b"1")


def test_heartbeats_go_where_the_clients_connection_goes(broker: BrokerProcess, tmp_path: Path, named: Any) -> None:
    """A name with two brokers: the messages in flight are those of the one that the client has reached."""
    with broker_process(tmp_path / "short", session_timeout_ms=600) as short:
        named([address_of(short), address_of(broker)])
        with qmq.connect_sync(f"qmq://{NAME}") as client, client.subscribe("b", group="g") as consumer:
            client.send("b", b"1")
            (message,) = consumer.pull(timeout=60)
            named([address_of(broker), address_of(short)])
            with qmq.connect_sync(short.url) as direct, direct.subscribe("b", group="g") as second:
                assert not second.pull(timeout=1.5)
            message.ack()
            consumer.flush()


def test_a_complete_name_is_without_its_dot_in_certificates() -> None:
    assert [parse_url(f"qmqs://{host}")[0].tls_name for host in ("a.b.", "a.b", "[::1]")] == ["a.b", "a.b", "::1"]
    assert parse_url("qmqs://a.b.")[0].host == "a.b."

"""Handshakes, those that are none, and what TLS may cost other clients."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq.broker.ports import commands, effects
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.server.accept import ConnectionWarnings
from qmq.net.server.connection import SLOW_DISK, ClientConnection
from qmq.net.server.server import Server
from qmq.net.server.tls import name_in
from tests.certificates import TlsFilesOfTests, client_context, over_tls
from tests.net.frames import HELLO, RawClient, batch, frame, on_uvloop, pull
from tests.net.server.rules import OPTIONS, StandIn, serving

#: A record of a handshake that holds none.
NO_HELLO = b"\x16\x03\x01\x00\x05hello"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[TlsFilesOfTests]:
    """Serve, and connect, by TLS."""
    with over_tls(tmp_path / "tls") as made:
        yield made


def unsubscribed(command: object) -> effects.Unsubscribed | None:
    return effects.Unsubscribed(command.connection, 2) if isinstance(command, commands.Unsubscribe) else None


async def round_trip(client: RawClient) -> float:
    """Return the seconds of a request and its answer."""
    began = time.perf_counter()
    client.send(frame(FrameKind.UNSUBSCRIBE, 2, frames.UNSUBSCRIBE.pack(1)))
    assert (await client.read()).kind == FrameKind.UNSUBSCRIBED
    return time.perf_counter() - began


async def raw_connection(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address)


def client_hello(context: ssl.SSLContext) -> bytes:
    """Return the first flight of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("first", [frames.encode_frame(FrameKind.HELLO, 1, HELLO), b"GET / HTTP/1.1\r\n\r\n", b"\0"])
@on_uvloop
async def test_a_plain_client_is_told_at_once(
    files: TlsFilesOfTests, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    async with serving() as s:
        client = RawClient(*await raw_connection(s.address))
        client.send(first)
        got = await client.read()
        fields = frames.unpack_meta(got.meta)
        assert (got.kind, fields["code"], fields["retryable"]) == (FrameKind.ERROR, "tls_failed", False)
        assert fields["message"].endswith("connect with qmqs:// instead of qmq://")
        assert await client.ended()
        await client.close()
    assert "is refused: it does not speak TLS, and this broker takes nothing else" in caplog.text


@on_uvloop
async def test_a_client_with_tls_is_told_at_once_by_a_plain_broker(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s:
        context = ssl.create_default_context()
        with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
            await asyncio.open_connection(*s.address, ssl=context)
    assert "is refused: it speaks TLS, and this broker does not: connect with qmq://" in caplog.text


@on_uvloop
async def test_a_handshake_may_arrive_byte_by_byte(files: TlsFilesOfTests) -> None:
    async with serving() as s:
        s.rules.answer = lambda command: None
        context = client_context(files)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await raw_connection(s.address)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeted = False
        answer = b""
        while not answer:
            try:
                if not greeted:
                    tls.do_handshake()
                    tls.write(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
                    greeted = True
                answer = tls.read(1 << 16)
            except ssl.SSLWantReadError:
                pass
            for byte in outgoing.read():
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            if not answer:
                incoming.write(await reader.read(7))
        assert frames.FRAME.unpack_from(answer)[1] == FrameKind.WELCOME
        writer.close()


@on_uvloop
async def test_half_open_handshakes_are_bounded_in_number_and_the_oldest_ends(
    files: TlsFilesOfTests, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(max_handshakes=20) as s:
        s.rules.answer = unsubscribed
        hello = client_hello(client_context(files))
        silent = [await raw_connection(s.address) for _ in range(10)]
        begun = [await raw_connection(s.address) for _ in range(10)]
        for reader, writer in begun:
            writer.write(hello)
            await reader.readexactly(5)  # the broker's flight
        client = await RawClient.connect(s.address)  # with it there are 21
        assert await silent[0][0].read() == b""
        await round_trip(client)
        assert "oldest of more than 20 unfinished ones (max_handshakes)" in caplog.text
        await client.close()
        for _, writer in silent + begun:
            writer.close()


@on_uvloop
async def test_half_open_handshakes_end_in_time(files: TlsFilesOfTests, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(first_frame_timeout_ms=200) as s:
        hello = client_hello(client_context(files))
        opened = [await raw_connection(s.address) for _ in range(3)]
        opened[1][1].write(hello)
        opened[2][1].write(hello[:20])
        async with asyncio.timeout(30):
            for reader, writer in opened:
                await reader.read()
                writer.close()
    assert "no TLS handshake within 0.2 s (first_frame_timeout_ms)" in caplog.text


@on_uvloop
async def test_a_thousand_half_open_handshakes_leave_others_their_time(files: TlsFilesOfTests) -> None:
    """Others get their answers while a thousand come, and most of the loop's time."""
    async with serving(max_handshakes=100) as s:
        s.rules.answer = unsubscribed
        client = await RawClient.connect(s.address)
        hello = client_hello(client_context(files))
        opened: list[asyncio.StreamWriter] = []

        async def flood() -> None:
            for _ in range(1_000):
                _, writer = await raw_connection(s.address)
                writer.write(hello)
                opened.append(writer)

        task, answers = asyncio.ensure_future(flood()), 0
        while not task.done():
            await round_trip(client)
            answers += 1
        await task
        for _ in range(100):
            await round_trip(client)
        assert answers > 500
        for writer in opened:
            writer.close()
        await client.close()


@on_uvloop
async def test_a_handshake_that_fails_is_paid_for_and_one_that_succeeds_is_not(files: TlsFilesOfTests) -> None:
    async with serving() as s:
        s.rules.answer = unsubscribed
        throttle = s.server._throttle
        for _ in range(5):
            await (await RawClient.connect(s.address)).close()
        assert not throttle.much
        opened = [(await raw_connection(s.address))[1] for _ in range(50)]
        for writer in opened:
            writer.write(NO_HELLO)
        client = await RawClient.connect(s.address)
        while not throttle.much:  # all of them are read
            await round_trip(client)
        await client.close()
        for writer in opened:
            writer.close()


@pytest.mark.parametrize("seed", range(20))
@on_uvloop
async def test_damaged_handshakes_end_only_their_connection(files: TlsFilesOfTests, seed: int) -> None:
    chance = random.Random(seed)
    async with serving() as s:
        s.rules.answer = unsubscribed
        other = await RawClient.connect(s.address)
        for _ in range(10):
            hello = bytearray(client_hello(client_context(files)))
            for _ in range(chance.randrange(1, 8)):
                hello[chance.randrange(1, len(hello))] = chance.randrange(256)
            reader, writer = await raw_connection(s.address)
            writer.write(bytes(hello[: chance.randrange(2, len(hello) + 1)]) + bytes(chance.randrange(0, 50)))
            if chance.random() < 0.5:
                writer.write_eof()
                await reader.read()
            await round_trip(other)
            writer.close()
        await other.close()


@pytest.mark.parametrize("seed", range(10))
@on_uvloop
async def test_damaged_records_end_only_their_connection(files: TlsFilesOfTests, seed: int) -> None:
    chance = random.Random(seed)
    async with serving() as s:
        s.rules.answer = unsubscribed
        other = await RawClient.connect(s.address)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = client_context(files).wrap_bio(incoming, outgoing, server_hostname="localhost")
        reader, writer = await raw_connection(s.address)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        tls.write(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
        tls.write(frame(FrameKind.UNSUBSCRIBE, 2, frames.UNSUBSCRIBE.pack(1)))
        records = bytearray(outgoing.read())
        records[chance.randrange(80, len(records))] ^= 1 << chance.randrange(8)  # behind the client's last flight
        writer.write(bytes(records))
        await reader.read()  # until the broker has closed it
        await round_trip(other)
        writer.close()
        await other.close()


@on_uvloop
async def test_large_answers_go_in_pieces_and_small_ones_come_in_between(files: TlsFilesOfTests) -> None:
    payload = memoryview(bytes(16 << 20))
    async with serving(max_inflight_bytes=32 << 20) as s:
        s.rules.answer = lambda command: (
            effects.PulledMessages(command.connection, command.request, [payload], len(payload), 1)
            if isinstance(command, commands.Pull)
            else unsubscribed(command)
        )
        slow, quick = await RawClient.connect(s.address), await RawClient.connect(s.address)
        slow.send(pull(4, 1))
        for _ in range(20):
            await round_trip(quick)
        held = max(connection.unread_bytes() for connection in s.server._connections.values())
        assert held > 8 << 20  # what the client has not read is counted
        got = await slow.read()
        assert len(got.payload) == len(payload)
        await slow.close()
        await quick.close()


@on_uvloop
async def test_old_versions_are_refused(files: TlsFilesOfTests) -> None:
    async with serving() as s:
        context = client_context(files)
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError, match="PROTOCOL"):
            await asyncio.open_connection(*s.address, ssl=context)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(files)
            context.minimum_version = context.maximum_version = version
            _, writer = await asyncio.open_connection(*s.address, ssl=context)
            assert writer.get_extra_info("ssl_object").version() == version.name.replace("v1_", "v1.")
            writer.close()


def test_plain_connections_have_no_layer() -> None:
    loop = asyncio.new_event_loop()
    server = Server(StandIn(), OPTIONS, lambda work: None, lambda looked: None, loop=loop)
    assert type(server.accepted()) is ClientConnection
    loop.close()


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        (None, ""),
        ({}, ""),
        ({"subject": ((("organizationName", "o"),), (("commonName", "billing"),))}, "billing"),
        ({"subject": (), "subjectAltName": (("DNS", "billing.shop"), ("DNS", "b"))}, "billing.shop"),
        ({"subject": ()}, ""),
    ],
)
def test_the_name_of_a_client_is_that_in_its_certificate(certificate: dict[str, object] | None, name: str) -> None:
    assert name_in(certificate) == name


def test_refused_connections_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    class Clock:
        now = 10.0

        def time(self) -> float:
            return self.now

    clock = Clock()
    warnings = ConnectionWarnings(clock)  # type: ignore[arg-type]  # its clock is all that counts
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            warnings.add("1.2.3.4:5", "why")
        clock.now += 1
        warnings.add("1.2.3.4:6", "why")
    assert [record.getMessage() for record in caplog.records] == [
        "the connection of 1.2.3.4:5 is refused: why",
        "the connection of 1.2.3.4:6 is refused: why (4 more were refused before)",
    ]


@on_uvloop
async def test_bytes_that_are_decrypted_already_wait_while_reading_is_paused(files: TlsFilesOfTests) -> None:
    """Frames that came in one record are many reads of the connection, which may stop after any of them."""
    async with serving() as s:
        client = await RawClient.connect(s.address)
        (connection,) = s.server._connections.values()

        def stop_at_the_first(command: object) -> None:
            if isinstance(command, commands.Send):
                connection.stop_reading(SLOW_DISK)

        s.rules.answer = stop_at_the_first
        batches = [batch(bytes([number]) * 3_000, sequence=number) for number in range(10)]
        client.send(*(frame(FrameKind.SEND, number + 1, batches[number]) for number in range(10)))
        await client.read()
        other = await RawClient.connect(s.address)  # some turns of the loop
        assert 1 <= len(s.rules.batches) < 4
        s.rules.answer = lambda command: None
        connection.read_on(SLOW_DISK)
        while len(s.rules.batches) < 10:
            await client.read()
        assert s.rules.batches == batches
        await client.close()
        await other.close()

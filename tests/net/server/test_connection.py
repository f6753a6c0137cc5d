"""What untrusted and slow clients may do without effect on others."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from qmq.broker.ports import commands, effects
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, MAX_HELLO_BYTES, FrameKind
from qmq.net.server.connection import ClientConnection
from tests.net.frames import HELLO, RawClient, batch, frame, on_uvloop, pull, sent_fields
from tests.net.server.rules import serving

JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http with a body": b"POST / HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nPING\r\n",
    "zeros": bytes(64),
    "ones": b"\xff" * 64,
    "a size below the header's": frames.FRAME.pack(3, FrameKind.HELLO, 0, 0, 1),
    "a hello that is too large": frames.FRAME.pack(MAX_HELLO_BYTES + 1, FrameKind.HELLO, 0, 0, 1),
    "no hello first": pull(1, 1),
    "an answer first": frame(FrameKind.WELCOME, 1, meta={"protocol": 1}),
    "meta that is no msgpack": frames.encode_frame(FrameKind.HELLO, 1, b"\xc1\xc1"),
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
@on_uvloop
async def test_invalid_bytes_are_answered_and_end_only_their_connection(junk: bytes) -> None:
    async with serving() as s:
        other = await RawClient.connect(s.address)
        untrusted = await RawClient.connect(s.address, hello=False)
        untrusted.send(junk)
        assert await untrusted.error() == (0, "protocol_error")
        assert await untrusted.ended()
        await untrusted.close()
        other.send(frame(FrameKind.SEND, 5, batch(b"x")))
        assert (await other.read()).request == 5
        await other.close()


@on_uvloop
async def test_another_version_is_refused() -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address, hello=False)
        client.send(frame(FrameKind.HELLO, 1, meta={"protocol": 99}))
        assert await client.error() == (0, "unsupported_version")
        assert await client.ended()
        await client.close()


@on_uvloop
async def test_a_silent_connection_is_closed_after_the_first_frame_timeout() -> None:
    async with serving(first_frame_timeout_ms=400) as s:
        silent = await RawClient.connect(s.address, hello=False)
        slow = await RawClient.connect(s.address, hello=False)
        slow.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO)[:10])
        for client in (silent, slow):
            assert await client.error() == (0, "protocol_error")
            assert await client.ended()
            await client.close()
        greeted = await RawClient.connect(s.address)
        start = time.monotonic()
        s.rules.answer = lambda command: effects.Unsubscribed(command.connection, 2)
        while time.monotonic() < start + 0.5:
            greeted.send(frame(FrameKind.UNSUBSCRIBE, 2, frames.UNSUBSCRIBE.pack(1)))
            assert (await greeted.read()).kind == FrameKind.UNSUBSCRIBED
        await greeted.close()


@on_uvloop
async def test_a_hello_and_its_followers_may_arrive_in_one_piece_or_byte_by_byte() -> None:
    stream = (
        frames.encode_frame(FrameKind.HELLO, 1, HELLO)
        + frame(FrameKind.SEND, 2, batch(b"x"))
        + frame(FrameKind.SEND, 3, batch(b"y"))
    )
    async with serving() as s:
        for step in (len(stream), 100, 1):
            client = await RawClient.connect(s.address, hello=False)
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(stream), step):
                client.send(stream[start : start + step])
                await asyncio.sleep(0)
            kinds = [(await client.read())[0:3:2] for _ in range(3)]
            assert kinds == [(FrameKind.WELCOME, 1), (FrameKind.SENT, 2), (FrameKind.SENT, 3)]
            await client.close()
        assert s.rules.batches == [batch(b"x"), batch(b"y")] * 3


BROKEN = {
    "a frame over the limit": frames.FRAME.pack((1 << 20) + 1, FrameKind.SEND, 0, 0, 9),
    "meta over the frame": frames.FRAME.pack(FRAME_SIZE + 5, FrameKind.SUBSCRIBE, 0, 6, 9),
    "an unknown kind": frame(77, 9),
    "an answer": frame(FrameKind.SENT, 9),
    "request 0": frame(FrameKind.SEND, 0, batch(b"x")),
    "a second hello": frames.encode_frame(FrameKind.HELLO, 9, HELLO),
    "a pull of 19 bytes": frame(FrameKind.PULL, 9, bytes(19)),
    "unknown flags": frame(FrameKind.SEND, 9, batch(b"x"), flags=128),
    "meta that is no map": frames.encode_frame(FrameKind.SUBSCRIBE, 9, b"\x93\x01\x02\x03"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
@on_uvloop
async def test_a_later_protocol_error_is_answered_and_ends_the_connection(broken: bytes) -> None:
    async with serving() as s:
        client = await RawClient.connect(s.address)
        client.send(frame(FrameKind.SEND, 5, batch(b"before")), broken, frame(FrameKind.SEND, 10, batch(b"after")))
        assert await client.error() == (0, "protocol_error")
        assert await client.ended()
        await client.close()
        assert s.rules.batches in ([], [batch(b"before")])
        assert len(s.rules.of(commands.Disconnected)) == 1


class Wire(asyncio.Transport):
    """A transport without a socket: a test calls the connection as a loop would."""

    def __getattribute__(self, name: str) -> object:
        if name in ("write", "writelines", "write_eof", "pause_reading", "resume_reading", "set_write_buffer_limits"):
            return lambda *arguments: None
        return super().__getattribute__(name)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


@on_uvloop
async def test_batches_of_a_connection_that_ends_stay_whole_until_the_turn() -> None:
    async with serving() as s:
        first, second = (ClientConnection(s.server, number) for number in (1, 2))
        for connection in (first, second):
            connection.connection_made(Wire())
        hello = frames.encode_frame(FrameKind.HELLO, 1, HELLO)
        sends = [frame(FrameKind.SEND, 2, batch(bytes([number]) * 1_000)) for number in (1, 2)]
        for connection, sent in ((first, hello + sends[0] + frame(77, 9)), (second, hello + sends[1])):
            connection.get_buffer(-1)[: len(sent)] = sent
            connection.buffer_updated(len(sent))
        ended = first.ended
        s.server.turn()
        for connection in (first, second):
            connection.connection_lost(None)
        assert ended
        assert s.rules.batches == [batch(b"\x01" * 1_000), batch(b"\x02" * 1_000)]


@on_uvloop
async def test_connections_over_the_limit_get_an_error_and_later_ones_are_admitted() -> None:
    async with serving(max_connections=2) as s:
        first, second = await RawClient.connect(s.address), await RawClient.connect(s.address)
        third = await RawClient.connect(s.address, hello=False)
        assert await third.error() == (0, "overloaded")
        assert await third.ended()
        await third.close()
        await first.close()
        for _ in range(100):
            again = await RawClient.connect(s.address, hello=False)
            again.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
            answer = await again.read()
            if answer.kind == FrameKind.WELCOME:
                break
            await again.close()
        assert answer.kind == FrameKind.WELCOME
        await again.close()
        await second.close()


@on_uvloop
async def test_large_frames_of_several_connections_arrive_whole() -> None:
    async with serving() as s:
        clients = [await RawClient.connect(s.address) for _ in range(4)]
        large = [batch(bytes([number]) * 900_000) for number in range(4)]
        for start in range(0, len(large[0]) + 100, 100_000):
            for client, payload in zip(clients, large, strict=True):
                client.send(frame(FrameKind.SEND, 5, payload)[start : start + 100_000])
        for client in clients:
            sent_fields(await client.read())
            await client.close()
        assert sorted(s.rules.batches) == sorted(large)


@on_uvloop
async def test_a_client_that_does_not_read_is_not_read_from_and_others_continue() -> None:
    answer = bytes(256 << 10)
    async with serving() as s:
        s.rules.answer = lambda command: (
            effects.PulledMessages(command.connection, command.request, [answer], len(answer), 1)
            if isinstance(command, commands.Pull)
            else None
        )
        slow, quick = await RawClient.connect(s.address), await RawClient.connect(s.address)
        slow.writer.transport.pause_reading()
        asked = 0
        while len(s.rules.of(commands.Pull)) == asked and asked < 1_000:
            asked += 1
            slow.send(pull(asked, 1))
            quick.send(frame(FrameKind.SEND, asked, batch(b"x")))
            assert (await quick.read()).request == asked
        taken = len(s.rules.of(commands.Pull))
        assert 4 <= taken < asked < 1_000  # reading is paused after max_inflight_bytes and the system's buffer
        slow.writer.transport.resume_reading()
        for request in range(1, asked + 1):
            got = await slow.read()
            assert (got.kind, got.request, len(got.payload)) == (FrameKind.MESSAGES, request, len(answer))
        await slow.close()
        await quick.close()


@on_uvloop
async def test_a_connection_that_is_reset_is_forgotten() -> None:
    async with serving() as s:
        gone, other = await RawClient.connect(s.address), await RawClient.connect(s.address)
        gone.send(frame(FrameKind.SEND, 1, bytes(500_000))[:300_000])
        sock = gone.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        gone.writer.transport.abort()
        request = 0
        while not s.rules.of(commands.Disconnected):
            request += 1
            other.send(frame(FrameKind.SEND, request, batch(b"x")))
            await other.read()
        await other.close()

"""A client that speaks raw frames without QMQ's client code, for tests of the server."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from qmq.format.build import RunContent, build_batch
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from tests.certificates import active, client_context

HELLO = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "test"})


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the loop that brokers run on."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        uvloop.run(test(*arguments, **named))

    return run


def frame(kind: int, request: int, payload: bytes = b"", meta: dict[str, Any] | None = None, flags: int = 0) -> bytes:
    packed = b"" if meta is None else frames.pack_meta(meta)
    return frames.encode_frame(kind, request, packed, len(payload), flags) + payload


def batch(*bodies: bytes, subject: str = "a.b", producer: bytes = bytes(16), sequence: int = 0) -> bytes:
    """Return a batch of one run."""
    parts = build_batch(
        [RunContent(subject, bodies, None)], created_at_us=1, producer_id=producer, producer_sequence=sequence
    )
    return b"".join(parts)


def pull(request: int, subscription: int, count: int = 100, timeout_ms: int = 0, least: int = 1) -> bytes:
    return frame(
        FrameKind.PULL, request, frames.PULL.pack(subscription, count, least, 1 << 20, timeout_ms, frames.NOT_EXPECTED)
    )


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: tuple[str, int], hello: bool = True) -> RawClient:
        files = active()
        tls = None if files is None else client_context(files)
        client = cls(*await asyncio.open_connection(*address, ssl=tls))
        if hello:
            client.send(frames.encode_frame(FrameKind.HELLO, 1, HELLO))
            welcome = await client.read()
            assert welcome.kind == FrameKind.WELCOME, frames.decode_error(welcome)
        return client

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def read(self) -> Frame:
        """Return the next frame. Raises IncompleteReadError at the end."""
        head = await self._reader.readexactly(frames.FRAME_SIZE)
        size, kind, flags, meta_size, request = frames.FRAME.unpack(head)
        rest = memoryview(await self._reader.readexactly(size - frames.FRAME_SIZE))
        return Frame(kind, flags, request, rest[:meta_size], rest[meta_size:])

    async def error(self) -> tuple[int, str]:
        """Return the request number and code of the next frame, an error."""
        got = await self.read()
        assert got.kind == FrameKind.ERROR, got
        return got.request, frames.unpack_meta(got.meta)["code"]

    async def ended(self) -> bool:
        """Return whether the server has closed the connection."""
        return await self._reader.read(1) == b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


def sent_fields(got: Frame) -> tuple[int, int, int, bytes, tuple[int, ...]]:
    """Return position, stored_at_us, partition, store id and first sequences of a SENT."""
    assert got.kind == FrameKind.SENT, frames.decode_error(got)
    position, stored_at_us, partition, store_id, runs = frames.SENT.unpack_from(got.payload)
    return position, stored_at_us, partition, store_id, struct.unpack_from(f"<{runs}Q", got.payload, frames.SENT.size)

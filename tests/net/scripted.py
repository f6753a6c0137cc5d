"""A broker that a test scripts: it answers HELLO, hands other frames to the test, and sends the test's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import msgpack
import numpy as np

from qmq.broker.ports.commands import DispositionRange, HandBack
from qmq.errors import QmqError
from qmq.format.batch import BatchLimits, CheckedBatch, check_batch, stamp
from qmq.format.build import MessageHeader, RunContent, build_batch
from qmq.format.pieces import read_answer
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.protocol.messages import encode_messages
from qmq.net.server.requests import decode_request

STORE: Final = b"store1"
SECRET: Final = bytes(16)
START_US: Final = 1_700_000_000_000_000
WELCOME: Final[dict[str, Any]] = {
    "protocol": frames.PROTOCOL_VERSION,
    "store_id": STORE,
    "version": "test",
    "max_frame_bytes": 16 << 20,
    "max_batch_bytes": 16 << 20,
    "max_message_bytes": 4 << 20,
    "producer_window": 64,
    "producer_ttl_ms": 3_600_000,
    "max_pull_count": 1_000_000,
    "max_pull_bytes": 16 << 20,
    "session_timeout_ms": 30_000,
}
TIMEOUT_S: Final = 60


class Peer(asyncio.Protocol):
    """One connection of a client, from the broker's side."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self._broker = broker
        self._received = bytearray()
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self.hello: dict[str, Any] = {}
        self.numbers = False  # it has subscribed to a group
        self.next_sequence = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._broker.transports.append(self.transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        view = memoryview(bytes(self._received))
        used = 0
        for frame in frames.split_frames(view, 1 << 30):
            used += frames.FRAME_SIZE + len(frame.meta) + len(frame.payload)
            if frame.kind == FrameKind.HELLO:
                self.hello = frames.unpack_meta(frame.meta)
                self._broker.greet(self, frame)
            else:
                self._frames.put_nowait(frame)
        del self._received[:used]

    def connection_lost(self, exc: Exception | None) -> None:
        self._frames.put_nowait(None)

    # --- called by the test
    # ----------------------------------------------------------------------------------------------

    async def any_frame(self) -> Frame | None:
        """Return the next frame; None if the client has closed the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._frames.get()

    async def frame(self, kind: FrameKind) -> Frame:
        """Return the next frame, which must be of *kind*."""
        frame = await self.any_frame()
        assert frame is not None, f"the client went away instead of sending {kind.name}"
        assert FrameKind(frame.kind) == kind, f"{FrameKind(frame.kind).name} came instead of {kind.name}"
        return frame

    async def gone(self) -> None:
        """Wait until the client closes the connection, without sending anything before."""
        assert await self.any_frame() is None

    def has_frame(self) -> bool:
        return not self._frames.empty()

    def answer(self, kind: FrameKind, request: int, meta: dict[str, Any] | None = None, payload: bytes = b"") -> None:
        packed = frames.pack_meta(meta) if meta else b""
        self.transport.write(frames.encode_frame(kind, request, packed, len(payload)) + payload)

    def refuse(self, request: int, error: QmqError) -> None:
        self.transport.write(frames.encode_error(request, error))

    def stored(self, frame: Frame, position: int = 1_000, first_sequence: int = 0) -> None:
        """Answer a batch with SENT; its runs begin at first_sequence, + 1_000, + 2_000 ..."""
        runs = check_batch(frame.payload, BatchLimits()).header.runs
        payload = frames.SENT.pack(position, START_US, 3, self._broker.store_id, runs)
        payload += b"".join((first_sequence + 1_000 * run).to_bytes(8, "little") for run in range(runs))
        self.answer(FrameKind.SENT, frame.request, payload=payload)

    async def batch(self, *, flush: bool | None = None) -> tuple[Frame, CheckedBatch]:
        """Return the next frame, a batch, checked as a broker checks it."""
        frame = await self.frame(FrameKind.SEND)
        if flush is not None:
            assert bool(frame.flags & frames.FLUSH) == flush
        return frame, check_batch(frame.payload, BatchLimits())

    async def subscribed(self, subscription: int = 7) -> dict[str, Any]:
        """Take a SUBSCRIBE and answer it; return its meta."""
        return self.subscribe(await self.frame(FrameKind.SUBSCRIBE), subscription)

    def subscribe(self, frame: Frame, subscription: int = 7) -> dict[str, Any]:
        """Answer a SUBSCRIBE; return its meta."""
        said = frames.unpack_meta(frame.meta)
        told: dict[str, Any] = {"subscription": subscription}
        if said["group"] is None:
            told["start_us"] = 4_711
        else:
            told["consumer_state"] = [1, 1, self.next_sequence, self.next_sequence, 1, START_US]
        self.numbers = said["group"] is not None
        self.answer(FrameKind.SUBSCRIBED, frame.request, told)
        return said

    async def pulled(self) -> tuple[int, tuple[int, ...]]:
        """Take a PULL: return its request, and (subscription, max_count, min_count, max_bytes, timeout_ms)."""
        frame = await self.frame(FrameKind.PULL)
        return frame.request, frames.PULL.unpack(frame.payload)[:-1]

    def messages(self, request: int, *batches: bytes, count: int | None = None) -> None:
        """Answer a pull. A consumer of a group gets the next delivery sequences: *count*, or all readable ones."""
        payload = b"".join(batches)
        if count is None:
            count = sum(run.count for run in read_answer(memoryview(payload))[0])
        ranges = list[tuple[int, int, int]]()
        if self.numbers and count:
            ranges = [(self.next_sequence, count, 1)]
            self.next_sequence += count
        self.answer_pull(request, payload, ranges)

    def answer_pull(
        self, request: int, payload: bytes, ranges: Sequence[tuple[int, int, int]] = (), left_us: int | None = None
    ) -> None:
        """Answer a pull with these bytes and this head."""
        self.transport.write(encode_messages(request, len(payload), ranges, left_us=left_us) + payload)

    async def unsubscribed(self) -> None:
        frame = await self.frame(FrameKind.UNSUBSCRIBE)
        self.answer(FrameKind.UNSUBSCRIBED, frame.request)

    def drop(self) -> None:
        """End the connection as a killed broker does."""
        self.transport.abort()


class ScriptedBroker:
    """Listens; every connection is a Peer."""

    def __init__(self, welcome: dict[str, Any]) -> None:
        self.welcome = {**WELCOME, **welcome}
        self.refusal: QmqError | None = None  # instead of WELCOME
        self.transports: list[asyncio.Transport] = []
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._port = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"qmq://127.0.0.1:{self._port}"

    @property
    def store_id(self) -> bytes:
        store_id: bytes = self.welcome["store_id"]
        return store_id

    async def listen(self) -> None:
        """Listen; after ``close``, on the same port again."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse connections, and drop the open ones."""
        assert self._server is not None
        self._server.close()
        for transport in self.transports:
            transport.abort()
        await self._server.wait_closed()

    def greet(self, peer: Peer, frame: Frame) -> None:
        if self.refusal is not None:
            peer.refuse(frame.request, self.refusal)
            return
        peer.answer(FrameKind.WELCOME, frame.request, self.welcome)
        self._peers.put_nowait(peer)

    async def peer(self) -> Peer:
        """Return the next client that said HELLO."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._peers.get()


@asynccontextmanager
async def scripted_broker(**welcome: Any) -> AsyncIterator[ScriptedBroker]:
    """Run a listening ScriptedBroker; *welcome* replaces fields of WELCOME."""
    broker = ScriptedBroker(welcome)
    await broker.listen()
    try:
        yield broker
    finally:
        await broker.close()


def stored_batch(
    contents: Mapping[str, Sequence[bytes]],
    *,
    position: int = 5_000,
    stored_at_us: int = START_US,
    first_sequence: int = 0,
    header: MessageHeader | None = None,
    partition: int = 0,
    store_id: bytes = STORE,
) -> bytes:
    """Return a batch as a message log stores it; all runs begin at *first_sequence*."""
    runs = [
        RunContent(subject, bodies, *((None,) if header is None else ([header] * len(bodies), header.lane)))
        for subject, bodies in contents.items()
    ]
    parts = build_batch(runs, created_at_us=START_US - 5, producer_id=bytes(16), producer_sequence=0)
    view = memoryview(bytearray(b"".join(parts)))
    sequences = first_sequence if len(runs) == 1 else np.full(len(runs), first_sequence, np.uint64)
    stamp(
        view, check_batch(view, BatchLimits()), position=position, stored_at_us=stored_at_us, partition=partition,
        store_id=store_id, secret=SECRET, first_sequences=sequences,
    )  # fmt: skip
    return bytes(view)


def unpacked(payload: memoryview) -> Any:
    return msgpack.unpackb(payload)


def backs_of(frame: Frame) -> list[DispositionRange]:
    """Return the dispositions in a HAND_BACK."""
    command = decode_request(1, frame._replace(request=1))
    assert isinstance(command, HandBack)
    return list(command.backs)

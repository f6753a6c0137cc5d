"""Workers with bare sockets: they send prepared batches to a broker, or run a plain loop to compare it with."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self, cast

from crc32c import crc32c

from qmq.bench.values import BenchFailed, latencies
from qmq.bench.worker import Gate
from qmq.format.build import RunContent, build_batch
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_PREFIX_SIZE, HEADER_CRC_OFFSET, PRODUCER_ID_SIZE
from qmq.net.client.address import parse_url
from qmq.net.client.blocking import open_socket
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind

#: Unanswered batches; a broker remembers 64 for each producer.
WINDOW: Final = 48
_SEQUENCE_OFFSET: Final = BATCH_PREFIX_SIZE - 12
_READ_BYTES: Final = 1 << 20
_MAX_FRAME_BYTES: Final = 1 << 26


def body_of(number: int, size: int) -> bytes:
    """Return a body of *size* bytes: *number*, then letters."""
    return (number.to_bytes(8, "big") + bytes(range(65, 91)) * (size // 26 + 1))[:size]


def bodies_of(count: int, size: int, first: int = 0) -> list[bytes]:
    """Return the bodies of a batch, numbered from *first* on."""
    return [body_of(number, size) for number in range(first, first + count)]


class Frames:
    """SEND frames of batches that differ only in the producer sequence: a head for each, and shared data."""

    def __init__(self, runs: Sequence[RunContent], batches: int, flush: bool) -> None:
        self.messages = sum(len(run.bodies) for run in runs)
        producer_id = os.urandom(PRODUCER_ID_SIZE)
        head, *data = build_batch(
            runs, created_at_us=time.time_ns() // 1_000, producer_id=producer_id, producer_sequence=0
        )
        self.data = b"".join(data)
        self.size = FRAME_SIZE + len(head) + len(self.data)
        self._heads = [
            frames.encode_frame(
                FrameKind.SEND, number + 1, b"", len(head) + len(self.data), frames.FLUSH if flush else 0
            )
            + _numbered(head, number * self.messages)
            for number in range(batches)
        ]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return ((head, self.data) for head in self._heads)

    def __len__(self) -> int:
        return len(self._heads)


def _numbered(head: bytes, sequence: int) -> bytes:
    changed = bytearray(head)
    changed[_SEQUENCE_OFFSET : _SEQUENCE_OFFSET + 8] = sequence.to_bytes(8, "little")
    crc = crc32c(changed[BATCH_HEADER_SIZE:], crc32c(changed[:BATCH_PREFIX_SIZE]))
    changed[HEADER_CRC_OFFSET : HEADER_CRC_OFFSET + 4] = crc.to_bytes(4, "little")
    return bytes(changed)


class RawClient:
    """A connection that sends frames as they are, and counts answers."""

    def __init__(self, url: str) -> None:
        address = parse_url(url)[0]
        self._socket = open_socket(address, None)
        self._is_plain = address.tls is None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        #: The number of batches of `send` that were acknowledged.
        self.acknowledged = 0
        meta = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "qmq-bench"})
        self._socket.sendall(frames.encode_frame(FrameKind.HELLO, 1, meta))
        self._answers()

    def send(self, sent: Frames) -> None:
        """Send batches, with at most WINDOW unanswered, until all are acknowledged."""
        unanswered = 0
        for head, data in sent:
            done = self._socket.sendmsg([head, data]) if self._is_plain else 0  # a socket by TLS has no sendmsg
            if done < len(head) + len(data):
                self._socket.sendall((head + data)[done:])
            unanswered += 1
            while unanswered >= WINDOW:
                unanswered -= self._acknowledgements()
        while unanswered:
            unanswered -= self._acknowledgements()

    def _acknowledgements(self) -> int:
        count = self._answers()
        self.acknowledged += count
        return count

    def _answers(self) -> int:
        """Read answers, and return how many there were, at least one."""
        count = 0
        while not count:
            read = self._socket.recv(_READ_BYTES)
            if not read:
                raise ConnectionError("the broker closed the connection")
            self._unread += read
            used = 0
            for frame in frames.split_frames(memoryview(self._unread), _MAX_FRAME_BYTES):
                if frame.kind == FrameKind.ERROR:
                    raise BenchFailed(f"the broker refused a batch: {frames.decode_error(frame)}")
                used += FRAME_SIZE + len(frame.meta) + len(frame.payload)
                count += 1
            self._unread = self._unread[used:]
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


# ---------------------------------------------------------------------------------------------------------------------
# Workers


def ingest(gate: Gate, *, url: str, subject: str, size: int, count: int, batches: int, flush: bool) -> dict[str, Any]:
    """Send *batches* prepared batches of *count* messages."""
    frames = Frames([RunContent(subject, bodies_of(count, size), None)], batches, flush)
    with RawClient(url) as client:
        gate()
        started = time.perf_counter()
        client.send(frames)
        seconds = time.perf_counter() - started
    return {"messages": len(frames) * count, "seconds": seconds}


def ingest_until_killed(gate: Gate, *, url: str, subject: str, size: int, count: int, batches: int) -> dict[str, Any]:
    """Send as `ingest` to a broker that is killed meanwhile; return how many messages were acknowledged, and sent."""
    frames = Frames([RunContent(subject, bodies_of(count, size), None)], batches, flush=False)
    with RawClient(url) as client:
        gate()
        try:
            client.send(frames)
        except ConnectionError:
            pass
        acknowledged = client.acknowledged
    return {"acknowledged": acknowledged * count, "most": min(acknowledged + WINDOW, batches) * count}


def ingest_many(
    gate: Gate, *, url: str, prefix: str, subjects: int, size: int, count: int, batches: int
) -> dict[str, Any]:
    """Send *batches* prepared batches, each with one message to *count* subjects, equally many to each of *subjects*.

    Every subject has its own body.
    """
    groups = max(subjects // count, 1)
    each = -(-batches // groups)
    frames = [
        Frames(
            [
                RunContent(f"{prefix}{number:06}", bodies_of(1, size, number), None)
                for number in range(group * count, (group + 1) * count)
            ],
            each,
            False,
        )
        for group in range(groups)
    ]
    with RawClient(url) as client:
        gate()
        started = time.perf_counter()
        for group in frames:
            client.send(group)
        seconds = time.perf_counter() - started
    return {"messages": groups * each * count, "seconds": seconds}


def send_plain(gate: Gate, *, port: int, size: int, count: int, batches: int) -> dict[str, Any]:
    """Send the same bytes as `ingest` to a `sink`."""
    frames = Frames([RunContent("bench", bodies_of(count, size), None)], batches, False)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        gate()
        started = time.perf_counter()
        for head, data in frames:
            done = connection.sendmsg([head, data])
            if done < len(head) + len(data):
                connection.sendall((head + data)[done:])
        connection.shutdown(socket.SHUT_WR)
        if not connection.recv(1):
            raise BenchFailed("the plain loop ended early")
        seconds = time.perf_counter() - started
    crc = 0
    for head, data in frames:
        crc = crc32c(data, crc32c(head, crc))
    return {"messages": len(frames) * count, "bytes": len(frames) * frames.size, "crc": crc, "seconds": seconds}


def sink(gate: Gate, *, write_to: str | None) -> dict[str, Any]:
    """Run the plain loop: receive, and with a file also checksum and write, until the sender is done."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gate(port=server.getsockname()[1])
        connection, _ = server.accept()
    buffer = memoryview(bytearray(_READ_BYTES))
    total = crc = 0
    descriptor = os.open(write_to, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600) if write_to else -1
    with connection:
        while read := connection.recv_into(buffer):
            if write_to:
                crc = crc32c(buffer[:read], crc)
                os.pwrite(descriptor, buffer[:read], total)
            total += read
        connection.sendall(b".")
    if write_to:
        os.close(descriptor)
        Path(write_to).unlink()
    return {"bytes": total, "crc": crc}


async def echo(gate: Gate) -> dict[str, Any]:
    """Send back everything that arrives on one connection until it closes: the least that a broker on this loop could
    do.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    server = await loop.create_server(lambda: _Echo(ended), "127.0.0.1", 0)
    gate(port=server.sockets[0].getsockname()[1])
    await ended
    server.close()
    return {}


async def ask_echo(gate: Gate, *, port: int, size: int, messages: int) -> dict[str, Any]:
    """Send *size* bytes to an `echo` and wait for them, *messages* times; return how long each takes."""
    transport, asking = await asyncio.get_running_loop().create_connection(_Asking, "127.0.0.1", port)
    gate()
    content = body_of(0, size)
    took = []
    try:
        for _ in range(messages):
            started = time.perf_counter()
            came = await asking.ask(transport, content)
            took.append(time.perf_counter() - started)
            if came != content:
                raise BenchFailed(f"the echo of {content!r:.90} was {came!r:.90}")
    finally:
        transport.close()
    return latencies(took)


class _Echo(asyncio.BufferedProtocol):
    def __init__(self, ended: asyncio.Future[None]) -> None:
        self._ended = ended
        self._buffer = bytearray(_READ_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._transport.write(bytes(self._buffer[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set_result(None)


class _Asking(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self._buffer = bytearray(_READ_BYTES)
        self._came = b""
        self._size = 0
        self._answer: asyncio.Future[bytes] | None = None

    def ask(self, transport: asyncio.Transport, content: bytes) -> asyncio.Future[bytes]:
        self._came, self._size = b"", len(content)
        self._answer = asyncio.get_running_loop().create_future()
        transport.write(content)
        return self._answer

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._came += self._buffer[:nbytes]
        if len(self._came) >= self._size and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._came)

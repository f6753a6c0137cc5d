"""Workers that attack a broker, each in one way, until the parent ends them."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from qmq.bench.raw import body_of
from qmq.bench.values import BenchFailed
from qmq.bench.worker import Gate
from qmq.format.build import RunContent, build_batch
from qmq.net.client.address import Address, parse_url
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind

#: The attacker has a low priority, so that the broker is measured and not the attacker.
_NICE: Final = 10
_FILES: Final = 200
_MIB: Final = 1 << 20
_EVERY_S: Final = 1.0
_AGAIN_S: Final = 0.05
_HELLO: Final = frames.encode_frame(
    FrameKind.HELLO, 1, frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "untrusted"})
)
_HTTP: Final = b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n"
_BOMB: Final = frames.encode_frame(FrameKind.SUBSCRIBE, 2, b"\x81\xa1k" + (b"\xdc" + struct.pack(">H", 4_000)) * 20_000)


class Attack:
    """A running attack: its target, how often it struck, and whether it is in full swing."""

    def __init__(self, address: Address, connections: int, prefix: str) -> None:
        self.address = address
        self.connections = connections
        self.prefix = prefix
        self.struck = 0
        self.swings = asyncio.Event()

    async def connect(self, hello: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection; with *hello*, say hello and read the answer."""
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port, limit=1 << 12)
        if hello:
            writer.write(_HELLO)
            size = frames.FRAME.unpack(await reader.readexactly(FRAME_SIZE))[0]
            await reader.readexactly(size - FRAME_SIZE)
        return reader, writer

    def strike(self, swings_after: int = 1) -> None:
        """Count a strike; after *swings_after* strikes the attack is in full swing."""
        self.struck += 1
        if self.struck >= swings_after:
            self.swings.set()

    async def crowd(self, count: int, one: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run *one* again and again, *count* at a time."""

        async def again() -> None:
            while True:
                try:
                    await one()
                except (OSError, asyncio.IncompleteReadError):
                    await asyncio.sleep(_AGAIN_S)

        await asyncio.gather(*(again() for _ in range(count)))


async def run(gate: Gate, *, how: str, url: str, connections: int, prefix: str) -> dict[str, Any]:
    """Run the attack that *how* names. It is prepared once it is in full swing.

    Return how often it struck, and its share of the processors.
    """
    os.nice(_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY:
        connections = min(connections, hard - _FILES)
    attack = Attack(parse_url(url)[0], connections, prefix)
    task = asyncio.ensure_future(ATTACKS[how](attack))
    swings = asyncio.ensure_future(attack.swings.wait())
    await asyncio.wait([task, swings], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        raise BenchFailed(f"the attack {how!r} has ended by itself: {task.exception()!r}")
    cpu_s, started = time.process_time(), time.perf_counter()
    await asyncio.to_thread(gate)
    cores = (time.process_time() - cpu_s) / (time.perf_counter() - started)
    if task.done():
        raise BenchFailed(f"the attack {how!r} has ended by itself: {task.exception()!r}")
    task.cancel()
    return {"struck": attack.struck, "cores": cores}


async def _ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read until the broker closes the connection, then close it."""
    while await reader.read(1 << 16):
        pass
    writer.close()


async def _come_and_go(attack: Attack) -> None:
    async def one() -> None:
        _, writer = await attack.connect(hello=False)
        attack.strike()
        writer.close()
        await writer.wait_closed()

    await attack.crowd(16, one)


async def _silent(attack: Attack) -> None:
    """Keep all connections open, and open those again that the broker closes. Opening one counts as a strike."""
    most = attack.connections

    async def one() -> None:
        reader, writer = await attack.connect(hello=False)
        attack.strike(most)
        await _ended(reader, writer)

    await attack.crowd(most, one)


async def _drip(attack: Attack, start: bytes, hello: bool) -> None:
    """Open a tenth of the connections, send *start* on each, then a byte every second."""

    async def one() -> None:
        reader, writer = await attack.connect(hello)
        writer.write(start)
        attack.strike(attack.connections // 10)
        gone = asyncio.ensure_future(_ended(reader, writer))
        while not (await asyncio.wait([gone], timeout=_EVERY_S))[0]:
            writer.write(b"\0")
            attack.strike(attack.connections // 10)
        gone.result()

    await attack.crowd(attack.connections // 10, one)


async def _slow_hello(attack: Attack) -> None:
    await _drip(attack, frames.FRAME.pack(frames.MAX_HELLO_BYTES, FrameKind.HELLO, 0, 0, 1), hello=False)


async def _slow_frame(attack: Attack) -> None:
    await _drip(attack, frames.FRAME.pack(_MIB, FrameKind.SEND, 0, 0, 2), hello=True)


async def _pull(attack: Attack, reads: int) -> None:
    """Open 50 connections that pull 4 MiB 100 times, and read nothing, or a little every second."""
    fields = {"group": None, "prefixes": [attack.prefix], "consumer": "c", "start": "first"}

    async def one() -> None:
        reader, writer = await attack.connect(hello=True)
        writer.write(frames.encode_frame(FrameKind.SUBSCRIBE, 2, frames.pack_meta(fields)))
        size, _, _, meta_size, _ = frames.FRAME.unpack(await reader.readexactly(FRAME_SIZE))
        answer = await reader.readexactly(size - FRAME_SIZE)
        subscription = frames.unpack_meta(memoryview(answer)[:meta_size])["subscription"]
        pull = frames.PULL.pack(subscription, 1_000_000, 1, 4 * _MIB, 0, frames.NOT_EXPECTED)
        for number in range(100):
            writer.write(frames.encode_frame(FrameKind.PULL, 3 + number, b"", len(pull)) + pull)
        attack.strike(50)
        while reads and await reader.read(reads):
            attack.strike(50)
            await asyncio.sleep(_EVERY_S)
        await writer.wait_closed()

    await attack.crowd(50, one)


async def _never_read(attack: Attack) -> None:
    await _pull(attack, 0)


async def _read_a_byte(attack: Attack) -> None:
    await _pull(attack, 1)


async def _say(attack: Attack, words: Callable[[], bytes], hello: bool) -> None:
    """Open 8 connections at a time, send something on each, and read the answer of the broker."""

    async def one() -> None:
        reader, writer = await attack.connect(hello)
        writer.write(words())
        await _ended(reader, writer)
        attack.strike()

    await attack.crowd(8, one)


async def _http(attack: Attack) -> None:
    await _say(attack, lambda: _HTTP, hello=False)


async def _bomb(attack: Attack) -> None:
    await _say(attack, lambda: _BOMB, hello=True)


async def _random(attack: Attack) -> None:
    choose = random.Random(1)
    await _say(attack, lambda: choose.randbytes(4_096), hello=True)


async def _lie(attack: Attack) -> None:
    """Open 8 connections that send a batch of 100 KB with a wrong checksum, read the answer, and send it again."""
    content = RunContent(attack.prefix + "lie", [body_of(number, 1_000) for number in range(100)], None)
    batch = bytearray(b"".join(build_batch([content], created_at_us=1, producer_id=bytes(16), producer_sequence=0)))
    batch[-1] ^= 1
    lie = frames.encode_frame(FrameKind.SEND, 2, b"", len(batch)) + batch

    async def one() -> None:
        reader, writer = await attack.connect(hello=True)
        while True:
            writer.write(lie)
            size = frames.FRAME.unpack(await reader.readexactly(FRAME_SIZE))[0]
            await reader.readexactly(size - FRAME_SIZE)
            attack.strike()

    await attack.crowd(8, one)


async def _flood(attack: Attack) -> None:
    """Open 4 connections that send small invalid batches without waiting for answers."""
    lies = (frames.encode_frame(FrameKind.SEND, 2, b"", 100) + bytes(100)) * 100

    async def one() -> None:
        reader, writer = await attack.connect(hello=True)
        reading = asyncio.ensure_future(_ended(reader, writer))
        while not reading.done():
            writer.write(lies)
            attack.strike()
            await writer.drain()

    await attack.crowd(4, one)


ATTACKS: Final[dict[str, Callable[[Attack], Awaitable[None]]]] = {
    "come and go": _come_and_go,
    "silent": _silent,
    "slow hellos": _slow_hello,
    "slow frames": _slow_frame,
    "never read": _never_read,
    "read a byte a second": _read_a_byte,
    "http": _http,
    "bombs": _bomb,
    "random": _random,
    "lies": _lie,
    "floods": _flood,
}

"""A TCP proxy that knows frames, and cuts, delays and swallows them as a test asks."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from qmq.net.protocol.frames import FRAME, FRAME_SIZE, FrameKind
from tests.certificates import active, client_context, server_context

TO_BROKER: Final = "to broker"
TO_CLIENT: Final = "to client"


class Passing(NamedTuple):
    """A frame on its way. ``connection`` and ``number`` (of the frame in its direction) count from 0."""

    direction: str
    connection: int
    number: int
    kind: int
    size: int


class Fault(NamedTuple):
    """What happens to a frame: its first ``passed`` bytes go on after ``delay`` seconds, then both sides are cut.

    ``cut`` None: nothing is cut, and all of the frame goes on, or (``passed`` 0) nothing of it. ``hold``: it goes on
    once that is set. ``flip``: that bit of the frame is turned over.
    """

    cut: str | None = None  # "close": as a process that ends; "reset": as one that is killed
    passed: int = 0
    delay: float = 0.0
    hold: asyncio.Event | None = None
    flip: int | None = None


Plan = Callable[[Passing], Fault | None]


class Proxy:
    """Listens on a port of its own for connections to *port*; ``plan`` decides over every frame, also by TLS.

    ``struck`` counts what was done: (what, direction, kind of frame, where).
    """

    def __init__(self, port: int, plan: Plan | None = None) -> None:
        self.plan = plan
        self.struck: Counter[tuple[str, str, str, str]] = Counter()
        self.connections = 0
        self._port = port
        self._joined: set[asyncio.Task[Any]] = set()
        self._pumps: set[asyncio.Task[str]] = set()
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        files = active()
        tls = None if files is None else server_context(files)
        self._to_broker_tls = None if files is None else client_context(files)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        self.url = f"{'qmq' if tls is None else 'qmqs'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._joined)

    async def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        try:
            await self._join(from_client, to_client)
        finally:
            self._joined.discard(task)
            to_client.close()

    async def _join(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        try:
            from_broker, to_broker = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._to_broker_tls)
        except OSError:
            return
        pumps = {
            asyncio.create_task(self._pump(TO_BROKER, number, from_client, to_broker)),
            asyncio.create_task(self._pump(TO_CLIENT, number, from_broker, to_client)),
        }
        self._pumps |= pumps
        done, left = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in left:
            pump.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._pumps -= pumps
        is_reset = any(not pump.cancelled() and pump.result() == "reset" for pump in done)
        for side in (to_client, to_broker):
            if is_reset:
                _reset(side)
            else:
                side.close()

    async def _pump(
        self, direction: str, connection: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> str:
        """Pass frames on until an end; says how to end both sides."""
        number = 0
        try:
            while True:
                head = await source.readexactly(FRAME_SIZE)
                size, kind, *_ = FRAME.unpack(head)
                frame = head + await source.readexactly(size - FRAME_SIZE)
                fault = self.plan(Passing(direction, connection, number, kind, size)) if self.plan else None
                number += 1
                if fault is None:
                    target.write(frame)
                    continue
                self._count(fault, direction, kind, size)
                if fault.delay:
                    await asyncio.sleep(fault.delay)
                if fault.hold is not None:
                    await fault.hold.wait()
                if fault.flip is not None:
                    frame = _flipped(frame, fault.flip)
                target.write(frame[: fault.passed])
                if fault.cut is not None:
                    return fault.cut
        except (asyncio.IncompleteReadError, OSError):
            return "close"

    def _count(self, fault: Fault, direction: str, kind: int, size: int) -> None:
        if fault.cut is not None:
            where = "before" if not fault.passed else "after" if fault.passed >= size else "within"
            self.struck[fault.cut, direction, FrameKind(kind).name, where] += 1
        elif fault.flip is not None:
            self.struck["flip", direction, FrameKind(kind).name, ""] += 1
        elif fault.passed:
            self.struck["delay", direction, FrameKind(kind).name, ""] += 1
        else:
            self.struck["swallow", direction, FrameKind(kind).name, ""] += 1


def _flipped(frame: bytes, bit: int) -> bytes:
    changed = bytearray(frame)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that the other side loses what it has not read yet."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def swallow_answers(passing: Passing) -> Fault | None:
    """Nothing that the broker says arrives."""
    return Fault() if passing.direction == TO_CLIENT else None


class SeededFaults:
    """A plan: each frame is cut (before, within or after it) or delayed with the given chances.

    The greetings of the first *spared* connections pass: a client whose first connection breaks says so and ends.
    """

    def __init__(self, seed: int, cut: float, delay: float, spared: int, longest_delay: float = 0.02) -> None:
        self._random = random.Random(seed)
        self._cut = cut
        self._delay = delay
        self._spared = spared
        self._longest_delay = longest_delay

    def __call__(self, passing: Passing) -> Fault | None:
        if passing.number == 0 and passing.connection < self._spared:
            return None
        chance = self._random.random()
        delay = self._random.uniform(0, self._longest_delay)
        if chance < self._cut:
            passed = self._random.choice((0, self._random.randrange(1, passing.size), passing.size))
            return Fault(self._random.choice(("close", "reset")), passed, delay)
        if chance < self._cut + self._delay:
            return Fault(None, passing.size, delay)
        return None

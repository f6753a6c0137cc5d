"""Connections in memory: a client's and a server's own protocols, joined frame by frame, and cut where a test says."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from qmq.daemon.main import RunningBroker
from qmq.net.protocol.frames import FRAME, FRAME_SIZE, FrameKind
from tests.faults.proxy import TO_BROKER, TO_CLIENT, Passing

#: The port of connections that nothing happens to; any other is a client's whose frames the plan decides over.
SPARED_PORT: Final = 2
CUT_PORT: Final = 1

#: How many bytes of a frame pass before both sides lose the connection; None: all of it, and nothing happens.
Plan = Callable[[Passing], int | None]


class End(asyncio.Transport):
    """One side's transport. What is written to it reaches the other side's protocol in a later turn of the loop."""

    def __init__(self, wires: Wires, direction: str, connection: int) -> None:
        super().__init__()
        self.peer: End
        self.protocol: asyncio.BufferedProtocol
        self._wires = wires
        self._direction = direction
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._written = bytearray()  # no whole frame yet
        self._number = 0
        self._coming: deque[bytes] = deque()
        self._paused = False
        self._closing = False
        self._lost = False

    # --- what a protocol calls ---------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._closing:
            return
        self._written += data
        while len(self._written) >= FRAME_SIZE and not self._closing:
            size, kind, *_ = FRAME.unpack_from(self._written)
            if len(self._written) < size:
                return
            frame = bytes(self._written[:size])
            del self._written[:size]
            self._pass(frame, Passing(self._direction, self._connection, self._number, kind, size))
            self._number += 1

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._loop.call_soon(self.peer.ended)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self.peer.ended)
            self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        self.lose_soon(None)
        self.peer.lose_soon(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._receive)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The other side always reads."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    # --- between the two ---------------------------------------------------------------------------------------------

    def _pass(self, frame: bytes, passing: Passing) -> None:
        passed = self._wires.decide(passing)
        if passing.kind == FrameKind.MESSAGES and passing.connection >= 0 and self._wires.damages:
            self._wires.damages = False
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        self.peer.deliver(frame if passed is None else frame[:passed])
        if passed is not None:
            error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            self.lose_soon(error)
            self.peer.lose_soon(error)

    def deliver(self, data: bytes) -> None:
        """The other side has written this."""
        if data:
            self._coming.append(data)
            self._loop.call_soon(self._receive)

    def ended(self) -> None:
        """The other side writes no more."""
        if not self._closing and not self.protocol.eof_received():
            self.close()

    def lose_soon(self, error: Exception | None) -> None:
        """The connection is gone; what has come still arrives."""
        self._closing = True
        self._loop.call_soon(self.lose, error)

    def lose(self, error: Exception | None) -> None:
        """Tell the protocol, once."""
        if not self._lost:
            self._lost = True
            self.protocol.connection_lost(error)

    def _receive(self) -> None:
        while self._coming and not self._paused and not self._lost:
            data = memoryview(self._coming.popleft())
            while len(data) and not self._lost:
                buffer = cast(memoryview, self.protocol.get_buffer(len(data)))
                size = min(len(buffer), len(data))
                buffer[:size] = data[:size]
                self.protocol.buffer_updated(size)
                data = data[size:]


class Wires:
    """Stands for the network in one loop. ``broker`` None: nobody listens. ``plan`` decides over every frame.

    ``passed`` are the frames of the connections that are not spared, which ``connections`` counts; ``struck`` counts
    cuts by direction, kind and where. While ``damages``, the next answer to a pull loses a bit of its last message.
    """

    def __init__(self) -> None:
        self.broker: RunningBroker | None = None
        self.plan: Plan | None = None
        self.passed: list[Passing] = []
        self.struck: Counter[tuple[str, str, str]] = Counter()
        self.connections = 0
        self.was_cut = False
        self.damages = False

    async def connect(
        self, factory: Callable[[], asyncio.BufferedProtocol], host: str, port: int
    ) -> tuple[End, asyncio.BufferedProtocol]:
        """What a loop's ``create_connection`` does."""
        if self.broker is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        number = -1
        if port != SPARED_PORT:
            number = self.connections
            self.connections += 1
        near, far = End(self, TO_BROKER, number), End(self, TO_CLIENT, number)
        near.peer, far.peer = far, near
        near.protocol, far.protocol = factory(), self.broker.server.connection()
        near.protocol.connection_made(near)
        far.protocol.connection_made(far)
        return near, near.protocol

    def decide(self, passing: Passing) -> int | None:
        """What happens to a frame."""
        if passing.connection < 0:
            return None
        self.passed.append(passing)
        passed = self.plan(passing) if self.plan is not None else None
        if passed is not None:
            self.was_cut = True
            where = "before" if not passed else "after" if passed >= passing.size else "during"
            self.struck[passing.direction, FrameKind(passing.kind).name, where] += 1
        return passed

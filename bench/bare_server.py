"""A store, a broker and a server without sockets, stepped by hand: bytes go in and out through methods.

The clock stands still until the caller moves it, and the loop runs only in ``settle``. So a history of frames always
gives the same files and answers, and what runs for one message can be counted.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from qmq.broker.broker import Broker
from qmq.broker.ports.commands import Checked, Fetched, Now, ReadDone, SyncBroken, Synced
from qmq.broker.ports.effects import CheckWanted, FetchWanted, ReadWanted, SyncWanted
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import QmqError
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind, encode_frame, made, split_frames
from qmq.net.server import Server, ServerOptions
from qmq.net.server.connection import ClientConnection
from qmq.net.server.replies import DiskWork
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions

START_US: Final = 1_700_000_000_000_000
_MAX_FRAME_BYTES: Final = 64 << 20


class _Timer:
    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class SteppedLoop:
    """The part of an event loop that the server uses. Its time is that of the caller."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, _Timer, Callable[[], object]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self.seconds

    def call_soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self._soon.append((call, arguments))

    def call_later(self, delay_s: float, call: Callable[[], object]) -> _Timer:
        timer = _Timer()
        heapq.heappush(self._timers, (self.seconds + delay_s, next(self._order), timer, call))
        return timer

    def settle(self) -> None:
        """Run what is due, and what follows from it."""
        while True:
            while self._timers and self._timers[0][0] <= self.seconds:
                _, _, timer, call = heapq.heappop(self._timers)
                if not timer.is_cancelled:
                    self._soon.append((call, ()))
            if not self._soon:
                return
            due, arguments = self._soon.popleft()
            due(*arguments)


class BareTransport:
    """The transport of one connection: keeps what the server writes in ``written``."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_over = False

    def write(self, data: bytes | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, buffers: list[bytes | memoryview]) -> None:
        self.written.append(b"".join(buffers))

    def get_extra_info(self, name: str) -> Any:
        return ("bare", 0) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def write_eof(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True


class BareConnection:
    """One client's connection: ``write`` is one read of the server, ``read`` returns the frames that it answered."""

    def __init__(self, server: Server) -> None:
        self.transport = BareTransport()
        self.protocol: ClientConnection = server.connection()
        self.protocol.connection_made(cast(asyncio.BaseTransport, self.transport))

    def write(self, data: bytes) -> None:
        """Hand in bytes that the server reads at once, in as many reads as it has room for."""
        while data and not self.transport.is_over:
            room = self.protocol.get_buffer(-1)
            size = min(len(data), len(room))
            room[:size] = data[:size]
            self.protocol.buffer_updated(size)
            data = data[size:]

    def read(self) -> list[Frame]:
        """Return the answers since the last call."""
        data = b"".join(self.transport.written)
        self.transport.written.clear()
        return list(split_frames(memoryview(data), _MAX_FRAME_BYTES))


class BareServer:
    """A broker over the store in *directory*, and its server."""

    def __init__(
        self, directory: Path, disk: Disk | None = None, limits: BrokerLimits | None = None,
        options: StoreOptions | None = None, *, takes_short_way: bool = True,
    ) -> None:  # fmt: skip
        self.loop = SteppedLoop()
        self.now = Now(1_000_000, START_US)
        self.limits = limits if limits is not None else BrokerLimits()
        self.store = Store.open(directory, options or StoreOptions(), disk or Disk(), self.now.wall_us)
        self.broker = Broker(self.store, self.limits, self.now)
        if not takes_short_way:
            self.broker.short_way = None
        #: Syncs and reads that the broker wants and that have not run.
        self.work: list[DiskWork] = []
        self.server = Server(
            self.broker, self._options(), self.work.append, lambda looked: None, lambda: self.now,
            cast(asyncio.AbstractEventLoop, self.loop), lambda: 0.0,
        )  # fmt: skip
        self.server.turn()

    def _options(self) -> ServerOptions:
        limits = self.limits
        return ServerOptions(
            store_id=self.store.store_id, version="0", max_frame_bytes=_MAX_FRAME_BYTES,
            max_batch_bytes=_MAX_FRAME_BYTES, max_message_bytes=limits.max_message_bytes,
            producer_window=limits.producer_window, unique_for_ms=limits.unique_for_ms,
        producer_ttl_ms=limits.producer_ttl_ms,
            max_pull_count=limits.max_pull_count, max_pull_bytes=limits.max_pull_bytes,
            session_timeout_ms=limits.session_timeout_ms, max_waiting_pulls=limits.max_waiting_pulls,
            max_connections=1_000, max_inflight_bytes=64 << 20, max_buffered_bytes=256 << 20,
            first_frame_timeout_ms=10_000,
        )  # fmt: skip

    def connect(self) -> BareConnection:
        """Return a new connection that has been welcomed."""
        connection = BareConnection(self.server)
        meta = frames.pack_meta({"protocol": frames.PROTOCOL_VERSION, "client": "bare"})
        connection.write(encode_frame(FrameKind.HELLO, 1, meta))
        self.settle()
        connection.read()
        return connection

    def advance(self, microseconds: int) -> None:
        """Let time pass, without running what falls due."""
        self.now = made(Now, (self.now.monotonic_us + microseconds, self.now.wall_us + microseconds))
        self.loop.seconds += microseconds / 1e6

    def settle(self) -> None:
        """Run the loop and the work on disk until nothing is left to do now."""
        while True:
            self.loop.settle()
            if not self.work:
                return
            self.finish_work()

    def finish_work(self) -> None:
        """Run the syncs and reads that are wanted, and hand in their results."""
        wanted, self.work[:] = self.work.copy(), []
        for one in wanted:
            if isinstance(one, SyncWanted):
                self._sync(one)
            elif isinstance(one, ReadWanted):
                self.server.submit(ReadDone(one.number, _error_of(one.read.step)))
            elif isinstance(one, FetchWanted):
                self.server.submit(Fetched(one.number, _error_of(one.fetch.run)))
            elif isinstance(one, CheckWanted):
                self._check(one)

    def _sync(self, wanted: SyncWanted) -> None:
        error = _error_of(self.store.partition(wanted.partition).sync)
        if error is None:
            self.server.submit(Synced(wanted.partition, wanted.position))
        else:
            self.server.submit(SyncBroken(wanted.partition, error))

    def _check(self, wanted: CheckWanted) -> None:
        reader = self.store.partition(wanted.partition).reader(wanted.position)
        try:
            batch, damage = reader.read_batch(wanted.position, wanted.size, wanted.first, wanted.messages)
            self.server.submit(Checked(wanted.number, batch, damage, None))
        except QmqError as error:
            self.server.submit(Checked(wanted.number, memoryview(b""), None, error))
        finally:
            reader.close()


def _error_of(work: Callable[[], object]) -> QmqError | None:
    try:
        while work():
            pass
    except QmqError as error:
        return error
    return None

"""A broker without sockets: the real server, rules and store, with a loop and transports that a target drives."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from fuzz.target import scratch_directory
from qmq.broker.broker import Broker
from qmq.broker.ports import commands, effects
from qmq.broker.ports.commands import Now
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import QmqError
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame
from qmq.net.server import Server, ServerOptions
from qmq.storage.disk.disk import Disk
from qmq.storage.store import Store, StoreOptions
from qmq.storage.verify.verify import verify

_START_US: Final = 1_700_000_000_000_000
#: Callbacks in one go beyond which something goes round for ever.
_MOST_CALLS: Final = 100_000
_MAX_FRAME_BYTES: Final = 256 << 10

LIMITS: Final = BrokerLimits(
    max_message_bytes=64 << 10,
    max_groups=100,
    max_producers=2_000,
    producer_window=8,
    max_waiting_pulls=8,
    max_pull_count=1_000,
    max_pull_bytes=64 << 10,
    max_consumers_per_connection=8,
    max_prefixes=20,
)


Work = (
    effects.SyncWanted
    | effects.ReadWanted
    | effects.CheckWanted
    | effects.FetchWanted
    | effects.InfoWanted
    | effects.StatsWanted
)
Outcome = commands.Synced | commands.ReadDone | commands.Checked | commands.Fetched | commands.InfoFound


class Timer:
    """What call_later gives."""

    def __init__(self, due: float, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.due = due
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        self.callback = None


class TurnLoop:
    """The part of an event loop that a server uses; runs when it is told to, by a clock that is set."""

    def __init__(self) -> None:
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._now = 1.0

    def time(self) -> float:
        return self._now

    def now(self) -> Now:
        return Now(int(self._now * 1e6), _START_US + int(self._now * 1e6))

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._ready.append((callback, arguments))

    def call_later(self, delay: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        timer = Timer(self._now + delay, callback, arguments)
        heapq.heappush(self._timers, (timer.due, next(self._numbers), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let time pass, and call what falls due, in its order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if timer.callback is not None:
                timer.callback(*timer.arguments)
            self.run()
        self._now = end

    def run(self) -> None:
        """Call what is ready, until nothing is."""
        calls = 0
        while self._ready:
            callback, arguments = self._ready.popleft()
            callback(*arguments)
            calls += 1
            assert calls < _MOST_CALLS, f"{callback} goes on for ever"


class Wire:
    """The transport of one connection, with what the other side sent and has not been taken, or did not read."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._high = 64 << 10
        self._paused = False
        self._closing = False
        self._eof = False
        self._to_broker = bytearray()
        self._unread = 0
        self.reading = True
        #: the untrusted client reads what the broker says
        self.reads = True
        self.said = bytearray()
        self.protocol = core.server.connection()
        self.protocol.connection_made(cast(asyncio.Transport, self))

    # --- the untrusted client's side ----------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return not self._closing

    def send(self, data: bytes) -> None:
        """Bytes arrive, as far as the broker reads."""
        self._to_broker += data
        self._deliver()

    def read_all(self) -> None:
        """The untrusted client reads what is unread."""
        self._unread = 0
        if self._paused and not self._closing:
            self._paused = False
            self.protocol.resume_writing()

    def hang_up(self) -> None:
        """The untrusted client is gone."""
        self._lose()

    @property
    def unsent(self) -> bool:
        """Not all that it sent has been read."""
        return bool(self._to_broker) and not self._closing

    def frames(self) -> Iterable[Frame]:
        """What the broker said so far. Raises ProtocolError when that is not frames."""
        view = memoryview(bytes(self.said))
        self.said.clear()
        used = 0
        for frame in frames.split_frames(view, 1 << 30):
            used += frames.FRAME_SIZE + len(frame.meta) + len(frame.payload)
            yield frame
        assert used == len(view), "the broker said half a frame"

    def _deliver(self) -> None:
        while self._to_broker and self.reading and not self._closing:
            room = self.protocol.get_buffer(-1)
            size = min(len(room), len(self._to_broker))
            assert size, "the broker gives no room"
            room[:size] = self._to_broker[:size]
            del self._to_broker[:size]
            self.protocol.buffer_updated(size)

    def _lose(self) -> None:
        if not self._closing:
            self._closing = True
            self._to_broker.clear()
            self._core.loop.call_soon(self.protocol.connection_lost, None)

    # --- asyncio's side ----------------------------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 << 10 if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._unread

    def get_extra_info(self, name: str) -> object:
        return ("untrusted", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | memoryview) -> None:
        self.writelines([data])

    def writelines(self, buffers: Iterable[bytes | memoryview]) -> None:
        assert not self._eof, "the broker wrote behind its last word"
        size = len(self.said)
        for buffer in buffers:
            self.said += buffer
        if not self.reads:
            self._unread += len(self.said) - size
        if self._unread > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def write_eof(self) -> None:
        self._eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if not self.reading:
            self.reading = True
            self._core.loop.call_soon(self._deliver)

    def abort(self) -> None:
        self._lose()

    close = abort


class Complaints(logging.Handler):
    """Errors in the log of the broker: there must be none, whatever an untrusted client sends."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def carry_out(store: Store, want: Work) -> Outcome:
    """What the wiring has done in a thread."""
    match want:
        case effects.SyncWanted():
            store.partition(want.partition).sync()
            return commands.Synced(want.partition, want.position)
        case effects.ReadWanted():
            try:
                while want.read.step():
                    pass
            except QmqError as error:
                return commands.ReadDone(want.number, error)
            return commands.ReadDone(want.number, None)
        case effects.FetchWanted():
            try:
                want.fetch.run()
            except QmqError as error:
                return commands.Fetched(want.number, error)
            return commands.Fetched(want.number, None)
        case effects.CheckWanted():
            reader = store.partition(want.partition).reader(want.position)
            try:
                batch, damage = reader.read_batch(want.position, want.size, want.first, want.messages)
            finally:
                reader.close()
            return commands.Checked(want.number, batch, damage, None)
        case effects.InfoWanted() | effects.StatsWanted():
            return commands.InfoFound(*want)


class Core:
    """One broker on a directory of its own, with small limits so that they are reached."""

    def __init__(self, max_buffered_bytes: int = 1 << 20) -> None:
        self.directory = scratch_directory()
        self.loop = TurnLoop()
        self._wanted: list[Work | effects.CheckpointWanted] = []
        self.complaints = Complaints()
        logging.getLogger("qmq.server").addHandler(self.complaints)
        options = StoreOptions(
            segment_bytes=1 << 20, reserve_bytes=16 << 20, max_frame_bytes=_MAX_FRAME_BYTES, max_subjects=3_000
        )
        self.store = Store.open(self.directory / "data", options, Disk(), self.loop.now().wall_us)
        self.broker = Broker(self.store, LIMITS, self.loop.now())
        loop = cast(asyncio.AbstractEventLoop, self.loop)
        given = _server_options(self.store, max_buffered_bytes)
        self.server = Server(
            self.broker, given, self._wanted.append, lambda looked: None, self.loop.now, loop, self.loop.time
        )

    def run(self) -> None:
        """Everything that is ready, syncs and reads too."""
        self.loop.run()
        while self._wanted:
            wanted, self._wanted[:] = self._wanted.copy(), []
            for want in wanted:
                if not isinstance(want, effects.CheckpointWanted):  # no request needs one here in time
                    self.server.submit(carry_out(self.store, want))
            self.loop.run()
        assert not self.complaints.records, self.complaints.format(self.complaints.records[0])

    def close(self) -> None:
        """Stop as a broker does; what it leaves must be faultless, and open again."""
        logging.getLogger("qmq.server").removeHandler(self.complaints)
        checkpoint = self.store.begin_checkpoint(self.broker.checkpoint_state(self.loop.now()))
        checkpoint.write()
        self.store.finish_checkpoint(checkpoint)
        self.store.close(clean=True)
        report = verify(self.directory / "data", Disk())
        assert not report.faults, report.faults
        shutil.rmtree(self.directory)


def _server_options(store: Store, max_buffered_bytes: int) -> ServerOptions:
    return ServerOptions(
        store_id=store.store_id,
        version="fuzz",
        max_frame_bytes=_MAX_FRAME_BYTES,
        max_batch_bytes=store.max_batch_bytes,
        max_message_bytes=LIMITS.max_message_bytes,
        producer_window=LIMITS.producer_window,
        unique_for_ms=LIMITS.unique_for_ms,
        producer_ttl_ms=LIMITS.producer_ttl_ms,
        max_pull_count=LIMITS.max_pull_count,
        max_pull_bytes=LIMITS.max_pull_bytes,
        session_timeout_ms=30_000,
        max_waiting_pulls=LIMITS.max_waiting_pulls,
        max_connections=100,
        max_inflight_bytes=256 << 10,
        max_buffered_bytes=max_buffered_bytes,
        first_frame_timeout_ms=10_000,
    )

"""A broker in a thread of this process, with a clock that tests set ahead.

A broker in a process of its own would need a way to set its clock from outside, and no broker that serves people may
have one. Here the clock is an object of the same process, and the daemon's broker takes it as an argument.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from qmq.broker.ports.commands import Now
from qmq.daemon.main import RunningBroker
from qmq.durations import Duration, microseconds_of
from qmq.errors import UsageError
from qmq.net.client.producer.receipts import utc_from_us
from qmq.settings import Settings, load

T = TypeVar("T")

#: Settings of a test's broker that differ from those of `qmq serve`.
_DEFAULTS: Final[dict[str, object]] = {"listen": "127.0.0.1:0", "segment_bytes": "32 MiB", "scrub_bytes_per_s": 0}
#: Seconds that the broker gets for each thing that a test wants of it.
_TIMEOUT_S: Final = 60.0
#: After the clock was set, the broker has done what is due when it had nothing to do for so many looks.
_QUIET_LOOKS: Final = 3
_LOOK_S: Final = 0.001


class BrokerClock:
    """The clock of one broker of a test: it goes as the machine's, and ``advance`` sets it ahead."""

    def __init__(self, broker: LocalBroker) -> None:
        self._broker = broker
        self._monotonic_us = 0
        self._wall_us = 0

    def __call__(self) -> Now:
        """Return the broker's time."""
        return Now(time.monotonic_ns() // 1_000 + self._monotonic_us, time.time_ns() // 1_000 + self._wall_us)

    @property
    def now(self) -> datetime:
        """The broker's time in UTC."""
        return utc_from_us(self().wall_us)

    def advance(self, duration: Duration, *, heartbeats: bool = True) -> None:
        """Set the broker's clock ahead, and return when it has done what is due by then.

        Delayed messages are delivered, retries are ready, messages expire, and ack deadlines and the timeouts of
        waiting pulls are over, all in the order of a broker that was very busy meanwhile. Consumers that are connected
        count as alive, as their heartbeats would have come; others expire after the session timeout. With
        *heartbeats* false, connected ones expire too. Raises UsageError while the broker does not run.

            broker.clock.advance("1h")
        """
        us = microseconds_of("duration", duration)
        self._broker._call(self._advance(us, heartbeats))

    async def _advance(self, us: int, heartbeats: bool) -> None:
        running = self._broker._running
        assert running is not None
        self._wall_us += us  # first, so that a waiting pull gets a retry that is due before its own timeout
        await _settle(running)
        self._monotonic_us += us
        if heartbeats:
            running.broker.hear_of_connected(self())
        await _settle(running)


async def _settle(running: RunningBroker) -> None:
    """Wait until the broker has done all that is due."""
    quiet = 0
    async with asyncio.timeout(_TIMEOUT_S):
        while quiet < _QUIET_LOOKS:
            is_due = running.server.clock_moved()
            quiet = 0 if is_due or not running.broker.has_settled() else quiet + 1
            await asyncio.sleep(_LOOK_S)


class LocalBroker:
    """A broker for one test: ``qmq.testing.broker`` makes it. It runs within its ``with`` or ``async with`` block."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """*settings* are those of ``qmq serve``. Raises InvalidOption."""
        _settings_of(settings, Path("."))
        self._given = dict(settings)
        self._undo = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._running: RunningBroker | None = None
        self._stop: asyncio.Event | None = None
        self._failed: BaseException | None = None
        self._directory: Path | None = None
        #: The broker's clock.
        self.clock = BrokerClock(self)

    @property
    def url(self) -> str:
        """The URL for ``qmq.connect``. Raises UsageError outside of the block."""
        return self._started().url

    @property
    def data_dir(self) -> Path:
        """The data directory, which is removed at the end of the block. Raises UsageError outside of it."""
        return self._started().settings.data_dir

    def restart(self) -> None:
        """Stop the broker, and start it on the same data and port: clients connect again."""
        listen = "{}:{}".format(*self._started().address)
        self._end()
        self._begin(listen)

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise UsageError("the broker runs already; call qmq.testing.broker again for another one")
        with ExitStack() as undo:
            self._directory = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="qmq-test-", ignore_cleanup_errors=True))
            )
            self._begin()
            undo.callback(self._end)
            for name, value in (("QMQ_SERVER", self.url), ("QMQ_STATE_DIR", str(self._directory / "state"))):
                undo.callback(_restore, name, os.environ.get(name))
                os.environ[name] = value
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._undo.close)

    def _begin(self, listen: str | None = None) -> None:
        """Start the thread, and wait until the broker serves. Raises the error with which it ends."""
        assert self._directory is not None
        settings = _settings_of(self._given if listen is None else {**self._given, "listen": listen}, self._directory)
        is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(settings, is_ready), name="qmq-broker", daemon=True)
        self._thread.start()
        is_ready.wait()
        if self._running is None:
            self._thread.join()
            self._thread, failed = None, self._failed
            assert failed is not None
            raise failed

    def _end(self) -> None:
        """Stop the broker, and wait for its thread."""
        thread, loop, stop = self._thread, self._loop, self._stop
        assert thread is not None
        assert loop is not None
        assert stop is not None
        self._thread, self._running = None, None
        loop.call_soon_threadsafe(stop.set)
        thread.join()

    def _run(self, settings: Settings, is_ready: threading.Event) -> None:
        """[thread] Run the broker until it is stopped."""
        import uvloop

        try:
            uvloop.run(self._serve(settings, is_ready))
        except BaseException as error:
            self._failed = error
        finally:
            is_ready.set()

    async def _serve(self, settings: Settings, is_ready: threading.Event) -> None:
        running = RunningBroker(settings, clock=self.clock)
        await running.start()
        self._loop, self._stop, self._running = asyncio.get_running_loop(), asyncio.Event(), running
        is_ready.set()
        await self._stop.wait()
        await running.stop()

    def _started(self) -> RunningBroker:
        if self._running is None:
            raise UsageError("the broker does not run; use it inside `with qmq.testing.broker() as broker`")
        return self._running

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run *coroutine* in the broker's loop, and return its result."""
        if self._running is None:
            coroutine.close()
        self._started()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * _TIMEOUT_S)


def _settings_of(given: Mapping[str, Any], directory: Path) -> Settings:
    """Return the settings of a broker that has its data in *directory*. Raises InvalidOption."""
    return load(flags={"data_dir": directory / "data", **_DEFAULTS, **given})


def _restore(name: str, value: str | None) -> None:
    """Set an environment variable to what it was before."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value

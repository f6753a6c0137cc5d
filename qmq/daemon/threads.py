"""Threads that make blocking calls to the disk, in order, beside the loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from qmq.errors import QmqError, StorageError

log = logging.getLogger("qmq.broker")


class CallThread:
    """A thread that makes calls in order, and reports their results in the loop.

    A call that returns True is made again, after those that wait.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool | None], Callable[[QmqError | None], None]] | None]
        self._calls = queue.SimpleQueue()
        self._given_up = False
        # A daemon thread: a disk that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], bool | None], done: Callable[[QmqError | None], None]) -> None:
        """Call *work* in the thread, then *done* in the loop, with the error or None."""
        self._calls.put((work, done))

    async def run(self, work: Callable[[], None]) -> None:
        """Call *work* in the thread; raise its error."""
        outcome: asyncio.Future[QmqError | None] = self._loop.create_future()
        self.call(work, lambda error: None if outcome.done() else outcome.set_result(error))
        error = await outcome
        if error is not None:
            raise error

    def stop(self, timeout_s: float) -> None:
        """End the thread after the calls so far, and wait for that up to *timeout_s*.

        A thread that is still running then makes no further calls, and does not report the current one.
        """
        self._calls.put(None)
        self._thread.join(timeout_s)
        self._given_up = self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait without limit for a stopped thread to end."""
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, done = call
            outcome: QmqError | None = None
            try:
                if work():
                    self._calls.put(call)
                    continue
            except QmqError as error:
                outcome = error
            except Exception as error:
                log.exception("a call to the disk failed unexpectedly")
                outcome = StorageError(f"a call to the disk failed: {error!r}; the log of the broker has the details")
            if self._given_up:
                return
            try:
                self._loop.call_soon_threadsafe(done, outcome)
            except RuntimeError:
                return  # the loop is closed: the broker no longer waits for this disk

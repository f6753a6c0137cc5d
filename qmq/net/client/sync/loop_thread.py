"""A thread with an event loop and an asyncio client in it, for the client without asyncio."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from qmq.errors import ConnectionLost
from qmq.format.build import MessageHeader
from qmq.net.client.brokers import Brokers
from qmq.net.client.client import Client, make_parts
from qmq.net.client.options import ClientOptions, Durability, is_flush
from qmq.net.client.producer.accumulator import BATCH_BYTES
from qmq.net.client.producer.batch import MESSAGE_OVERHEAD

T = TypeVar("T")

_Queued = tuple[str, bytes, MessageHeader, bool, str | None]


class ClientThread:
    """A thread with an event loop, and a connected client in it. A fork does not copy it: each process has its own."""

    def __init__(self, options: ClientOptions) -> None:
        self.pid = os.getpid()
        self.parts = make_parts(options)
        self.client = Client(self.parts)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ticket = 0
        self._queued: list[_Queued] = []  # messages of send_nowait that the loop has not taken
        self._queued_bytes = 0
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="qmq-client", daemon=True)
        self._thread.start()
        try:
            self.run(self.client.__aenter__(), lambda _: self.parts.brokers.close(ConnectionLost("given up")))
        except BaseException:
            self._stop()
            raise

    def __del__(self) -> None:
        """Close the client and end the thread of a program that has dropped them; else both would stay for ever."""
        if self.pid == os.getpid() and not sys.is_finalizing():
            self.call_soon(partial(_leave, self._loop, self.parts.brokers))

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Run a coroutine in the loop and return its result; an interrupt cancels it. If it has ended just then, *undo*
        is called in the loop with its result, which would be lost otherwise.
        """
        results: list[T] = []

        async def noted() -> T:
            result = await coroutine
            results.append(result)
            return result

        def undone() -> None:
            assert undo is not None
            for result in results:
                undo(result)

        future = asyncio.run_coroutine_threadsafe(coroutine if undo is None else noted(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            if undo is not None:
                self._loop.call_soon_threadsafe(undone)  # after the cancellation, so the coroutine has ended
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Call *function* in the loop, and wait until it has returned; do nothing once the client is closed."""
        if threading.current_thread() is self._thread:
            function()
            return

        async def called() -> None:
            function()

        with suppress(RuntimeError):
            self.run(called())

    def call_soon(self, function: Callable[[], object]) -> None:
        """[any thread, also from a signal's handler] Have the loop call *function*; not once the client is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def queue(
        self, subject: str, body: bytes, header: MessageHeader, durability: Durability | None, unique: str | None = None
    ) -> int:
        """Do as Client.send_nowait. The loop is woken once for all messages that it has not taken yet."""
        flush = self.parts.options.flush if durability is None else is_flush(durability)
        size = len(body) + len(header.packed) + MESSAGE_OVERHEAD
        with self._lock:
            self.parts.brokers.ready()
            if unique is not None:
                self.parts.accumulator.check_unique()
            self.parts.accumulator.check_nowait(subject, len(body), len(header.packed), self._queued_bytes)
            self._ticket += 1
            ticket = self._ticket
            self._queued.append((subject, body, header, flush, unique))
            self._queued_bytes += size
            if len(self._queued) == 1:
                self._loop.call_soon_threadsafe(self._take_queued)
        return ticket

    def _take_queued(self) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
            self._queued_bytes = 0
            # The lock keeps each message in one of the two counts of queued bytes.
            now, accumulator = self._loop.time(), self.parts.accumulator
            for subject, body, header, flush, unique in queued:
                if unique is not None or not accumulator.append_nowait(subject, body, header, flush):
                    accumulator.add_nowait(subject, body, header, flush, now, unique)
        self.parts.brokers.want_turn()

    def drain(self) -> None:
        """Do as Client.drain."""
        if self._queued_bytes > BATCH_BYTES or self.parts.accumulator.is_crowded(self._queued_bytes):
            self.run(self.client.drain())

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client, as at the end of its block, and end the thread."""
        try:
            self.run(self.client.__aexit__(kind, error, traceback))
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end its tasks; in this thread no interrupt comes in between."""
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
    finally:
        loop.close()


def _leave(loop: asyncio.AbstractEventLoop, brokers: Brokers) -> None:
    """Send what a client that was dropped has, then stop the loop."""
    task = loop.create_task(brokers.close_left_open())
    task.add_done_callback(lambda _: loop.stop())


async def _end_tasks() -> None:
    """Cancel the tasks of the loop, and let transports close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)

"""A client of asyncio that lives in a thread of its own: what the client without asyncio is made of."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from qmq.errors import ConnectionLost
from qmq.format.build import MessageHeader
from qmq.net.client.client import Client, make_parts
from qmq.net.client.options import ClientOptions, Durability, is_flush
from qmq.net.client.producer.accumulator import BATCH_BYTES
from qmq.net.client.producer.batch import MESSAGE_OVERHEAD

T = TypeVar("T")

_Queued = tuple[str, bytes, MessageHeader, bool]


class ClientThread:
    """A thread with a loop, and a connected client in it: what a process has, and its forks do not."""

    def __init__(self, options: ClientOptions) -> None:
        self.pid = os.getpid()
        self.parts = make_parts(options)
        self.client = Client(self.parts)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ticket = 0
        self._queued: list[_Queued] = []  # by send_nowait, for the loop to take
        self._queued_bytes = 0
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="qmq-client", daemon=True)
        self._thread.start()
        try:
            self.run(self.client.__aenter__(), lambda _: self.parts.brokers.close(ConnectionLost("given up")))
        except BaseException:
            self._stop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None = None) -> T:
        """Run it in the loop and wait; an interrupt of the wait cancels it. *undo* is called in the loop with what it
        returned when it was through just then, so that nobody else gets that.
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
                self._loop.call_soon_threadsafe(undone)  # behind the cancellation: it is through, or never will be
            raise

    def queue(self, subject: str, body: bytes, header: MessageHeader, durability: Durability | None) -> int:
        """As Client.send_nowait. The loop is woken once for all messages that it has not taken yet."""
        flush = self.parts.options.flush if durability is None else is_flush(durability)
        size = len(body) + len(header.packed) + MESSAGE_OVERHEAD
        with self._lock:
            self.parts.brokers.ready()
            self.parts.accumulator.check_nowait(subject, len(body), len(header.packed), self._queued_bytes)
            self._ticket += 1
            ticket = self._ticket
            self._queued.append((subject, body, header, flush))
            self._queued_bytes += size
            if len(self._queued) == 1:
                self._loop.call_soon_threadsafe(self._take_queued)
        return ticket

    def _take_queued(self) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
            self._queued_bytes = 0
            # Under the lock, so that no message is in neither of the two counts.
            now = self._loop.time()
            for message in queued:
                self.parts.accumulator.add_nowait(*message, now)
        self.parts.brokers.want_turn()

    def drain(self) -> None:
        """As Client.drain."""
        if self._queued_bytes > BATCH_BYTES or self.parts.accumulator.is_crowded(self._queued_bytes):
            self.run(self.client.drain())

    def close(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the client, as at the end of its block, and end the thread."""
        try:
            self.run(self.client.__aexit__(kind, error, traceback))
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run it until it is stopped, then end what is in it: here, where no interrupt comes between."""
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Cancel what still runs in the loop, and let transports close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)

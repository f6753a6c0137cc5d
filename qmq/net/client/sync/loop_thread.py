"""A thread with an event loop and an asyncio client in it, for the client without asyncio."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from _thread import allocate_lock
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

from qmq.errors import ConnectionLost, UsageError
from qmq.format.build import MessageHeader
from qmq.net.client.brokers import Brokers
from qmq.net.client.client import Client, make_parts
from qmq.net.client.options import ClientOptions, Durability, is_flush
from qmq.net.client.producer.accumulator import BATCH_BYTES
from qmq.net.client.producer.batch import MESSAGE_OVERHEAD

T = TypeVar("T")

_Queued = tuple[str, bytes, MessageHeader, bool, str | None]


class _Call(Generic[T]):
    """A coroutine that the loop runs for another thread, which waits at the gate until it has ended.

    The gate is a plain lock, since a future of concurrent.futures costs more than many calls.
    """

    __slots__ = ("_coroutine", "_task", "gate", "loop")

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.gate = allocate_lock()
        self.gate.acquire()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """[loop] Run the coroutine."""
        self._task = task = self.loop.create_task(self._coroutine)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self.gate.release()

    def give_up(self, undo: Callable[[T], object] | None) -> None:
        """[loop] Cancel the coroutine, as nobody waits for it; call *undo* with its result if it ends with one."""
        task = self._task
        if task is None:  # it comes behind ``begin``, unless the loop has ended
            return
        task.cancel()
        task.add_done_callback(partial(_undo, undo))

    def close(self) -> None:
        """[thread of the loop] End the wait, as the loop has ended before the coroutine."""
        if self._task is None:
            self._coroutine.close()
        if self._task is None or not self._task.done():
            self.gate.release()

    @property
    def has_failed(self) -> bool:
        """Whether the coroutine has ended without a result. One that has not begun may do so."""
        task = self._task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    def result(self) -> T:
        """Return the result of a coroutine that has ended. Raises its error."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            raise ConnectionLost("the client was closed by another thread during this call")
        return self._task.result()


def _undo(undo: Callable[[T], object] | None, task: asyncio.Task[T]) -> None:
    if not task.cancelled() and task.exception() is None and undo is not None:
        undo(task.result())


class ClientThread:
    """A thread with an event loop, and a connected client in it. A fork does not copy it: each process has its own."""

    def __init__(self, options: ClientOptions) -> None:
        self.pid = os.getpid()
        self.parts = make_parts(options)
        self.client = Client(self.parts)
        self._loop = _new_loop()
        self._calls = set[_Call[Any]]()  # those that wait
        self._lock = threading.Lock()
        self._ticket = 0
        self._queued: list[_Queued] = []  # messages of send_nowait that the loop has not taken
        self._queued_bytes = 0
        self._thread = threading.Thread(target=_run, args=(self._loop, self._calls), name="qmq-client", daemon=True)
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
        call = _Call(coroutine, self._loop)
        if not self._begin(call):
            raise UsageError("the client is closed; call connect_sync for another")
        try:
            call.gate.acquire()
            return call.result()
        except BaseException:
            if not call.has_failed:  # an interrupt, maybe when it had just ended
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(call.give_up, undo)
            raise
        finally:
            self._calls.discard(call)

    def _begin(self, call: _Call[Any]) -> bool:
        """Have the loop begin a call; return False once it is closed."""
        self._calls.add(call)
        try:
            self._loop.call_soon_threadsafe(call.begin)
        except RuntimeError:
            self._calls.discard(call)
            call.close()
            return False
        return True

    def call(self, function: Callable[[], object]) -> None:
        """Call *function* in the loop, and wait until it has returned; do nothing once the client is closed."""
        if threading.current_thread() is self._thread:
            function()
            return

        async def called() -> None:
            function()

        call = _Call(called(), self._loop)
        if self._begin(call):
            call.gate.acquire()
            self._calls.discard(call)
            call.result()

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


def check_threads() -> None:
    """Raise UsageError where gevent has replaced threads: the client's own would never run."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise UsageError(
            "gevent has replaced threads (monkey.patch_all), and this client needs one: begin the program with "
            "monkey.patch_all(thread=False), and call what waits in a thread, for instance "
            "gevent.get_hub().threadpool.apply(consumer.pull, (100,))"
        )


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop, where it is installed: nobody else uses this loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run(loop: asyncio.AbstractEventLoop, calls: set[_Call[Any]]) -> None:
    """Run the loop until it is stopped, then end its tasks; in this thread no interrupt comes in between."""
    try:
        loop.run_forever()
        loop.run_until_complete(_end_tasks())
    finally:
        loop.close()
        for call in list(calls):  # they came too late
            call.close()


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

"""Work that waits for a disk or a name server, done in a thread beside the event loop, and work that never ends by an
unexpected error.

Each call has a thread of its own: the default executor of the loop is the program's, which may fill it for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from qmq.errors import QmqError
from qmq.net.client.backoff import Backoff

T = TypeVar("T")

log = logging.getLogger("qmq.client")

#: While a task keeps failing, its traceback is logged once in so many seconds.
_LOG_EVERY: Final = 30.0


async def in_thread(call: Callable[[], T], *, daemon: bool = False) -> T:
    """Return the result of *call* in a thread of its own. Raises what *call* raises, and RuntimeError if the system has
    no more threads. The end of the program waits for the thread, unless it is a *daemon*.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not future.done():
            settled()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            raised = error
            settled: Callable[[], None] = lambda: future.set_exception(raised)  # noqa: E731
        else:
            settled = lambda: future.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=work, name="qmq-work", daemon=daemon).start()
    return await future


async def going_on(work: Callable[[], Awaitable[T]], shown: str) -> T:
    """Return the result of *work*; after an unexpected error log it, and call *work* again. Raises QmqError."""
    backoff, logged_at = Backoff(), -_LOG_EVERY
    loop = asyncio.get_running_loop()
    while True:
        try:
            return await work()
        except QmqError:
            raise
        except Exception:
            if loop.time() >= logged_at + _LOG_EVERY:
                logged_at = loop.time()
                log.exception("%s failed unexpectedly; trying again", shown)
        await asyncio.sleep(backoff.next_delay())


async def taken_in_thread(take: Callable[[], T], give_back: Callable[[T], object]) -> T:
    """Call *take* in a thread and return its result, which holds a file or lock open. Raises what *take* raises.

    If this is cancelled, *give_back* gets the result: in the thread if *take* still runs, as the loop may end before.
    """
    lock = threading.Lock()
    taken: list[T] = []
    is_wanted = True

    def work() -> T:
        thing = take()
        with lock:
            if is_wanted:
                taken.append(thing)
                return thing
        give_back(thing)
        return thing

    try:
        return await in_thread(work)
    except asyncio.CancelledError:
        with lock:
            is_wanted = False
        for thing in taken:
            give_back(thing)
        raise

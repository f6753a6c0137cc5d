"""Work that waits for a disk, done in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


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
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        with lock:
            is_wanted = False
        for thing in taken:
            give_back(thing)
        raise

"""What waits for a disk, done in a thread beside the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def taken_in_thread(take: Callable[[], T], give_back: Callable[[T], object]) -> T:
    """What *take* returns, which holds something open. Who is cancelled meanwhile has it given back, in the thread
    where that is still at work: the loop may have ended before it is through.

    Raises what *take* raises.
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

"""What waits for a disk, done in a thread beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def taken_in_thread(take: Callable[[], T], give_back: Callable[[T], object]) -> T:
    """What *take* returns, which holds something open. Who is cancelled meanwhile has it given back.

    Raises what *take* raises.
    """
    taking = asyncio.ensure_future(asyncio.to_thread(take))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(lambda done: _give_back(done, give_back))
        raise


def _give_back(done: asyncio.Future[T], give_back: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        give_back(done.result())

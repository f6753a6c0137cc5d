"""Cancels a call at each point where it waits, one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from functools import partial
from typing import Any


class CancelledAt:
    """Awaits *call*, and cancels the awaiting task when it waits for the *number*-th time (from 1).

    ``waits`` counts the waits so far; while it is below *number*, the call was not cancelled.
    """

    def __init__(self, call: Awaitable[Any], number: int) -> None:
        self._call = call
        self._number = number
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._call.__await__()
        task = asyncio.current_task()
        assert task is not None
        step = partial(next, steps)
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._number:
                task.cancel()
            try:
                yield waited_for
                step = partial(next, steps)
            except BaseException as error:
                step = partial(steps.throw, error)


async def run(call: CancelledAt) -> bool:
    """Run it in a task of its own; return whether it was cancelled."""

    async def awaited() -> None:
        await call

    task = asyncio.ensure_future(awaited())
    await asyncio.wait({task})
    if task.cancelled():
        return True
    task.result()
    return False


async def run_turns(call: Awaitable[Any], turns: int, cancels: int = 1) -> bool:
    """Run it in a task of its own, which is cancelled after *turns* turns of the loop, up to *cancels* times in each.

    Returns whether it was cancelled.
    """

    async def awaited() -> None:
        await call

    task = asyncio.ensure_future(awaited())
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({task})
    if task.cancelled():
        return True
    task.result()
    return False

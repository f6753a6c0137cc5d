"""Runs work in pieces (broker/ports/work.py) of the daemon itself, a part in each turn of the loop."""

from __future__ import annotations

import asyncio

from qmq.broker.ports.work import TURN_WORK, T, Work


async def in_turns(work: Work[T]) -> T:
    """Do a task, and let others run after each turn's part of it; return its result."""
    done = 0
    while True:
        try:
            done += next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if done >= TURN_WORK:
            done = 0
            await asyncio.sleep(0)

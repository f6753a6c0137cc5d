"""A load generator: `python -m qmq.bench.worker MODULE.FUNCTION OPTIONS`, started by qmq.bench.processes.

The function gets ``gate`` and the options (JSON). Its work before it calls the gate is not measured: the gate tells the
parent that everything is prepared, and returns when the parent allows it. The result of the function goes to the
parent.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

Gate = Callable[..., None]


def gate(**prepared: object) -> None:
    """Tell the parent that everything is prepared, with values for it, and wait for its line."""
    print(json.dumps(prepared), flush=True)
    gc.collect()
    gc.freeze()
    if not sys.stdin.readline():
        raise SystemExit("the bench is gone")


def run(job: str, options: dict[str, Any]) -> dict[str, Any]:
    """Call the function that *job* names, in an event loop (uvloop) if it is a coroutine function."""
    module, _, name = job.partition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"qmq.bench.{module}"), name)
    if inspect.iscoroutinefunction(function):
        work: Callable[..., Awaitable[dict[str, Any]]] = function
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_awaited(work(gate, **options)))
    result: dict[str, Any] = function(gate, **options)
    return result


async def _awaited(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await work


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))), flush=True)

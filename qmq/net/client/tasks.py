"""The tasks of the client. None begins within the call that makes it, whatever task factory the loop has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

#: Whether the tasks of a factory begin at once, as those of ``asyncio.eager_task_factory`` do.
_eager = WeakKeyDictionary[Callable[..., Any], bool]()


def begin_task(coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, name: str) -> asyncio.Task[T]:
    """Run a coroutine as a task that begins in the next turn of the loop: until then the caller can note the task.

    Raises RuntimeError if the loop is closed, and in asyncio's debug mode in another thread.
    """
    factory = loop.get_task_factory()
    if factory is not None and _is_eager(factory, loop):
        return asyncio.Task(coroutine, loop=loop, name=name)
    return loop.create_task(coroutine, name=name)


def _is_eager(factory: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a task of the loop's factory begins at once, by making one."""
    is_eager = _eager.get(factory)
    if is_eager is None:
        is_eager = loop.create_task(_nothing()).done()
        with suppress(TypeError):  # nothing can refer to it weakly
            _eager[factory] = is_eager
    return is_eager


async def _nothing() -> None:
    """End at once."""

"""Processes of a simulated world: event loops that share one virtual clock, one at a time, in an order from a seed.

Everything in a process is what ships: its tasks, timers and callbacks run in a loop of asyncio whose time is a number.
A process ends like one that is killed: from one operation to the next nothing of it runs any more.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import events
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

#: The wall clock at the beginning of the world, in microseconds.
START_US: Final = 1_700_000_000_000_000
#: What a thread takes at most (seconds) until the loop hears of its result.
_THREAD_S: Final = 0.003
#: How long (seconds) a turn of a loop takes; processes that take so many without a pause go round in a circle.
_TURN_S: Final = 1e-6
_MOST_TURNS: Final = 5_000
#: No coroutine is in so many blocks that wait when they are left.
_MOST_BLOCKS: Final = 100


class Killed(KeyboardInterrupt):
    """The process ends here. Nothing catches it: it leaves the task and the loop's turn that it is raised in."""


class _Task(asyncio.Task[Any]):
    """A task with a place of its own in every set, so that a history can be run again."""

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: Process, **options: Any) -> None:
        self._number = loop.world.number()
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class Process(asyncio.BaseEventLoop):
    """One process; *name* says whose."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self.set_debug(False)
        self.world = world
        self.name = name
        self.is_killed = False
        #: Until then it does nothing, as a process that is stopped.
        self.paused_until = 0.0
        #: Called when it is killed, or has come to its end.
        self.at_end: list[Callable[[], None]] = []
        self.main: asyncio.Task[Any] | None = None
        self._selector: Any = self
        self._clock_resolution = 1e-7
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=self, **options))
        world.processes.append(self)

    # --- as asyncio wants it -----------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the world began."""
        return self.world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Nothing comes from outside."""
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """There is nothing to be woken from."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """What a thread does, at once; the loop hears of it a little later."""
        future = self.create_future()
        try:
            call, outcome = future.set_result, func(*args)
        except Exception as error:
            call, outcome = future.set_exception, error
        self.call_later(self.world.chance.random() * _THREAD_S, lambda: None if future.done() else call(outcome))
        return future

    async def create_connection(self, factory: Callable[[], Any], host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        """To whoever listens on that port."""
        return await self.world.connect(self, factory, port)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing may fail without anybody's knowing: the history does then."""
        error = context.get("exception")
        if error is not None and not self.is_killed:
            self.world.failures.append(error)

    # --- in the world ------------------------------------------------------------------------------------------------

    def run_main(self, main: Coroutine[Any, Any, None]) -> None:
        """Begin with this; the process ends with it."""
        self.main = self.create_task(main)
        self.main.add_done_callback(lambda task: self._ended(task))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self.is_killed:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.world.failures.append(error)
            self.kill()

    def kill(self) -> None:
        """It is no more."""
        if self.is_killed:
            return
        self.is_killed = True
        self.world.processes.remove(self)
        self.world.graves.append(self)
        for call in self.at_end:
            call()

    def due_at(self) -> float | None:
        """When it has something to do; None: never by itself."""
        if self._ready:
            return self.paused_until
        return max(self._scheduled[0]._when, self.paused_until) if self._scheduled else None

    def turn(self) -> None:
        """One turn of its loop."""
        events._set_running_loop(self)
        try:
            self._run_once()
        except Killed:
            self.kill()
        finally:
            events._set_running_loop(None)

    def bury(self) -> None:
        """Nothing of it is looked at any more, and nothing is left to whoever collects garbage later."""
        ended: set[asyncio.Task[Any]] = set()
        events._set_running_loop(self)  # some begin others when they are left
        try:
            while left := asyncio.all_tasks(self) - ended:
                for task in left:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    _end(task.get_coro())
                ended |= left
        finally:
            events._set_running_loop(None)
        self._ready.clear()
        self._scheduled.clear()
        self._closed = True


def _end(coro: Any) -> None:
    """Have it leave what it is in, block by block; where one waits for what no longer comes, it is left as well."""
    for _ in range(_MOST_BLOCKS):
        if coro.cr_frame is None:
            return
        with suppress(BaseException):
            coro.close()
    raise AssertionError(f"{coro} does not end")


class World:
    """Time, processes, and who listens where."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1.0
        self.processes: list[Process] = []
        self.graves: list[Process] = []
        #: What failed in a process without anybody's knowing.
        self.failures: list[BaseException] = []
        self.current: Process | None = None
        self.connect: Callable[[Process, Callable[[], Any], int], Coroutine[Any, Any, Any]]
        self._counted = self._turns = 0

    def number(self) -> int:
        """Another number each time."""
        self._counted += 1
        return self._counted

    def busy(self) -> list[str]:
        """Who has something to do now."""
        return [process.name for process in self.processes if (process.due_at() or self.now) <= self.now]

    def step(self) -> None:
        """One turn of one process; time passes until one has something to do."""
        dues = [(process, process.due_at()) for process in self.processes]
        first = min(due for _, due in dues if due is not None)
        self._turns = self._turns + 1 if first <= self.now else 0
        assert self._turns < _MOST_TURNS, f"round in a circle: {self.busy()}"
        self.now = max(self.now, first) + _TURN_S
        ready = [process for process, due in dues if due is not None and due <= self.now]
        self.current = ready[0] if len(ready) == 1 else self.chance.choice(ready)
        self.current.turn()
        self.current = None
        if self.failures:
            raise self.failures[0]

    def close(self) -> None:
        """It is over."""
        for process in [*self.processes, *self.graves]:
            process.is_killed = True
            process.bury()

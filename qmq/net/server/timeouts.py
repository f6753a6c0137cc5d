"""Timeouts of connections, all equally long: one timer for all, and a few connections ended at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

#: Ten thousand that expire together are ended within five seconds, for a tenth of the loop's time.
_AT_ONCE: Final = 4
_PAUSE_S: Final = 0.002


class ConnectionTimeouts(Generic[T]):
    """Calls *over* for each connection that was added *wait_s* seconds ago and not discarded since."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_s: float, over: Callable[[T], None]) -> None:
        self._loop = loop
        self._wait_s = wait_s
        self._over = over
        self._due: dict[T, float] = {}  # in the order of time
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: T) -> None:
        """Start the timeout of *connection*."""
        self._due[connection] = self._loop.time() + self._wait_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._fire)

    def discard(self, connection: T) -> None:
        """Cancel the timeout of *connection*."""
        self._due.pop(connection, None)

    def close(self) -> None:
        """Cancel all timeouts."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.clear()

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for _ in range(_AT_ONCE):
            first = next(iter(self._due.items()), None)
            if first is None:
                return
            connection, due = first
            if due > now:
                break
            del self._due[connection]
            self._over(connection)
        if self._due:
            wait_s = next(iter(self._due.values())) - now
            self._timer = self._loop.call_later(max(wait_s, _PAUSE_S), self._fire)

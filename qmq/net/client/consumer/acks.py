"""Acknowledgements of a program's threads, brought to the loop many at a time: each call into a loop costs far more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmq.net.client.consumer.in_flight import Holding


class Crossing:
    """Of one consumer."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Holding, int]] = deque()
        self._due = False  # the loop is about to take them

    def ack(
        self, holding: Holding, sequence: int, call_soon_threadsafe: Callable[[Callable[[], None]], object]
    ) -> None:
        """[any thread] A message is handled. Raises RuntimeError when the loop is closed."""
        self._waiting.append((holding, sequence))
        if self._due:
            return
        self._due = True
        try:
            call_soon_threadsafe(self._take)
        except RuntimeError:
            self._due = False
            raise

    def _take(self) -> None:
        """Acknowledge what waits; what comes one after another in one go."""
        self._due = False  # before it looks: who comes now may be too late for this time, and calls again
        waiting = self._waiting
        current: Holding | None = None
        start = end = 0
        for _ in range(len(waiting)):
            holding, sequence = waiting.popleft()
            if sequence != end or holding is not current:
                if current is not None:
                    current.ack(start, end)
                current, start = holding, sequence
            end = sequence + 1
        if current is not None:
            current.ack(start, end)

"""Bounds how long the garbage collector holds the loop.

A full collection visits every object that may be part of a cycle: 250 ms for the state of 10,000 groups. What is alive
after a long one is most likely state, which goes by its counts of references and needs no collector; so it is frozen,
and never visited again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Final

#: A full collection that takes longer is the last one that visits what it leaves.
LONG_S: Final = 0.002
#: A full collection may come after so many of the middle generation: about 10,000 new objects later.
_MIDDLE: Final = 1
_FULL: Final = 2


class CollectorBound:
    """Freezes what a long collection leaves; ``heard`` is a callback of ``gc``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, freeze: Callable[[], None] = gc.freeze) -> None:
        self._clock = clock
        self._freeze = freeze
        self._began = 0.0

    def begin(self) -> None:
        """Collect and freeze what there is, and bound collections from now on."""
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _MIDDLE)
        gc.collect()
        self._freeze()
        gc.collect()  # the next full one comes once a quarter as many objects are new as this one has visited
        if self.heard not in gc.callbacks:
            gc.callbacks.append(self.heard)

    def end(self) -> None:
        """Bound collections no more."""
        if self.heard in gc.callbacks:
            gc.callbacks.remove(self.heard)

    def heard(self, phase: str, collection: dict[str, Any]) -> None:
        """Time full collections, and freeze what a long one leaves."""
        if collection["generation"] != _FULL:
            return
        if phase == "start":
            self._began = self._clock()
        elif self._clock() - self._began > LONG_S:
            self._freeze()

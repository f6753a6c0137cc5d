"""Limit the time of any wait, and keep signals from interrupting a block."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from qmq.bench.values import BenchFailed

_INTERRUPTING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise BenchFailed in the block if it takes longer. For the main thread only: an alarm interrupts any wait."""

    def late(*_: object) -> None:
        raise BenchFailed(f"it took more than {seconds:,.0f} s, and was ended")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals that would raise in the block until its end: a process that was just started would be left running.
    For the main thread only.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            os.kill(os.getpid(), late)

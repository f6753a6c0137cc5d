"""How long something may take, whatever it waits for; and what no signal may interrupt."""

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
    """Raises BenchFailed in the block when it takes longer. For the main thread alone: an alarm ends what it waits for,
    be it a worker, a program or a server."""

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
    """Signals that would raise in the block do so behind it: a process that was started and is not known yet would be
    left running. For the main thread alone."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            os.kill(os.getpid(), late)

"""Handle signals that arrive while a command is being loaded or a broker starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process silently in this block, where nothing is open that would have to be
    closed.

    A signal that the parent process has had ignored stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    changed = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for number in changed:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


@contextmanager
def noting_hangups() -> Iterator[Callable[[], bool]]:
    """Keep SIGHUP from ending the process in this block; yields a function that returns whether one has arrived."""
    came = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: came
        return
    before = signal.signal(signal.SIGHUP, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGHUP, before)

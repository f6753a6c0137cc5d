"""Signals that come while a command is still being loaded, or a broker is starting."""

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
    """Let either signal end the process meanwhile, without a word: nothing is open that would have to be closed.

    One that is ignored stays ignored, as whoever started the process wanted.
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
    """Have SIGHUP not end the process meanwhile; gives a function that says whether one has come."""
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

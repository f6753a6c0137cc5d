"""Handle signals that arrive while a command is being loaded or a broker starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)
_are_held = False


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process silently in this block, where nothing is open that would have to be
    closed.

    A signal that the parent process has had ignored stays ignored. The system does not end the first process of a
    container by a signal that has no handler; here it has one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    changed = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for number in changed:
        signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def end_first_process() -> None:
    """Have SIGTERM end the first process of a container from now on, as it ends every other one."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def hold_hangups() -> None:
    """Block SIGHUP in this thread until ``deliver_hangups``, while nobody knows whether the command is a broker."""
    global _are_held
    _are_held = signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def deliver_hangups() -> None:
    """Deliver a SIGHUP that ``hold_hangups`` holds back, and all later ones."""
    global _are_held
    if _are_held:
        _are_held = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


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
    deliver_hangups()
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGHUP, before)

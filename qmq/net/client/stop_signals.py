"""SIGTERM and SIGINT while handlers run: the first asks them to stop, the second cuts them off."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

#: The functions to call at a signal, and the handlers that the signals had before. Only the main thread changes them.
_calls: list[Callable[[], object]] = []
_before: dict[int, Any] = {}


@contextmanager
def calling_at_signals(call: Callable[[], object]) -> Iterator[None]:
    """Call *call* at each SIGTERM and SIGINT during the block; other handlers of the program are called after it.

    *call* runs in the main thread between two instructions, so it may only schedule work. Signals that are ignored stay
    ignored. Does nothing outside of the main thread, as only the main thread gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _calls:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN and before is not None:  # None: not set from Python, so it is not ours
                _before[number] = before
                signal.signal(number, _came)
    _calls.append(call)
    try:
        yield
    finally:
        _calls.remove(call)
        if not _calls:
            for installed, before in _before.items():
                if signal.getsignal(installed) is _came:
                    signal.signal(installed, before)
            _before.clear()


def _came(number: int, frame: FrameType | None) -> None:
    for call in tuple(_calls):
        call()
    before = _before.get(number)
    if callable(before) and before is not signal.default_int_handler and not _cancels_main_task(before):
        before(number, frame)


def _cancels_main_task(handler: Any) -> bool:
    """Whether *handler* is that of ``asyncio.run``, which would cancel the program instead of stopping it."""
    return isinstance(getattr(getattr(handler, "func", None), "__self__", None), asyncio.Runner)

"""Calls that end in time, though what they call may not."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class NoAnswer(Exception):
    """A call was given up; the same object makes no other."""


class BoundedCalls:
    """Makes calls one after another in a thread of its own, and waits for each no longer than *seconds*."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: _Calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given_up = False
        weakref.finalize(self, self._calls.put, None)

    def __call__(self, function: Callable[[], T]) -> T:
        """What *function* returns or raises. Raises NoAnswer when that takes too long."""
        if self._given_up:
            raise NoAnswer
        if self._thread is None:
            # A daemon: nobody waits for one that waits for ever.
            self._thread = threading.Thread(target=_make, args=(self._calls,), daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            if answer.done():  # it was the function's own
                raise
            self._given_up = True
            raise NoAnswer from None


def _make(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        answer, function = call
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
        del call, answer, function  # or the last one would be kept until the next comes

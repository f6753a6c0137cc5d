"""A line on stderr that says how far a command is: on a terminal only, and gone when the command ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

_EVERY_S: Final = 0.1


class Counting:
    """Shows a count and its rate, as "12,345 sent, 4,000/s"."""

    def __init__(self, what: str, *, shown: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._started = self._next = clock()
        self._live: Live | None = None
        if shown if shown is not None else sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True, force_terminal=True), transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, count: int) -> None:
        """Show a new count, unless the last one is too fresh."""
        if self._live is None:
            return
        now = self._clock()
        if now >= self._next:
            self._next = now + _EVERY_S
            self._live.update(Text(self.line(count, now)), refresh=True)

    def line(self, count: int, now: float) -> str:
        """What is shown for *count* at that time."""
        rate = count / max(now - self._started, _EVERY_S)
        return f"{count:,} {self._what}, {rate:,.0f}/s"

"""Show on stderr how far a command is: only on a terminal, and removed when the command ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_EVERY_S: Final = 0.1


class Counting:
    """Shows a count and its rate, such as "12,345 sent, 4,000/s"."""

    def __init__(self, what: str, *, shown: bool | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._started = self._next = clock()
        self._live: Live | None = None
        if shown if shown is not None else sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

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
        """Show a new count, at most once every 0.1 s."""
        if self._live is None:
            return
        now = self._clock()
        if now >= self._next:
            from rich.text import Text

            self._next = now + _EVERY_S
            self._live.update(Text(self.line(count, now)), refresh=True)

    def line(self, count: int, now: float) -> str:
        """Return the line for *count* at the time *now*."""
        rate = count / max(now - self._started, _EVERY_S)
        return f"{count:,} {self._what}, {rate:,.0f}/s"


@contextmanager
def reading_bar(console: Console | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar with bytes, rate and time left while files are read.

    Yields a function that takes the bytes read so far and in all; None if stderr is no terminal.
    """
    if not (sys.stderr.isatty() if console is None else console.is_terminal):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

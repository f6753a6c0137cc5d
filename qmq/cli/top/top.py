"""``qmq top``: rates, backlogs and their reasons, group by group, refreshed on the terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from qmq import connect
from qmq.cli.common.arguments import Seconds
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.listing import end_if_incomplete
from qmq.net.client.address import parse_url

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from qmq.cli.top.screen import View
    from qmq.console.watch import Watch

#: Bytes that may be the Escape key are taken for it when no others follow for so many seconds.
_ESCAPE_SECONDS: Final = 0.1
#: The width of the one look without a terminal.
_PLAIN_WIDTH: Final = 160


@click.command(short_help="Watch rates and backlogs of groups on the terminal.")
@click.option(
    "--interval", metavar="S", type=Seconds(above_0=True), default="1s", show_default=True,
    help="How long until the next look.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Show it once, and end. Without a terminal it always does.")
@admin_options
def top(interval: float, once: bool, server: str, timeout: float) -> None:
    """Show what goes on, again and again: rates, and for each group how many messages wait, since when, how many are in
    flight, in retry and dead, and why they wait. The group with the oldest message comes first.

    Keys sort and filter: ? shows them, q ends. Several brokers are summed; one that is away is named, and comes back by
    itself. The token needs the right to browse everything.

    \b
    Examples:
      qmq top
      qmq top --server qmq://10.0.0.1,qmq://10.0.0.2 --interval 5s
      qmq top --once > now.txt
    """
    run(_watch(server, interval, timeout, once=once or not _is_terminal()))


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


async def _watch(server: str, interval: float, timeout: float, *, once: bool) -> None:
    """Show the brokers of *server*, once or until somebody ends it. Raises QmqError if none of them answers."""
    from rich.console import Console

    from qmq.cli.top.screen import View
    from qmq.console.watch import SLOW_SECONDS, ClientSource, Watch

    async with connect(server, admin_timeout=timeout, name="top") as client:  # wrong addresses and tokens end here
        await client.admin.stats()
    sources = [ClientSource(address.url, str(address), name="top") for address in parse_url(server)]
    async with Watch(sources, fast_seconds=interval, slow_seconds=max(interval, SLOW_SECONDS)) as watch:
        watch.look()
        view = View(await watch.newer_than(0))
        if once:
            view.take(await watch.newer_than(1))  # rates are those between two looks
            _print(view)
            end_if_incomplete(not view.snapshot.away)
            return
        await Top(watch, view, Console()).run()


def _print(view: View) -> None:
    """Print all groups as text; as wide as the terminal, if there is one."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else _PLAIN_WIDTH
    for line in view.whole(width).split("\n", allow_blank=True):
        line.rstrip()
        console.print(line, soft_wrap=True)


class Top:
    """The screen of a terminal: draws the view whenever a snapshot, a key or another size comes."""

    def __init__(self, watch: Watch, view: View, console: Console) -> None:
        from qmq.cli.top.keys import Keys

        self._watch = watch
        self._view = view
        self._console = console
        self._keys = Keys()
        self._stdin = sys.stdin.fileno()
        self._changed = asyncio.Event()
        self._is_suspended = False
        self._escape: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Show the view until a key ends it. However it ends, the terminal is left as it was."""
        from qmq.cli.top.keys import keys_at_once

        loop = asyncio.get_running_loop()
        follow = asyncio.create_task(self._follow(), name="snapshots")
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        try:
            while not self._view.is_done:
                with keys_at_once(self._stdin):
                    loop.add_reader(self._stdin, self._typed)
                    try:
                        with self._live() as live:
                            await self._show(live)
                    finally:
                        loop.remove_reader(self._stdin)
                if self._is_suspended:
                    self._is_suspended = False
                    os.kill(os.getpid(), signal.SIGSTOP)  # goes on when the shell says so
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            loop.remove_signal_handler(signal.SIGTSTP)
            follow.cancel()
            with suppress(asyncio.CancelledError):
                await follow

    def _live(self) -> Live:
        from rich.live import Live

        return Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    async def _show(self, live: Live) -> None:
        while not self._view.is_done and not self._is_suspended:
            self._changed.clear()
            width, height = self._console.size
            live.update(self._view.draw(width, height), refresh=True)
            await self._changed.wait()

    async def _follow(self) -> None:
        """Take each snapshot. While the view is paused the brokers are asked rarely."""
        number = self._view.snapshot.number
        while True:
            if not self._view.is_paused:
                self._watch.look()
            snapshot = await self._watch.newer_than(number)
            number = snapshot.number
            self._view.take(snapshot)
            self._changed.set()

    def _typed(self) -> None:
        from qmq.cli.top.keys import read_some

        data = read_some(self._stdin)
        if not data:  # the terminal is gone
            self._view.is_done = True
        self._press(self._keys.feed(data))
        if self._escape is not None:
            self._escape.cancel()
            self._escape = None
        if self._keys.is_open:
            self._escape = asyncio.get_running_loop().call_later(_ESCAPE_SECONDS, self._flush)

    def _flush(self) -> None:
        self._press(self._keys.flush())

    def _press(self, keys: list[str]) -> None:
        was_paused = self._view.is_paused
        for key in keys:
            self._view.press(key)
        if was_paused and not self._view.is_paused:
            self._view.take(self._watch.latest)
            self._watch.look()
        self._changed.set()

    def _suspend(self) -> None:
        self._is_suspended = True
        self._changed.set()

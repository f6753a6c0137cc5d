"""Show the demo: bars on a terminal, else plain lines, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

from rich.box import HORIZONTALS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.tally import GroupTally
from qmq import GroupInfo

#: Without a terminal: the seconds between two lines.
PLAIN_EVERY = 0.5


class Summary(NamedTuple):
    """The result of one run. Seconds are from the first send to the last acknowledgement."""

    run: int
    sent: int
    sending_seconds: float
    groups: Sequence[GroupTally]
    stored: int
    #: The broker's counts of the groups at the end.
    infos: Sequence[GroupInfo]

    @property
    def left(self) -> int:
        """Return how many messages the broker still has for a group, or has given up."""
        return sum(info.ready + info.in_flight + info.in_retry + info.dead for info in self.infos)

    @property
    def is_right(self) -> bool:
        return not self.left and not any(count for group in self.groups for count in group.verdict.values())


class Screen:
    """Shows the progress of a run. ``refresh`` is called often; entering and leaving starts and stops the bars."""

    #: Invoices that the broker has acknowledged.
    acknowledged = 0

    def __init__(self, console: Console, to_send: int, groups: Sequence[GroupTally]) -> None:
        self._console = console
        self._to_send = to_send
        self._groups = groups
        self._said_at = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._sending = self._progress.add_task("acknowledged", total=to_send)
        self._bars: dict[str, TaskID] = {}
        for group in groups:
            self._bars[group.name] = self._progress.add_task(f"[bold]{group.name}[/]", total=group.expected)
            if len(group.consumers) > 1:
                for consumer in group.consumers:
                    self._bars[consumer] = self._progress.add_task(f"  {consumer}", total=group.expected)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def refresh(self) -> None:
        """Show how far sending and each group are."""
        self._progress.update(self._sending, completed=self.acknowledged)
        for group in self._groups:
            self._progress.update(self._bars[group.name], completed=group.handled - group.left_over)
            for name, consumer in group.consumers.items():
                if name in self._bars:
                    self._progress.update(self._bars[name], completed=consumer.handled)
        if not self._console.is_terminal and time.monotonic() - self._said_at >= PLAIN_EVERY:
            self._said_at = time.monotonic()
            counts = ", ".join(f"{group.name} {group.handled:,} of {group.expected:,}" for group in self._groups)
            self._console.print(
                f"acknowledged {self.acknowledged:,} of {self._to_send:,}; handled: {counts}", soft_wrap=True
            )


def summary_table(summary: Summary) -> Table:
    """Return a table of what was sent and handled, at which rates, and how that compares with the file."""
    table = Table(title=f"Run {summary.run}", title_style="bold", title_justify="left", box=HORIZONTALS)
    table.add_column("", no_wrap=True)
    for column in ("invoices", "/s", "attempts", "missing", "doubled", "changed"):
        table.add_column(column, justify="right")
    rate = _rate(summary.sent, summary.sending_seconds)
    table.add_row("sent, on disk", f"{summary.sent:,}", rate, end_section=True)
    for group in summary.groups:
        verdict = [f"{count:,}" if not count else f"[red]{count:,}[/]" for count in group.verdict.values()]
        rate = _rate(group.handled, group.seconds)
        attempts = f"{group.attempts:,}"
        table.add_row(group.name, f"{group.handled:,}", rate, attempts, *verdict, style="bold")
        for name, consumer in group.consumers.items():
            rate = _rate(consumer.handled, consumer.seconds)
            table.add_row(f"  {name}", f"{consumer.handled:,}", rate, f"{consumer.attempts:,}")
        if group.left_over:
            table.add_row("  of earlier runs", f"{group.left_over:,}")
        table.add_section()
    runs = "1 run" if summary.run == 1 else f"{summary.run:,} runs"
    table.add_row(f"stored, {runs}", f"{summary.stored:,}")
    return table


def account(group: GroupTally, info: GroupInfo) -> str:
    """Return how the attempts of a group ended, and the broker's counts of it."""
    handled = ", ".join(f"{count:,} at attempt {attempt}" for attempt, count in sorted(group.by_attempt.items()))
    again = f" + {group.again:,} again, as a kill came before the acknowledgement" if group.again else ""
    return (
        f"{group.name}: {group.attempts:,} attempts = {group.handled:,} handled ({handled or 'none'}){again} "
        f"+ {group.failed:,} failed + {group.cut_short:,} cut short. The broker says: {info.ready:,} ready, "
        f"{info.in_flight:,} in flight, {info.in_retry:,} in retry, {info.dead:,} dead."
    )


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else ""

"""Run ``make demo``: a broker, real orders, two groups that handle them, and a summary.

python -m examples.demo [--data-dir DIR] [--handling-ms MS]

During the run one consumer is killed in the middle of its work, the broker is killed too, and some orders fail at
first. The data directory stays: the next run continues there. Exits 0 if each group handled exactly the orders of the
file.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

import qmq
from examples.packer import JAM, JAMS_ONE_IN
from examples.processes import SESSION_TIMEOUT_MS, Broker, Worker
from examples.retail import InvoiceMessage, read_invoices
from examples.screen import Screen, Summary, account, summary_table
from examples.tally import GroupTally

RUNS = "demo.runs"
PACKERS = ("packer-1", "packer-2", "packer-3", "packer-4")
#: The consumer that is killed, and does not come back.
DOOMED = "packer-3"
#: How many times slower the last packer is than the others, which do not wait for it.
SLOWER = 4
#: After this time in seconds without progress, messages count as missing.
TURN_TIMEOUT = 40.0


async def send_all(client: qmq.Client, invoices: Sequence[InvoiceMessage], run: int) -> None:
    """Queue every invoice. They are sent in batches, and acknowledged when they are on disk."""
    for invoice in invoices:
        client.send_nowait(invoice.subject, invoice.body, key=invoice.key, properties={"run": str(run)})
        await client.drain()
    await client.flush()


class Stage:
    """One run: its processes, and what they have reported."""

    def __init__(self, console: Console, broker: Broker, run: int, groups: Sequence[GroupTally]) -> None:
        self.console = console
        self.broker = broker
        self.run = run
        self.groups = groups
        self.workers: dict[str, Worker] = {}
        self._listening: list[asyncio.Task[None]] = []
        self._began_at = time.monotonic()

    async def hire(self, group: GroupTally, name: str, handling: float, prefixes: Sequence[str]) -> None:
        """Start a consumer, and follow its reports."""
        worker = self.workers[name] = Worker(name)
        await worker.start(self.broker.url, group.name, self.run, handling, prefixes)
        self._listening.append(asyncio.create_task(self._listen(group, worker)))

    async def _listen(self, group: GroupTally, worker: Worker) -> None:
        async for what, *fields in worker.said():
            group.hear(worker.name, what, fields)

    async def dismiss(self) -> None:
        """Stop all consumers, and read their last reports."""
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await asyncio.gather(*self._listening)

    def tell(self, what: str) -> None:
        """Print what happens, and when."""
        self.console.print(f"{time.monotonic() - self._began_at:5.1f} s  {what}", soft_wrap=True)

    async def spoil(self, client: qmq.Client, group: GroupTally) -> None:
        """Kill a packer when a quarter of the invoices is handled, and the broker when half is."""
        await group.handles(group.expected // 4)
        await self.workers[DOOMED].kill()
        held = sum(one.in_flight for one in await client.admin.consumers(group.name) if one.name == DOOMED)
        self.tell(
            f"kill -9 of {DOOMED} in the middle of its work. It has {held} invoices in flight: after "
            f"{SESSION_TIMEOUT_MS / 1000:g} s of silence the others get them."
        )
        await group.handles(group.expected // 2)
        await self.broker.kill()
        killed_at = time.monotonic()
        self.tell(f"kill -9 of the broker, with {group.handled:,} of {group.expected:,} invoices handled.")
        await self.broker.start()
        self.tell(f"The broker serves again, after {time.monotonic() - killed_at:.1f} s.")

    async def end(self, client: qmq.Client) -> list[qmq.GroupInfo]:
        """Wait until all is handled by our count and by the broker's; return what the broker says at the end."""
        while True:
            infos = [info for group in self.groups for info in await client.admin.groups(group.name)]
            left = sum(info.ready + info.in_flight + info.in_retry for info in infos)
            if not left and all(group.complete for group in self.groups):
                return infos
            if time.monotonic() - max(group.heard_at for group in self.groups) > TURN_TIMEOUT:
                return infos
            await asyncio.sleep(0.1)


@asynccontextmanager
async def stage(data_dir: Path, console: Console, groups: Sequence[GroupTally]) -> AsyncIterator[Stage]:
    """Yield a broker and a run of it; at the end all processes have been stopped."""
    broker = Broker(data_dir)
    try:
        await broker.start()
        async with qmq.connect(broker.url) as client:
            # One message for each run: its sequence is the number of the run in this data directory.
            receipt = await client.send(RUNS, b"started")
            assert receipt.sequence is not None  # only a delayed message has no sequence yet
            run = receipt.sequence + 1
        shown = Stage(console, broker, run, groups)
        try:
            yield shown
        finally:
            await shown.dismiss()
    finally:
        await broker.stop()


async def run_once(data_dir: Path, handling: float, console: Console) -> Summary:
    """Do one run: send every invoice of the file, and have both groups handle it."""
    invoices = list(read_invoices())
    cancellations = [invoice for invoice in invoices if invoice.is_cancellation]
    fulfilment = GroupTally("fulfilment", invoices, PACKERS)
    cancel_subjects = sorted({invoice.subject for invoice in cancellations})
    refunds = GroupTally("cancellations", cancellations, ["refunds-1"])
    groups = [fulfilment, refunds]

    async with stage(data_dir, console, groups) as shown, qmq.connect(shown.broker.url) as client:
        console.print(f"A broker serves on {shown.broker.url}; its data lies in {data_dir}.")
        console.print(f"Group fulfilment: {len(PACKERS)} consumers, a process each, share everything below retail.")
        console.print(
            f"Group cancellations: one consumer follows {len(cancel_subjects)} subjects, retail.<country>.cancel"
        )
        paces = [handling * SLOWER if packer == PACKERS[-1] else handling for packer in PACKERS]
        hired = [shown.hire(fulfilment, packer, pace, ["retail."]) for packer, pace in zip(PACKERS, paces, strict=True)]
        await asyncio.gather(*hired, shown.hire(refunds, "refunds-1", 0, cancel_subjects))
        screen = Screen(console, len(invoices), groups)
        with screen:
            ticking = asyncio.create_task(tick(screen))
            spoiling = asyncio.create_task(shown.spoil(client, fulfilment))
            try:
                started_at = time.monotonic()
                await send_all(client, invoices, shown.run)
                seconds = time.monotonic() - started_at
                screen.acknowledged = len(invoices)
                await spoiling
                left = await shown.end(client)
            finally:
                ticking.cancel()
                spoiling.cancel()
            screen.refresh()
        stored = sum([subject.messages async for subject in client.subjects("retail.")])
    return Summary(shown.run, len(invoices), seconds, groups, stored, left)


async def tick(screen: Screen) -> None:
    """Show the progress ten times a second."""
    while True:
        screen.refresh()
        await asyncio.sleep(0.1)


async def demonstrate(data_dir: Path, handling: float, console: Console) -> bool:
    """Do a run and print the result; return True if everything is right. SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    summary = await run_once(data_dir, handling, console)
    console.print()
    console.print(summary_table(summary))
    for group, info in zip(summary.groups, summary.infos, strict=True):
        console.print(account(group, info))
    verdict = "[green]all is right[/]" if summary.is_right else "[red]something is wrong[/]"
    console.print(f"Missing, doubled, changed: compared with the file, invoice by invoice; {verdict}.")
    console.print(
        f"For one invoice in {JAMS_ONE_IN} the handler fails at first; it comes again {JAM} s later, as attempt 2. "
        f"A packer takes {handling * 1000:g} ms an invoice, packer-4 {handling * 1000 * SLOWER:g} ms; "
        "no other waits for it.\n"
    )
    console.print(f"Next: `make demo` continues in {data_dir} with run {summary.run + 1}. Or look at the data:")
    console.print(f"  .venv/bin/qmq serve --data-dir {data_dir} &", soft_wrap=True)
    console.print("  .venv/bin/qmq subjects retail.")
    console.print("  .venv/bin/qmq groups")
    console.print("  .venv/bin/qmq consume retail.france. --solo --start first --count 3")
    return summary.is_right


def milliseconds(text: str) -> float:
    """Parse an argument of 0 to 1,000; raises ValueError for other values."""
    number = float(text)
    if not 0 <= number <= 1_000:
        raise ValueError(text)
    return number


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="A broker, and real orders through it."
    )
    parser.add_argument("--data-dir", type=Path, default=Path("demo-data"), help="the broker's (default: %(default)s)")
    parser.add_argument(
        "--handling-ms", type=milliseconds, default=5.0, help="work for each invoice, to 1,000 (default: %(default)s)"
    )
    arguments = parser.parse_args()
    logging.getLogger("qmq").setLevel(logging.ERROR)  # the lost connection to the killed broker is expected
    console = Console(highlight=False)
    exit_code = 1
    try:
        if asyncio.run(demonstrate(arguments.data_dir, arguments.handling_ms / 1000, console)):
            exit_code = 0
    except* qmq.QmqError as errors:
        console.print(f"[red]demo:[/] {errors.exceptions[0]}")
    except* (KeyboardInterrupt, asyncio.CancelledError):
        exit_code = 130
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

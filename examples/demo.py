"""``make demo``: a broker, real orders through it, two groups that follow them, and what happened.

    python -m examples.demo [--data-dir DIR] [--handling-ms MS]

The broker runs as a child process on its own data directory, which stays: the next run continues there. Exits 0 when
both groups received exactly what the file holds.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rich.console import Console

import qmq
from examples.retail import InvoiceMessage, read_invoices
from examples.screen import Screen, Summary, summary_table
from examples.tally import GroupTally

RUNS = "demo.runs"
READY = "ready on "
START_TIMEOUT = 60.0
#: How long a group may receive nothing before the rest counts as missing.
PATIENCE = 30.0
#: The last packer is this much slower than the others, and nobody waits for it.
SLOWER = 4


@asynccontextmanager
async def broker(data_dir: Path) -> AsyncIterator[str]:
    """Run ``qmq serve`` on *data_dir* and give its URL; on leaving it is asked to stop, and has."""
    command = Path(sys.executable).with_name("qmq")
    arguments = ["serve", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0", "--log-level", "warning"]
    # In a session of its own, Ctrl-C reaches the demo only, which then stops the broker last.
    child = await asyncio.create_subprocess_exec(
        command, *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT):
            line = (await child.stdout.readline()).decode()
        if not line.startswith(READY):
            raise qmq.QmqError("the broker did not start; what it said stands above")
        yield line.removeprefix(READY).split(",")[0].strip()
    finally:
        with suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


async def send_all(client: qmq.Client, invoices: Sequence[InvoiceMessage], run: int) -> None:
    """Queue every invoice; they go out as batches, and come back acknowledged when they are on disk."""
    for invoice in invoices:
        client.send_nowait(invoice.subject, invoice.body, key=invoice.key, properties={"run": str(run)})
        await client.drain()
    await client.flush()


async def follow(url: str, group: GroupTally, name: str, prefixes: Sequence[str], run: int, handling: float) -> None:
    """One consumer, on a connection of its own: takes what comes next, until its group has everything."""
    async with (
        qmq.connect(url) as client,
        client.subscribe(*prefixes, group=group.name, consumer=name) as consumer,
    ):
        complete = False
        # One more pull after the group has everything: what came then would be one too many.
        while not complete and time.monotonic() - group.heard_at < PATIENCE:
            complete = group.complete
            for message in await consumer.pull(max_count=10, timeout=0.2):
                await asyncio.sleep(handling)
                invoice = InvoiceMessage(message.subject, message.key or "", bytes(message.body))
                group.take(name, invoice, this_run=message.properties.get("run") == str(run))


async def run_once(data_dir: Path, handling: float, console: Console) -> Summary:
    """One run: every invoice of the file goes in, and out to both groups."""
    invoices = list(read_invoices())
    cancellations = [invoice for invoice in invoices if invoice.is_cancellation]
    packers = [f"packer-{number}" for number in (1, 2, 3, 4)]
    fulfilment = GroupTally("fulfilment", invoices, packers)
    cancel_subjects = sorted({invoice.subject for invoice in cancellations})
    refunds = GroupTally("cancellations", cancellations, ["refunds-1"])

    async with broker(data_dir) as url, qmq.connect(url) as client:
        console.print(f"A broker serves on {url}; its data lies in {data_dir}.")
        console.print(f"Group fulfilment: {len(packers)} consumers share everything below retail.")
        console.print(
            f"Group cancellations: one consumer follows {len(cancel_subjects)} subjects, retail.<country>.cancel"
        )
        # A message a run: its sequence numbers the runs of this data directory.
        run = (await client.send(RUNS, b"started")).sequence + 1
        screen = Screen(console, len(invoices), [fulfilment, refunds])
        with screen:
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(tick(screen))
                followers = [
                    tasks.create_task(follow(url, refunds, "refunds-1", cancel_subjects, run, 0)),
                    *(
                        tasks.create_task(follow(url, fulfilment, packer, ["retail."], run, pace))
                        for packer, pace in zip(packers, [handling] * 3 + [handling * SLOWER], strict=True)
                    ),
                ]
                started_at = time.monotonic()
                await send_all(client, invoices, run)
                seconds = time.monotonic() - started_at
                screen.acknowledged = len(invoices)
                await asyncio.wait(followers)
                ticking.cancel()
            screen.refresh()
        stored = sum([subject.messages async for subject in client.subjects("retail.")])
    return Summary(run, len(invoices), seconds, [fulfilment, refunds], stored)


async def tick(screen: Screen) -> None:
    """Show how far everything is, ten times a second."""
    while True:
        screen.refresh()
        await asyncio.sleep(0.1)


async def demonstrate(data_dir: Path, handling: float, console: Console) -> bool:
    """Run once and print what happened; True when everything is right. SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    summary = await run_once(data_dir, handling, console)
    console.print()
    console.print(summary_table(summary))
    verdict = "[green]all is right[/]" if summary.is_right else "[red]something is wrong[/]"
    console.print(f"Missing, doubled, changed: against the file, invoice by invoice; {verdict}.")
    work_ms = handling * 1000
    console.print(
        f"A packer takes {work_ms:g} ms an invoice, packer-4 {work_ms * SLOWER:g} ms; no other waits for it.\n"
    )
    console.print(f"Next: `make demo` goes on in {data_dir} with run {summary.run + 1}. Or look at what is there:")
    console.print(f"  .venv/bin/qmq serve --data-dir {data_dir} &", soft_wrap=True)
    console.print("  .venv/bin/qmq subjects retail.")
    console.print("  .venv/bin/qmq consume retail.france. --solo --start first --count 3")
    return summary.is_right


def milliseconds(text: str) -> float:
    """An argument of 0 to 1,000; raises ValueError for another."""
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

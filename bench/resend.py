"""Measure a resend: its time, the broker's processor time and memory, and sends beside it.

`python -m bench.resend --messages 10000000 --groups 2` resends that many messages to two groups. With `--subjects
100000` they lie in as many subjects, so that the resend has as many ranges; with `--retries 100000` so many messages of
the first group are in retry, which the resend looks at and leaves alone. At the end one group takes and acks all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import qmq
from tests.broker_process import BrokerProcess, broker_process

_BATCH: Final = 1_000
_TICK: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def anonymous_mib(pid: int) -> float:
    """Return the RssAnon of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


@contextmanager
def measured(what: str, broker: BrokerProcess) -> Iterator[None]:
    """Print how long it took, with the broker's processor time and memory."""
    began, before = time.perf_counter(), cpu_s(broker.pid)
    yield
    took, used = time.perf_counter() - began, cpu_s(broker.pid) - before
    print(f"{what}: {took:.2f} s, {used:.2f} s of the broker's processor, RssAnon {anonymous_mib(broker.pid):.0f} MiB")


async def send_some(client: qmq.Client, stop: asyncio.Event, pid: int) -> str:
    """Send one message after another until *stop*; return the percentiles of their times."""
    times, most = list[float](), 0.0
    while not stop.is_set():
        began = time.perf_counter()
        await client.send("other.subject", b"x" * 100)
        times.append(time.perf_counter() - began)
        most = max(most, anonymous_mib(pid))
        await asyncio.sleep(0.001)
    times.sort()
    shown = ", ".join(f"{name} {times[min(int(len(times) * at), len(times) - 1)] * 1e3:.2f} ms" for name, at in (
        ("p50", 0.5), ("p99", 0.99), ("most", 1.0)))  # fmt: skip
    return f"{len(times):,} sends beside it: {shown}; RssAnon at most {most:.0f} MiB"


async def fill(client: qmq.Client, messages: int, subjects: int) -> None:
    """Store the messages, subject by subject in turn."""
    body, sent = b"x" * 100, 0
    while sent < messages:
        if subjects == 1:
            calls = [client.send_many("resent.all", [body] * _BATCH) for _ in range(16)]
            await asyncio.gather(*calls)
            sent += 16 * _BATCH
        else:
            for number in range(sent, sent + 16 * _BATCH):
                client.send_nowait(f"resent.{number % subjects}", body)
            await client.drain()
            sent += 16 * _BATCH
    await client.flush()


async def fail_some(client: qmq.Client, group: str, retries: int) -> None:
    """Let so many messages of a group wait in retry."""
    await client.admin.seek(group, "first")
    async with client.subscribe("resent.", group=group, max_unacked=1_000_000) as consumer:
        left = retries
        while left > 0:
            batch = await consumer.pull_batch(min(left, 10_000), timeout=5)
            left -= len(batch)
            batch[::2].ack()
            await batch[1::2].nack(delay=86_400)
        await consumer.flush()
    await client.admin.seek(group, "new")


async def take_all(client: qmq.Client, group: str, expected: int) -> int:
    """Take and ack what was resent to a group; return how much it was."""
    found = 0
    async with client.subscribe("resent.", group=group, max_unacked=1_000_000) as consumer:
        while found < expected:
            batch = await consumer.pull_batch(100_000, timeout=10)
            if not len(batch):
                break
            assert batch[0].replayed
            found += len(batch)
            batch.ack()
        await consumer.flush()
    return found


async def measure(broker: BrokerProcess, options: argparse.Namespace) -> None:
    groups = [f"group-{number}" for number in range(options.groups)]
    async with qmq.connect(broker.url) as client, qmq.connect(broker.url) as other:
        with measured(f"{options.messages:,} messages in {options.subjects:,} subjects sent", broker):
            await fill(client, options.messages, options.subjects)
        for group in groups:  # they begin behind all messages, so they are through with them
            async with client.subscribe("resent.", group=group, start="new", max_unacked=1_000_000):
                pass
        if options.retries:
            with measured(f"{options.retries:,} messages of {groups[0]} handled, half of them in retry", broker):
                await fail_some(client, groups[0], options.retries)
        stop = asyncio.Event()
        sends = asyncio.create_task(send_some(other, stop, broker.pid))
        with measured("nothing else", broker):
            await asyncio.sleep(3)
        stop.set()
        print(" ", await sends)
        for dry in (True, False):
            stop = asyncio.Event()
            sends = asyncio.create_task(send_some(other, stop, broker.pid))
            with measured("a dry run" if dry else "the resend", broker):
                count = await client.admin.resend(prefix="resent.", all_groups=True, dry_run=dry)
            stop.set()
            print(f"  {count:,} messages to {count.groups} groups; {count.retrying:,} left alone in retry")
            print(" ", await sends)
        with measured("one group takes and acks what is its", broker):
            found = await take_all(client, groups[-1], options.messages)
        print(f"  {found:,} messages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--subjects", type=int, default=1)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--retries", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qmq-resend-") as directory, broker_process(Path(directory)) as broker:
        asyncio.run(measure(broker, options))


if __name__ == "__main__":
    main()

"""Measure TLS beside plain connections: ``python -m bench.tls --messages 300000 --rounds 5``.

Two brokers run, one with TLS. Each round measures both, one after the other: `send_many`, `pull_batch` in a group,
single sends, and connects. Beside rates it shows the processor time of broker and client together, which says more on a
busy machine. At the end it shows what an idle connection costs each broker in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import uvloop

import qmq
from bench.resend import anonymous_mib, cpu_s
from tests.broker_process import BrokerProcess, broker_process
from tests.certificates import TlsFilesOfTests

_BATCH: Final = 1_000
_SINGLE: Final = 1_000
_CONNECTS: Final = 100
_IDLE: Final = 500
_BODY: Final = b"x" * 100

Values = dict[str, list[float]]


class Side:
    """One of the two brokers, and what was measured of it, by name."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.found: Values = {}

    def add(self, name: str, value: float) -> None:
        """Keep a value."""
        self.found.setdefault(name, []).append(value)

    async def rate(self, name: str, messages: int, work: Callable[[], Awaitable[object]]) -> None:
        """Measure messages a second, and microseconds of processor time a message."""
        before, began = cpu_s(self.broker.pid) + time.process_time(), time.perf_counter()
        await work()
        took, used = time.perf_counter() - began, cpu_s(self.broker.pid) + time.process_time() - before
        self.add(f"{name}, messages a second", messages / took)
        self.add(f"{name}, us of processors a message", used / messages * 1e6)

    async def round(self, messages: int) -> None:
        """Take one round."""
        subject = f"bench.{secrets.token_hex(4)}"
        bodies = [_BODY] * _BATCH
        async with qmq.connect(self.broker.url, durability="append") as client:

            async def send() -> None:
                for _ in range(messages // (4 * _BATCH)):
                    await asyncio.gather(*(client.send_many(subject, bodies) for _ in range(4)))

            await self.rate("send_many", messages // (4 * _BATCH) * 4 * _BATCH, send)
            async with client.subscribe(subject, group=subject, start="first", max_unacked=100_000) as consumer:

                async def pull() -> None:
                    left = messages // (4 * _BATCH) * 4 * _BATCH
                    while left:
                        batch = await consumer.pull_batch(10_000, timeout=60)
                        left -= len(batch)
                        batch.ack()
                    await consumer.flush()

                await self.rate("pull_batch", messages // (4 * _BATCH) * 4 * _BATCH, pull)
            await client.admin.delete_group(subject)
            times = []
            for _ in range(_SINGLE):
                began = time.perf_counter()
                await client.send(subject, _BODY)
                times.append(time.perf_counter() - began)
            self.add("one send, p50 in us", statistics.median(times) * 1e6)
        times = []
        for _ in range(_CONNECTS):
            began = time.perf_counter()
            async with qmq.connect(self.broker.url):
                times.append(time.perf_counter() - began)
        self.add("connect, p50 in us", statistics.median(times) * 1e6)

    async def idle(self) -> float:
        """Return the KiB of the broker's memory that an idle connection takes."""
        async with AsyncExitStack() as stack:
            before = anonymous_mib(self.broker.pid)
            for _ in range(_IDLE):
                await stack.enter_async_context(qmq.connect(self.broker.url))
            return (anonymous_mib(self.broker.pid) - before) * 1024 / _IDLE


async def measure(plain: Side, encrypted: Side, messages: int, rounds: int) -> None:
    """Take all rounds, and print medians."""
    for side in (plain, encrypted):
        await side.round(messages // 10)  # warms up
        side.found.clear()
    for number in range(rounds):
        for side in (plain, encrypted) if number % 2 else (encrypted, plain):
            await side.round(messages)
    print(f"{'':34}{'plain':>12}{'TLS':>12}{'TLS/plain':>12}{'TLS-plain':>12}")
    for name, values in plain.found.items():
        one, other = statistics.median(values), statistics.median(encrypted.found[name])
        print(f"{name:34}{one:12,.1f}{other:12,.1f}{other / one:12.2f}{other - one:12,.1f}")
    one, other = await plain.idle(), await encrypted.idle()
    print(f"{'KiB an idle connection':34}{one:12,.1f}{other:12,.1f}{other / max(one, 0.1):12.2f}{other - one:12,.1f}")


def main() -> None:
    """Run the measurement that the command line asks for."""
    parser = argparse.ArgumentParser(description="Measure TLS beside plain connections.")
    parser.add_argument("--messages", type=int, default=300_000, help="of each rate in each round")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qmq-bench-") as scratch:
        files = TlsFilesOfTests.make(Path(scratch) / "tls")
        with (
            broker_process(Path(scratch) / "plain") as plain,
            broker_process(Path(scratch) / "encrypted", **files.settings) as encrypted,
            files.trusted(),
        ):
            uvloop.run(measure(Side(plain), Side(encrypted), wanted.messages, wanted.rounds))


if __name__ == "__main__":
    main()

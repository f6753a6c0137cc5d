"""Measure the console beside a large broker: a scrape, the first page, and open event streams beside sends.

`python -m bench.console` makes 100,000 subjects and 10,000 groups, which takes some minutes. Broker and console are
processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import qmq
from bench.resend import anonymous_mib, cpu_s
from qmq.console.watch import LOOKED_SECONDS
from tests.broker_process import BrokerProcess, broker_process
from tests.cli.commands import qmq_process

#: So long after the last look a console asks its brokers each 10 s only.
REST_S: Final = LOOKED_SECONDS + 1
#: For how long each round sends.
SEND_S: Final = 5.0


async def fill(url: str, subjects: int, groups: int) -> None:
    """Send a message to each subject, and make the groups; each follows a tenth of the subjects."""
    async with qmq.connect(url) as client:
        for number in range(subjects):
            client.send_nowait(f"family{number % 10}.{number}", b"x" * 100)
            if number % 10_000 == 0:
                await client.drain()
        await client.flush()

        async def make(number: int) -> None:
            async with client.subscribe(f"family{number % 10}.", group=f"group-{number:05}") as consumer:
                await consumer.pull(1, timeout=0)

        for first in range(0, groups, 100):
            await asyncio.gather(*map(make, range(first, min(first + 100, groups))))


def get(port: int, path: str) -> tuple[float, bytes]:
    """Ask the console; return the seconds that it took, and the body."""
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == 200, body
    return time.perf_counter() - began, body


def scrapes(port: int, broker: BrokerProcess, console: int, seconds: float) -> None:
    """Scrape once in 5 s for so long, and print what it takes."""
    began, of_broker, of_console = time.perf_counter(), cpu_s(broker.pid), cpu_s(console)
    times, text = list[float](), b""
    while (passed := time.perf_counter() - began) < seconds:
        took, text = get(port, "/metrics")
        times.append(took)
        time.sleep(max(0.0, min(5.0, seconds - passed)))
    passed = time.perf_counter() - began
    of_broker, of_console = cpu_s(broker.pid) - of_broker, cpu_s(console) - of_console
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    print(
        f"{len(times)} scrapes: {min(times):.3f} to {max(times):.3f} s, {series:,} series, {len(text) / 1024:.0f} KiB; "
        f"{of_broker / passed:.2%} of a processor in the broker, {of_console / passed:.2%} in the console, RssAnon "
        f"{anonymous_mib(console):.0f} MiB"
    )


def first_pages(port: int) -> None:
    """Open the first page some times, and print what it takes."""
    found = [get(port, "/") for _ in range(10)]
    times = sorted(took for took, _ in found)
    print(
        f"first page: {len(found[-1][1]) / 1024:.0f} KiB, median {times[5] * 1e3:.0f} ms, most {times[-1] * 1e3:.0f} ms"
    )


async def read_streams(port: int, count: int) -> None:
    """Keep so many tabs open, each of which reads its events and forgets them; say `open` once all have begun."""

    async def read(reader: asyncio.StreamReader, begun: asyncio.Event) -> None:
        while await reader.read(1 << 20):
            begun.set()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            begun = asyncio.Event()
            tasks.create_task(read(reader, begun))
            await begun.wait()
        print("open", flush=True)


@contextmanager
def open_streams(port: int, count: int) -> Iterator[int]:
    """Keep so many tabs open in a process of their own; yield its id."""
    command = [sys.executable, "-m", "bench.console", "--read", str(port), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as readers:
        assert readers.stdout is not None
        try:
            assert readers.stdout.readline() == b"open\n"
            yield readers.pid
        finally:
            readers.kill()


async def send(url: str, seconds: float) -> int:
    """Send for so long, 1,000 messages at a time; return how many."""
    async with qmq.connect(url) as client:
        began, sent = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            await client.send_many("family0.0", [b"x" * 100] * 1_000)
            sent += 1_000
    return sent


def beside_sends(port: int, broker: BrokerProcess, console: int, streams: int, rounds: int) -> None:
    """Send with and without open tabs in turn, and print rates and the processor time of broker and console."""
    rates: dict[int, list[float]] = {0: [], streams: []}
    costs: dict[int, list[float]] = {0: [], streams: []}
    consoles: dict[int, list[float]] = {0: [], streams: []}
    for _ in range(rounds):
        for count in (0, streams):
            if not count:
                time.sleep(REST_S)
            with open_streams(port, count):
                before, of_console = cpu_s(broker.pid), cpu_s(console)
                sent = asyncio.run(send(broker.url, SEND_S))
                rates[count].append(sent / SEND_S)
                costs[count].append((cpu_s(broker.pid) - before) / sent * 1e6)
                consoles[count].append((cpu_s(console) - of_console) / SEND_S)
    for count in rates:
        rate, cost, of_console = (statistics.median(found[count]) for found in (rates, costs, consoles))
        print(
            f"{count} open streams: {rate:,.0f} messages a second, {cost:.3f} us of the broker's processor each; "
            f"{of_console:.1%} of a processor in the console"
        )
    ratios = [some / none for some, none in zip(rates[streams], rates[0], strict=True)]
    print(
        f"sends beside {streams} streams, of those without: median {statistics.median(ratios):.3f} of {rounds} rounds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30, help="for how long to scrape")
    parser.add_argument("--rounds", type=int, default=5, help="of sends, with and without streams")
    parser.add_argument("--read", type=int, nargs=2, metavar=("PORT", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        asyncio.run(read_streams(*options.read))
        return
    with (
        tempfile.TemporaryDirectory(prefix="qmq-console-") as directory,
        broker_process(Path(directory)) as broker,
        qmq_process("console", "--listen", "127.0.0.1:0", "--server", broker.url, "--log-level", "error") as console,
    ):
        assert console.stdout is not None
        port = int(console.stdout.readline().decode().rstrip("/\n").rpartition(":")[2])
        began = time.perf_counter()
        asyncio.run(fill(broker.url, options.subjects, options.groups))
        print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
        time.sleep(REST_S)
        scrapes(port, broker, console.pid, options.seconds)
        first_pages(port)
        beside_sends(port, broker, console.pid, options.streams, options.rounds)


if __name__ == "__main__":
    main()

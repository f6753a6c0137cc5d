"""Measure what docs/production.md says on size: ``python -m bench.sizing [--scale 0.01]`` prints its tables.

Each figure is of one broker, in a process of its own with an own directory, and of one client.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import qmq
from qmq.bench.processes import BrokerProcess, Child
from qmq.daemon.main import RunningBroker
from qmq.settings import Settings
from qmq.storage.disk.disk import Disk

_T = TypeVar("_T")
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
#: Settings of a broker that keeps all that it was sent for recovery: it takes no checkpoint.
_NO_CHECKPOINT: Final = {"checkpoint_ms": 3_600_000, "checkpoint_bytes": 64 << 30, "max_unsynced_bytes": 64 << 30}


def print_table(title: str, heads: list[str], rows: Iterator[list[str]]) -> None:
    """Print a table in Markdown, each row as soon as it is measured."""
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def with_client(url: str, task: Callable[[qmq.Client], Awaitable[_T]]) -> _T:
    """Run a task with a client of the broker, and return what it returns."""

    async def run() -> _T:
        async with qmq.connect(url) as client:
            return await task(client)

    return asyncio.run(run())


async def send(client: qmq.Client, subject: str, size: int, count: int, batch: int) -> None:
    """Send *count* messages with bodies of *size* bytes, *batch* at a time."""
    bodies = [bytes(size)] * batch
    for _ in range(count // batch):
        await client.send_many(subject, bodies, durability="append")


# ---------------------------------------------------------------------------------------------------------------------
# Bytes on disk


def disk_rows(parent: Path, scale: float) -> Iterator[list[str]]:
    """Bytes a message of the message log, and of the files that are made of it, by the size of bodies and batches.

    Of the latter only those of full segments count: a file that is being written has room ahead.
    """
    settings = {"segment_bytes": 1 * _MIB, "max_frame_bytes": 512 * _KIB, "max_message_bytes": 64 * _KIB}
    for size, batch, total in ((100, 1, 3), (100, 100, 30), (_KIB, 1, 10), (_KIB, 100, 30), (10 * _KIB, 10, 30)):
        count = max(int(scale * total * _MIB) // size // batch, 1) * batch
        with BrokerProcess(parent / f"disk-{size}-{batch}", settings) as broker:
            with_client(broker.url, lambda client: send(client, "a.b", size, count, batch))  # noqa: B023
            (info,) = with_client(broker.url, lambda client: client.admin.info())
            message = info.log_bytes / count
            full = sorted(broker.directory.glob("log-0/*.messages"))[:-1]
            messages = sum(path.stat().st_size for path in full) / message
            names = {path.stem for path in full}
            beside = [*broker.directory.glob("consumer-log/*/*"), *broker.directory.glob("log-0/*.index")]
            derived = sum(path.stat().st_size for path in beside if path.stem in names)
        yield [f"{size:,} B", str(batch), f"{message:,.0f} B", f"{derived / messages:,.1f} B" if messages else "-"]


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def memory_rows(parent: Path, scale: float) -> Iterator[list[str]]:
    """Bytes of RssAnon for each thing that a broker remembers: the growth from a tenth of the count to all of it."""
    things: tuple[tuple[str, int, _Make], ...] = (
        ("a subject", 100_000, _make_subjects),
        ("a group, of one subject", 2_000, _make_groups),
        ("a connection that has sent", 1_000, _make_connections),
        ("a message in flight, sent in batches of 100", 200_000, _make_in_flight),
    )
    with BrokerProcess(parent / "idle", {}) as broker:
        yield ["a broker with nothing", "", f"{broker.anonymous_bytes() / _MIB:,.0f} MiB"]
    for name, most, make in things:
        few = max(int(most * scale) // 10, 1)
        with BrokerProcess(parent / make.__name__, {}) as broker:
            growth = with_client(broker.url, lambda client: _growth(client, broker, make, few))  # noqa: B023
        yield [name, f"{10 * few:,}", f"{growth / (9 * few):,.0f} B"]


_Make = Callable[[qmq.Client, str, range], AbstractAsyncContextManager[None]]


async def _growth(client: qmq.Client, broker: BrokerProcess, make: _Make, few: int) -> int:
    """Return the bytes by which the broker grows from *few* things to ten times as many."""
    async with make(client, broker.url, range(few)):
        await asyncio.sleep(3)  # for a checkpoint, which needs memory of its own
        before = broker.anonymous_bytes()
        async with make(client, broker.url, range(few, 10 * few)):
            await asyncio.sleep(3)
            return broker.anonymous_bytes() - before


@asynccontextmanager
async def _make_subjects(client: qmq.Client, url: str, numbers: range) -> AsyncIterator[None]:
    for first in range(numbers.start, numbers.stop, 1_000):
        some = range(first, min(first + 1_000, numbers.stop))
        await asyncio.gather(*(client.send(f"shop.order.{number:08}", b"x", durability="append") for number in some))
    yield


@asynccontextmanager
async def _make_groups(client: qmq.Client, url: str, numbers: range) -> AsyncIterator[None]:
    if not numbers.start:
        await client.send("shop.order", b"x")
    for number in numbers:
        async with client.subscribe("shop.order", group=f"group-{number}") as consumer:
            await consumer.pull(max_count=1, timeout=0)
    yield


@asynccontextmanager
async def _make_connections(client: qmq.Client, url: str, numbers: range) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for _ in numbers:
            one = await stack.enter_async_context(qmq.connect(url))
            await one.send("shop.order", b"x", durability="append")
        yield


@asynccontextmanager
async def _make_in_flight(client: qmq.Client, url: str, numbers: range) -> AsyncIterator[None]:
    subject = f"flight.{numbers.start}"
    await send(client, subject, 100, len(numbers), min(100, len(numbers)))
    settings: dict[str, Any] = {"max_unacked": 1_000_000, "max_unacked_bytes": 1 << 34}
    async with client.subscribe(subject, group=subject, start="first", **settings) as consumer:
        taken: list[qmq.Message] = []
        while len(taken) < len(numbers):
            taken += await consumer.pull(max_count=len(numbers) - len(taken), timeout=5)
        yield
        for message in taken:
            message.ack()


# ---------------------------------------------------------------------------------------------------------------------
# Sends, by the time of an fsync


class SlowDisk(Disk):
    """A disk whose fdatasync takes a set time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fdatasync(self, fd: int) -> None:
        time.sleep(self._seconds)

    def aside(self) -> None:
        return None


async def serve_slowly(directory: Path, fsync_ms: float) -> None:
    """Run a broker whose fsync takes that long, until it is killed."""
    settings = Settings.model_validate({"data_dir": directory, "listen": "127.0.0.1:0"})
    broker = RunningBroker(settings, SlowDisk(fsync_ms / 1_000))
    await broker.start()
    print(broker.url, flush=True)
    await asyncio.Event().wait()


@contextmanager
def slow_broker(directory: Path, fsync_ms: float) -> Iterator[str]:
    """Yield the URL of such a broker in a process of its own."""
    command = ["-m", "bench.sizing", "--serve", str(directory), "--fsync-ms", str(fsync_ms)]
    broker = Child("the broker", command, directory.with_suffix(".errors"))
    try:
        yield broker.read_line()
    finally:
        broker.kill()
        broker.end()


def send_rows(parent: Path, scale: float) -> Iterator[list[str]]:
    """Sends a second that are on disk, of 1 KiB, by the time of an fsync and the number that send at the same time."""
    for fsync_ms in (1, 5, 20):
        with slow_broker(parent / f"slow-{fsync_ms}", fsync_ms) as url:
            rates = [with_client(url, lambda client: _rate(client, many, 4 * scale)) for many in (1, 10, 100)]  # noqa: B023
        yield [f"{fsync_ms} ms", *(f"{rate:,.0f}" for rate in rates)]


async def _rate(client: qmq.Client, many: int, seconds: float) -> float:
    """Sends a second of *many* tasks, each of which waits for its send before the next."""
    sent, until = 0, time.perf_counter() + seconds

    async def task() -> None:
        nonlocal sent
        while time.perf_counter() < until:
            await client.send("a.b", bytes(_KIB))
            sent += 1

    began = time.perf_counter()
    await asyncio.gather(*(task() for _ in range(many)))
    return sent / (time.perf_counter() - began)


# ---------------------------------------------------------------------------------------------------------------------
# Recovery


def recovery_rows(parent: Path, scale: float) -> Iterator[list[str]]:
    """Seconds of a start after kill -9, for each GB behind the last checkpoint."""
    for size, batch, total in ((_KIB, 100, 256 * _MIB), (100, 100, 32 * _MIB), (100, 1, 2 * _MIB)):
        directory = parent / f"recovery-{size}-{batch}"
        count = max(int(scale * total) // size // batch, 1) * batch
        with BrokerProcess(directory, _NO_CHECKPOINT) as broker:
            with_client(broker.url, lambda client: send(client, "a.b", size, count, batch))  # noqa: B023
            (info,) = with_client(broker.url, lambda client: client.admin.info())
            broker.kill()
        sizes = info.log_bytes
        with BrokerProcess(parent / "empty", {}) as empty:
            idle_s = empty.cpu_s()
        with BrokerProcess(directory, {}) as again:
            cpu_s = again.cpu_s() - idle_s
        yield [
            f"{size:,} B",
            str(batch),
            f"{sizes / 1e6:,.0f} MB",
            f"{again.ready_after_s - empty.ready_after_s:,.2f} s",
            f"{cpu_s:,.2f} s",
            f"{cpu_s / (sizes / 1e9):,.1f} s",
            f"{cpu_s / count * 1e6:,.1f} µs",
        ]


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.sizing")
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts: 0.01 to see that it runs")
    parser.add_argument("--only", help="one of disk, memory, sends, recovery")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fsync-ms", type=float, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve_slowly(arguments.serve, arguments.fsync_ms))
        return
    tables = {
        "disk": ("Bytes a message on disk", ["body", "messages a batch", "message log", "files made of it"], disk_rows),
        "memory": ("Memory of the broker (RssAnon)", ["of", "measured with", "each"], memory_rows),
        "sends": ("Sends a second, on disk", ["an fsync takes", "1 sender", "10", "100"], send_rows),
        "recovery": (
            "A start after kill -9",
            ["body", "messages a batch", "behind the checkpoint", "longer by", "processor time", "a GB", "a message"],
            recovery_rows,
        ),
    }
    with tempfile.TemporaryDirectory(prefix="qmq-sizing-") as directory:
        for name, (title, heads, rows) in tables.items():
            if arguments.only in (None, name):
                print_table(title, heads, rows(Path(directory), arguments.scale))


if __name__ == "__main__":
    main()

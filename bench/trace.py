"""Measure traces: ``python -m bench.trace [--groups 1000] [--records 10000000] [--dir DIR]`` prints a table.

A message that each of many groups was handed and has acknowledged is traced, while the pull log keeps many more records
of these groups. Another client sends one message after another meanwhile, and before: the difference is what a trace
costs others.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import qmq
from qmq.bench.processes import BrokerProcess
from qmq.broker.journal.record_bytes import pack
from qmq.broker.journal.record_types import RecordKind
from qmq.storage.disk.disk import Disk
from qmq.storage.pull_log.kept import PullLogKeep
from qmq.storage.store import Store, StoreOptions

_SUBJECT: Final = "shop.order.created"
_SETTINGS: Final = {"pull_log_keep_ms": "10d", "pull_log_keep_bytes": "16 GiB"}
_KEEP: Final = PullLogKeep(10 * 86_400_000_000, 16 << 30)
#: Records of one write.
_AT_ONCE: Final = 1_000
#: Where ranges by position begin: 2^31, in the log of partition 0.
_LOG: Final = 1 << 31
_SPAWN: Final = multiprocessing.get_context("spawn")
_HEAD: Final = "| | p50 | p99 | most |\n|---|---:|---:|---:|"


async def prepare(directory: Path, groups: int) -> str:
    """Have each group handed one message, which it acknowledges; return the message's id."""
    broker = BrokerProcess(directory, _SETTINGS)
    try:
        async with qmq.connect(broker.url) as client:
            receipt = await client.send(_SUBJECT, b"traced", key="order-4421")
            for number in range(groups):
                async with client.subscribe("shop.", group=f"group-{number}", consumer="one") as consumer:
                    (message,) = await consumer.pull(1, timeout=60)
                    await message.ack()
    finally:
        broker.end()
    return receipt.id


def fill(directory: Path, groups: int, records: int) -> int:
    """Write so many records of pulls and acks of other messages into the pull log of a stopped broker, and a checkpoint
    behind them; return their bytes.
    """
    now_us = time.time_ns() // 1_000
    options = StoreOptions(pull_log_keep_us=_KEEP.keep_us, pull_log_keep_bytes=_KEEP.keep_bytes)
    store = Store.open(directory, options, Disk(), now_us)
    store.groups.take_records()
    files, position = store.groups, store.partitions[0].message_log.end
    for number in range(0, records, 2):
        group, at = 1 + number // 2 % groups, 10 * number
        where = [["shop.", [position + 40 * at]]]
        fields = (_LOG, position + 40 * at, 0, 0, 10, position + 40 * at)
        pull, ack = RecordKind.PULL, RecordKind.ACK
        files.stage(pull, pack(pull, (group, 1, 10 + at, 2_130, now_us + number, fields, where)))
        files.stage(ack, pack(ack, (group, 1, now_us + number, (10 + at, 20 + at))))
        if files.staged >= _AT_ONCE:
            files.write()
    files.write()
    for _ in range(3):  # the records before the last but one are kept for traces alone
        checkpoint = store.begin_checkpoint(dict(store.state), now_us + records)
        checkpoint.write()
        store.finish_checkpoint(checkpoint)
    store.close(clean=True)
    return sum(path.stat().st_size for path in (directory / "pulls").iterdir())


async def send_until(url: str, begun: Event, end: Event) -> list[float]:
    """Send one message after another until an event; return the milliseconds of each, ascending."""
    taken = list[float]()
    async with qmq.connect(url) as client:
        for _ in range(1_000):
            await client.send("other.subject", b"x" * 100, durability="append")
        begun.set()
        while not end.is_set():
            sent = time.perf_counter()
            await client.send("other.subject", b"x" * 100, durability="append")
            taken.append((time.perf_counter() - sent) * 1_000)
    return sorted(taken)


def _send(url: str, begun: Event, end: Event, found: Queue[list[float]]) -> None:
    """[process] Put the times of all sends until the event."""
    found.put(asyncio.run(send_until(url, begun, end)))


@contextmanager
def sends(url: str, name: str) -> Iterator[None]:
    """Send in a process of its own meanwhile, and print the times: the program that traces takes none of its time."""
    begun, end = _SPAWN.Event(), _SPAWN.Event()
    found: Queue[list[float]] = _SPAWN.Queue()
    sender = _SPAWN.Process(target=_send, args=(url, begun, end, found))
    sender.start()
    begun.wait()
    try:
        yield
    finally:
        end.set()
        print(_row(name, found.get()))
        sender.join()


async def trace(url: str, message_id: str, traces: int) -> list[float]:
    """Trace a message so many times; return the milliseconds of each, ascending."""
    taken = list[float]()
    async with qmq.connect(url, admin_timeout=600) as client:
        for _ in range(traces):
            begun = time.perf_counter()
            found = await client.trace(message_id)
            taken.append((time.perf_counter() - begun) * 1_000)
            assert {group.state for group in found.groups} == {"acked"}, found.groups[0]
            assert all(len(group.events) == 2 for group in found.groups)
    return sorted(taken)


def measure(url: str, message_id: str, traces: int, seconds: float) -> None:
    """Print the table."""
    print(_HEAD)
    with sends(url, "a send, nothing beside it"):
        time.sleep(seconds)
    with sends(url, "a send, beside the first trace, which looks at every file"):
        first = asyncio.run(trace(url, message_id, 1))
    with sends(url, "a send, beside traces"):
        taken = asyncio.run(trace(url, message_id, traces))
    print(_row("the first trace", first))
    print(_row("a trace", taken))


def _row(name: str, taken: list[float]) -> str:
    at = [taken[min(int(len(taken) * share), len(taken) - 1)] for share in (0.5, 0.99, 1.0)]
    return f"| {name} | " + " | ".join(f"{one:,.2f} ms" for one in at) + " |"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--traces", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="of sends with nothing beside them")
    parser.add_argument("--dir", type=Path, help="where the data directory is made; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as made:
        directory = Path(made) / "data"
        message_id = asyncio.run(prepare(directory, options.groups))
        size = fill(directory, options.groups, options.records)
        print(f"{options.groups:,} groups, {options.records:,} records, {size >> 20:,} MiB of pull log\n")
        broker = BrokerProcess(directory, _SETTINGS)
        try:
            measure(broker.url, message_id, options.traces, options.seconds)
        finally:
            broker.end()


if __name__ == "__main__":
    main()

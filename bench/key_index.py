"""Measure look-ups by key: ``python -m bench.key_index [--messages 10000000] [--dir DIR]`` prints a table.

Messages with a key each are written into a new data directory as ready batches, without a broker. Then a broker opens
it, makes the key indexes in the background, and a client looks keys up, one at a time. ``--sends`` also measures sends
beside a broker that makes key indexes, and beside one that has made them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import qmq
from qmq.bench.processes import BrokerProcess
from qmq.format.batch import BatchLimits, check_batch, entry_of, stamp
from qmq.format.build import build_flat, little
from qmq.format.hashing import key_hash
from qmq.format.layout import KEY_PAGE_ENTRIES, KEY_PAGE_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.key_index.key_file import KeyFile, owner_of, sizes_of
from qmq.storage.store import Store, StoreOptions

_MIB: Final = 1 << 20
_SUBJECT: Final = "shop.order.created"
_KEY: Final = "order-%010d"
_PRODUCER: Final = bytes(range(16))
#: Look-ups of each kind.
LOOK_UPS: Final = 1_000
COLD_LOOK_UPS: Final = 20


HEAD: Final = "\n| {} | p50 | p99 | most | broker's processor | own processor |\n|---|---:|---:|---:|---:|---:|"


class Taken(NamedTuple):
    """The milliseconds of each look-up, ascending, and the processor time of one in the mean."""

    taken: list[float]
    broker_cpu: float
    own_cpu: float


def key_of(number: int) -> str:
    """Return the key of a message."""
    return _KEY % number


def fill(directory: Path, messages: int, batch: int, body_bytes: int) -> None:
    """Write a stopped store with so many messages, each with a key of its own."""
    store = Store.open(directory, StoreOptions(), Disk(), time.time_ns() // 1_000)
    part, number, bodies = store.partitions[0], store.add_subject(_SUBJECT), [bytes(body_bytes)] * batch
    lengths = little("I", [body_bytes] * batch)
    stamp_us = max(store.last_stored_at_us, time.time_ns() // 1_000 - messages)
    for first in range(0, messages, batch):
        keys = list(map(_KEY.__mod__, range(first, min(first + batch, messages))))
        parts = build_flat(
            [_SUBJECT], [len(keys)], bodies[: len(keys)], keys, created_at_us=stamp_us, producer_id=_PRODUCER,
            producer_sequence=first, lengths=lengths[: 4 * len(keys)],
        )  # fmt: skip
        buffer = bytearray(b"".join(parts))
        view = memoryview(buffer)
        checked = check_batch(view, BatchLimits())
        position = part.position_for(len(buffer))
        stamp_us += 1
        stamp(
            view, checked, position=position, stored_at_us=stamp_us, partition=0, store_id=store.store_id,
            secret=store.secret, first_sequences=first,
        )  # fmt: skip
        part.stage(position, buffer, entry_of(checked, position, stamp_us, number, first))
        store.subjects.ends[number] = first + len(keys)
        part.write()
        part.consumer_log.publish(part.message_log.end)
        if store.unsynced_bytes > 512 * _MIB:
            _checkpoint(store)
    _checkpoint(store)
    store.close(clean=True)


def _checkpoint(store: Store) -> None:
    checkpoint = store.begin_checkpoint(store.state)
    checkpoint.write()
    store.finish_checkpoint(checkpoint)


class Watched:
    """A broker, and the most memory that it had when it was asked."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.most_bytes = 0

    def look(self) -> None:
        """Note how much memory the broker has."""
        self.most_bytes = max(self.most_bytes, self.broker.anonymous_bytes())


@contextmanager
def broker_on(directory: Path) -> Iterator[Watched]:
    """Yield a broker on a directory that is there."""
    broker = BrokerProcess(directory, {})
    try:
        yield Watched(broker)
    finally:
        broker.end()


async def index(directory: Path, watched: Watched) -> tuple[float, float]:
    """Wait until each sealed segment has its key index; return the seconds, and those of the broker's processor."""
    log = directory / "log-0"
    begun, cpu_s = time.perf_counter(), watched.broker.cpu_s()
    while len(list(log.glob("*.keys"))) < len(list(log.glob("*.messages"))) - 1:
        watched.look()
        await asyncio.sleep(0.2)
    return time.perf_counter() - begun, watched.broker.cpu_s() - cpu_s


async def look_up(client: qmq.Client, key: str) -> int:
    """Return how many messages have a key."""
    count = 0
    async with aclosing(_found(client, key)) as found:
        async for _ in found:
            count += 1
    return count


async def _found(client: qmq.Client, key: str) -> AsyncGenerator[object]:
    async for message in client.find("", key=key):
        yield message


async def timed(
    client: qmq.Client, keys: list[str], wanted: int, watched: Watched, before: Callable[[], None] = lambda: None
) -> Taken:
    """Look keys up, each of which has to find *wanted* messages."""
    taken = []
    cpu_s, own_cpu_s = watched.broker.cpu_s(), time.process_time()
    for key in keys:
        before()
        begun = time.perf_counter()
        count = await look_up(client, key)
        taken.append((time.perf_counter() - begun) * 1_000)
        assert count == wanted, f"{key} has {count} messages"
        watched.look()
    cpu_s, own_cpu_s = watched.broker.cpu_s() - cpu_s, time.process_time() - own_cpu_s
    return Taken(sorted(taken), cpu_s * 1_000 / len(keys), own_cpu_s * 1_000 / len(keys))


def forget_pages(directory: Path) -> None:
    """Have the system forget the pages of the segments and of their key indexes, as far as nobody maps them."""
    for path in (directory / "log-0").iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_alone(directory: Path, keys: list[str]) -> Taken:
    """Look keys up in all key indexes, without a broker."""
    disk, log = Disk(), directory / "log-0"
    bases = sorted(int(path.stem, 16) for path in log.glob("*.messages"))
    store_id = bytes.fromhex((log / f"{bases[0]:016x}.keys").read_bytes()[12:18].hex())
    owners = [owner_of(0, store_id, base, end) for base, end in pairwise(bases)]
    files = [KeyFile.open(disk, log, owner) for owner in owners]
    taken, own_cpu_s = [], time.process_time()
    for key in keys:
        begun, value = time.perf_counter(), key_hash(key)
        for file in files:
            if file.may_have(value):
                file.offsets(value, 0, 1 << 32)
        taken.append((time.perf_counter() - begun) * 1_000)
    own_cpu_s = time.process_time() - own_cpu_s
    for file in files:
        file.close()
    return Taken(sorted(taken), 0.0, own_cpu_s * 1_000 / len(keys))


async def sends(client: qmq.Client, seconds: float) -> float:
    """Return how many messages of 100 bytes a second are stored in batches of 1,000."""
    bodies, count, begun = [bytes(100)] * 1_000, 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds:
        await client.send_many("bench.sends", bodies, durability="append")
        count += 1_000
    return count / taken


def show(name: str, found: Taken) -> str:
    """Return a row of the table."""
    taken = found.taken
    p50, p99 = taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 99 // 100)]
    return f"| {name} | {p50:.2f} | {p99:.2f} | {taken[-1]:.2f} | {found.broker_cpu:.2f} | {found.own_cpu:.2f} |"


async def measure(directory: Path, messages: int, *, with_sends: bool) -> None:
    """Print the table."""
    chance = random.Random(1)
    there = [key_of(number) for number in chance.sample(range(messages), LOOK_UPS)]
    missing = [f"nobody-{number}" for number in range(LOOK_UPS)]
    with broker_on(directory) as watched:
        async with qmq.connect(watched.broker.url) as client:
            beside = await sends(client, 3) if with_sends else 0.0
            wall_s, cpu_s = await index(directory, watched)
            files = [path.stat().st_size for path in (directory / "log-0").glob("*.keys")]
            print(f"key indexes: {len(files)} files, {sum(files) / _MIB:.0f} MiB; made in {wall_s:.1f} s, with")
            print(f"{cpu_s:.1f} s of the processor, {cpu_s / messages * 1e6:.2f} s a million keys; RssAnon at most")
            print(f"{watched.most_bytes / _MIB:.0f} MiB meanwhile")
            entries, filter_pages = sizes_of(messages)
            print(
                f"bytes a key: {KEY_PAGE_SIZE / KEY_PAGE_ENTRIES:.2f} in entries ({entries} pages in one file), "
                f"{filter_pages * KEY_PAGE_SIZE / messages:.2f} in the filter"
            )
            if with_sends:
                print(f"sends a second while they are made: {beside:,.0f}, behind: {await sends(client, 3):,.0f}")
            await asyncio.sleep(3)  # filters of the segment that is being written
            await timed(client, there[:50], 1, watched)
            print(HEAD.format("look-up through a client, milliseconds"))
            print(show("key of one message", await timed(client, there, 1, watched)))
            print(show("key that is not there", await timed(client, missing, 0, watched)))
            cold = await timed(client, there[:COLD_LOOK_UPS], 1, watched, lambda: forget_pages(directory))
            print(show("key of one message, cold", cold))
            print(f"\nRssAnon of the broker: at most {watched.most_bytes / _MIB:.0f} MiB")
    print(HEAD.format("all key indexes, without a broker, milliseconds"))
    print(show("key of one message", files_alone(directory, there)))
    print(show("key that is not there", files_alone(directory, missing)))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=1_000, help="messages a batch")
    parser.add_argument("--body", type=int, default=100, help="bytes of a body")
    parser.add_argument("--dir", type=Path, help="where the data directory is made; it is deleted at the end")
    parser.add_argument("--sends", action="store_true", help="measure sends, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        directory = Path(name) / "broker"
        begun = time.perf_counter()
        fill(directory, options.messages, options.batch, options.body)
        print(f"{options.messages:,} messages in batches of {options.batch}: {time.perf_counter() - begun:.0f} s")
        asyncio.run(measure(directory, options.messages, with_sends=options.sends))


if __name__ == "__main__":
    main()

"""Bits that rot in the files of a broker process while it runs: nobody is given what is bad, everybody all the rest."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import qmq
from qmq.errors import QmqError
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE
from tests.broker_process import BrokerProcess
from tests.faults.brokers import broker_in, until
from tests.storage.stores import segment_files

SEED: Final = 11
TIMEOUT_S: Final = 30
SMALL: Final[dict[str, Any]] = {
    "segment_bytes": 128 << 10,
    "max_frame_bytes": 64 << 10,
    "max_message_bytes": 32 << 10,
}


class Stored(NamedTuple):
    """An acknowledged message, and where it lies: its batch and its body, as offsets in *file*."""

    body: bytes
    file: Path
    batch: int
    batch_end: int
    offset: int


async def fill(url: str) -> list[bytes]:
    """Batches of one message, of one run and of several, with keys and tags and without; returns the bodies."""
    sent = list[bytes]()

    def body(size: int) -> bytes:
        sent.append(b"%05d" % len(sent) + b"." * size)
        return sent[-1]

    async with qmq.connect(url, durability="append") as client:
        for number in range(130):
            await client.send("a.one", body(1_500))
            await client.send_many("a.many", [body(100) for _ in range(5)])
            for name in ("a.x", "a.y", "a.x", "a.z"):
                client.send_nowait(name, body(200), key=f"key-{number}", tags=["t"], properties={"n": str(number)})
            await client.flush()
    return sent


def places_of(bodies: list[bytes], files: list[Path]) -> list[Stored]:
    """Those of the messages that lie in these segments."""
    found = list[Stored]()
    for file in files:
        data, base = file.read_bytes(), int(file.stem, 16)
        starts = sorted({data.index(body) for body in bodies if body in data})
        batch = batch_end = 0
        for start in starts:
            while batch_end <= start:
                batch = batch_end or 64
                batch_end = batch + parse_header(memoryview(data)[batch:]).size
                assert parse_header(memoryview(data)[batch:]).position == base + batch
            body = next(body for body in bodies if data[start : start + 5] == body[:5])
            found.append(Stored(body, file, batch, batch_end, start))
    return found


def batches_of(messages: list[Stored]) -> list[tuple[Path, int, int]]:
    """File, start and end of every other batch: bad headers in a row are one bad place."""
    return sorted({(message.file, message.batch, message.batch_end) for message in messages})[::2]


def flip(file: Path, offset: int, bit: int = 0) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


# --- every way to take messages: of a group until a body comes -------------------------------------------------------


class Took(NamedTuple):
    bodies: list[bytes]
    damaged: int
    errors: list[QmqError]


Way = Callable[[str, str, bytes], Coroutine[Any, Any, Took]]


async def by_loop(url: str, group: str, last: bytes) -> Took:
    got, errors = list[bytes](), list[QmqError]()
    async with qmq.connect(url) as client, client.subscribe("a.", group=group) as consumer:
        consumer.on_unreadable = errors.append
        async with aclosing(consumer.__aiter__()) as messages:
            async for message in messages:
                got.append(message.body)
                if message.body == last:
                    break
        return Took(got, consumer.damaged, errors)


async def by_pull(url: str, group: str, last: bytes) -> Took:
    """In steps that cut runs."""
    got, errors = list[bytes](), list[QmqError]()
    async with qmq.connect(url) as client, client.subscribe("a.", group=group) as consumer:
        consumer.on_unreadable = errors.append
        while last not in got:
            got += [message.body for message in await consumer.pull(3)]
        return Took(got, consumer.damaged, errors)


async def by_pull_batch(url: str, group: str, last: bytes) -> Took:
    got, errors = list[bytes](), list[QmqError]()
    async with qmq.connect(url) as client, client.subscribe("a.", group=group) as consumer:
        consumer.on_unreadable = errors.append
        while last not in got:
            got += (await consumer.pull_batch(200)).bodies
        return Took(got, consumer.damaged, errors)


async def by_solo(url: str, group: str, last: bytes) -> Took:
    got, errors = list[bytes](), list[QmqError]()
    async with qmq.connect(url) as client, client.subscribe("a.", start="first") as consumer:
        consumer.on_unreadable = errors.append
        while last not in got:
            got += [message.body for message in await consumer.pull(200)]
        return Took(got, consumer.damaged, errors)


def _sync(take: Callable[[qmq.SyncConsumer, bytes], list[bytes]]) -> Way:
    def run(url: str, group: str, last: bytes) -> Took:
        errors = list[QmqError]()
        with qmq.connect_sync(url) as client, client.subscribe("a.", group=group) as consumer:
            consumer.on_unreadable = errors.append
            return Took(take(consumer, last), consumer.damaged, errors)

    async def run_aside(url: str, group: str, last: bytes) -> Took:
        return await asyncio.to_thread(run, url, group, last)

    return run_aside


def _loop(consumer: qmq.SyncConsumer, last: bytes) -> list[bytes]:
    got = list[bytes]()
    for message in consumer:
        got.append(message.body)
        if message.body == last:
            break
    return got


def _pull(consumer: qmq.SyncConsumer, last: bytes) -> list[bytes]:
    got = list[bytes]()
    while last not in got:
        got += [message.body for message in consumer.pull(50)]
    return got


def _pull_batch(consumer: qmq.SyncConsumer, last: bytes) -> list[bytes]:
    got = list[bytes]()
    while last not in got:
        got += consumer.pull_batch(50).bodies
    return got


WAYS: Final[dict[str, Way]] = {
    "async-for": by_loop,
    "pull": by_pull,
    "pull_batch": by_pull_batch,
    "solo": by_solo,
    "sync-for": _sync(_loop),
    "sync-pull": _sync(_pull),
    "sync-pull_batch": _sync(_pull_batch),
}


# --- what the broker says --------------------------------------------------------------------------------------------

_LINE: Final = re.compile(r"are not served: (\S+) at offset (\d+) \(position (\d+) of partition 0\)")


def places_told(broker: BrokerProcess) -> Counter[tuple[Path, int]]:
    """File and offset of each bad place in the log, and how often it stands there."""
    found = Counter[tuple[Path, int]]()
    for file, offset, position in _LINE.findall(broker.log()):
        assert int(Path(file).stem, 16) + int(offset) == int(position)
        found[Path(file), int(offset)] += 1
    return found


def summary(broker: BrokerProcess) -> tuple[int, ...]:
    """Bad places, and how many of them by scrub, pull and report."""
    (line,) = re.findall(r"in all: (\d+ bad places since the start: .*)", broker.log())
    total, by = re.match(r"(\d+) bad places since the start: ((?:\d+ by \w+(?:, )?)+)", line).groups()  # type: ignore[union-attr]
    found = {finder: int(count) for count, finder in re.findall(r"(\d+) by (\w+)", by)}
    return int(total), *(found.get(finder, 0) for finder in ("scrub", "pull", "report"))


@pytest.fixture
async def unscrubbed(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    async with broker_in(tmp_path, scrub_bytes_per_s=0, **SMALL) as broker:
        yield broker


async def test_consumers_of_every_kind_get_everything_else(unscrubbed: BrokerProcess) -> None:
    print(f"seed {SEED}")
    broker, chance = unscrubbed, random.Random(SEED)
    bodies = await fill(broker.url)
    messages = places_of(bodies[:-1], segment_files(broker.path))  # of the one that is written, too
    assert len({message.file for message in messages}) >= 3
    bad, by_report = dict[bytes, Stored](), set[tuple[Path, int]]()
    for name, way in WAYS.items():
        # One of a batch each, so that each is a damage of its own; in parts that no earlier consumer made known.
        fresh = [message for message in messages if (message.file, message.batch) not in by_report]
        hit = {message.batch + int(message.file.stem, 16): message for message in chance.sample(fresh, 5)}
        for message in hit.values():
            flip(message.file, message.offset + chance.randrange(len(message.body)), chance.randrange(8))
            bad[message.body] = message
            by_report.add((message.file, message.batch))
        took = await asyncio.wait_for(way(broker.url, name, bodies[-1]), TIMEOUT_S)
        assert sorted(took.bodies) == sorted(set(bodies) - bad.keys()), name
        assert took.damaged == len(took.errors) == len(hit), name
        assert all(isinstance(error, qmq.BadBatch) for error in took.errors), name
    assert places_told(broker) == dict.fromkeys(by_report, 1)
    assert await asyncio.to_thread(broker.stop) == 0
    assert summary(broker) == (len(by_report), 0, 0, len(by_report))


@pytest.mark.parametrize("first", ["pull", "pull_batch", "solo"])
async def test_any_bit_costs_only_the_batch_it_hits(unscrubbed: BrokerProcess, first: str) -> None:
    print(f"seed {SEED}")
    broker, chance = unscrubbed, random.Random(SEED)
    bodies = await fill(broker.url)
    messages = places_of(bodies, segment_files(broker.path)[:-1])
    batches = batches_of(messages)
    hit = dict[tuple[Path, int], int]()
    for number, (file, start, end) in enumerate(chance.sample(batches, 60)):
        offset = chance.randrange(BATCH_HEADER_SIZE) if number % 3 == 0 else chance.randrange(end - start)
        flip(file, start + offset, chance.randrange(8))
        hit[file, start] = offset
    may_miss = {message.body for message in messages if (message.file, message.batch) in hit}
    lost = set[bytes]()
    for name in (first, "async-for", "sync-pull"):
        took = await asyncio.wait_for(WAYS[name](broker.url, name, bodies[-1]), TIMEOUT_S)
        assert len(took.bodies) == len(set(took.bodies))
        assert set(bodies) - set(took.bodies) <= may_miss
        assert set(took.bodies) <= set(bodies)
        assert took.damaged == len(took.errors)
        lost = lost or set(bodies) - set(took.bodies)
        assert set(bodies) - set(took.bodies) == lost  # what one has found is known to all
    told = places_told(broker)
    assert set(told.values()) == {1}
    assert told.keys() <= hit.keys()
    quiet = {hit[place] for place in hit.keys() - told.keys()}
    assert all(BATCH_HEADER_SIZE - 12 <= offset < BATCH_HEADER_SIZE for offset in quiet)  # a mark: it keeps no message
    assert await asyncio.to_thread(broker.stop) == 0
    bad, by_scrub, by_pull, by_report = summary(broker)
    print(f"{len(lost)} messages lost of {len(may_miss)}; {bad} bad places: {by_pull} by pull, {by_report} by report")
    assert (bad, by_scrub) == (len(told), 0)
    assert by_pull
    assert by_report


async def test_the_scrub_finds_what_nobody_reads(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    async with broker_in(tmp_path, scrub_bytes_per_s=1 << 30, scrub_round_ms=10, **SMALL) as broker:
        bodies = await fill(broker.url)
        messages = places_of(bodies, segment_files(tmp_path)[:-1])
        batches = batches_of(messages)
        hit = set[tuple[Path, int]]()
        for file, start, end in chance.sample(batches, 40):
            flip(file, chance.randrange(start, end), chance.randrange(8))
            hit.add((file, start))
        await until(lambda: len(places_told(broker)) == len(hit), "the scrub has found all")
        took = await by_pull_batch(broker.url, "g", bodies[-1])
        may_miss = {message.body for message in messages if (message.file, message.batch) in hit}
        assert set(bodies) - set(took.bodies) <= may_miss
        assert len(took.bodies) == len(set(took.bodies) & set(bodies))
        assert took.damaged == 0  # they were not even sent
        assert places_told(broker) == dict.fromkeys(hit, 1)
        assert await asyncio.to_thread(broker.stop) == 0
        assert summary(broker) == (len(hit), len(hit), 0, 0)

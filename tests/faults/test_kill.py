"""kill -9 of a broker under load, again and again: nothing acknowledged is lost, and no send makes two messages."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq import Client, Message
from qmq.net import link
from qmq.net.options import Durability
from qmq.storage.disk import Disk
from qmq.storage.verify import verify
from tests.broker_process import BrokerProcess
from tests.faults.ledger import Ledger, drain, fresh_seed

SUBJECTS: Final = ("order.created", "order.paid", "order.sent", "stock.counted", "log")
#: Small, so that kills strike while segments are rolled, reserves renewed, checkpoints written.
SETTINGS: Final = {
    "segment_bytes": "192 KiB",
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
    "checkpoint_ms": 30,
    "checkpoint_bytes": "128 KiB",
}
PATIENCE_S: Final = 60
#: A follower that gets nothing for so long has got all that it will get.
SILENCE_S: Final = 5


class Load:
    """Producers and consumers that know nothing of kills: their clients have to bear them."""

    def __init__(self, url: str, seed: int, following: tuple[str, ...]) -> None:
        self.url = url
        self.following = following
        self.ledger = Ledger()
        self.random = random.Random(seed)
        self.ended = asyncio.Event()
        self.arrival = asyncio.Event()
        self.followed: list[Message] = []
        self.shared: list[Message] = []

    async def caught_up(self) -> None:
        """Wait until the one that follows has as many messages as were sent."""
        while len(self.followed) < len(self.ledger.entries):
            self.arrival.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self.arrival.wait()
            except TimeoutError:
                return  # what is missing will be named

    async def in_turn(self, client: Client) -> None:
        """One send after another, flushed."""
        while not self.ended.is_set():
            await self._send(client, "flush")

    async def in_flight(self, client: Client) -> None:
        """Many sends at once, of both durabilities."""
        while not self.ended.is_set():
            count = self.random.randrange(1, 40)
            await asyncio.gather(*(self._send(client, self._durability()) for _ in range(count)))

    async def many(self, client: Client) -> None:
        """send_many, of one message up to several batches."""
        while not self.ended.is_set():
            subject, size = self.random.choice(SUBJECTS), self.random.choice((20, 100, 1_000))
            entries = [self.ledger.open(subject, size) for _ in range(self.random.choice((1, 7, 50, 120)))]
            bodies = [entry.body for entry in entries]
            self.ledger.acknowledged(entries, await client.send_many(subject, bodies, durability=self._durability()))

    async def unawaited(self, client: Client) -> None:
        """send_nowait with drain, and a flush now and then."""
        while not self.ended.is_set():
            entries = []
            for _ in range(self.random.randrange(1, 200)):
                entry = self.ledger.open(self.random.choice(SUBJECTS), self.random.choice((12, 200)), self._key())
                client.send_nowait(entry.subject, entry.body, key=entry.key, durability=self._durability())
                entries.append(entry)
                await client.drain()
            await client.flush()
            self.ledger.acknowledged(entries, [None] * len(entries))

    async def follow(self, client: Client) -> None:
        """A consumer alone: it remembers over every restart of the broker where it was."""
        async with client.subscribe(*self.following, start="first") as consumer:
            while True:
                self.followed += await consumer.pull(max_count=1_000)
                self.arrival.set()

    async def share(self, client: Client) -> None:
        """One of two consumers of a group."""
        async with client.subscribe("order.", "log", group="shared") as consumer:
            while True:
                self.shared += await consumer.pull(max_count=200, timeout=self.random.choice((0.05, None)))

    async def _send(self, client: Client, durability: Durability) -> None:
        size = self.random.choice((12, 100, 100, 3_000, 30_000))
        entry = self.ledger.open(self.random.choice(SUBJECTS), size, self._key())
        receipt = await client.send(entry.subject, entry.body, key=entry.key, durability=durability)
        self.ledger.acknowledged([entry], [receipt])

    def _durability(self) -> Durability:
        return self.random.choice(("flush", "append"))

    def _key(self) -> str | None:
        return self.random.choice((None, "", "k", f"order-{self.random.randrange(1_000)}"))


@pytest.mark.parametrize(("rounds", "partitions", "following"), [(20, 1, ("",)), (5, 2, ("order.", "stock.", "log"))])
async def test_kills_under_load_lose_nothing_and_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, partitions: int, following: tuple[str, ...]
) -> None:
    seed = fresh_seed()
    # A client is back at once even where its last connection was a short one: more kills in less time.
    monkeypatch.setattr(link, "GOOD_AFTER", 0.0)
    broker = BrokerProcess(tmp_path / "data", partitions=partitions, **SETTINGS)
    try:
        await asyncio.to_thread(broker.start)
        load = Load(broker.url, seed, following)
        struck = await _under_load(broker, load, rounds)
        # A kill between the writes to two partitions may lose a sequence, with the message that nobody was told of.
        await _settled(broker, load, contiguous=partitions == 1)
        _check(load, struck, rounds)
        assert broker.stop() == 0, broker.log()
    finally:
        broker.close()
    report = verify(tmp_path / "data", Disk())
    assert report.is_good, "\n".join(map(str, report.findings))
    segments = len(list((tmp_path / "data").rglob("*.messages")))
    assert segments > partitions * 2, "too few segments were rolled to call this a test of rolling"
    print(f"{segments} segments, {len(report.findings)} notes")


async def _under_load(broker: BrokerProcess, load: Load, rounds: int) -> list[tuple[int, int]]:
    """Run producers and a group while the broker is killed; then let the producers come to an end.

    Returns for each kill the messages in flight, and when it was, in microseconds.
    """
    producers: tuple[Callable[[Client], Awaitable[None]], ...]
    producers = (load.in_turn, load.in_turn, load.in_flight, load.many, load.many, load.unawaited)
    struck = []
    async with asyncio.TaskGroup() as consumers:
        consuming = [consumers.create_task(_with_client(load, work)) for work in (load.share, load.share, load.follow)]
        async with asyncio.TaskGroup() as sending:
            for producer in producers:
                sending.create_task(_with_client(load, producer))
            for _ in range(rounds):
                await load.ledger.acknowledgements(load.random.choice((1, 50, 300, 1_000)))
                await asyncio.sleep(load.random.uniform(0, 0.02))
                killed_us = time.time_ns() // 1_000
                await asyncio.to_thread(broker.kill)
                struck.append((load.ledger.count("open"), killed_us))
                await asyncio.to_thread(broker.start)
            await load.ledger.acknowledgements(1)
            load.ended.set()
        await load.caught_up()
        for task in consuming:
            task.cancel()
    return struck


async def _with_client(load: Load, work: Callable[[Client], Awaitable[None]]) -> None:
    async with qmq.connect(load.url, send_timeout=PATIENCE_S) as client:
        await work(client)


async def _settled(broker: BrokerProcess, load: Load, contiguous: bool) -> None:
    """Everything is acknowledged: hold it against what a new group gets, and what the others got meanwhile."""
    messages = await drain(broker.url, "afterwards")
    load.ledger.check(messages, contiguous=contiguous)
    load.ledger.check(load.followed, contiguous=contiguous)
    by_id = {message.id: message for message in messages}
    for message in load.shared:
        load.ledger.entry_of(message)
        assert by_id[message.id].body == message.body, f"{message} was delivered, and is not what is there now"


def _check(load: Load, struck: list[tuple[int, int]], rounds: int) -> None:
    """Faults must have struck, or nothing was tested."""
    ledger = load.ledger
    hit = sum(open_then > 0 for open_then, _ in struck)
    repeats = 0
    for entry in ledger.entries:
        assert entry.state == "acknowledged", entry
        if entry.receipt is not None:
            stored = entry.receipt.stored_at_us
            repeats += any(stored < killed < entry.acknowledged_us for _, killed in struck)
    print(
        f"{hit} of {rounds} kills struck with sends in flight ({[count for count, _ in struck]}); {repeats} messages "
        f"were stored before a kill and acknowledged after it; {len(ledger.entries)} sent, {len(load.shared)} shared"
    )
    assert hit, "no kill struck anything in flight"

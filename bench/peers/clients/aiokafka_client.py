"""aiokafka: Kafka's client in Python."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from bench.peers.peer import Target
from bench.peers.workers.driving import AwaitedSender, Receiver, Sender, portions

_TAKE: Final = 10_000
_BATCHES_IN_FLIGHT: Final = 16
_SENDS_IN_FLIGHT: Final = 20_000
_BATCH_BYTES: Final = 1_000_000


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Create topics of one partition."""
    admin = AIOKafkaAdminClient(bootstrap_servers=target.address)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 1, 1) for topic in topics])
    await admin.close()


class _Producing(Sender):
    """Sends by ``send``: queued, its future awaited later."""

    async def open(self, topics: Sequence[str]) -> None:
        self._producer: Any = await _producer(self.target, topics)
        self._sent: set[asyncio.Future[Any]] = set()
        self._most = _SENDS_IN_FLIGHT

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        for body in bodies:
            self._sent.add(await self._producer.send(topic, body, partition=0))
        await self._settle()

    async def _settle(self) -> None:
        """Wait until no more sends than allowed are in flight."""
        while len(self._sent) >= self._most:
            done, self._sent = await asyncio.wait(self._sent, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()

    async def flush(self) -> None:
        await self._producer.flush()
        await asyncio.gather(*self._sent)
        self._sent.clear()

    async def close(self) -> None:
        await self._producer.stop()


class _Batches(_Producing):
    """Sends by ``send_batch``: the caller makes the batches."""

    async def open(self, topics: Sequence[str]) -> None:
        await super().open(topics)
        self._most = _BATCHES_IN_FLIGHT

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        batch = self._producer.create_batch()
        for body in bodies:
            if batch.append(key=None, value=body, timestamp=None) is None:
                await self._hand_over(batch, topic)
                batch = self._producer.create_batch()
                batch.append(key=None, value=body, timestamp=None)
        await self._hand_over(batch, topic)

    async def _hand_over(self, batch: Any, topic: str) -> None:
        batch.close()
        self._sent.add(await self._producer.send_batch(batch, topic, partition=0))
        await self._settle()


class _Awaited(AwaitedSender):
    async def open(self, topics: Sequence[str]) -> None:
        self._producer: Any = await _producer(self.target, topics)

    async def one(self, topic: str, body: bytes) -> None:
        await self._producer.send_and_wait(topic, body, partition=0)

    async def close(self) -> None:
        await self._producer.stop()


class _Tasks(_Awaited):
    """Awaits each message with key and header in a task of its own."""

    async def one(self, topic: str, body: bytes) -> None:
        await self._producer.send_and_wait(topic, body, key=b"order-1", partition=0, headers=[("price", b"125")])

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        for part in portions(bodies, messages, self.in_flight):
            await asyncio.gather(*[asyncio.ensure_future(self.one(topic, body)) for body in part])


async def _producer(target: Target, topics: Sequence[str]) -> Any:
    producer = AIOKafkaProducer(
        bootstrap_servers=target.address,
        acks="all",
        linger_ms=5,
        max_batch_size=_BATCH_BYTES,
        max_request_size=4 * _BATCH_BYTES,
    )
    await producer.start()
    for topic in topics:
        await producer.partitions_for(topic)
    return producer


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    kinds: dict[str, type[Sender]] = {
        "bulk": _Batches,
        "queued": _Producing,
        "awaited": _Awaited,
        "key and property": _Tasks,
    }
    return kinds[way](target)


class _GetMany(Receiver):
    async def open(self) -> None:
        self._consumer: Any = AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.target.address,
            group_id=f"{self.topic}.{self.group}",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_partition_fetch_bytes=4_194_304,
            fetch_max_bytes=1 << 26,
        )
        await self._consumer.start()

    async def take(self) -> Sequence[bytes]:
        found = await self._consumer.getmany(timeout_ms=int(self.silence_s * 1e3), max_records=_TAKE)
        bodies = [record.value for records in found.values() for record in records]
        if bodies:
            await self._consumer.commit()
        return bodies

    async def flush(self) -> None:
        """Do nothing: each commit has its answer."""

    async def left(self) -> int:
        (partition,) = self._consumer.assignment()
        end = (await self._consumer.end_offsets([partition]))[partition]
        return int(end - (await self._consumer.committed(partition) or 0))

    async def close(self) -> None:
        await self._consumer.stop()


class _Iterated(_GetMany):
    _came = 0

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        try:
            async with asyncio.timeout(self.silence_s):
                async for record in self._consumer:
                    found.append(record.value)
                    if len(found) == 1_000:
                        break
        except TimeoutError:
            pass
        self._came += len(found)
        if self._came >= _TAKE:
            await self.flush()
        return found

    async def flush(self) -> None:
        self._came = 0
        await self._consumer.commit()


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    return {"bulk": _GetMany, "each": _Iterated}[way](target, topic, group)

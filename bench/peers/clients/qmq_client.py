"""QMQ's asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal, cast

from bench.peers.peer import Promise, Target
from bench.peers.workers.driving import FAILS_ONE_OF, AwaitedSender, Receiver, Sender, limit_of, portions
from qmq import Client, connect
from qmq.net.client.consumer.consumer import Consumer

_CALLS_IN_FLIGHT: Final = 64
#: The most messages in flight to a consumer.
_WINDOW: Final = 100_000
_WINDOW_BYTES: Final = 1 << 30
_PULL: Final = 10_000
_PULL_BATCH: Final = 50_000
_HANDED_ON: Final = 1_000
_DEFAULT_WINDOW: Final = 10_000
_KEYS: Final = [f"order-{number}" for number in range(1_000)]
_PROPERTIES: Final = {"price": "125"}


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Do nothing: subjects need not be created."""


def _client(target: Target) -> Client:
    durability = {Promise.PAGE_CACHE: "append", Promise.FSYNC: "flush"}[target.promise]
    return connect(target.address, durability=cast(Literal["append", "flush"], durability))


class _Awaited(AwaitedSender):
    async def open(self, topics: Sequence[str]) -> None:
        self._client = await _client(self.target).__aenter__()

    async def one(self, topic: str, body: bytes) -> None:
        await self._client.send(topic, body)

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)


class _Tasks(_Awaited):
    """Awaits each message with key and property in a task of its own."""

    async def one(self, topic: str, body: bytes) -> None:
        await self._client.send(topic, body, key=_KEYS[0], properties=_PROPERTIES)

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        for part in portions(bodies, messages, self.in_flight):
            await asyncio.gather(*[asyncio.ensure_future(self.one(topic, body)) for body in part])


class _Queued(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._client = await _client(self.target).__aenter__()

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        for body in bodies:
            self._client.send_nowait(topic, body)
        await self._client.drain()

    async def flush(self) -> None:
        await self._client.flush()

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)


class _QueuedWithKey(_Queued):
    at_once = 500

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        for body, key in zip(bodies, _KEYS, strict=False):
            self._client.send_nowait(topic, body, key=key)
        await self._client.drain()


class _Bulk(_Queued):
    async def open(self, topics: Sequence[str]) -> None:
        await super().open(topics)
        self._free = asyncio.Semaphore(_CALLS_IN_FLIGHT)
        self._calls: set[asyncio.Task[object]] = set()

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        await self._free.acquire()
        call = asyncio.ensure_future(self._client.send_many(topic, bodies))
        self._calls.add(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[object]) -> None:
        if call.exception() is None:  # an exception stays for flush to raise
            self._calls.discard(call)
        self._free.release()

    async def flush(self) -> None:
        await asyncio.gather(*self._calls)


class _Paced(_Queued):
    """Sends by ``send_nowait``; the messages of one turn of the loop make one batch."""

    tells_acks = False

    def post(self, topic: str, body: bytes, number: int) -> None:
        self._client.send_nowait(topic, body)

    async def turn(self) -> None:
        await self._client.drain()
        await asyncio.sleep(0)


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    kinds: dict[str, type[Sender]] = {
        "bulk": _Bulk,
        "queued": _Queued,
        "awaited": _Awaited,
        "paced": _Paced,
        "key": _QueuedWithKey,
        "key and property": _Tasks,
    }
    return kinds[way](target)


class _Group(Receiver):
    async def open(self) -> None:
        self._client = await connect(self.target.address).__aenter__()
        self._consumer: Consumer = await self._client.subscribe(
            self.topic, group=self.group, start="first"
        ).__aenter__()
        await self._client.admin.set_group(self.group, max_unacked=_WINDOW, max_unacked_bytes=_WINDOW_BYTES)

    async def flush(self) -> None:
        await self._consumer.flush()

    async def left(self) -> int:
        (group,) = await self._client.admin.groups(self.group)
        return group.ready + group.in_flight + group.in_retry + group.dead

    async def close(self) -> None:
        await self._consumer.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)


class _Pull(_Group):
    async def take(self) -> Sequence[bytes]:
        messages = await self._consumer.pull(_PULL, timeout=self.silence_s)
        found = []
        for message in messages:
            found.append(message.body)
            message.ack()
        return found


class _Failing(_Pull):
    """Fails every tenth message at its first attempt."""

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        while not found:
            messages = await self._consumer.pull(_PULL, timeout=self.silence_s)
            if not messages:
                break
            failing = [message for message in messages[::FAILS_ONE_OF] if message.attempt == 1]
            refused = {id(message) for message in failing}
            self.refused += len(failing)
            nacks = asyncio.gather(*[message.nack(delay=0.0) for message in failing])
            for message in messages:
                if id(message) not in refused:
                    found.append(message.body)
                    message.ack()
            await nacks
        return found


class _PullBatch(_Group):
    async def take(self) -> int:
        batch = await self._consumer.pull_batch(_PULL_BATCH, timeout=self.silence_s)
        batch.ack()
        return len(batch)


class _Limited(_Group):
    """Pulls batches with a limit and the default window; bodies are not touched."""

    limit = 0

    async def open(self) -> None:
        await super().open()
        await self._client.admin.set_group(self.group, max_unacked=_DEFAULT_WINDOW)

    async def take(self) -> Sequence[bytes] | int:
        batch = await self._consumer.pull_batch(self.limit, timeout=self.silence_s)
        batch.ack()
        return len(batch)


class _Spread(_Limited):
    """Pulls batches of all topics with a prefix, and touches bodies."""

    async def take(self) -> Sequence[bytes]:
        batch = await self._consumer.pull_batch(self.limit, timeout=self.silence_s)
        batch.ack()
        return batch.bodies


class _Iterated(_Group):
    """Consumes by `async for`, and returns several messages at a time."""

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        try:
            async with asyncio.timeout(self.silence_s):
                async for message in self._consumer:
                    found.append(message.body)
                    message.ack()
                    if len(found) == _HANDED_ON:
                        break
        except TimeoutError:
            pass
        return found


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    if way.startswith("at most"):
        limited = _Limited(target, topic, group)
        limited.limit = limit_of(way)
        return limited
    kinds: dict[str, type[Receiver]] = {
        "bulk": _PullBatch,
        "each": _Pull,
        "iterated": _Iterated,
        "failing": _Failing,
        "paced": _Pull,
    }
    return kinds[way](target, topic, group)


def spread_receiver(target: Target, way: str, prefix: str, topics: Sequence[str]) -> Receiver:
    """Return a receiver of all topics with that prefix."""
    spread = _Spread(target, prefix + ".", f"{prefix}-{limit_of(way)}")
    spread.limit = limit_of(way)
    return spread

"""redis-py with hiredis."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import redis
import redis.asyncio

from bench.peers.peer import Target
from bench.peers.workers.driving import AwaitedSender, Receiver, Sender, limit_of, portions

_COUNT: Final = 1_000
_CONNECTIONS: Final = 100
_KEYS: Final = [b"order-%d" % number for number in range(1_000)]


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Do nothing: streams need not be created."""


def _connect(target: Target) -> Any:
    host, port = target.address.split(":")
    return redis.Redis(host=host, port=int(port))


class _Pipelines(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._redis = _connect(self.target)
        self._redis.ping()
        self._posted: list[tuple[str, bytes, int]] = []

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for body in bodies:
            pipeline.xadd(topic, {b"b": body})
        pipeline.execute()

    async def flush(self) -> None:
        """Do nothing: each pipeline has its answers when ``put`` returns."""
        await self.turn()

    def post(self, topic: str, body: bytes, number: int) -> None:
        self._posted.append((topic, body, number))

    async def turn(self) -> None:
        if not self._posted:
            return
        posted, self._posted = self._posted, []
        pipeline = self._redis.pipeline(transaction=False)
        for topic, body, _ in posted:
            pipeline.xadd(topic, {b"b": body})
        pipeline.execute()
        for _, _, number in posted:
            self.acked(number)

    async def close(self) -> None:
        self._redis.close()


class _PipelinesWithKey(_Pipelines):
    at_once = 500

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for body, key in zip(bodies, _KEYS, strict=False):
            pipeline.xadd(topic, {b"b": body, b"k": key})
        pipeline.execute()


class _Awaited(AwaitedSender):
    async def open(self, topics: Sequence[str]) -> None:
        host, port = self.target.address.split(":")
        pool = redis.asyncio.BlockingConnectionPool(host=host, port=int(port), max_connections=_CONNECTIONS, timeout=60)
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        await asyncio.gather(*[self._redis.ping() for _ in range(_CONNECTIONS)])

    async def one(self, topic: str, body: bytes) -> None:
        await self._redis.xadd(topic, {b"b": body})

    async def close(self) -> None:
        await self._redis.aclose()


class _Tasks(_Awaited):
    """Awaits each message with key and property in a task of its own."""

    async def one(self, topic: str, body: bytes) -> None:
        await self._redis.xadd(topic, {b"b": body, b"k": _KEYS[0], b"price": b"125"})

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        for part in portions(bodies, messages, self.in_flight):
            await asyncio.gather(*[asyncio.ensure_future(self.one(topic, body)) for body in part])


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    kinds: dict[str, type[Sender]] = {
        "bulk": _Pipelines,
        "awaited": _Awaited,
        "paced": _Pipelines,
        "key": _PipelinesWithKey,
        "key and property": _Tasks,
    }
    return kinds[way](target)


class _Group(Receiver):
    blocks = True
    count = _COUNT

    async def open(self) -> None:
        self._redis = _connect(self.target)
        self._name = secrets.token_hex(4)
        try:
            self._redis.xgroup_create(self.topic, self.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):  # the group exists
                raise

    def _read(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found = self._redis.xreadgroup(
            self.group, self._name, {self.topic: ">"}, count=self.count, block=int(self.silence_s * 1e3)
        )
        if not found:
            return []
        messages: list[tuple[bytes, dict[bytes, bytes]]] = _of_stream(found)
        return messages

    async def take(self) -> Sequence[bytes]:
        messages = self._read()
        if messages:
            self._acknowledge([number for number, _ in messages])
        return [fields[b"b"] for _, fields in messages]

    def _acknowledge(self, numbers: list[bytes]) -> None:
        self._redis.xack(self.topic, self.group, *numbers)

    async def flush(self) -> None:
        """Do nothing: each XACK has its answer."""

    async def left(self) -> int:
        pending = int(self._redis.xpending(self.topic, self.group)["pending"])
        return pending + len(self._redis.xreadgroup(self.group, self._name, {self.topic: ">"}, count=_COUNT))

    async def close(self) -> None:
        self._redis.close()


class _Each(_Group):
    def _acknowledge(self, numbers: list[bytes]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for number in numbers:
            pipeline.xack(self.topic, self.group, number)
        pipeline.execute()


class _Spread(Receiver):
    """Reads many streams, some at a time: COUNT is of each stream, so it is one for as many streams as messages."""

    blocks = True

    def __init__(self, target: Target, topics: Sequence[str], limit: int) -> None:
        super().__init__(target, topics[0], "spread")
        self._topics = topics
        self._limit = limit
        self._at = 0

    async def open(self) -> None:
        self._redis = _connect(self.target)
        self.group = self._name = secrets.token_hex(4)
        for start in range(0, len(self._topics), _COUNT):
            pipeline = self._redis.pipeline(transaction=False)
            for topic in self._topics[start : start + _COUNT]:
                pipeline.xgroup_create(topic, self.group, id="0")
            pipeline.execute()

    async def take(self) -> Sequence[bytes]:
        deadline = time.monotonic() + self.silence_s
        while time.monotonic() < deadline:
            some = self._topics[self._at : self._at + self._limit]
            self._at = (self._at + self._limit) % (-(-len(self._topics) // self._limit) * self._limit)
            each = max(self._limit // len(some), 1)
            found = self._redis.xreadgroup(self.group, self._name, dict.fromkeys(some, ">"), count=each)
            if not found:
                continue
            bodies = list[bytes]()
            pipeline = self._redis.pipeline(transaction=False)
            for topic, messages in _by_stream(found):
                bodies += [fields[b"b"] for _, fields in messages]
                pipeline.xack(topic, self.group, *[number for number, _ in messages])
            pipeline.execute()
            return bodies
        return []

    async def flush(self) -> None:
        """Do nothing: each XACK has its answer."""

    async def close(self) -> None:
        self._redis.close()


def _by_stream(found: Any) -> list[tuple[bytes, Any]]:
    """Return the messages of each stream, for either protocol of the client."""
    if isinstance(found, dict):
        return [(topic, messages[0]) for topic, messages in found.items()]
    return [(topic, messages) for topic, messages in found]


def _of_stream(found: Any) -> Any:
    """Return the messages of the one stream, for either protocol of the client."""
    return next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    if way.startswith("at most"):
        limited = _Group(target, topic, group)
        limited.count = limit_of(way)
        return limited
    return {"bulk": _Group, "each": _Each, "paced": _Group}[way](target, topic, group)


def spread_receiver(target: Target, way: str, prefix: str, topics: Sequence[str]) -> Receiver:
    """Return a receiver of all these streams."""
    return _Spread(target, topics, limit_of(way))

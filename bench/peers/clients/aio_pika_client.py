"""aio-pika."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import aio_pika

from bench.peers.clients.pika_client import make_topics as make_topics
from bench.peers.peer import Target
from bench.peers.workers.driving import AwaitedSender, Receiver, Sender

_PREFETCH: Final = 1_000
_TAKE: Final = 1_000


async def _connect(target: Target) -> Any:
    return await aio_pika.connect(f"amqp://guest:guest@{target.address}/")


class _Awaited(AwaitedSender):
    async def open(self, topics: Sequence[str]) -> None:
        self._connection = await _connect(self.target)
        self._exchange = (await self._connection.channel(publisher_confirms=True)).default_exchange

    async def one(self, topic: str, body: bytes) -> None:
        message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
        await self._exchange.publish(message, topic)

    async def close(self) -> None:
        await self._connection.close()


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    return {"awaited": _Awaited}[way](target)


class _Each(Receiver):
    async def open(self) -> None:
        self._connection = await _connect(self.target)
        self._channel = await self._connection.channel()
        await self._channel.set_qos(_PREFETCH)
        self._queue = await self._channel.get_queue(self.topic)
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self._tag: str | None = None

    async def take(self) -> Sequence[bytes]:
        if self._tag is None:
            self._tag = await self._queue.consume(self._came.put)
        found: list[bytes] = []
        try:
            message = await asyncio.wait_for(self._came.get(), self.silence_s)
        except TimeoutError:
            return []
        while True:
            await message.ack()
            found.append(message.body)
            if len(found) == _TAKE or self._came.empty():
                return found
            message = self._came.get_nowait()

    async def flush(self) -> None:
        # The broker answers this call after everything sent before it.
        await self._channel.set_qos(_PREFETCH)

    async def close(self) -> None:
        await self._connection.close()


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way; a queue has one group."""
    return {"each": _Each}[way](target, topic, group)

"""nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError

from bench.peers.peer import Target
from bench.peers.workers.driving import FAILS_ONE_OF, AwaitedSender, Receiver, Sender

_SILENCE_S: Final = 10.0
_FETCH: Final = 1_000
_PUSHED: Final = 65_536
_GIVEN_BACK_S: Final = 0.05


def _stream(topic: str) -> str:
    return topic.replace(".", "-")


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Create a stream of one subject for each topic."""
    connection = await nats.connect(target.address)
    stream = connection.jetstream()
    for topic in topics:
        await stream.add_stream(StreamConfig(name=_stream(topic), subjects=[topic], storage=StorageType.FILE))
    await connection.close()


class _Awaited(AwaitedSender):
    async def open(self, topics: Sequence[str]) -> None:
        self._connection = await nats.connect(self.target.address)
        self._stream: Any = self._connection.jetstream(timeout=60)

    async def one(self, topic: str, body: bytes) -> None:
        await self._stream.publish(topic, body)

    async def close(self) -> None:
        await self._connection.close()


class _Queued(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._connection = await nats.connect(self.target.address)
        self._stream: Any = self._connection.jetstream(timeout=60)
        self._sent: list[asyncio.Future[Any]] = []

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        publish = self._stream.publish_async
        self._sent = [one for one in self._sent if not one.done() or one.result() is None]
        for body in bodies:
            self._sent.append(await publish(topic, body))

    async def flush(self) -> None:
        await self._stream.publish_async_completed()
        await asyncio.gather(*self._sent)

    async def close(self) -> None:
        await self._connection.close()


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    kinds: dict[str, type[Sender]] = {"queued": _Queued, "awaited": _Awaited, "paced": _Awaited}
    return kinds[way](target)


class _Fetch(Receiver):
    policy = AckPolicy.EXPLICIT

    async def open(self) -> None:
        self._connection = await nats.connect(self.target.address)
        self._stream: Any = self._connection.jetstream(timeout=60)
        settings = ConsumerConfig(ack_policy=self.policy, max_ack_pending=100_000, deliver_policy=DeliverPolicy.ALL)
        self._messages = await self._stream.pull_subscribe(
            self.topic, durable=self.group, stream=_stream(self.topic), config=settings
        )

    async def take(self) -> Sequence[bytes]:
        try:
            messages = await self._messages.fetch(_FETCH, timeout=self.silence_s)
        except TimeoutError:
            return []
        await self._acknowledge(messages)
        return [message.data for message in messages]

    async def _acknowledge(self, messages: list[Any]) -> None:
        for message in messages:
            await message.ack()

    async def flush(self) -> None:
        """Wait until the broker has all acks, which have no answers: ask it for the count."""
        deadline = time.monotonic() + _SILENCE_S
        pending = 1
        while pending and time.monotonic() < deadline:
            pending = (await self._info()).num_ack_pending

    async def _info(self) -> Any:
        return await self._stream.consumer_info(_stream(self.topic), self.group)

    async def left(self) -> int:
        found = await self._info()
        return int(found.num_pending + found.num_ack_pending)

    async def close(self) -> None:
        await self._connection.close()


class _FetchAll(_Fetch):
    policy = AckPolicy.ALL

    async def _acknowledge(self, messages: list[Any]) -> None:
        await messages[-1].ack()


class _Failing(_Fetch):
    """Fails every tenth message the first time."""

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        while not found:
            try:
                messages = await self._messages.fetch(_FETCH, timeout=self.silence_s)
            except TimeoutError:
                break
            for number, message in enumerate(messages):
                if not number % FAILS_ONE_OF and message.metadata.num_delivered == 1:
                    await message.nak()
                    self.refused += 1
                else:
                    await message.ack()
                    found.append(message.data)
        return found


class _Push(_Fetch):
    """Consumes by push, for fixed rates, at which pulling would cost time."""

    async def open(self) -> None:
        self._connection = await nats.connect(self.target.address)
        self._stream = self._connection.jetstream(timeout=60)
        settings = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT, max_ack_pending=_PUSHED, ack_wait=self.session_timeout_s
        )
        try:
            self._messages = await self._join(settings)
        except BadRequestError:  # another member has created the consumer since this one asked
            self._messages = await self._join(settings)

    async def _join(self, settings: ConsumerConfig) -> Any:
        """Subscribe with a queue, so that several members can share it."""
        return await self._stream.subscribe(
            self.topic,
            queue=self.group,
            durable=self.group,
            stream=_stream(self.topic),
            config=settings,
            manual_ack=True,
        )

    async def take(self) -> Sequence[bytes]:
        try:
            message = await self._messages.next_msg(timeout=self.silence_s)
        except TimeoutError:
            return []
        await message.ack()
        return [message.data]

    async def flush(self) -> None:
        """Leave, so that new messages go to others, and give back those that were pushed and not taken."""
        await self._messages.unsubscribe()
        try:
            while True:
                await (await self._messages.next_msg(timeout=_GIVEN_BACK_S)).nak()
        except TimeoutError:
            await super().flush()


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    return {"bulk": _FetchAll, "each": _Fetch, "paced": _Push, "failing": _Failing}[way](target, topic, group)

"""confluent-kafka: Kafka's C client."""

from __future__ import annotations

import functools
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from confluent_kafka import AcknowledgeType, Consumer, KafkaException, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from bench.peers.peer import Target
from bench.peers.workers.driving import FAILS_ONE_OF, Receiver, Sender, limit_of
from qmq.bench.values import BenchFailed

_JOINING_S: Final = 30.0
_CONSUME: Final = 10_000
_COMMIT_EVERY_S: Final = 0.1
_QUEUE: Final = 1_000_000
_KEYS: Final = [b"order-%d" % number for number in range(1_000)]


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Create topics of one partition."""
    admin = AdminClient({"bootstrap.servers": target.address})
    for made in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        made.result(60)


class _Producing(Sender):
    """Sends by ``produce_batch``; *failed* has what was not delivered."""

    at_once = 10_000
    linger_ms = 50.0

    async def open(self, topics: Sequence[str]) -> None:
        self._failed: list[Any] = []
        self._left = 0
        self._producer = Producer(
            {
                "bootstrap.servers": self.target.address,
                "linger.ms": self.linger_ms,
                "batch.size": 1_000_000,
                "batch.num.messages": 100_000,
                "queue.buffering.max.messages": _QUEUE,
                "acks": "all",
                "enable.idempotence": True,
            }
        )
        self._producer.list_topics(timeout=60)

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        self._room(len(bodies))
        self._producer.produce_batch(topic, [{"value": body} for body in bodies])

    def _room(self, count: int) -> None:
        self._producer.poll(0)
        while len(self._producer) + count > _QUEUE:
            self._producer.poll(0.001)

    async def flush(self) -> None:
        left = self._producer.flush(60)
        if left or self._failed:
            raise BenchFailed(
                f"{left} messages were not delivered in 60 s, {len(self._failed)} failed: {self._failed[:1]}"
            )

    async def close(self) -> None:
        """Do nothing: all is flushed, and the client closes its connections when it is deleted."""


class _Produce(_Producing):
    at_once = 1_000

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        produce = self._producer.produce
        self._room(len(bodies))
        for body in bodies:
            produce(topic, body)


class _ProduceWithKey(_Produce):
    at_once = 500

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        produce = self._producer.produce
        self._room(len(bodies))
        for body, key in zip(bodies, _KEYS, strict=False):
            produce(topic, body, key)


class _Paced(_Producing):
    def __init__(self, target: Target, linger_ms: float) -> None:
        super().__init__(target)
        self.linger_ms = linger_ms

    def post(self, topic: str, body: bytes, number: int) -> None:
        self._producer.produce(topic, body, on_delivery=functools.partial(self._delivered, number))

    def _delivered(self, number: int, error: Any, _: Any) -> None:
        if error is not None:
            self._failed.append(error)
        else:
            self.acked(number)

    async def turn(self) -> None:
        self._producer.poll(0)


def sender(target: Target, way: str) -> Sender:
    """Return a sender for that way."""
    if way.startswith("linger"):
        return _Paced(target, float(way.split()[1]))
    kinds: dict[str, type[Sender]] = {"bulk": _Producing, "queued": _Produce, "key": _ProduceWithKey}
    return kinds[way](target)


class _Group(Receiver):
    """Consumes in a consumer group; assigned messages wait until the first ``take``."""

    blocks = True
    limit = _CONSUME

    async def open(self) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": self.target.address,
                "group.id": f"{self.topic}.{self.group}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "queued.min.messages": 100_000,
                "fetch.queue.backoff.ms": 5,
                "max.partition.fetch.bytes": 4_194_304,
            }
        )
        assigned: list[Any] = []

        def hold(consumer: Any, partitions: Any) -> None:
            assigned.extend(partitions)
            consumer.assign(partitions)
            consumer.pause(partitions)

        self._consumer.subscribe([self.topic], on_assign=hold)
        deadline = time.monotonic() + _JOINING_S
        while not assigned and time.monotonic() < deadline:
            self._consumer.poll(0.05)
        self._held = assigned

    def _consume(self) -> list[Any]:
        if self._held:
            self._consumer.resume(self._held)
            self._held = []
        messages = self._consumer.consume(self.limit, 0.05)
        deadline = time.monotonic() + self.silence_s
        while not messages and time.monotonic() < deadline:
            messages = self._consumer.consume(self.limit, 0.05)
        if messages:
            self._next = messages[-1].offset() + 1
            self._consumer.commit(asynchronous=True)
        return list(messages)

    async def take(self) -> Sequence[bytes] | int:
        return [message.value() for message in self._consume()]

    async def flush(self) -> None:
        # By number: a commit of the stored offsets fails if an earlier one has committed all of them.
        self._consumer.commit(offsets=[TopicPartition(self.topic, 0, self._next)], asynchronous=False)

    async def left(self) -> int:
        partition = TopicPartition(self.topic, 0)
        _, end = self._consumer.get_watermark_offsets(partition)
        (committed,) = self._consumer.committed([partition])
        return int(end - committed.offset)

    async def close(self) -> None:
        self._consumer.close()


class _GroupBulk(_Group):
    async def take(self) -> int:
        return len(self._consume())


class _Spread(_Group):
    """Consumes all topics with a prefix in a consumer group."""

    async def flush(self) -> None:
        self._consumer.commit(asynchronous=False)

    async def left(self) -> int:
        return 0


class _Arriving(_Group):
    """Consumes one message at a time, as soon as it arrives."""

    _committed = 0.0

    async def open(self) -> None:
        await super().open()
        self._consumer.resume(self._held)

    async def take(self) -> Sequence[bytes]:
        message = self._consumer.poll(self.silence_s)
        if message is None:
            return []
        if message.error():
            raise KafkaException(message.error())
        self._next = message.offset() + 1
        if (now := time.monotonic()) - self._committed > _COMMIT_EVERY_S:
            self._committed = now
            self._consumer.commit(asynchronous=True)
        return [message.value()]


class _Share(Receiver):
    """Consumes in a share group, in which nobody owns a partition. Joining takes seconds, so the clock starts at the
    first message.
    """

    blocks = True
    late_start = True
    mode = "implicit"

    async def open(self) -> None:
        resource = ConfigResource(
            ResourceType.GROUP,
            f"{self.topic}.{self.group}",
            incremental_configs=[
                ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
            ],
        )
        admin = AdminClient({"bootstrap.servers": self.target.address})
        for changed in admin.incremental_alter_configs([resource]).values():
            changed.result(30)
        self._consumer: Any = ShareConsumer(
            {
                "bootstrap.servers": self.target.address,
                "group.id": f"{self.topic}.{self.group}",
                "share.acknowledgement.mode": self.mode,
            }
        )
        self._consumer.subscribe([self.topic])
        self._came = False

    def _poll(self) -> Any:
        deadline = time.monotonic() + (self.silence_s if self._came else _JOINING_S)
        messages = self._consumer.poll(min(1.0, self.silence_s))
        while not len(messages) and time.monotonic() < deadline:
            messages = self._consumer.poll(min(1.0, self.silence_s))
        self._came = True
        return messages

    async def take(self) -> Sequence[bytes] | int:
        count = len(self._poll())
        if count:
            self._commit()
        return count

    def _commit(self) -> None:
        for error in self._consumer.commit_sync().values():
            if error is not None:
                raise error

    async def flush(self) -> None:
        """Do nothing: each commit has its answer."""

    async def close(self) -> None:
        self._consumer.close()


class _ShareEach(_Share):
    mode = "explicit"

    async def take(self) -> Sequence[bytes]:
        found = []
        messages = self._poll()
        for message in messages:
            found.append(message.value())
            self._consumer.acknowledge(message)
        if found:
            self._commit()
        return found


class _ShareFailing(_ShareEach):
    """Releases every tenth message the first time."""

    async def open(self) -> None:
        await super().open()
        self._released: set[int] = set()

    async def take(self) -> Sequence[bytes]:
        found: list[bytes] = []
        while not found:
            messages = self._poll()
            for number, message in enumerate(messages):
                if not number % FAILS_ONE_OF and message.offset() not in self._released:
                    self._released.add(message.offset())
                    self.refused += 1
                    self._consumer.acknowledge(message, AcknowledgeType.RELEASE)
                else:
                    found.append(message.value())
                    self._consumer.acknowledge(message)
            if not len(messages):
                break
            self._commit()
        return found


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way."""
    if way.startswith("at most"):
        limited = _GroupBulk(target, topic, group)
        limited.limit = limit_of(way)
        return limited
    kinds: dict[str, type[Receiver]] = {
        "bulk": _GroupBulk,
        "each": _Group,
        "share bulk": _Share,
        "share each": _ShareEach,
        "failing": _ShareFailing,
        "paced": _Arriving,
    }
    return kinds[way](target, topic, group)


def spread_receiver(target: Target, way: str, prefix: str, topics: Sequence[str]) -> Receiver:
    """Return a receiver of all topics with that prefix."""
    spread = _Spread(target, f"^{re.escape(prefix)}[.].*", secrets.token_hex(4))
    spread.limit = limit_of(way)
    return spread

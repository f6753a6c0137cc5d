"""pika's `SelectConnection`: its blocking one confirms one message at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import pika

from bench.peers.peer import Target
from bench.peers.workers.driving import FAILS_ONE_OF, Receiver, Sender, Tags
from qmq.bench.values import BenchFailed

_SILENCE_S: Final = 10.0
_IN_FLIGHT: Final = 10_000
_PREFETCH: Final = 10_000
_TAKE: Final = 1_000
_TICK_S: Final = 0.05
_QUORUM: Final = {"x-queue-type": "quorum"}


async def make_topics(target: Target, topics: Sequence[str]) -> None:
    """Create quorum queues."""
    connection = pika.BlockingConnection(_parameters(target))
    channel = connection.channel()
    for topic in topics:
        channel.queue_declare(topic, durable=True, arguments=_QUORUM)
    connection.close()


def _parameters(target: Target) -> pika.ConnectionParameters:
    host, port = target.address.split(":")
    return pika.ConnectionParameters(host, int(port))


class _Line:
    """A connection with one channel, whose loop runs only while something is awaited."""

    def __init__(self, target: Target) -> None:
        self.channel: Any = None
        self._gone: list[object] = []
        self._connection = pika.SelectConnection(
            _parameters(target),
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=lambda _, why: self._gone.append(why),
            on_close_callback=lambda _, why: self._gone.append(why),
        )
        self._loop = self._connection.ioloop
        self._loop.activate_poller()
        self._tick()
        self.wait(lambda: self.channel is not None, _SILENCE_S)

    def _opened(self, channel: Any) -> None:
        channel.add_on_close_callback(lambda _, why: self._gone.append(why))
        self.channel = channel

    def _tick(self) -> None:
        """Bound the time of a turn."""
        self._loop.call_later(_TICK_S, self._tick)

    def turn(self, waits: bool) -> None:
        """Read and write once; with *waits*, wait a little if there is nothing to do."""
        if not waits:
            self._loop.call_later(0, _nothing)
        self._loop.process_timeouts()
        self._loop.poll()
        if self._gone:
            raise BenchFailed(f"RabbitMQ closed the connection: {self._gone[0]}")

    def wait(self, until: Callable[[], object], timeout_s: float) -> bool:
        """Run the loop until the condition holds; return False if the time is up."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                return False
            self.turn(waits=True)
        return True

    def close(self) -> None:
        """Disconnect; the broker's answer does not matter."""
        self._gone.clear()
        self._connection.close()
        deadline = time.monotonic() + _SILENCE_S
        while not self._connection.is_closed and time.monotonic() < deadline:
            self._loop.process_timeouts()
            self._loop.poll()


def _nothing() -> None:
    """Add a timer that is due, so that the loop does not wait."""


class _Confirmed(Sender):
    async def open(self, topics: Sequence[str]) -> None:
        self._line = _Line(self.target)
        self._sent = self._confirmed = 0
        self._refused = 0
        self._tags = Tags()
        self._open: list[object] = []
        self._line.channel.confirm_delivery(self._on_confirm, callback=self._open.append)
        self._line.wait(lambda: self._open, _SILENCE_S)
        self._properties = pika.BasicProperties(delivery_mode=2)
        self._base: int | None = None

    def _on_confirm(self, frame: Any) -> None:
        last = int(frame.method.delivery_tag)
        if isinstance(frame.method, pika.spec.Basic.Nack):
            self._refused += 1
        self._settled(self._tags.confirm(last, bool(frame.method.multiple)))

    def _settled(self, tags: Sequence[int]) -> None:
        self._confirmed += len(tags)
        if self._base is not None:
            for tag in tags:
                self.acked(tag - self._base)

    def _publish(self, topic: str, body: bytes) -> None:
        self._line.channel.basic_publish("", topic, body, self._properties)
        self._sent += 1

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        for body in bodies:
            self._publish(topic, body)
        self._line.turn(waits=False)
        self._line.wait(lambda: self._sent - self._confirmed < _IN_FLIGHT, 60)

    async def flush(self) -> None:
        everything = self._line.wait(lambda: self._sent == self._confirmed, 60)
        if not everything or self._refused:
            raise BenchFailed(
                f"{self._sent - self._confirmed} messages were not confirmed in 60 s, {self._refused} refused"
            )

    def post(self, topic: str, body: bytes, number: int) -> None:
        if self._base is None:
            self._base = self._sent + 1 - number
        self._publish(topic, body)

    async def turn(self) -> None:
        self._line.turn(waits=False)

    async def close(self) -> None:
        self._line.close()


def sender(target: Target, way: str) -> Sender:
    """Return a sender; all ways are the same."""
    return _Confirmed(target)


class _Consuming(Receiver):
    """Collects deliveries while the loop runs; the consumer starts at the first ``take``."""

    blocks = True
    each = True
    most = _TAKE

    async def open(self) -> None:
        self._line = _Line(self.target)
        self._came: deque[tuple[Any, bytes]] = deque()
        ready: list[object] = []
        self._line.channel.basic_qos(prefetch_count=_PREFETCH, callback=ready.append)
        self._line.wait(lambda: ready, _SILENCE_S)
        self._started = False

    def _start(self) -> None:
        self._line.channel.basic_consume(self.topic, lambda _, method, __, body: self._came.append((method, body)))
        self._started = True

    async def take(self) -> Sequence[bytes]:
        if not self._started:
            self._start()
        self._line.wait(lambda: self._came, self.silence_s)
        taken = [self._came.popleft() for _ in range(min(len(self._came), self.most))]
        if taken:
            self._acknowledge([method.delivery_tag for method, _ in taken])
        return [body for _, body in taken]

    def _acknowledge(self, tags: list[int]) -> None:
        for tag in tags:
            self._line.channel.basic_ack(tag)

    async def flush(self) -> None:
        # The broker answers a synchronous call after everything sent before it.
        answered: list[object] = []
        self._line.channel.basic_qos(prefetch_count=_PREFETCH, callback=answered.append)
        self._line.wait(lambda: answered, 60)

    async def left(self) -> int:
        # Acks are replicated before the broker counts them.
        counts: list[int] = [1]

        def is_empty() -> bool:
            counted: list[int] = []
            self._line.channel.queue_declare(
                self.topic, passive=True, callback=lambda frame: counted.append(frame.method.message_count)
            )
            self._line.wait(lambda: counted, 60)
            counts[0] = counted[0]
            return not counts[0]

        self._line.wait(is_empty, _SILENCE_S)
        return counts[0]

    async def close(self) -> None:
        self._line.close()


class _Failing(_Consuming):
    """Returns every tenth message to the queue the first time."""

    async def take(self) -> Sequence[bytes]:
        if not self._started:
            self._start()
        found: list[bytes] = []
        while not found and self._line.wait(lambda: self._came, self.silence_s):
            for number in range(min(len(self._came), self.most)):
                method, body = self._came.popleft()
                if not number % FAILS_ONE_OF and not method.redelivered:
                    self._line.channel.basic_nack(method.delivery_tag, requeue=True)
                    self.refused += 1
                else:
                    self._line.channel.basic_ack(method.delivery_tag)
                    found.append(body)
        return found


class _Multiple(_Consuming):
    def _acknowledge(self, tags: list[int]) -> None:
        self._line.channel.basic_ack(tags[-1], multiple=True)


def receiver(target: Target, way: str, topic: str, group: str) -> Receiver:
    """Return a receiver for that way; a queue has one group."""
    return {"bulk": _Multiple, "each": _Consuming, "paced": _Consuming, "failing": _Failing}[way](target, topic, group)

"""The interface that drives each client library: a `Sender` and a `Receiver` for each of its ways.

A module of `bench.peers.clients` has ``make_topics(target, topics)``, ``sender(target, way)`` and ``receiver(target,
way, topic, group)``; a way is a name of its `peer.Client`. Libraries without asyncio are driven from coroutines that
never wait: nothing else runs in the worker's loop.
"""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from bench.peers.peer import Target

IN_FLIGHT = 1_000
#: A consumer that fails does so for one message in so many, the first time it gets it.
FAILS_ONE_OF = 10
_REMEMBERED = 10_000


class Sender(ABC):
    """Sends to topics (streams, queues), and knows when all messages are acknowledged."""

    #: The number of messages of a ``put``.
    at_once: int = 1_000
    #: Whether ``acked`` is called for each message of ``post``; else only ``flush`` says that all are acknowledged.
    tells_acks: bool = True

    def __init__(self, target: Target) -> None:
        self.target = target
        #: Called with the number of a message of ``post`` when it is acknowledged.
        self.acked: Callable[[int], None] = _ignore

    @abstractmethod
    async def open(self, topics: Sequence[str]) -> None:
        """Connect, and prepare for sending to *topics*."""

    @abstractmethod
    async def put(self, topic: str, bodies: list[bytes]) -> None:
        """Send messages. It may return before they are acknowledged, but waits while too many are in flight."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait until all messages are acknowledged; raises if one is not."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""

    def post(self, topic: str, body: bytes, number: int) -> None:
        """Send one message at once without waiting for it, and call ``acked`` when it is acknowledged."""
        raise NotImplementedError(f"{type(self).__name__} does not send on a schedule")

    async def turn(self) -> None:
        """Let the client do its work between two posts."""
        await asyncio.sleep(0)

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        """Send that many messages, with the bodies over and over; all are acknowledged when it returns."""
        for part in portions(bodies, messages, self.at_once):
            await self.put(topic, part)
        await self.flush()


class AwaitedSender(Sender):
    """Awaits each message, with *IN_FLIGHT* of them at a time."""

    in_flight = IN_FLIGHT

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._posted: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def one(self, topic: str, body: bytes) -> None:
        """Send one message; it is acknowledged on return."""

    async def put(self, topic: str, bodies: list[bytes]) -> None:
        left = iter(bodies)

        async def send() -> None:
            for body in left:
                await self.one(topic, body)

        await asyncio.gather(*[send() for _ in range(min(self.in_flight, len(bodies)))])

    async def flush(self) -> None:
        while self._posted:
            await asyncio.gather(*self._posted)

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        # One pool for all portions: a pool for each would wait for its slowest call.
        await self.put(topic, (bodies * (messages // len(bodies) + 1))[:messages])

    def post(self, topic: str, body: bytes, number: int) -> None:
        task = asyncio.ensure_future(self._post(topic, body, number))
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)

    async def _post(self, topic: str, body: bytes, number: int) -> None:
        await self.one(topic, body)
        self.acked(number)


class Receiver(ABC):
    """Takes messages of one topic for one group, and acknowledges them."""

    #: Whether joining cannot be told from receiving, so that the clock starts at the first message.
    late_start: bool = False
    #: Whether ``take`` blocks its thread while it waits, as libraries without asyncio do.
    blocks: bool = False
    #: How many messages it has failed, in a way that fails.
    refused: int = 0
    #: How long ``take`` waits for a message.
    silence_s: float = 10.0
    #: The time after which an unacknowledged message comes again, if the client can set it: so long that none expires
    #: while it waits in a slow consumer.
    session_timeout_s: float = 300.0

    def __init__(self, target: Target, topic: str, group: str) -> None:
        self.target = target
        self.topic = topic
        self.group = group

    @abstractmethod
    async def open(self) -> None:
        """Connect and join, without taking messages."""

    @abstractmethod
    async def take(self) -> Sequence[bytes] | int:
        """Return the next messages, acknowledged: the bodies, or their number if bodies are not read; none after a
        silence.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Wait until all acknowledgements are confirmed, as far as the client can know."""

    async def rest(self) -> Sequence[tuple[int, bytes]]:
        """Stop, and return the acknowledged messages that were not taken, each with its time (monotonic, ns)."""
        return ()

    async def left(self) -> int:
        """Return the broker's count of messages that the group has not acknowledged; 0 if it cannot be asked."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Leave and disconnect."""


class Tags:
    """The numbers that the broker has confirmed: of several queues in any order, and all up to one at once."""

    def __init__(self) -> None:
        self._all_to = 0
        self._ahead: set[int] = set()

    def confirm(self, tag: int, multiple: bool) -> Sequence[int]:
        """Return the numbers that a confirmation covers and no earlier one did."""
        if multiple:
            new = [one for one in range(self._all_to + 1, tag + 1) if one not in self._ahead]
            self._all_to = max(tag, self._all_to)
        else:
            new = [tag]
            self._ahead.add(tag)
        while self._all_to + 1 in self._ahead:
            self._all_to += 1
        if multiple or len(self._ahead) > _REMEMBERED:
            self._ahead = {one for one in self._ahead if one > self._all_to}
        return new


def limit_of(way: str) -> int:
    """Return the most messages at once of a way to consume, such as "at most 5,000"."""
    return int(way.removeprefix("at most ").replace(",", ""))


class Driver(Protocol):
    """The interface of a module of `bench.peers.clients`."""

    async def make_topics(self, target: Target, topics: Sequence[str]) -> None:
        """Create topics, or their equivalents."""

    def sender(self, target: Target, way: str) -> Sender:
        """Return a sender for that way."""

    def receiver(self, target: Target, way: str, topic: str, group: str) -> Receiver:
        """Return a receiver for that way, from the topic's first message on."""

    def spread_receiver(self, target: Target, way: str, prefix: str, topics: Sequence[str]) -> Receiver:
        """Return a receiver of all *topics*, whose names begin with *prefix*, if its `peer.Client` has ``spread``."""


def driver(module: str) -> Driver:
    """Return the module of that name."""
    found: Any = importlib.import_module(f"bench.peers.clients.{module}")
    return found  # type: ignore[no-any-return]  # each module has this interface


def portions(bodies: list[bytes], messages: int, at_once: int) -> Iterator[list[bytes]]:
    """Yield *bodies* over and over in lists of *at_once*, *messages* in all."""
    twice = bodies * (at_once // len(bodies) + 2)
    for start in range(0, messages, at_once):
        first = start % len(bodies)
        yield twice[first : first + min(at_once, messages - start)]


def _ignore(_: int) -> None:
    """Do nothing."""


@asynccontextmanager
async def closing(opened: Sender | Receiver) -> AsyncIterator[None]:
    """Close it at the end of the block in any case."""
    try:
        yield
    finally:
        await opened.close()

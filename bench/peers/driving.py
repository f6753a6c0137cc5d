"""What drives a client library: a `Sender` and a `Receiver` for each of its ways, behind one interface.

A module of `bench.peers.clients` has ``make_topics(target, topics)``, ``sender(target, way)`` and
``receiver(target, way, topic, group)``; a way is a name of its `peer.Client`. Libraries without asyncio are driven from
coroutines that never wait: nothing else runs in the worker's loop.
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
#: A consumer that fails does so for one message of so many, the first time it gets it.
FAILS_ONE_OF = 10
_REMEMBERED = 10_000


class Sender(ABC):
    """Sends to topics (streams, queues) and knows when all is acknowledged."""

    #: Messages of a ``put``.
    at_once: int = 1_000
    #: Whether ``acked`` is told of each message of ``post``; else ``flush`` alone says that all are acknowledged.
    tells_acks: bool = True

    def __init__(self, target: Target) -> None:
        self.target = target
        #: Called with a message's number when it is acknowledged, for those of ``post``.
        self.acked: Callable[[int], None] = _ignore

    @abstractmethod
    async def open(self, topics: Sequence[str]) -> None:
        """Connect, and learn all there is to know before sending to *topics*."""

    @abstractmethod
    async def put(self, topic: str, bodies: list[bytes]) -> None:
        """Send these. May return before they are acknowledged, but not while too many are on their way."""

    @abstractmethod
    async def flush(self) -> None:
        """All is acknowledged, or it raises."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect."""

    def post(self, topic: str, body: bytes, number: int) -> None:
        """Send one at once without waiting for it, and tell ``acked`` when it is acknowledged."""
        raise NotImplementedError(f"{type(self).__name__} does not send on a schedule")

    async def turn(self) -> None:
        """Let the client do what it has to do between two posts."""
        await asyncio.sleep(0)

    async def run(self, topic: str, bodies: list[bytes], messages: int) -> None:
        """Send that many, the bodies over and over; all are acknowledged when it returns."""
        for part in portions(bodies, messages, self.at_once):
            await self.put(topic, part)
        await self.flush()


class AwaitedSender(Sender):
    """Awaits each message, *IN_FLIGHT* of them at a time."""

    in_flight = IN_FLIGHT

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._posted: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def one(self, topic: str, body: bytes) -> None:
        """Send one; it is acknowledged on return."""

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
        # One pool over all, not one for each portion: those would wait for their slowest.
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

    #: Whether joining can't be told from receiving, so that the clock starts with the first messages.
    late_start: bool = False
    #: Whether ``take`` blocks its thread while it waits, as libraries without asyncio do.
    blocks: bool = False
    #: How many messages it has refused: those of a way that fails.
    refused: int = 0
    #: How long ``take`` waits for a message.
    silence_s: float = 10.0
    #: After how long a message that was handed out and not acknowledged comes again, where the client may say so: none
    #: must expire because a consumer that is too slow for the rate has it waiting.
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
        """What came next, acknowledged: the bodies, or how many if bodies are not touched; none after a silence."""

    @abstractmethod
    async def flush(self) -> None:
        """All acknowledgements are confirmed as far as the client can know."""

    async def rest(self) -> Sequence[tuple[int, bytes]]:
        """It takes no more: what was acknowledged for it that it has not taken, each with when (monotonic, ns)."""
        return ()

    async def left(self) -> int:
        """How many messages the group has not acknowledged, as the broker says; 0 where it can't be asked."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Leave and disconnect."""


class Tags:
    """Which numbers the broker has confirmed: of several queues in any order, and all up to one at once."""

    def __init__(self) -> None:
        self._all_to = 0
        self._ahead: set[int] = set()

    def confirm(self, tag: int, multiple: bool) -> Sequence[int]:
        """Those that a confirmation is of and none before it was."""
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


class Driver(Protocol):
    """A module of `bench.peers.clients`."""

    async def make_topics(self, target: Target, topics: Sequence[str]) -> None:
        """Make topics, or whatever they are called there."""

    def sender(self, target: Target, way: str) -> Sender:
        """One that sends so."""

    def receiver(self, target: Target, way: str, topic: str, group: str) -> Receiver:
        """One that consumes so, from the topic's first message on."""


def driver(module: str) -> Driver:
    """The module of that name."""
    found: Any = importlib.import_module(f"bench.peers.clients.{module}")
    return found  # type: ignore[no-any-return]  # what a module names so is one


def portions(bodies: list[bytes], messages: int, at_once: int) -> Iterator[list[bytes]]:
    """*bodies* over and over, *messages* of them, *at_once* in a list; each starts with the first body."""
    portion = (bodies * (at_once // len(bodies) + 1))[:at_once]
    for start in range(0, messages, at_once):
        yield portion if messages - start >= at_once else portion[: messages - start]


def _ignore(_: int) -> None:
    """Nobody asks."""


@asynccontextmanager
async def closing(opened: Sender | Receiver) -> AsyncIterator[None]:
    """Close it at the end of the block, however that ends."""
    try:
        yield
    finally:
        await opened.close()

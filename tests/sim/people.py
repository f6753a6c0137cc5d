"""Programs of a simulated world: producers and consumers as users write them, with a record of all they were told."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final, NamedTuple, Protocol

import qmq
from qmq.errors import ConnectionLost, Fenced, SendFailed, StorageFailed
from qmq.net.client.consumer.in_flight import InFlightWindow
from qmq.net.client.consumer.message import Message
from tests.sim.copies import MAX_ATTEMPTS, MAX_SESSION_EXPIRIES, Book, Copies, Copy, Holder
from tests.sim.world import World

SUBJECTS: Final = ("a.x", "a.y", "b")
RETRY_DELAYS: Final = (0.3, 0.7, 1.5)
MAX_UNACKED: Final = 24
SETTINGS: Final[dict[str, Any]] = {
    "max_attempts": MAX_ATTEMPTS,
    "max_session_expiries": MAX_SESSION_EXPIRIES,
    "max_unacked": MAX_UNACKED,
    "retry_delays": RETRY_DELAYS,
}


class Given(NamedTuple):
    """A message that a consumer has."""

    message: Message
    number: int
    copy: Copy
    in_flight: InFlightWindow
    holder: Holder


class Scene(Protocol):
    """Where they act."""

    world: World
    book: Book
    url: str

    def power_lost_at(self, copy: Copy) -> float:
        """When its broker has lost power last."""

    def is_in_flight(self, group: str, copy: Copy, holder: Holder) -> bool:
        """Its broker is there, and would take that one's acknowledgement."""


async def produce(scene: Scene, seed: int, failover_after: float | None) -> None:
    """Send batch after batch, without end."""
    chance = random.Random(seed)
    while True:
        try:
            async with qmq.connect(scene.url, failover_after=failover_after, send_timeout=6.0) as client:
                while True:
                    await asyncio.gather(*(_send(scene, client, chance) for _ in range(chance.choice((1, 1, 2)))))
                    await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.3)))
        except ConnectionLost:
            await asyncio.sleep(0.2)


async def _send(scene: Scene, client: qmq.Client, chance: random.Random) -> None:
    subject = chance.choice(SUBJECTS)
    numbers = [scene.book.begin(subject) for _ in range(chance.choice((1, 1, 2, 6)))]
    try:
        receipts = await client.send_many(subject, [b"%d" % number + b"." * (number % 40) for number in numbers])
    except SendFailed as error:
        for failure in error.failures:
            scene.book.failed(numbers[failure.ticket], failure.outcome)
        return
    for number, receipt in zip(numbers, receipts, strict=True):
        scene.book.acknowledged(number, receipt.id, maybe_duplicate=receipt.maybe_duplicate)


class Consuming:
    """One consumer, in one process."""

    def __init__(self, scene: Scene, name: str, copies: Copies, seed: int) -> None:
        self.scene = scene
        self.name = name
        self.copies = copies
        self.chance = random.Random(seed)
        self.open: list[Given] = []
        self._acked: list[tuple[Given, float]] = []

    async def work(self, pulls: int, *, calmly: bool = False) -> None:
        """So many pulls, then leave."""
        failover_after = 0.4
        while True:
            try:
                async with qmq.connect(self.scene.url, failover_after=failover_after) as client:
                    watch(client, self.copies)
                    consumer = client.subscribe(
                        "", group=self.copies.group, consumer=self.name, start="first", **SETTINGS
                    )
                    async with consumer:
                        for _ in range(pulls):
                            await (self._drain(consumer) if calmly else self._turn(consumer))
                    return
            except ConnectionLost:
                await asyncio.sleep(0.2)

    async def _drain(self, consumer: qmq.Consumer) -> None:
        for given in await self._pull(consumer, 1_000, 0.5):
            self._ack(given)
        await self._flush(consumer)

    async def _turn(self, consumer: qmq.Consumer) -> None:
        chance = self.chance
        most, least = chance.choice(((1, 1), (3, 1), (10, 1), (10, 4), (100, 1)))
        self.open += await self._pull(consumer, most, chance.choice((0.0, 0.05, 0.3, 1.0)), least)
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.01, 0.2)))
        dispositions = chance.sample(self.open, chance.randrange(len(self.open) + 1)) if chance.random() < 0.8 else []
        self.open = [given for given in self.open if given not in dispositions]
        await asyncio.gather(*map(self._handle, dispositions))
        if chance.random() < 0.2:
            await self._flush(consumer)

    async def _pull(self, consumer: qmq.Consumer, most: int, timeout: float, least: int = 1) -> list[Given]:
        messages = await consumer.pull(most, least, timeout)
        assert len(messages) <= most
        return [self._given(message) for message in messages]

    def _given(self, message: Message) -> Given:
        run, index = message._run, message._index
        number = int(bytes(message.body).rstrip(b"."))
        assert message.subject == self.scene.book.sent[number].subject
        copy = Copy(run.store_id, run.partition, run.position + run.ordinal + index)
        in_flight = run.in_flight
        consumer_state = in_flight.consumer_state
        holder = Holder(self.name, consumer_state.epoch, consumer_state.generation, message._number)
        was_in_flight = self.scene.is_in_flight(self.copies.group, copy, holder)
        before = self.copies.delivered(number, message.id, copy, holder, run.attempt, is_in_flight=was_in_flight)
        if before is not None and before != holder:
            assert not self.scene.is_in_flight(self.copies.group, copy, before), f"{number} is held by two"
        return Given(message, number, copy, in_flight, holder)

    def _ack(self, given: Given) -> None:
        given.message.ack()
        self.copies.handled.add(given.number)
        self._acked.append((given, self.scene.world.now))

    async def _flush(self, consumer: qmq.Consumer) -> None:
        acked, self._acked = self._acked, []
        try:
            await consumer.flush()
        except Fenced:
            return
        for given, acked_at in acked:
            if given.in_flight.fenced is None and self.scene.power_lost_at(given.copy) < acked_at:
                self.copies.confirmed(given.copy, given.holder, self.scene.world.now)

    async def _handle(self, given: Given) -> None:
        kind = self.chance.random()
        if kind < 0.6:
            self._ack(given)
        elif kind < 0.85:
            await self._nack(given)
        elif kind < 0.95:
            given.message.release()
        else:
            self.copies.may_be_dead.add(given.number)
            await self._told("reject", given.message.reject("nobody can"))

    async def _nack(self, given: Given) -> None:
        delay, attempt = self.chance.choice((None, None, 0.0, 0.2)), given.message.attempt
        self.copies.nacking(given.number, given.copy, attempt)
        taken = len(self.copies.taken[given.number])
        if await self._told("nack", given.message.nack(delay)) and taken == len(self.copies.taken[given.number]):
            self.copies.nacked(given.copy, given.holder, attempt)

    async def _told(self, what: str, disposition: Any) -> bool:
        """Whether it was taken."""
        try:
            await disposition
        except (Fenced, StorageFailed):
            self.copies.count[f"{what} refused"] += 1
            return False
        self.copies.count[what] += 1
        return True


def watch(client: qmq.Client, copies: Copies) -> None:
    """Note what its consumers hand over."""
    handover = client._brokers.handover
    take = handover.take

    async def taking(run: Any, index: int, *rest: Any) -> None:
        copies.takes(int(bytes(run.body(index)).rstrip(b".")), run.attempt)
        await take(run, index, *rest)

    handover.take = taking  # type: ignore[method-assign]

"""Programs of a simulated world: producers and consumers as users write them, with a record of all they were told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

import qmq
from qmq.errors import ConnectionLost, Fenced, SendFailed, SendFailure, StorageFailed
from qmq.net.client.consumer.in_flight import InFlightWindow
from qmq.net.client.consumer.message import Message
from tests.sim.copies import MAX_ATTEMPTS, MAX_SESSION_EXPIRIES, Book, Copies, Holder
from tests.sim.slots import ORDER_KEYS, Copy
from tests.sim.world import Process, World

SUBJECTS: Final = ("a.x", "a.y", "b")
SEND_TIMEOUT: Final = 6.0
#: Messages that come within this time wait together.
_TOGETHER: Final = SEND_TIMEOUT / 8 + 0.01
#: Of one producer, at once, or a few more.
MOST_SENDS: Final = 4
#: The error of a send that has failed because the broker of its order key is away says so.
AWAY: Final = "no other broker could keep the order of these order keys"
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

    @property
    def is_open(self) -> bool:
        """It has no disposition, also none by an earlier one of its order key."""
        return self.in_flight.is_open(self.holder.sequence)

    @property
    def is_taken_back(self) -> bool:
        """An earlier one of its order key has a disposition by which both come again."""
        return self.holder.sequence in self.in_flight.taken_back


class Scene(Protocol):
    """Where they act."""

    world: World
    book: Book
    url: str

    def power_lost_at(self, copy: Copy) -> float:
        """When its broker has lost power last."""

    def is_away(self, store: bytes) -> bool:
        """Nobody reaches that broker now."""

    def home_of(self, order_key: str) -> bytes:
        """The store that has the messages of a subject and order key, by the rule for it."""


async def produce(scene: Scene, seed: int, failover_after: float | None) -> None:
    """Send batch after batch, without end."""
    chance = random.Random(seed)
    while True:
        try:
            async with qmq.connect(scene.url, failover_after=failover_after, send_timeout=SEND_TIMEOUT) as client:
                sends = list[asyncio.Task[None]]()
                while True:
                    sends += (
                        asyncio.create_task(_send(scene, client, chance)) for _ in range(chance.choice((1, 1, 2)))
                    )
                    if len(sends) < MOST_SENDS or chance.random() < 0.5:  # some wait long, for their broker
                        await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await asyncio.wait(sends)
                    for task in [task for task in sends if task.done()]:
                        sends.remove(task)
                        task.result()
                    await asyncio.sleep(chance.choice((0.0, 0.02, 0.1, 0.3)))
        except ConnectionLost:
            await asyncio.sleep(0.2)


async def _send(scene: Scene, client: qmq.Client, chance: random.Random) -> None:
    subject, kind, count = chance.choice(SUBJECTS), chance.random(), chance.choice((1, 1, 2, 6))
    options: dict[str, Any] = {}
    priority, keys = "normal", list[str | None]([None]) * count
    if kind < 0.2:
        options["priority"] = priority = chance.choice(("high", "low"))
    elif kind < 0.4:
        options["order_key"] = key = chance.choice(ORDER_KEYS)
        keys = [key] * count
    elif kind < 0.6:
        options["order_keys"] = keys = [chance.choice(ORDER_KEYS) for _ in range(count)]
    if chance.random() < 0.1:
        options["delay"] = chance.choice((0.2, 1.0, 2.5))
    numbers = [scene.book.begin(subject, priority, key, is_delayed="delay" in options) for key in keys]
    bodies = [b"%d" % number + b"." * (number % 40) for number in numbers]
    began_at, away = scene.world.now, {key for key in keys if key and scene.is_away(scene.home_of(key))}
    try:
        if count == 1 and "order_keys" not in options:
            receipts: Sequence[qmq.Receipt] = [await client.send(subject, bodies[0], **options)]
        else:
            receipts = await client.send_many(subject, bodies, **options)
    except SendFailed as error:
        for failure in error.failures:
            number = numbers[failure.ticket if count > 1 else 0]
            scene.book.failed(number, failure.outcome)
            _check_failure(scene, number, failure, began_at)
        return
    last: dict[str, int] = {}
    for number, key, receipt in zip(numbers, keys, receipts, strict=True):
        scene.book.acknowledged(number, receipt.id, receipt.sequence, maybe_duplicate=receipt.maybe_duplicate)
        if key is not None and receipt.sequence is not None:
            assert receipt.sequence > last.get(key, -1), f"{number} lies before one that was sent with it"
            last[key] = receipt.sequence
        scene.book.count["ordered send waited for its broker"] += key in away


def _check_failure(scene: Scene, number: int, failure: SendFailure, began_at: float) -> None:
    """A message with an order key has waited for its broker before it fails, and the error names that."""
    is_ordered, says_so = scene.book.sent[number].order_key is not None, AWAY in str(failure.error)
    assert is_ordered or not says_so, f"{number} has no order key: {failure.error}"
    if not is_ordered or not isinstance(failure.error, ConnectionLost):
        return
    if not says_so:  # its broker had it, and was silent
        assert failure.outcome == "unknown", f"{number} has an order key: {failure.error}"
        return
    scene.book.count["ordered send failed as its broker was away"] += 1
    process, took = asyncio.get_running_loop(), scene.world.now - began_at
    assert isinstance(process, Process)
    if process.paused_until < began_at - SEND_TIMEOUT:  # else it may have joined others that waited in the pause
        assert took >= SEND_TIMEOUT - _TOGETHER, f"{number} waited for {took} s only"


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
        sent = self.scene.book.sent[number]
        found = message.subject, message.priority, message.order_key
        assert found == (sent.subject, sent.priority, sent.order_key), f"{number} came as {found}: {sent}"
        copy = Copy(run.store_id, run.partition, run.position + run.ordinal + index)
        self.scene.book.check(number, message.id, copy, run.lane, message.sequence)
        in_flight = run.in_flight
        consumer_state = in_flight.consumer_state
        holder = Holder(self.name, consumer_state.epoch, consumer_state.generation, message._number)
        self.copies.delivered(number, message.id, copy, holder, run.attempt, self.scene.world.now)
        return Given(message, number, copy, in_flight, holder)

    def _ack(self, given: Given) -> None:
        self.copies.handled.add(given.number)
        if given.is_open:
            self.copies.acking(given.copy, given.holder)
            self._acked.append((given, self.scene.world.now))
        else:  # it goes back because of an earlier one of its order key, or its consumer is out of touch
            self.copies.count["acknowledged too late"] += 1
        given.message.ack()

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
            if given.is_open:
                self.copies.going_back(given.copy, given.holder)
            await self._release(given.message)
        else:
            self.copies.may_be_dead.add(given.number)
            await self._told("reject", given.message.reject("nobody can"))

    async def _release(self, message: Message) -> None:
        after = self.chance.choice((None, None, 0.0, 0.2))
        if self.chance.random() < 0.6:
            message.release(after)
            return
        with suppress(qmq.Retry):
            async with message:
                raise qmq.Retry("not yet", after=after, counts=False)

    async def _nack(self, given: Given) -> None:
        delay, attempt = self.chance.choice((None, None, 0.0, 0.2)), given.message.attempt
        self.copies.nacking(given.number, given.copy, attempt)
        if given.is_open and attempt < MAX_ATTEMPTS:
            self.copies.going_back(given.copy, given.holder)
        taken = len(self.copies.taken[given.number])
        waits = given.message.order_key is not None and self.scene.is_away(given.copy.store)
        self.copies.count["ordered nack waited for its broker"] += waits
        if given.is_taken_back:  # it comes again anyway, and this is no attempt
            await self._told("nack of what was taken back", given.message.nack(delay))
        elif await self._told("nack", given.message.nack(delay)) and taken == len(self.copies.taken[given.number]):
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

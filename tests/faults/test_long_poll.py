"""Pulls that wait, with a broker in a process of its own: what ends them, and what becomes of what they brought."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest

import qmq
from qmq import Consumer, Message
from qmq.net.client import broker_link as link
from qmq.net.client.consumer import pull as pulling
from qmq.net.client.options import Durability
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import BrokerProcess, broker_process
from tests.faults.brokers import until
from tests.faults.proxy import TO_BROKER, TO_CLIENT, Fault, Passing, Proxy

#: Far longer than anything here takes: a pull that ends by this has hung.
LONG: Final = 60.0
DURABILITIES: Final[tuple[Durability, ...]] = ("append", "flush")


class Held:
    """A plan that holds the answers to pulls back until they are let go. ``asked`` and ``answered`` count pulls."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.asked = 0
        self.answered = 0

    async def answers(self, count: int) -> None:
        """Wait until so many pulls have been answered."""
        await until(lambda: self.answered >= count, f"{count} pulls are answered")

    def __call__(self, passing: Passing) -> Fault | None:
        if passing.direction == TO_BROKER and passing.kind == FrameKind.PULL:
            self.asked += 1
        if passing.direction == TO_CLIENT and passing.kind == FrameKind.MESSAGES:
            self.answered += 1
            if not self.open.is_set():
                return Fault(None, passing.size, hold=self.open)
        return None


class World:
    """A broker, a client that sends to it, and one that pulls through a proxy. ``subject`` is this test's alone."""

    _numbers = itertools.count()

    def __init__(self, broker: BrokerProcess, sender: qmq.Client, client: qmq.Client, plan: Held) -> None:
        self.subject = f"t{next(self._numbers)}"
        self.broker = broker
        self.sender = sender
        self.client = client
        self.plan = plan

    async def waiting_pulls(self, pulls: int) -> None:
        """Wait until so many pulls have gone to the broker in all, and it has had the time to look at them."""
        await until(lambda: self.plan.asked >= pulls, f"{pulls} pulls are sent")
        # An answer to a later request says that the broker has seen the pulls before it.
        assert self.client._brokers.connection is not None
        await self.client.last_sequence("nobody")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("long-poll") / "data") as started:
        yield started


@pytest.fixture
async def world(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(link, "GOOD_AFTER", 0.0)
    plan = Held()
    async with (
        Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy,
        qmq.connect(broker.url, durability="append") as sender,
        qmq.connect(proxy.url) as client,
    ):
        yield World(broker, sender, client, plan)


async def arrived(pull: asyncio.Task[list[Message]]) -> list[bytes]:
    return [message.body for message in await pull]


async def test_a_pull_returns_at_arrival_whatever_it_follows(world: World) -> None:
    exact, prefix = f"{world.subject}.b", f"{world.subject}."
    for number, prefixes in enumerate([(exact,), (prefix,), ("",), ("x", prefix, "y."), (exact,)]):
        group = f"{world.subject}-{number}" if number < 4 else None
        async with world.client.subscribe(*prefixes, group=group, start="new") as consumer:
            for durability in DURABILITIES:
                before = world.plan.asked
                pull = asyncio.create_task(consumer.pull(timeout=LONG))
                await world.waiting_pulls(before + 1)
                assert not pull.done()
                began = time.monotonic()
                if prefixes != ("",):
                    await world.sender.send("other", b"not for it")
                await world.sender.send(f"{world.subject}.b", b"now", durability=durability)
                assert await arrived(pull) == [b"now"], prefixes
                assert time.monotonic() - began < LONG / 4
                assert world.plan.asked == before + 1, "one pull was enough"


async def test_a_pull_returns_what_is_there_when_its_time_is_up(world: World) -> None:
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        for timeout in (0, 0.05, 0.4):
            began = time.monotonic()
            assert await consumer.pull(timeout=timeout) == []
            assert timeout <= time.monotonic() - began < timeout + LONG / 4
        pull = asyncio.create_task(consumer.pull(min_count=3, timeout=1.0))
        await world.waiting_pulls(4)
        began = time.monotonic()
        await world.sender.send_many(world.subject, [b"1", b"2"])
        assert await arrived(pull) == [b"1", b"2"]
        assert time.monotonic() - began < LONG / 4
        assert await consumer.pull(timeout=0) == []


async def test_a_pull_returns_at_min_count_and_takes_no_more_than_max_count(world: World) -> None:
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        pull = asyncio.create_task(consumer.pull(min_count=5, max_count=7, timeout=LONG))
        await world.waiting_pulls(1)
        for number in range(4):
            await world.sender.send(world.subject, b"%d" % number)
        await world.client.last_sequence("nobody")
        assert not pull.done()
        await world.sender.send(world.subject, b"4")
        assert await arrived(pull) == [b"0", b"1", b"2", b"3", b"4"]

        pull = asyncio.create_task(consumer.pull(min_count=5, max_count=7, timeout=LONG))
        await world.waiting_pulls(2)
        await world.sender.send_many(world.subject, [b"%d" % number for number in range(20)])
        assert await arrived(pull) == [b"%d" % number for number in range(7)]
        assert [m.body for m in await consumer.pull(min_count=7, max_count=7, timeout=LONG)] == [
            b"%d" % number for number in range(7, 14)
        ]
        assert [m.body for m in await consumer.pull(timeout=LONG)] == [b"%d" % number for number in range(14, 20)]


async def test_what_arrives_for_many_waiting_consumers_goes_to_one_of_them(world: World) -> None:
    consumers: list[Consumer] = []
    async with (
        world.client.subscribe(world.subject, group=world.subject) as one,
        world.client.subscribe(world.subject, group=world.subject) as two,
    ):
        consumers = [one, two]
        pulls = [asyncio.create_task(consumer.pull(max_count=1, timeout=LONG)) for consumer in consumers]
        await world.waiting_pulls(2)
        await world.sender.send(world.subject, b"first")
        done, waiting = await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
        assert [await arrived(pull) for pull in done] == [[b"first"]]
        await world.client.last_sequence("nobody")
        assert not any(pull.done() for pull in waiting)
        await world.sender.send(world.subject, b"second")
        assert [await arrived(pull) for pull in waiting] == [[b"second"]]


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_pull_waits_while_the_broker_is_away_and_goes_on_when_it_is_back(world: World, how: str) -> None:
    async with (
        world.client.subscribe(world.subject, group=world.subject) as shared,
        world.client.subscribe(f"{world.subject}.", start="new") as alone,
        world.client.subscribe(world.subject, group=f"{world.subject}-2") as impatient,
    ):
        pulls = [asyncio.create_task(consumer.pull(timeout=LONG)) for consumer in (shared, alone)]
        await world.waiting_pulls(2)
        await asyncio.to_thread(world.broker.stop if how == "stop" else world.broker.kill)
        await until(lambda: world.client._brokers.connection is None, "the client has seen it")
        began = time.monotonic()
        assert await impatient.pull(timeout=0.3) == [], "no broker is no error"
        assert 0.3 <= time.monotonic() - began < LONG / 4
        assert not any(pull.done() for pull in pulls)
        await asyncio.to_thread(world.broker.start)
        await world.sender.send(world.subject, b"shared")
        await world.sender.send(f"{world.subject}.b", b"alone")
        assert [await arrived(pull) for pull in pulls] == [[b"shared"], [b"alone"]]
        assert [message.body for message in await impatient.pull(timeout=LONG)] == [b"shared"]


async def test_async_for_waits_while_the_broker_is_away(world: World) -> None:
    got: list[bytes] = []

    async def follow() -> None:
        async with world.client.subscribe(world.subject, group=world.subject) as consumer:
            async for message in consumer:
                got.append(message.body)
                if message.body == b"end":
                    return

    following = asyncio.create_task(follow())
    await world.sender.send(world.subject, b"before")
    await until(lambda: got == [b"before"], "the first has come")
    assert await asyncio.to_thread(world.broker.stop) == 0
    await asyncio.to_thread(world.broker.start)
    await world.sender.send(world.subject, b"after")
    await world.sender.send(world.subject, b"end")
    await asyncio.wait_for(following, LONG)
    assert got == [b"before", b"after", b"end"]


async def test_what_a_cancelled_pull_brought_is_returned_first_by_the_next(world: World) -> None:
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        for number in range(10):
            world.plan.open.clear()
            asked, answered = world.plan.asked, world.plan.answered
            pull = asyncio.create_task(consumer.pull(max_count=2, timeout=LONG))
            await world.waiting_pulls(asked + 1)
            await world.sender.send_many(world.subject, [b"%d first" % number, b"%d second" % number])
            await world.plan.answers(answered + 1)
            pull.cancel()
            await asyncio.gather(pull, return_exceptions=True)
            assert pull.cancelled()
            await world.sender.send(world.subject, b"%d third" % number)
            world.plan.open.set()
            came = [message.body for message in await consumer.pull(timeout=LONG)]
            assert came[:2] == [b"%d first" % number, b"%d second" % number]
            if len(came) == 2:
                came += [message.body for message in await consumer.pull(timeout=LONG)]
            assert came[2:] == [b"%d third" % number]


async def test_a_cancelled_pull_that_brought_nothing_takes_nothing(world: World) -> None:
    async with (
        world.client.subscribe(world.subject, group=world.subject) as one,
        world.client.subscribe(world.subject, group=world.subject) as two,
    ):
        pull = asyncio.create_task(one.pull(timeout=LONG))
        await world.waiting_pulls(1)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        await world.client.last_sequence("nobody")  # the broker knows of it
        await world.sender.send(world.subject, b"for the other")
        assert [message.body for message in await two.pull(timeout=LONG)] == [b"for the other"]
        assert await one.pull(timeout=0) == []


async def test_a_pull_whose_time_passes_while_its_answer_is_on_the_way_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "GRACE", 0.5)
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        world.plan.open.clear()
        pull = asyncio.create_task(consumer.pull(timeout=0.3))
        await world.waiting_pulls(1)
        await world.sender.send(world.subject, b"late")
        assert await pull == []
        world.plan.open.set()
        assert [message.body for message in await consumer.pull(timeout=LONG)] == [b"late"]


async def test_a_group_that_leaves_while_a_pull_waits_frees_it(world: World) -> None:
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        pull = asyncio.create_task(consumer.pull(timeout=LONG))
        await world.waiting_pulls(1)
    with pytest.raises(qmq.QmqError, match="not subscribed"):
        await pull
    await world.sender.send(world.subject, b"for who comes next")
    async with world.client.subscribe(world.subject, group=world.subject) as consumer:
        assert [message.body for message in await consumer.pull(timeout=LONG)] == [b"for who comes next"]

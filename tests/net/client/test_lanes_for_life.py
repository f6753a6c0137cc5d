"""A message keeps its priority and its order key for life: whatever happens to it, and whoever looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from tests.broker_process import BrokerProcess, running_broker

EXPECTED = {b"high": ("high", None), b"low": ("low", None), b"ordered": ("normal", "order-1")}


def seen(messages: list[qmq.Message]) -> dict[bytes, tuple[str, str | None]]:
    return {message.body: (message.priority, message.order_key) for message in messages}


async def send_all(client: qmq.Client, subject: str, delay: float | None = None) -> list[qmq.Receipt]:
    return [
        await client.send(subject, b"high", priority="high", delay=delay),
        await client.send(subject, b"low", priority="low", delay=delay),
        await client.send(subject, b"ordered", order_key="order-1", delay=delay),
    ]


async def pull_all(consumer: qmq.Consumer) -> list[qmq.Message]:
    return [message for _ in range(3) for message in await consumer.pull(1, timeout=20)]


async def test_failed_dead_redriven_and_resent(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url) as client,
        client.subscribe("a.", group="g", start="first", max_attempts=2, retry_delays=[0]) as consumer,
    ):
        await send_all(client, "a.b")
        first = await pull_all(consumer)
        assert seen(first) == EXPECTED
        for message in first:
            await message.nack()
        again = await pull_all(consumer)
        assert (seen(again), {message.attempt for message in again}) == (EXPECTED, {2})
        for message in again:
            await message.nack(reason="no")
        letters = [letter async for letter in client.admin.dead_letters("g")]
        assert len(letters) == 3
        assert await client.admin.redrive("g", all=True) == 3
        redriven = await pull_all(consumer)
        assert (seen(redriven), {message.attempt for message in redriven}) == (EXPECTED, {1})
        for message in redriven:
            await message.ack()
        count = await client.admin.resend(prefix="a.", group="g")
        assert count == 3
        resent = await pull_all(consumer)
        assert seen(resent) == EXPECTED
        assert all(message.replayed for message in resent)
        for message in resent:
            got = await client.get(message.id)
            assert (got.priority, got.order_key) == EXPECTED[got.body]
            trace = await client.trace(message.id)
            assert (trace.message.priority, trace.message.order_key) == EXPECTED[message.body]
        found = [message async for message in client.find("a.")]
        assert {one.body: (one.priority, one.order_key) for one in found} == EXPECTED


async def test_resent_by_key_and_by_the_id_of_a_copy(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url) as client,
        client.subscribe("a.", group="g", start="first") as consumer,
    ):
        for number in range(3):  # so that sequences of the lanes differ
            await client.send("a.b", b"plain %d" % number, key="other")
        await client.send("a.b", b"high", priority="high", key="k")
        await client.send("a.b", b"ordered", order_key="order-1", key="k")
        delayed = await client.send("a.b", b"low", priority="low", key="k", delay=0.01)
        for message in [one for _ in range(6) for one in await consumer.pull(1, timeout=20)]:
            await message.ack()
        assert await client.admin.resend(prefix="a.", key="k", group="g") == 3
        found = await pull_all(consumer)
        assert seen(found) == EXPECTED
        for message in found:
            await message.ack()
        assert await client.admin.resend(ids=[delayed.id], group="g") == 1
        assert seen(await consumer.pull(1, timeout=20)) == {b"low": EXPECTED[b"low"]}


async def test_delayed_and_due(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url) as client,
        client.subscribe("a.", group="g", start="first") as consumer,
    ):
        delayed = [await client.get(receipt.id) for receipt in await send_all(client, "a.b", 1.0)]
        assert {one.body: (one.priority, one.order_key) for one in delayed} == EXPECTED
        found = await pull_all(consumer)
        assert seen(found) == EXPECTED
        for message in found:
            got = await client.get(message.id)
            assert (got.priority, got.order_key) == EXPECTED[got.body]


async def test_a_restart_keeps_them(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send_all(client, "a.b")
        await send_all(client, "a.c", 1.0)
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url) as client,
        client.subscribe("a.b", group="g", start="first") as consumer,
        client.subscribe("a.c", group="h", start="first") as late,
    ):
        assert seen(await pull_all(consumer)) == EXPECTED
        assert seen(await pull_all(late)) == EXPECTED


async def test_a_cancelled_one_of_each_lane_is_gone(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path / "data") as url,
        qmq.connect(url) as client,
        client.subscribe("a.", group="g", start="first") as consumer,
    ):
        for receipt in await send_all(client, "a.b", 1.0):
            assert await client.cancel(receipt.id)
        await send_all(client, "a.c", 1.1)
        found = await pull_all(consumer)
        assert (seen(found), {message.subject for message in found}) == (EXPECTED, {"a.c"})


async def test_handed_over_to_another_broker(several: list[BrokerProcess]) -> None:
    """Only priorities: a message with an order key waits for its own broker."""
    url = ",".join([several[0].url, several[1].url.rpartition("/")[2]])
    async with (
        qmq.connect(url, failover_after=0.1) as client,
        client.subscribe("a.", group="g", start="first", retry_delays=[0], priority_share=0) as consumer,
    ):
        for priority in ("low", "high", "normal"):
            await client.send("a.b", priority.encode(), priority=priority)
        found = [message for _ in range(3) for message in await consumer.pull(1, timeout=20)]
        stores = [await store_id(one.url) for one in several]
        several[stores.index(found[0].id[:12])].kill()
        for message in found:
            await message.nack()
        again = [message for _ in range(3) for message in await consumer.pull(1, timeout=20)]
        assert {message.body: (message.priority, message.attempt) for message in again} == {
            b"high": ("high", 2), b"normal": ("normal", 2), b"low": ("low", 2)
        }  # fmt: skip


async def store_id(url: str) -> str:
    """Return the store id of a broker, as ids of its messages begin."""
    async with qmq.connect(url) as client:
        return (await client.send("other", b"")).id[:12]


@pytest.fixture
def several(tmp_path: Path) -> Iterator[list[BrokerProcess]]:
    brokers = [BrokerProcess(tmp_path / str(number)) for number in range(2)]
    for broker in brokers:
        broker.start()
    yield brokers
    for broker in brokers:
        broker.close()

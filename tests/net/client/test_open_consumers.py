"""A client that is closed while consumers are open: they leave, so their acks arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("open") / "data") as started:
        yield started


def left(broker: BrokerProcess, group: str) -> list[tuple[bytes, int]]:
    """Return the messages that the group still has, with the attempt of each."""
    with qmq.connect_sync(broker.url) as client, client.subscribe(group, group=group, retry_delays=[0]) as consumer:
        return [(message.body, message.attempt) for message in consumer.pull(timeout=0.3)]


@pytest.mark.parametrize("end", ["close", "with", "error"])
def test_the_client_without_asyncio_leaves_open_consumers(broker: BrokerProcess, end: str) -> None:
    group = f"sync.{end}"
    client = qmq.connect_sync(broker.url)
    client.send_many(group, [b"1", b"2", b"3"])
    consumer = client.subscribe(group, group=group, retry_delays=[0]).__enter__()
    for message in consumer.pull(3, 3, timeout=TIMEOUT_S)[:2]:
        message.ack()
    if end == "close":
        client.close()
    elif end == "with":
        with client:
            pass
    else:
        with pytest.raises(ValueError, match="no such room"), client:
            raise ValueError("no such room")
    assert left(broker, group) == [(b"3", 2 if end == "error" else 1)]


@pytest.mark.parametrize("end", ["close", "with", "error", "cancel"])
def test_the_client_of_asyncio_leaves_open_consumers(broker: BrokerProcess, end: str) -> None:
    group = f"async.{end}"

    async def take(client: qmq.Client) -> None:
        await client.send_many(group, [b"1", b"2", b"3"])
        consumer = await client.subscribe(group, group=group, retry_delays=[0]).__aenter__()
        for message in (await consumer.pull(3, 3))[:2]:
            message.ack()

    async def work() -> None:
        if end == "close":
            client = await qmq.connect(broker.url)
            await take(client)
            await client.close()
            return
        async with qmq.connect(broker.url) as client:
            await take(client)
            if end == "error":
                raise ValueError("no such room")
            if end == "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait([asyncio.ensure_future(work())])

    asyncio.run(main())
    assert left(broker, group) == [(b"3", 2 if end == "error" else 1)]


def test_a_program_that_ends_without_closing_leaves_them_too(broker: BrokerProcess) -> None:
    async def main() -> None:
        client = await qmq.connect(broker.url)
        await client.send_many("ended", [b"1", b"2", b"3"])
        consumer = await client.subscribe("ended", group="ended").__aenter__()
        for message in (await consumer.pull(3, 3))[:2]:
            message.ack()

    with pytest.warns(ResourceWarning, match="left open"):
        asyncio.run(main())
    assert left(broker, "ended") == [(b"3", 1)]


async def test_a_consumer_may_be_left_after_its_client(broker: BrokerProcess) -> None:
    client = await qmq.connect(broker.url)
    async with asyncio.timeout(TIMEOUT_S), client.subscribe("after", group="after") as consumer:
        await client.send("after", b"1")
        (await consumer.pull(1))[0].ack()
        await client.close()
        with pytest.raises(qmq.QmqError):
            await consumer.pull(1)

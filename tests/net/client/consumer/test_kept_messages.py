"""Messages that a program keeps do not keep the large answers that they came in."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process

COUNT = 2_000
BODY = bytes(1_000)
#: Programs keep one of so many messages.
ONE_OF = 500
#: Less than half of the answers. A client that is closed has a buffer of 128 KiB; one without asyncio has a loop of
#: 250 KiB.
MOST_KEPT_BYTES = 700 << 10

Kept = list[qmq.Message] | list[qmq.SyncMessage]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with COUNT messages in one run, in a batch of small runs, and in batches of one message."""
    with broker_process(tmp_path_factory.mktemp("kept") / "data") as started:
        with qmq.connect_sync(started.url) as client:
            client.send_many("run", [BODY] * COUNT, keys=[f"order-{number}" for number in range(COUNT)])
            for number in range(COUNT):
                client.send_nowait(f"many.{number % 97}", BODY, key=f"order-{number}")
            client.flush()
            for number in range(COUNT):
                client.send("alone", BODY, key=f"order-{number}", durability="append")
        yield started


async def pulled(consumer: qmq.Consumer) -> list[qmq.Message]:
    return (await consumer.pull(COUNT, COUNT, 30))[::ONE_OF]


async def iterated(consumer: qmq.Consumer) -> list[qmq.Message]:
    kept, number = list[qmq.Message](), 0
    async for message in consumer:
        message.ack()
        if number % ONE_OF == 0:
            kept.append(message)
        number += 1
        if number == COUNT:
            break
    return kept


async def handled(consumer: qmq.Consumer) -> list[qmq.Message]:
    kept, number = list[qmq.Message](), 0

    async def handle(message: qmq.Message) -> None:
        nonlocal number
        if number % ONE_OF == 0:
            kept.append(message)
        number += 1
        if number == COUNT:
            consumer.stop()

    await consumer.run(handle)
    return kept


async def iterated_batch(consumer: qmq.Consumer) -> list[qmq.Message]:
    batch = await consumer.pull_batch(COUNT, COUNT, 30)
    return list(batch)[::ONE_OF]


async def indexed_batch(consumer: qmq.Consumer) -> list[qmq.Message]:
    batch = await consumer.pull_batch(COUNT, COUNT, 30)
    return [batch[number] for number in range(0, COUNT, ONE_OF)]


def sync_pulled(consumer: qmq.SyncConsumer) -> list[qmq.SyncMessage]:
    return consumer.pull(COUNT, COUNT, 30)[::ONE_OF]


def sync_iterated(consumer: qmq.SyncConsumer) -> list[qmq.SyncMessage]:
    kept = list[qmq.SyncMessage]()
    for number, message in enumerate(consumer):
        message.ack()
        if number % ONE_OF == 0:
            kept.append(message)
        if number == COUNT - 1:
            break
    return kept


def sync_handled(consumer: qmq.SyncConsumer) -> list[qmq.SyncMessage]:
    kept, number = list[qmq.SyncMessage](), 0

    def handle(message: qmq.SyncMessage) -> None:
        nonlocal number
        if number % ONE_OF == 0:
            kept.append(message)
        number += 1
        if number == COUNT:
            consumer.stop()

    consumer.run(handle)
    return kept


def check(kept: Kept, before: int) -> None:
    """Check what is in memory since *before*, and that the messages show all that they have."""
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    assert len(kept) == COUNT // ONE_OF
    assert all(message.body == BODY and message.key is not None and message.app is not None for message in kept)
    assert len({message.id for message in kept}) == len(kept)
    assert taken < MOST_KEPT_BYTES


@pytest.fixture
def traced() -> Iterator[None]:
    gc.freeze()  # a collection looks at new objects only: tests before this one may have left very many
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("subject", ["run", "many.", "alone"])
@pytest.mark.parametrize("keep", [pulled, iterated, handled, iterated_batch, indexed_batch])
async def test_kept_messages_keep_no_answers(
    broker: BrokerProcess, keep: Callable[[qmq.Consumer], Awaitable[list[qmq.Message]]], subject: str
) -> None:
    before = tracemalloc.get_traced_memory()[0]
    async with qmq.connect(broker.url) as client:
        async with client.subscribe(subject, group=f"{keep.__name__}-{subject[:4]}", start="first") as consumer:
            kept = await keep(consumer)
        del consumer
    del client
    check(kept, before)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("subject", ["run", "many.", "alone"])
@pytest.mark.parametrize("keep", [sync_pulled, sync_iterated, sync_handled])
def test_kept_messages_of_the_client_without_asyncio_keep_no_answers(
    broker: BrokerProcess, keep: Callable[[qmq.SyncConsumer], list[qmq.SyncMessage]], subject: str
) -> None:
    before = tracemalloc.get_traced_memory()[0]
    with qmq.connect_sync(broker.url) as client:
        with client.subscribe(subject, group=f"{keep.__name__}-{subject[:4]}", start="first") as consumer:
            kept = keep(consumer)
        del consumer
    del client
    check(kept, before)

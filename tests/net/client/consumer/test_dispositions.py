"""Dispositions that are awaited, and those of batches: the messages selected, and the broker when a call returns."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import qmq
from qmq.errors import Fenced
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import BrokerProcess, broker_process
from tests.net.test_handlers import given

COUNT = 12


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("dispositions") / "data") as started:
        yield started


@asynccontextmanager
async def pulled(broker: BrokerProcess, subject: str) -> AsyncIterator[tuple[qmq.Client, qmq.MessageBatch]]:
    """Enter a consumer, with COUNT messages of its group as a batch of several runs."""
    async with asyncio.timeout(60), qmq.connect(broker.url) as client:
        for number in range(COUNT):
            await client.send(f"{subject}.{number // 4}", b"%d" % number)
        async with client.subscribe(f"{subject}.", group=subject, retry_delays=[3_600]) as consumer:
            yield client, await consumer.pull_batch(COUNT, COUNT)


async def state(client: qmq.Client, group: str) -> tuple[int, int, int]:
    """Return how many messages are in flight, in retry and dead."""
    (info,) = await client.admin.groups(group)
    return info.in_flight, info.in_retry, info.dead


async def test_an_awaited_ack_or_release_is_at_the_broker(broker: BrokerProcess) -> None:
    async with pulled(broker, "awaited") as (client, batch):
        await batch[0].ack()
        assert (await state(client, "awaited"))[0] == COUNT - 1
        await batch[1].release()
        await batch[2:4].ack()
        await batch[4:6].release()
        assert (await state(client, "awaited"))[0] == COUNT - 6
        await batch[0].ack()  # again: it has a disposition


async def test_dispositions_that_are_not_awaited_warn_of_nothing(broker: BrokerProcess) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with pulled(broker, "unawaited") as (_, batch):
            batch[0].ack()
            batch[1].release()
            batch[2:4].ack()
            batch[4:].release()
        gc.collect()


async def test_an_awaited_ack_that_is_refused_raises() -> None:
    async with given(b"1", b"2") as (s, messages):
        acking = asyncio.ensure_future(messages[0].ack())
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(1))
        with pytest.raises(Fenced, match="the ack was refused"):
            await acking


async def test_an_awaited_ack_raises_when_another_consumer_takes_over() -> None:
    async with given(b"1", b"2") as (s, messages):
        acking = asyncio.ensure_future(messages[0].ack())
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.refuse(frame.request, Fenced("another"))
        with pytest.raises(Fenced, match="another"):
            await acking


async def test_a_cancelled_wait_for_an_ack_leaves_the_ack() -> None:
    async with given(b"1") as (s, (message,)):
        acking = asyncio.ensure_future(message.ack())
        frame = await s.peer.frame(FrameKind.ACK)
        acking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acking
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
        await s.consumer.flush()


MASK = np.array([number % 3 == 1 for number in range(COUNT)])


@pytest.mark.parametrize(
    "index",
    [
        slice(0, 0),
        slice(1, 11),
        slice(None, None, 5),
        slice(None, None, -1),
        slice(-3, None),
        MASK,
        MASK.tolist(),
        ~MASK,
    ],
)
async def test_a_batch_is_cut_by_slices_and_masks(broker: BrokerProcess, index: Any) -> None:
    async with pulled(broker, "cut") as (_, batch):
        wanted = [b"%d" % number for number in np.arange(COUNT)[index].tolist()]
        selected = batch[index]
        assert selected.bodies == [message.body for message in selected] == wanted
        assert [message.id for message in selected] == [batch[int(body)].id for body in wanted]


@pytest.mark.parametrize(("index", "error"), [([1, 2], TypeError), ([True], ValueError), ("a", TypeError)])
async def test_what_selects_no_messages_is_refused(broker: BrokerProcess, index: Any, error: type[Exception]) -> None:
    async with pulled(broker, "refused") as (_, batch):
        with pytest.raises(error):
            batch[index]


async def test_the_dispositions_of_a_batch_are_those_of_the_rest(broker: BrokerProcess) -> None:
    async with pulled(broker, "rest") as (client, batch):
        batch[0].ack()
        await batch[:3].nack("1h", "later")
        await batch[:6].reject("bad address")
        assert await state(client, "rest") == (COUNT - 6 + 1, 2, 3)  # the ack goes later
        await batch.ack()
        assert await state(client, "rest") == (0, 2, 3)


async def test_a_batch_that_fails_nacks_its_messages_and_raises_on(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with pulled(broker, "fails") as (client, batch):
        batch[:10].ack()
        with pytest.raises(ValueError, match="no such hotel"):
            async with batch:
                raise ValueError("no such hotel")
        assert (await state(client, "fails"))[1:] == (2, 0)
    (record,) = (record for record in caplog.records if hasattr(record, "messages"))
    ids = [message.id for message in batch[10:]]
    assert (record.count, [fields["message_id"] for fields in record.messages]) == (len(ids), ids)  # type: ignore[attr-defined]  # extra fields
    assert record.getMessage() == (
        f"2 messages ({ids[0]}, {ids[1]}) failed, they come again in 1h: ValueError: no such hotel"
    )


async def test_a_rejected_message_is_logged(broker: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    async with pulled(broker, "rejects") as (_, batch):
        await batch[0].reject("no such hotel")
        await batch[1:7].reject("no such city")
    one, several = (record for record in caplog.records if "rejected" in record.getMessage())
    first, dead = batch[0], "and is a dead letter now"
    assert one.getMessage() == f"message {first.id} of {first.subject} was rejected, {dead}: no such hotel"
    assert (one.message_id, one.attempt, one.retry_in, one.levelname) == (first.id, 1, None, "ERROR")  # type: ignore[attr-defined]  # extra fields
    ids, dead = ", ".join(message.id for message in batch[1:4]), "and are dead letters now"
    assert several.getMessage() == f"6 messages ({ids} and 3 more) were rejected, {dead}: no such city"
    assert several.count == 6  # type: ignore[attr-defined]  # an extra field


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_is_acked_or_released_at_the_end_of_its_block(broker: BrokerProcess, cancelled: bool) -> None:
    """The consumer is left right after the cancellation, so its messages have not failed."""
    group = f"ends.{cancelled}"
    async with pulled(broker, group) as (client, batch):
        entered = asyncio.Event()

        async def work() -> None:
            async with batch:
                entered.set()
                if cancelled:
                    await asyncio.Event().wait()

        working = asyncio.create_task(work())
        await entered.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert working.cancelled() == cancelled
        if not cancelled:
            await batch
            assert (await state(client, group))[0] == 0
    async with qmq.connect(broker.url) as client, client.subscribe(f"{group}.", group=group) as consumer:
        found = await consumer.pull(COUNT, timeout=0.2)
        assert [message.attempt for message in found] == [1] * (COUNT if cancelled else 0)

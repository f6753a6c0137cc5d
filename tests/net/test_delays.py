"""Delayed messages from end to end: sent in every way, delivered by a real broker, cancelled by id."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import qmq
from tests.broker_process import broker_process, running_broker

TIMEOUT_S = 60


async def take(consumer: qmq.Consumer, count: int) -> list[qmq.Message]:
    """Receive and ack *count* messages."""
    found = list[qmq.Message]()
    async with asyncio.timeout(TIMEOUT_S):
        while len(found) < count:
            messages = await consumer.pull(max_count=count - len(found), timeout=TIMEOUT_S)
            for message in messages:
                message.ack()
            found += messages
    return found


async def test_every_way_to_send_later(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        begun = time.time()
        at = datetime.now(UTC) + timedelta(seconds=0.9)
        one = await client.send("a", b"one", key="k", tags=["t"], properties={"p": "1"}, delay=0.3)
        many = await client.send_many("a", [b"two", b"three"], deliver_at=begun + 0.6)
        client.send_nowait("a", b"four", deliver_at=at)
        plain = await client.send("a", b"zero", delay=0)
        await client.flush()
        async with client.subscribe("a", group="g", start="first") as consumer:
            found = await take(consumer, 5)
        by_body = {message.body: message for message in found}
        names = [by_body[body].id for body in (b"zero", b"one", b"two", b"three")]
        assert names == [plain.id, one.id, many[0].id, many[1].id]
        first = by_body[b"one"]
        assert (first.key, first.tags, first.properties) == ("k", ("t",), {"p": "1"})
        assert [message.attempt for message in found] == [1] * 5
        for body, due in (
            (b"one", begun + 0.3),
            (b"two", begun + 0.6),
            (b"three", begun + 0.6),
            (b"four", at.timestamp()),
        ):
            assert by_body[body].stored_at_us / 1e6 >= due - 1e-5


async def test_cancelled_in_time_and_too_late(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        receipt = await client.send("a", b"never", delay=3_600)
        late = await client.send("a", b"late", delay=0.01)
        assert await client.cancel(receipt.id)
        assert await client.cancel(receipt.id)
        async with client.subscribe("a", group="g", start="first") as consumer:
            assert [message.body for message in await take(consumer, 1)] == [b"late"]
        assert not await client.cancel(late.id)
        assert not await client.cancel((await client.send("a", b"plain")).id)
        with pytest.raises(qmq.InvalidOption, match="is not a message id"):
            await client.cancel("nonsense")


async def test_too_far_ahead_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        with pytest.raises(qmq.InvalidOption, match="at most 731 days"):
            await client.send("a", b"", delay=732 * 86_400)
        await client.send("a", b"", delay=731 * 86_400)


async def test_a_nacked_delayed_message_keeps_its_id(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        receipt = await client.send("a", b"x", delay=0.05)
        async with client.subscribe("a", group="g", start="first") as consumer:
            for attempt in (1, 2):
                (message,) = await consumer.pull(timeout=TIMEOUT_S)
                assert (message.id, message.attempt) == (receipt.id, attempt)
                if attempt == 1:
                    await message.nack(delay=0)
            message.ack()


def test_the_sync_client_delays_and_cancels(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, qmq.connect_sync(broker.url) as client:
        receipt = client.send("a", b"one", delay=1_000)
        kept = client.send_many("a", [b"two"], delay=0.1)
        client.send_nowait("a", b"three", delay=0.2)
        client.flush()
        assert client.cancel(receipt.id)
        with client.subscribe("a", group="g", start="first") as consumer:
            found = list[bytes]()
            while len(found) < 2:
                for message in consumer.pull(timeout=TIMEOUT_S):
                    found.append(message.body)
                    message.ack()
        assert found == [b"two", b"three"]
        assert not client.cancel(kept[0].id)


async def test_delays_outlive_kill_9(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        async with qmq.connect(broker.url) as client:
            receipts = await client.send_many("a", [b"0", b"1"], delay=2.0)
            cancelled = await client.send("a", b"2", delay=3_600)
            assert await client.cancel(cancelled.id)
        broker.kill()
    with broker_process(tmp_path) as broker:
        async with qmq.connect(broker.url) as client, client.subscribe("a", group="g", start="first") as consumer:
            found = await take(consumer, 2)
            assert [message.id for message in found] == [receipts[0].id, receipts[1].id]
            assert await client.cancel(cancelled.id)
            assert all(
                message.stored_at_us >= receipt.stored_at_us + 2_000_000
                for message, receipt in zip(found, receipts, strict=True)
            )

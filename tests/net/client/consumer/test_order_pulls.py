"""Order keys and priorities in each way to receive: pull, pull_batch, and a loop with its messages fetched ahead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import qmq
from tests.broker_process import running_broker


def bodies(messages: list[qmq.Message]) -> list[str]:
    return [message.body.decode() for message in messages]


async def test_pulls_and_batches_of_two_consumers_keep_the_order_of_a_key(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        for number in range(6):
            client.send_nowait("a.b", b"k %d" % number, order_key="k")
        await client.flush()
        await client.send("a.b", b"l 0", order_key="l")
        async with (
            client.subscribe("a.", group="g", start="first", retry_delays=[0]) as one,
            client.subscribe("a.", group="g") as two,
        ):
            first = await one.pull(2, timeout=20)
            assert bodies(first) == ["k 0", "k 1"]
            async with await two.pull_batch(10, timeout=20) as batch:
                assert [body.decode() for body in batch.bodies] == ["l 0"]
            waiting = asyncio.create_task(two.pull(10, timeout=20))
            await first[1].nack()
            await first[0].ack()
            again = await waiting
            assert [(message.body, message.attempt) for message in again] == [(b"k 1", 2)]
            await again[0].ack()
            batch = await one.pull_batch(10, min_count=4, timeout=20)
            assert [body.decode() for body in batch.bodies] == ["k 2", "k 3", "k 4", "k 5"]
            batch.ack()
            await one.flush()


async def test_a_pull_of_one_gets_a_high_message_next(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a.b", [b"low %d" % number for number in range(20)], priority="low")
        async with client.subscribe("a.", group="g", start="first") as consumer:
            (message,) = await consumer.pull(1, timeout=20)
            assert message.body == b"low 0"
            await client.send("a.b", b"high", priority="high")
            assert bodies(await consumer.pull(1, timeout=20)) == ["high"]
            assert bodies(await consumer.pull(1, timeout=20)) == ["low 1"]


async def test_a_loop_hands_out_what_it_has_fetched_before_a_high_message(tmp_path: Path) -> None:
    found = list[str]()
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a.b", [b"low %d" % number for number in range(2_000)], priority="low")
        async with client.subscribe("a.", group="g", start="first", max_unacked=100) as consumer:
            async with asyncio.timeout(20):
                async for message in consumer:
                    found.append(message.body.decode())
                    message.ack()
                    if len(found) == 300:
                        await client.send("a.b", b"high", priority="high")
                    if len(found) == 1_000:
                        break
    assert found.index("high") <= 501, "behind what was fetched ahead at most, and before the rest"
    assert [body for body in found if body != "high"] == [f"low {number}" for number in range(999)]

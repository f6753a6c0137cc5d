"""Each message says where it came from: the address that the broker saw, the program and the producer."""

from __future__ import annotations

import re
from pathlib import Path

import qmq
from tests.broker_process import running, running_broker


async def test_all_ways_to_send_show_where_from(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url:
        async with qmq.connect(url, app="shop-api", durability="append") as shop:
            await shop.send("a.b", b"0")
            await shop.send("a.b", b"1", key="k")
            await shop.send_many("a.b", [b"2", b"3"])
            shop.send_nowait("a.c", b"4")
            shop.send_nowait("a.b", b"5", delay=0.001)
            await shop.flush()
        async with qmq.connect(url, app="billing") as billing, billing.subscribe("a.", start="first") as consumer:
            await billing.send("a.b", b"6", delay=0.001)
            found = [message for _ in range(7) for message in await consumer.pull(1, timeout=10)]
    by_body = {message.body: message for message in found}
    assert len(by_body) == 7
    assert {message.source is not None and re.fullmatch(r"127\.0\.0\.1:\d+", message.source) for message in found}
    assert {message.app for body, message in by_body.items() if body != b"6"} == {"shop-api"}
    assert by_body[b"6"].app == "billing"
    shops = {(message.source, message.producer) for body, message in by_body.items() if body != b"6"}
    assert len(shops) == 1
    assert (by_body[b"6"].source, by_body[b"6"].producer) not in shops
    assert {message.sender for message in found} == {None}


async def test_a_message_that_comes_again_says_the_same(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url, app="shop-api") as client:
        await client.send_many("a", [b"0", b"1", b"2"])
        async with client.subscribe("a", group="g", start="first", retry_delays=[0]) as consumer:
            first = await consumer.pull(3, 3, timeout=10)
            before = {(message.source, message.app, message.producer) for message in first}
            await first[1].nack()  # comes again as a piece of its batch
            (again,) = await consumer.pull(1, 1, timeout=10)
            assert again.attempt == 2
            assert {(again.source, again.app, again.producer)} == before
            batch = qmq.MessageBatch([first[0]._run])
            assert set(batch.to_arrow().column("app").to_pylist()) == {"shop-api"}


async def test_a_restart_forgets_no_source(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as broker, qmq.connect(broker.url, app="shop-api") as client:
        await client.send("a", b"0")
        await client.send("a", b"1", delay=3)
    async with (
        running(tmp_path / "data") as broker,
        qmq.connect(broker.url) as client,
        client.subscribe("a", start="first") as consumer,
    ):
        found = [message for _ in range(2) for message in await consumer.pull(1, timeout=20)]
    assert [message.app for message in found] == ["shop-api"] * 2
    assert found[0].source == found[1].source is not None

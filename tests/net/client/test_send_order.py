"""The order in which one client's messages of a subject, a priority or an order key are stored."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

import qmq
from tests.broker_process import running_broker
from tests.daemon.test_token_file import guarded, until

OPTIONS: list[dict[str, Any]] = [
    {},
    {"expires_in": "1h"},
    {"tags": ["t"]},
    {"key": "K"},
    {"durability": "append"},
    {"durability": "append", "expires_in": "1h"},
    {"properties": {"p": "1"}, "expires_in": "1h"},
]
NAMES: list[dict[str, Any]] = [{}, {"priority": "high"}, {"order_key": "k"}, {"order_key": "l"}]


async def test_the_order_holds_where_a_message_of_a_batch_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (broker, keys, ops):
        web = keys.add("web", produce=("ok.",))
        await until(lambda: "web" in broker.server.token_names)
        async with qmq.connect(broker.url, token=web) as client:
            failures = []
            for number in range(0, 30, 3):
                for body in (b"%d" % each for each in range(number, number + 3)):
                    client.send_nowait("ok.a", body)
                    client.send_nowait("ok.b", body, order_key="k")
                    if int(body) == number:
                        client.send_nowait("no.a", b"x")
                    await asyncio.sleep(0)  # a batch leaves, and the next one before its answer comes
                    await asyncio.sleep(0)
                with pytest.raises(qmq.SendFailed) as failed:
                    await client.flush()
                failures += failed.value.failures
        assert [failure.subject for failure in failures] == ["no.a"] * 10
        async with qmq.connect(broker.url, token=ops) as client, client.subscribe("ok.", start="first") as consumer:
            messages = await consumer.pull(60, 60, timeout=10)
        for subject in ("ok.a", "ok.b"):
            assert [int(one.body) for one in messages if one.subject == subject] == list(range(30))


async def test_each_subject_priority_and_order_key_keeps_the_order_of_the_calls(tmp_path: Path) -> None:
    choose = random.Random(20_881)
    sent: dict[str, list[int]] = {}
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        waiting: list[asyncio.Task[Any]] = []
        number = 0
        for _ in range(400):
            subject, name = choose.choice(["a.b", "a.c"]), choose.choice(NAMES)
            options = name | choose.choice(OPTIONS)
            way = choose.choice(["nowait", "nowait", "send", "many", "pause"])
            count = 3 if way == "many" else 1
            bodies = [b"%d" % each for each in range(number, number + count)]
            if way == "pause":
                await asyncio.sleep(0)
                continue
            sent.setdefault(f"{subject} {name}", []).extend(range(number, number + count))
            number += count
            if way == "nowait":
                client.send_nowait(subject, bodies[0], **options)
                continue
            if "key" in options and way == "many":
                options["keys"] = [options.pop("key")] * count
            if way == "many":
                waiting.append(asyncio.create_task(client.send_many(subject, bodies, **options)))
            else:
                waiting.append(asyncio.create_task(client.send(subject, bodies[0], **options)))
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        await client.flush()
        came: dict[str, list[int]] = {}
        async with client.subscribe("a.", group="g", priority_share=0) as consumer:
            while sum(map(len, came.values())) < number:
                for message in await consumer.pull(1_000, timeout=10):
                    name = {"order_key": message.order_key} if message.order_key else {}
                    if message.priority != "normal":
                        name = {"priority": message.priority}
                    came.setdefault(f"{message.subject} {name}", []).append(int(message.body))
                    message.ack()
    assert came == sent

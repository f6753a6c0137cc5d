"""kill -9 of the broker in the middle of a large resend: it goes on, and each message comes again once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import BrokerProcess, broker_process
from tests.faults.ledger import fresh_seed

#: The processes run the same lines whoever is killed.
pytestmark = pytest.mark.no_cover

SUBJECTS: Final = 4_000
EACH: Final = 3
KILLS: Final = 3


async def fill(client: qmq.Client) -> None:
    """Store the messages, and let the group take and ack them all; a few of them die."""
    for at in range(EACH):
        for number in range(SUBJECTS):
            client.send_nowait(f"a.{number}", b"%d" % (at * SUBJECTS + number))
        await client.drain()
    await client.flush()
    left = EACH * SUBJECTS
    async with client.subscribe("a.", group="g", consumer="c", max_unacked=100_000) as consumer:
        while left:
            batch = await consumer.pull_batch(2_000, timeout=30)
            assert len(batch)
            left -= len(batch)
            await batch[:10].reject("bad")
            batch[10:].ack()
        await consumer.flush()


async def in_retry(client: qmq.Client) -> int:
    (row,) = await client.admin.groups("g")
    return row.in_retry


async def kill_again_and_again(broker: BrokerProcess, client: qmq.Client, dice: random.Random) -> int:
    """Kill and start the broker while the resend is under way; return how often it was."""
    begun = 0
    for _ in range(KILLS):
        least = await in_retry(client)
        for _ in range(10_000):
            if least == EACH * SUBJECTS or await in_retry(client) > least:
                break
            await asyncio.sleep(0.005)
        await asyncio.sleep(dice.random() * 0.1)
        begun += 0 < await in_retry(client) < EACH * SUBJECTS
        broker.kill()
        broker.start()
    return begun


async def take_all(client: qmq.Client) -> Counter[int]:
    found = Counter[int]()
    async with client.subscribe("a.", group="g", consumer="c") as consumer:
        while found.total() < EACH * SUBJECTS:
            batch = await consumer.pull_batch(2_000, timeout=30)
            assert len(batch), f"{found.total()} came"
            assert all(message.replayed for message in batch)
            found.update(int(message.body) for message in batch)
            batch.ack()
        assert not await consumer.pull(10, timeout=1)
        await consumer.flush()
    return found


def test_a_resend_goes_on_after_kills(tmp_path: Path) -> None:
    seed = fresh_seed()
    dice = random.Random(seed)

    async def resend_and_kill(broker: BrokerProcess) -> None:
        async with (
            qmq.connect(broker.url, admin_timeout=120) as client,
            qmq.connect(broker.url, admin_timeout=120) as other,
        ):
            await fill(client)
            resending = asyncio.create_task(client.admin.resend(prefix="a.", group="g"))
            begun = await kill_again_and_again(broker, other, dice)
            count = await resending
            assert begun, f"no kill came in the middle (seed {seed})"
            assert (count, count.gone, count.waiting) == (EACH * SUBJECTS, 0, 0), f"seed {seed}"
            assert await in_retry(other) == EACH * SUBJECTS, f"seed {seed}"
            assert await take_all(client) == Counter(range(EACH * SUBJECTS)), f"seed {seed}"
            assert [letter async for letter in client.admin.dead_letters("g")] == []

    with broker_process(tmp_path / "data") as broker:
        asyncio.run(resend_and_kill(broker))
        broker.stop()
    report = verify(tmp_path / "data", Disk(), None)
    assert not report.faults, (seed, report.faults)

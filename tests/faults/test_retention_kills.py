"""kill -9 of a broker that drops old segments: what its groups still have to do with is there, under the same ids."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import qmq
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import broker_process

SETTINGS = {
    "segment_bytes": 70_000,
    "max_frame_bytes": "64 KiB",
    "max_message_bytes": "32 KiB",
    "reserve_bytes": "1 MiB",
    "checkpoint_ms": 20,
    "checkpoint_bytes": "64 KiB",
    "retention_bytes": 150_000,
}
#: When each life of the broker but the last ends: once it has dropped so many segments.
LIVES = (0, 1, 2, 0, 1, 3)
#: Sent in each life, 20,000 bytes each: four segments, of which retention keeps two.
SENDS = 12
#: A checkpoint comes before each drop, and the disk may be slow.
PATIENCE_S = 120


async def test_what_is_held_waits_or_is_dead_survives_segments_and_kills(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data", **SETTINGS) as broker:
        async with (
            qmq.connect(broker.url, durability="append") as client,
            client.subscribe("a", group="g", consumer="c") as consumer,
        ):
            await client.send_many("a", [b"%d" % number for number in range(30)])
            messages = await consumer.pull(max_count=30, min_count=30, timeout=30)
            ids = {message.body: message.id for message in messages}
            for message in messages[:10]:
                await message.nack(delay=3_600)
            for message in messages[10:20]:
                await message.reject("bad")
            dead = [letter.id async for letter in client.admin.dead_letters("g")]
            assert dead == [ids[b"%d" % number] for number in range(10, 20)]
            for wanted in LIVES:
                await client.send_many("filler", [bytes(20_000)] * SENDS)
                deadline = time.monotonic() + PATIENCE_S
                while (await client.admin.stats())[0].dropped_segments < wanted:
                    assert time.monotonic() < deadline, f"fewer than {wanted} segments have gone"
                    await asyncio.sleep(0.01)
                broker.kill()
                broker.start()
            await client.send_many("filler", [bytes(20_000)] * SENDS)
            deadline = time.monotonic() + PATIENCE_S
            while [subject.messages async for subject in client.subjects("a")] != [0]:
                assert time.monotonic() < deadline, "the segments that had them have not gone"
                await asyncio.sleep(0.01)
            (row,) = await client.admin.groups("g")
            assert (row.in_flight, row.in_retry, row.dead, row.skipped) == (10, 10, 10, 0)
            assert [letter.id async for letter in client.admin.dead_letters("g")] == dead
            for message in messages[20:]:
                message.ack()
            await consumer.flush()
            assert await client.admin.redrive("g", all=True) == 10
            again = await consumer.pull(max_count=10, min_count=10, timeout=30)
            assert {message.body: message.id for message in again} == {
                body: ids[body] for body in (b"%d" % number for number in range(10, 20))
            }
            for message in again:
                message.ack()
            await consumer.flush()
        broker.stop()
    assert not verify(tmp_path / "data", Disk()).faults

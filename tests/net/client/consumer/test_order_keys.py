"""Order keys in the client: what follows a failed message goes back with it, and no two handlers have one key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import qmq
from tests.broker_process import running_broker


async def send(client: qmq.Client, *bodies: str) -> None:
    """Send messages; the first word of each is its order key."""
    for body in bodies:
        client.send_nowait("a.b", body.encode(), order_key=body.split()[0])
    await client.flush()


async def test_a_loop_skips_what_follows_a_failed_message(tmp_path: Path) -> None:
    found = list[str]()
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, *(f"k {number}" for number in range(8)), "l 0")
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            async with asyncio.timeout(20):
                async for message in consumer:
                    found.append(f"{message.body.decode()} {message.attempt}")
                    if len(found) in (3, 6):
                        await message.nack()
                        continue
                    message.ack()
                    if len([one for one in found if one.startswith("k")]) >= 10 and len(found) >= 11:
                        break
            await consumer.flush()
    keys = [one for one in found if one.startswith("k")]
    handled = list(dict.fromkeys(one.rsplit(" ", 1)[0] for one in keys))
    assert handled == [f"k {number}" for number in range(8)]
    assert [one.split()[1] for one in keys] == sorted(one.split()[1] for one in keys)
    assert sum(int(one.split()[2]) > 1 for one in keys) == len(keys) - 8, "only what failed counts an attempt"

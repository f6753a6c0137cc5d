"""Restored messages have the priority and the order key that they were archived with, and keep the order of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

import qmq
from tests.archive.archives import archive
from tests.broker_process import running_broker
from tests.restore.archived import restoring

EXPECTED = {f"{key} {number}": lane for key, lane in {
    "high": ("high", None), "low": ("low", None), "k": ("normal", "k"), "l": ("normal", "l"),
}.items() for number in range(4)}  # fmt: skip


async def archived(root: Path) -> None:
    """Make an archive of a broker that had messages of all lanes."""
    async with running_broker(root / "source") as url, qmq.connect(url) as client:
        for number in range(4):
            for priority in ("low", "high"):
                await client.send("a.b", b"%s %d" % (priority.encode(), number), priority=priority)
            for key in "kl":
                await client.send("a.b", b"%s %d" % (key.encode(), number), order_key=key)
        await client.admin.roll()
    archive(root / "source", root / "archive")


@pytest.mark.parametrize("group", [None, "g"])
async def test_priorities_and_order_keys_come_back(tmp_path: Path, group: str | None) -> None:
    await archived(tmp_path)
    found = list[qmq.Message]()
    async with (
        running_broker(tmp_path / "target") as url,
        qmq.connect(url) as client,
        client.subscribe("a.", group="g", start="first", priority_share=0) as consumer,
    ):
        await restoring(tmp_path, url, group=group).run()
        while len(found) < len(EXPECTED):
            for message in await consumer.pull(1, timeout=20):
                found.append(message)
                await message.ack()
    seen = {message.body.decode(): (message.priority, message.order_key) for message in found}
    assert seen == EXPECTED
    bodies = [message.body.decode() for message in found]
    assert all(body.startswith("high") for body in bodies[:4])
    assert all(body.startswith("low") for body in bodies[-4:])
    for key in "kl":
        assert [body for body in bodies if body[0] == key and body[1] == " "] == [f"{key} {at}" for at in range(4)]

"""Data directories of all sets of format versions that this program reads: it opens, serves and verifies them.

If the test of versions fails, bytes on disk have changed: see CONTRIBUTING.md, "When bytes on disk change".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.format.golden_directory import archives, serving, told, unpack, written_versions

DAY_US = 86_400_000_000


def test_the_newest_has_the_versions_that_are_written(tmp_path: Path) -> None:
    assert unpack(archives()[-1], tmp_path)["versions"] == written_versions()


@pytest.mark.parametrize("path", archives(), ids=lambda path: path.name)
async def test_what_a_broker_has_left_is_served(path: Path, tmp_path: Path) -> None:
    expected = unpack(path, tmp_path)
    data, made_us = tmp_path / "data", expected["made_us"]
    assert verify(data, Disk()).is_good
    async with serving(data, 1_000_000, made_us) as broker, qmq.connect(broker.url) as client:
        found = json.loads(json.dumps(await told(client)))
        for name, group in found["groups"].items():  # it may have settings that are newer than the directory
            group["settings"] = {key: group["settings"][key] for key in expected["groups"][name]["settings"]}
        assert found == {name: expected[name] for name in found}
        for text, message_id in expected.get("unique", {}).items():
            receipt = await client.send("shop.charge", b"", unique=text)
            assert (receipt.id, receipt.duplicate) == (message_id, True)
        async with client.subscribe("shop.", group="work", consumer="holder") as consumer:
            held: list[qmq.Message] = []
            while len(held) < len(expected["held"]):
                held += await consumer.pull(len(expected["held"]) - len(held))
            assert [message.id for message in held] == expected["held"], "what was in flight comes again"
            for message in held:
                await message.ack()
    assert not broker.broker.unaccounted()
    assert verify(data, Disk()).is_good


@pytest.mark.parametrize("path", archives(), ids=lambda path: path.name)
async def test_all_that_waits_in_it_comes_in_time(path: Path, tmp_path: Path) -> None:
    """Retries, delayed messages and letters that are redriven, also where each start reads the pull log anew."""
    expected = unpack(path, tmp_path)
    data, made_us, work = tmp_path / "data", expected["made_us"], expected["groups"]["work"]
    waiting = work["ready"] + work["in_flight"] + work["in_retry"] + work["dead"] + work["delayed"]
    bodies = list[bytes]()
    async with serving(data, 400 * DAY_US, made_us) as broker, qmq.connect(broker.url) as client:
        await client.admin.redrive("work", all=True)
        async with client.subscribe("shop.", group="work", consumer="holder") as consumer:
            while messages := await consumer.pull(timeout=1):
                bodies += [message.body for message in messages]
                for message in messages:
                    message.ack()
            await consumer.flush()
        (group,) = [group for group in await client.admin.groups() if group.name == "work"]
        assert (group.ready, group.in_flight, group.in_retry) == (0, 0, 0)
        expired = [letter.reason async for letter in client.admin.dead_letters("work")]
        assert set(expired) <= {"expired"}
        assert len(bodies) + len(expired) == waiting
        await _send_and_take(client)
    assert not broker.broker.unaccounted()
    assert bodies.count(b"in a year") == 1
    assert b"cancelled" not in bodies
    assert verify(data, Disk()).is_good


async def _send_and_take(client: qmq.Client) -> None:
    """Use what the directory knows: order keys, priorities, each kind of group."""
    settings: dict[str, Any] = {"shop.step": {"order_key": "k1"}, "shop.mail": {"priority": "high"}, "shop.order": {}}
    receipts = [await client.send(subject, b"new", **fields) for subject, fields in settings.items()]
    modes: dict[str, qmq.Mode] = {"work": "reliable", "once": "at_most_once", "all": "broadcast"}
    for group, mode in modes.items():
        prefix = "shop." if mode != "broadcast" else "shop.mail"
        ids = set[str]()
        wanted = {receipt.id for receipt in receipts if mode != "broadcast" or receipt.subject == "shop.mail"}
        async with client.subscribe(prefix, group=group, mode=mode, consumer="b1", start="first") as consumer:
            while not wanted <= ids:
                for message in await consumer.pull():
                    ids.add(message.id)
                    if mode != "at_most_once":
                        message.ack()

"""The prefixes that a group is subscribed to, listed and changed by clients of real brokers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.errors import InvalidName, InvalidOption, UnknownGroup
from qmq.net.client.admin.admin import checked_follows
from tests.broker_process import broker_process, running_broker
from tests.net.several import put, several


async def follows(client: qmq.Client, group: str = "g") -> list[list[str]]:
    return [row.follows for row in await client.admin.groups(group)]


async def test_a_group_is_narrowed_while_its_consumers_are_there(tmp_path: Path) -> None:
    async with (
        running_broker(tmp_path) as url,
        qmq.connect(url) as client,
        client.subscribe("a.", "b.", group="g", consumer="old") as old,
        client.subscribe("b.", group="g", consumer="of-b") as of_b,
    ):
        waits = asyncio.ensure_future(of_b.pull())
        await asyncio.sleep(0)
        told = await client.admin.set_group("g", follows=["a."], max_attempts=3)
        assert (told["follows"], told["max_attempts"]) == (["a."], 3)
        with pytest.raises(InvalidOption, match=r"group g does not follow 'b\.', only 'a\.'"):
            await waits
        await client.send("b.x", b"not for it")
        await client.send("a.x", b"for it")
        assert [message.body for message in await old.pull(2)] == [b"for it"]
        (row,) = await client.admin.groups("g")
        assert (row.follows, row.ready) == (["a."], 0)


async def test_a_connection_that_is_made_anew_widens_nothing(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        async with qmq.connect(broker.url) as client, client.subscribe("", group="g", consumer="c") as consumer:
            await client.admin.set_group("g", follows=["a."])
            broker.kill()
            await asyncio.to_thread(broker.start)
            await client.send("b.x", b"not for it")
            await client.send("a.x", b"for it")
            assert [message.body for message in await consumer.pull(1)] == [b"for it"]
            assert await follows(client) == [["a."]]
            async with client.subscribe("b.", group="g"):  # a consumer that asks again sets them
                assert await follows(client) == [["a.", "b."]]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("a.", InvalidOption),
        ([], InvalidOption),
        ({"a.": 1}, InvalidOption),
        (["a..b"], InvalidName),
        ([3], InvalidName),
    ],
)
def test_invalid_prefixes_are_refused_before_a_broker_is_asked(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_follows(given)


@pytest.mark.parametrize("more", [{"mode": "broadcast"}, {"tags": ["t"]}, {"max_attempts": 3}, {"group": None}])
def test_looking_changes_no_settings(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="look needs an existing reliable group"):
        qmq.connect("qmq://127.0.0.1:1").subscribe("a.", **{"group": "g", "look": True, **more})


async def test_a_look_at_several_brokers_needs_one_that_knows_the_group(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        await put(brokers.one(1), "a.x", [b"1"])
        async with qmq.connect(brokers.one(1)) as one, one.subscribe("a.", group="g", consumer="c"):
            pass
        async with qmq.connect(brokers.url) as client:
            async with client.subscribe("", group="g", look=True) as looks:
                assert [message.body for message in await looks.pull(1)] == [b"1"]
            assert await follows(client) == [["a."]]
            with pytest.raises(UnknownGroup, match="no group 'other'"):
                async with client.subscribe("", group="other", look=True):
                    pass
            assert [row.name for row in await client.admin.groups()] == ["g"]

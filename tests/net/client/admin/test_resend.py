"""``client.admin.resend`` at one broker and at several, and its sync twin."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.errors import BrokersMissed, InvalidName, InvalidOption, QmqError, UnknownGroup, UnknownMessage, UsageError
from tests.net.several import put, several


async def handled(client: qmq.Client, count: int, group: str = "g", subject: str = "a.") -> list[qmq.Message]:
    """Take and ack so many messages."""
    async with client.subscribe(subject, group=group, consumer="c") as consumer:
        found = list[qmq.Message]()
        while len(found) < count:
            found += await consumer.pull(count - len(found), 1, 10)
        for message in found:
            message.ack()
        await consumer.flush()
    return found


async def test_messages_come_again_marked(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        receipts = await client.send_many("a.x", [b"0", b"1", b"2"])
        first = await handled(client, 3)
        assert not any(message.replayed for message in first)
        far: list[tuple[int, int]] = []
        count = await client.admin.resend(prefix="a.", group="g", on_progress=lambda *one: far.append(one))
        assert (count, count.groups, count.waiting) == (3, 1, 0)
        assert far[-1] == (3, 3)
        again = await handled(client, 3)
        assert [(one.body, one.attempt, one.replayed, one.id) for one in again] == [
            (b"%d" % at, 1, True, receipts[at].id) for at in range(3)
        ]
        assert await client.admin.resend(ids=[receipts[1].id.upper(), receipts[1].id], group="g") == 1
        await client.send("a.x", b"new")
        both = sorted(await handled(client, 2), key=lambda message: message.sequence)
        assert [(one.body, one.replayed) for one in both] == [(b"1", True), (b"new", False)]


async def test_times_and_all_groups(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        before = (await client.send("a.x", b"0")).stored_at
        after = (await client.send("a.x", b"1")).stored_at
        for group in ("g", "h"):
            await handled(client, 2, group)
        count = await client.admin.resend(prefix="a.x", since=before, until=after, all_groups=True, dry_run=True)
        assert (count, count.groups) == (2, 2)
        count = await client.admin.resend(prefix="a.x", since=after, all_groups=True)
        assert (count, count.groups) == (2, 2)
        assert [one.body for group in ("g", "h") for one in await handled(client, 1, group)] == [b"1", b"1"]


async def test_keys(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        for number in range(2):
            async with qmq.connect(brokers.one(number)) as one:
                await one.send_many("a.x", [b"0", b"1", b"2"], keys=["k", "other", "k"])
                await one.send("a.y", b"3", key="k")
        await handled(client, 8)
        assert await client.admin.resend(key="k", group="g", dry_run=True) == 6
        assert await client.admin.resend(prefix="a.x", key="k", group="g") == 4
        assert sorted(one.body for one in await handled(client, 4)) == [b"0", b"0", b"2", b"2"]


async def test_a_message_that_was_delayed(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        receipt = await client.send("a.x", b"late", delay=0.1)
        later = await client.send("a.x", b"later", delay=3_600)
        await handled(client, 1)
        assert await client.admin.resend(ids=[receipt.id], group="g") == 1
        (message,) = await handled(client, 1)
        assert (message.id, message.body, message.replayed) == (receipt.id, b"late", True)
        with pytest.raises(UnknownMessage, match="is not delivered yet"):
            await client.admin.resend(ids=[later.id], group="g")


async def test_a_failed_resent_message_stays_marked(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        await client.send("a.x", b"0")
        await handled(client, 1)
        await client.admin.resend(prefix="", group="g")
        async with client.subscribe("a.", group="g", consumer="c") as consumer:
            (message,) = await consumer.pull(1, 1, 10)
            await message.nack(0)
            (message,) = await consumer.pull(1, 1, 10)
            assert (message.attempt, message.replayed) == (2, True)
            message.ack()


NOW = datetime.now(UTC)
WRONG: list[tuple[dict[str, Any], type[QmqError], str]] = [
    ({"prefix": "a."}, UsageError, "give either the group"),
    ({"prefix": "a.", "group": "g", "all_groups": True}, UsageError, "give either the group"),
    ({"group": "g"}, UsageError, "give either the ids"),
    ({"ids": ["0" * 32], "prefix": "a.", "group": "g"}, UsageError, "give either the ids"),
    ({"ids": "0" * 32, "group": "g"}, UsageError, "must be a list"),
    ({"ids": [], "group": "g"}, UsageError, "ids is empty"),
    ({"ids": [7], "group": "g"}, UsageError, "32 hex digits"),
    ({"ids": ["0123"], "group": "g"}, InvalidOption, "is not a message id"),
    ({"ids": ["0" * 32], "since": NOW, "group": "g"}, UsageError, "with ids leave them out"),
    ({"prefix": "a.", "since": NOW, "until": NOW, "group": "g"}, UsageError, "is not before until"),
    ({"prefix": "a.", "since": NOW.replace(tzinfo=None), "group": "g"}, UsageError, "has no time zone"),
    ({"prefix": "a.", "since": 5, "group": "g"}, UsageError, "an aware datetime"),
    ({"prefix": "a b", "group": "g"}, InvalidName, "a b"),
    ({"prefix": "a.", "group": "no group"}, InvalidName, "no group"),
    ({"prefix": "a.", "group": "absent"}, UnknownGroup, "absent"),
    ({"prefix": "b.", "group": "g"}, InvalidOption, "nothing is selected"),
    ({"prefix": "c", "group": "g"}, InvalidOption, "does not follow subject 'c'"),
    ({"prefix": "a.", "since": NOW + timedelta(days=1), "group": "g"}, InvalidOption, "no message of that time"),
    ({"ids": ["0" * 32], "group": "g"}, UnknownMessage, "no broker here has message 0+"),
    ({"key": "absent", "group": "g"}, InvalidOption, "has the key 'absent'"),
    ({"key": "k" * 2000, "group": "g"}, UsageError, "key"),
    ({"ids": ["0" * 32], "key": "k", "group": "g"}, UsageError, "give either the ids"),
]


async def test_wrong_use_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        await client.send("a.x", b"0")
        await client.send("c", b"c")
        await handled(client, 1)
        for options, error, text in WRONG:
            with pytest.raises(error, match=text):
                await client.admin.resend(**options)
        (group,) = await client.admin.groups("g")
        assert (group.in_retry, group.ready) == (0, 0)


async def test_several_brokers(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url, admin_timeout=2) as client:
        ids = list[str]()
        for number in range(2):
            async with qmq.connect(brokers.one(number)) as one:
                ids.append((await one.send("a.x", b"%d" % number)).id)
        await handled(client, 2)
        count = await client.admin.resend(prefix="a.", group="g")
        assert (count, count.groups) == (2, 1)
        assert sorted(one.body for one in await handled(client, 2)) == [b"0", b"1"]
        await put(brokers.one(1), "b.only", [b"x"])
        with pytest.raises(InvalidOption, match=r"does not follow a subject of prefix 'b\.'"):
            await client.admin.resend(prefix="b.", group="g")
        with pytest.raises(UnknownMessage, match="is not stored here"):
            await client.admin.resend(ids=[ids[0], ids[1][:16] + "f" * 16], group="g")
        assert sum(row.in_retry for row in await client.admin.groups("g")) == 0, "nothing is done at the other broker"
        assert await client.admin.resend(ids=ids, group="g") == 2
        await handled(client, 2)
        await brokers.stop(1)
        missed = brokers.address(1)
        with pytest.raises(BrokersMissed, match=f"nothing was done; no answer within 2 s from {missed}"):
            await client.admin.resend(prefix="a.", group="g")
        with pytest.raises(BrokersMissed, match=missed):
            await client.admin.resend(ids=ids, group="g")
        assert await client.admin.resend(ids=ids[:1], group="g") == 1, "all of it is at the broker that is there"


async def test_the_sync_twin(tmp_path: Path) -> None:
    def use(url: str) -> None:
        with qmq.connect_sync(url) as client:
            client.send("a.x", b"0")
            with client.subscribe("a.", group="g", consumer="c") as consumer:
                (message,) = consumer.pull(1, timeout=10)
                message.ack()
                consumer.flush()
                count = client.admin.resend(prefix="a.", group="g")
                assert (count, count.groups) == (1, 1)
                (message,) = consumer.pull(1, timeout=10)
                assert message.replayed
                message.ack()

    async with several(tmp_path, 1) as brokers:
        await asyncio.to_thread(use, brokers.url)

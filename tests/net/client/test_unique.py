"""Sends with unique texts by all ways of the client, to brokers that know them and to one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq.net.client.address import Address
from qmq.net.client.brokers import OrderKeyBrokers
from tests.broker_process import BrokerProcess, running
from tests.net.scripted import scripted_broker


async def bodies_in(client: qmq.Client, subject: str) -> list[bytes]:
    return [message.body async for message in client.find(subject)]


async def test_all_ways_to_send_store_a_text_once(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        first = await client.send("a", b"1", unique="t", key="k", tags=["v"], properties={"p": "q"})
        assert not first.duplicate
        found = await client.get(first.id)
        assert (found.body, found.keys, found.tags, found.properties) == (b"1", ("k",), ("v",), {"p": "q"})
        again = await client.send("a", b"2", unique="t", priority="high")
        assert again.duplicate
        assert (again.id, again.sequence, again.stored_at) == (first.id, first.sequence, first.stored_at)
        client.send_nowait("a", b"3", unique="t")
        client.send_nowait("a", b"4", unique="u")
        client.send_nowait("a", b"5", unique="u", order_key="o")
        await client.flush()
        texts, keys = ["v", "t", "v", "w"], ["k", None, "l", ["m", "n"]]
        many = await client.send_many("a", [b"6", b"7", b"8", b"9"], unique=texts, keys=keys)
        assert [receipt.duplicate for receipt in many] == [False, True, True, False]
        assert (many[1].id, many[2].id) == (first.id, many[0].id)
        assert [receipt.duplicate for receipt in many[1:3]] == [True, True]
        late = await client.send("a", b"10", unique="x", delay="1h", expires_in="1h")
        assert (await client.send("a", b"11", unique="x")).id == late.id
        assert await bodies_in(client, "a") == [b"1", b"4", b"6", b"9"]

        def sync() -> None:
            with qmq.connect_sync(broker.url) as other:
                assert other.send("a", b"12", unique="t").id == first.id
                assert other.send_many("a", [b"13"], unique=["t"])[0].duplicate
                other.send_nowait("a", b"14", unique="t")
                other.flush()

        await asyncio.to_thread(sync)
        assert len(await bodies_in(client, "a")) == 4


async def test_order_keys_and_unique_texts_in_one_call(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        keys = [f"order-{number % 7}" for number in range(40)]
        texts = [f"text-{number % 20}" for number in range(40)]
        first = await client.send_many("a", [b"%d" % n for n in range(40)], unique=texts, order_keys=keys)
        again = await client.send_many("a", [b"x"] * 41, unique=[*texts, "new"], order_keys=[*keys, "o"])
        assert sum(receipt.duplicate for receipt in first) == 20
        assert len({receipt.id for receipt in first}) == 20
        assert [receipt.id for receipt in again[:40]] == [receipt.id for receipt in first]
        assert [receipt.duplicate for receipt in again] == [True] * 40 + [False]
        assert len(await bodies_in(client, "a")) == 21
        one_key = await client.send_many("a", [b"y", b"z"], unique=["text-1", "newer"], order_key="o")
        assert [receipt.duplicate for receipt in one_key] == [True, False]


async def test_many_clients_at_once_store_each_text_once(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:

        async def send() -> list[qmq.Receipt]:
            async with qmq.connect(broker.url, durability="append") as client:
                sends = [client.send("a", b"", unique=f"text-{number}") for number in range(100)]
                return await asyncio.gather(*sends)

        of_clients = await asyncio.gather(*(send() for _ in range(5)))
        for receipts in zip(*of_clients, strict=True):
            assert len({receipt.id for receipt in receipts}) == 1
            assert [receipt.duplicate for receipt in receipts].count(False) == 1


@pytest.mark.parametrize(
    ("unique", "says"),
    [
        ("", "a unique text has 1 to 1,024 bytes as UTF-8, not 0 as ''"),
        ("ž" * 513, "not 1,026 as 'žžž"),
        ("\ud800", "must be a str that UTF-8 can hold"),
        (b"t", "must be a str that UTF-8 can hold, not b't'"),
        (5, "must be a str that UTF-8 can hold, not 5"),
    ],
)
async def test_a_wrong_text_is_refused_and_nothing_is_sent(tmp_path: Path, unique: str, says: str) -> None:
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        with pytest.raises(qmq.InvalidOption, match=says):
            await client.send("a", b"", unique=unique)
        with pytest.raises(qmq.UsageError, match=says):
            client.send_nowait("a", b"", unique=unique)
        with pytest.raises(qmq.InvalidOption, match=says):
            await client.send_many("a", [b"", b""], unique=["t", unique])
        for wrong in ("ab", ["t"], ["t"] * 3):
            with pytest.raises(qmq.InvalidOption, match="unique must be a list of 2 texts"):
                await client.send_many("a", [b"", b""], unique=wrong)
        await client.flush()
        assert await bodies_in(client, "a") == []


async def test_the_longest_texts_are_taken(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, qmq.connect(broker.url) as client:
        for text in ("t", "t" * 1_024, "ž" * 512):
            first, again = await client.send("a", b"", unique=text), await client.send("a", b"", unique=text)
            assert (first.duplicate, again.duplicate) == (False, True)


async def test_sends_at_once_join_one_batch_and_are_checked_each(tmp_path: Path) -> None:
    async with running(tmp_path, max_message_bytes="8 KiB") as broker, qmq.connect(broker.url) as client:
        sends = [client.send("a", b"%d" % number, unique=f"text-{number % 20}") for number in range(40)]
        sends += [client.send("a", bytes(8 << 10), unique="large"), client.send("b", b"", unique="text-0")]
        sends += [client.send("a", b"k", key="k", unique="text-1"), client.send("a", b"plain")]
        *found, large, other, keyed, plain = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(large, qmq.MessageTooLarge)
        receipts = [receipt for receipt in (*found, other, keyed, plain) if isinstance(receipt, qmq.Receipt)]
        assert len(receipts) == 43
        assert [receipt.duplicate for receipt in receipts] == [False] * 20 + [True] * 20 + [False, True, False]
        assert len({receipt.id for receipt in receipts}) == 22
        assert await bodies_in(client, "a") == [*(b"%d" % number for number in range(20)), b"plain"]


async def test_a_broker_of_an_older_version_gets_no_unique_texts() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        for send in (
            lambda: client.send("a", b"", unique="t"),
            lambda: client.send_many("a", [b""], unique=["t"]),
        ):
            with pytest.raises(qmq.InvalidOption, match="this broker is too old for unique="):
                await send()
        with pytest.raises(qmq.InvalidOption, match="this broker is too old for unique="):
            client.send_nowait("a", b"", unique="t")


@pytest.fixture
def several(tmp_path: Path) -> Iterator[list[BrokerProcess]]:
    brokers = [BrokerProcess(tmp_path / str(number)) for number in range(2)]
    for broker in brokers:
        broker.start()
    yield brokers
    for broker in brokers:
        broker.close()


async def test_a_text_goes_to_one_of_several_brokers_and_waits_for_it(several: list[BrokerProcess]) -> None:
    addresses = [Address("127.0.0.1", int(broker.url.rpartition(":")[2])) for broker in several]
    chosen = OrderKeyBrokers(addresses)
    texts = [f"text-{number}" for number in range(30)]
    here, there = (next(text for text in texts if chosen.broker_of(text) == number) for number in range(2))
    url = ",".join([several[0].url, several[1].url.rpartition("/")[2]])
    backwards = ",".join([several[1].url, several[0].url.rpartition("/")[2]])
    async with qmq.connect(url, send_timeout=2.0, failover_after=0.2) as client, qmq.connect(backwards) as other:
        first = await client.send_many("a", [b""] * 30, unique=texts)
        assert len({receipt.id[:12] for receipt in first}) == 2
        again = await asyncio.gather(*(other.send("a", b"", unique=text) for text in texts))
        assert [receipt.id for receipt in again] == [receipt.id for receipt in first]
        assert all(receipt.duplicate for receipt in again)
        keyed = [await one.send("b", b"", unique="t", order_key=there) for one in (client, other)]
        assert keyed[0].id == keyed[1].id
        assert keyed[0].id[:12] == first[texts.index(there)].id[:12], "an order key decides, by itself"
        several[1].kill()
        waiting = asyncio.ensure_future(client.send("a", b"", unique=there))
        assert (await client.send("a", b"", unique=here)).duplicate  # others go on
        with pytest.raises(qmq.SendFailed, match="no other broker knows what was sent before"):
            await waiting
        several[1].start()
        assert (await client.send("a", b"", unique=there)).id == first[texts.index(there)].id

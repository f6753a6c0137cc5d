"""Finding messages at real brokers: by id, key, time and text, at one broker and at several."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import qmq
from tests.net.several import several


async def test_a_message_is_found_by_its_id_with_all_its_fields(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect(app="shop-api") as client:
        receipt = await client.send(
            "shop.order.paid", json={"total": 125}, key="order-4421", tags=["eu"], properties={"trace": "t-1"},
            expires_in="1d",
        )  # fmt: skip
        message = await client.get(receipt.id)
        assert (message.id, message.subject, message.sequence) == (receipt.id, "shop.order.paid", receipt.sequence)
        assert message.json() == {"total": 125}
        assert (message.key, message.keys, message.tags) == ("order-4421", ("order-4421",), ("eu",))
        assert message.properties == {"content-type": "application/json", "trace": "t-1"}
        assert message.stored_at == receipt.stored_at
        assert message.created_at <= message.stored_at
        assert message.expires_at_us == message.stored_at_us + 86_400_000_000
        assert message.expires_at is not None
        assert message.deliver_at is None
        assert message.size > len(message.body)
        assert message.broker in qmq_broker.url
        assert (message.source or "").startswith("127.0.0.1:")
        assert (message.app, message.sender) == ("shop-api", None)
        assert len(message.producer or "") == 32
        with pytest.raises(FrozenInstanceError):
            message.subject = "other"  # type: ignore[misc]
        plain = await client.get((await client.send("shop.mail", b"no json")).id)
        assert (plain.key, plain.keys, plain.expires_at) == (None, (), None)
        with pytest.raises(ValueError, match="no JSON"):
            plain.json()


async def test_a_delayed_message_keeps_its_id(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipt = await client.send("shop.mail", b"later", delay="1h", expires_in="2h")
        waiting = await client.get(receipt.id)
        assert (waiting.sequence, waiting.body) == (None, b"later")
        assert waiting.deliver_at_us == waiting.stored_at_us + 3_600_000_000
        assert waiting.expires_at_us == waiting.deliver_at_us + 7_200_000_000
        assert waiting.deliver_at is not None
        async with client.subscribe("shop.mail", group="g") as consumer:
            qmq_broker.clock.advance("1h")
            (delivered,) = await consumer.pull(1, timeout=30)
            assert delivered.id == receipt.id
        message = await client.get(receipt.id)
        assert (message.id, message.sequence, message.deliver_at) == (receipt.id, 0, None)
        cancelled = await client.send("shop.mail", b"never", delay="1h")
        await client.cancel(cancelled.id)
        with pytest.raises(qmq.UnknownMessage, match="cancelled"):
            await client.get(cancelled.id)


async def test_ids_that_name_nothing_are_clear_errors(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipt = await client.send("shop.mail", b"1")
        for wrong in ("", "order-4421", receipt.id[:-1], receipt.id + "0", " " + receipt.id[1:]):
            with pytest.raises(qmq.InvalidOption, match="message id"):
                await client.get(wrong)
        with pytest.raises(qmq.UnknownMessage, match="it is of store"):
            await client.get("ab" * 16)
        with pytest.raises(qmq.UnknownMessage, match="no message"):
            await client.get(receipt.id[:-4] + "ffff")


async def test_searches_change_nothing(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        receipts = await client.send_many(
            "shop.order.paid", [b"%d" % n for n in range(50)], keys=[f"k-{n % 5}" for n in range(50)]
        )
        found = [message async for message in client.find("shop.", key="k-3", newest=True)]
        assert [message.id for message in found] == [receipts[n].id for n in range(48, 0, -5)]
        assert await client.get(receipts[7].id) == [one async for one in client.find("", limit=None)][7]
        assert await client.admin.groups() == []
        assert (await client.admin.info())[0].groups == 0


async def test_a_text_is_found_where_its_sender_wrote_it(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        await client.send("shop.mail", "Grüße an k".encode())
        await client.send("shop.mail", b"1", key="Gruen-Gr\u00fc\u00dfe")
        await client.send("shop.mail", b"2", tags=["Gr\u00fc\u00dfe"])
        await client.send("shop.mail", b"3", properties={"text": "viele Gr\u00fc\u00dfe"})
        await client.send("shop.mail", b"4", properties={"Gr\u00fc\u00dfe": "x"})
        await client.send("shop.mail", b"nothing")
        await client.send_many("shop.mail", [b"Gr", "\u00fc\u00dfe".encode()])
        found = [message.body async for message in client.find("shop.", contains="Gr\u00fc\u00dfe")]
        assert found == ["Grüße an k".encode(), b"1", b"2", b"3", b"4"]
        assert [one async for one in client.find("shop.", contains="gr\u00fc\u00dfe")] == []
        assert [one.body async for one in client.find("shop.", contains="k", newest=True)] == [found[0]], (
            "not names of fields"
        )


async def test_a_loop_may_be_left_at_any_time(qmq_broker: qmq.testing.LocalBroker) -> None:
    async with qmq.connect() as client:
        await client.send_many("shop.mail", [b"%d" % n for n in range(3_000)])
        finder = client.find("shop.", limit=None)
        async for message in finder:
            if message.sequence == 1_234:
                break
        rest = [one.sequence async for one in client.find("shop.", limit=None, cursor=finder.cursor)]
        assert rest == list(range(1_235, 3_000))


async def test_several_brokers_are_searched_as_one(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as both:
        receipts = []
        for number in range(2):
            async with qmq.connect(both.one(number)) as client:
                receipts += [await client.send("shop.mail", b"%d" % number, key="k") for _ in range(3)]
        async with qmq.connect(both.url, admin_timeout=1) as client:
            for receipt in receipts:
                assert (await client.get(receipt.id)).id == receipt.id
            for newest in (False, True):
                found = [one.id async for one in client.find("shop.", key="k", newest=newest)]
                assert found == [receipt.id for receipt in receipts][:: -1 if newest else 1]
            await both.stop(1)
            assert (await client.get(receipts[0].id)).body == b"0"
            with pytest.raises(qmq.BrokersMissed, match=both.address(1)):
                await client.get(receipts[-1].id)
            finder = client.find("shop.", key="k")
            assert [one.body async for one in finder] == [b"0"] * 3
            assert finder.missed == (both.address(1),)
            assert not finder.is_complete
            await both.start(1)
            more = client.find("shop.", key="k", cursor=finder.cursor, stop_after="1m")
            assert [one.body async for one in more] == [b"1"] * 3
            assert more.is_complete


async def test_a_search_goes_on_after_its_broker_has_restarted(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as one, qmq.connect(one.url) as client:
        sent = await client.send_many("shop.mail", [b"%d" % n for n in range(2_500)])
        for newest in (False, True):
            finder = client.find("shop.", limit=None, newest=newest)
            found = await finder.page(100)
            await one.stop(0)
            await one.start(0)
            found += [message async for message in finder]
            assert [message.id for message in found] == [receipt.id for receipt in sent][:: -1 if newest else 1]
            assert finder.is_complete


async def test_a_message_that_was_handed_over_is_found_by_its_id(tmp_path: Path) -> None:
    async with (
        several(tmp_path, 2) as both,
        qmq.connect(both.url, failover_after=0.2, admin_timeout=0.5) as client,
        client.subscribe("shop.mail", group="g", retry_delays=[0]) as consumer,
    ):
        receipt = await client.send("shop.mail", b"1", key="order-1")
        (message,) = await consumer.pull(1, timeout=30)
        await both.stop(0)
        await message.nack(reason="again")
        copy = await client.get(receipt.id)
        assert (copy.id, copy.subject, copy.sequence, copy.body) == (receipt.id, "shop.mail", None, b"1")
        by_key = [one.id async for one in client.find("shop.", key="order-1")]
        assert by_key == [receipt.id]
        assert [one.id async for one in client.find("shop.")] == [], "a prefix alone does not find it"


def test_the_client_without_asyncio_finds_the_same(qmq_broker: qmq.testing.LocalBroker) -> None:
    with qmq.connect_sync() as client:
        client.send_many("shop.mail", [b"%d" % n for n in range(1_500)], keys=[f"k-{n % 3}" for n in range(1_500)])
        finder = client.find("shop.", key="k-1", limit=None)
        assert [message.body for message in finder] == [b"%d" % n for n in range(1, 1_500, 3)]
        assert (finder.is_complete, finder.cursor, finder.missed, finder.unreadable) == (True, None, (), 0)
        assert finder.progress.found == 500
        limited = client.find("shop.", newest=True, limit=2)
        first = list(limited)
        assert not limited.is_complete
        more = client.find("shop.", newest=True, limit=2, cursor=limited.cursor)
        assert [message.body for message in [*first, *more]] == [b"1499", b"1498", b"1497", b"1496"]
        assert client.get(first[0].id) == first[0]
        with pytest.raises(qmq.UsageError):
            client.find("bad..name")

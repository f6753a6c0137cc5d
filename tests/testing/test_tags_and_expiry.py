"""Groups with tags and expiry, through the client: nothing is lost beside other features, and counts say what went."""

from __future__ import annotations

import time

import pytest

import qmq
from qmq import testing


async def all_of(consumer: qmq.Consumer, count: int) -> list[str]:
    """Pull, so many at a time, until nothing comes; acknowledge all."""
    bodies = list[str]()
    while messages := await consumer.pull(count, timeout=0):
        for message in messages:
            message.ack()
        await consumer.flush()
        bodies += [message.body.decode() for message in messages]
    return bodies


@pytest.mark.parametrize("has_tags", [True, False])
async def test_no_message_is_lost_where_a_filter_leaves_order_keys_to_two_consumers(has_tags: bool) -> None:
    settings = {"tags": ["red"]} if has_tags else {"expire_after": "1h"}
    async with (
        testing.broker() as broker,
        qmq.connect(name="one") as client,
        qmq.connect(name="two") as other,
        client.subscribe("s", group="g", **settings) as one,  # type: ignore[arg-type]
        other.subscribe("s", group="g") as two,
    ):

        async def send(body: str, *, is_wanted: bool, order_key: str | None = None) -> None:
            tags = (["red"] if is_wanted else ["blue"]) if has_tags else None
            expires_in = 0.05 if not has_tags and not is_wanted else None
            await client.send("s", body.encode(), tags=tags, expires_in=expires_in, order_key=order_key)

        await send("first", is_wanted=True)
        assert await all_of(one, 1) == ["first"]  # its next pull begins with order keys
        for key, is_wanted in (("a", False), ("b", False), ("c", True), ("d", True)):
            await send(key, is_wanted=is_wanted, order_key=key)
        for number in range(5):
            await send(f"plain {number}", is_wanted=number > 1)
        broker.clock.advance(1)
        found = await all_of(one, 1) + await all_of(two, 10)
        assert sorted(found) == ["c", "d", "plain 2", "plain 3", "plain 4"]
        (row,) = await client.admin.groups("g")
        assert (row.filtered, row.dead) == ((4, 0) if has_tags else (0, 4))
        assert (row.ready, row.in_flight, row.in_retry, row.skipped) == (0, 0, 0, 0)


async def test_a_retry_without_the_tags_that_a_group_has_now_is_filtered() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        ids = [(await client.send("a.b", b"%d" % at, tags=["red" if at % 2 == 0 else "blue"])).id for at in range(4)]
        async with client.subscribe("a.", group="g", tags=["red"], retry_delays=["1h"]) as consumer:
            first, second = await consumer.pull(10, timeout=0)
            await first.nack(reason="broke")
            second.ack()
            await consumer.flush()
            await client.admin.set_group("g", tags=["blue"])
            (found,) = (await client.trace(ids[0])).groups
            assert found.state == "retrying"
            assert found.reason == "broke; it has none of the tags blue: it is not handed out again"
            broker.clock.advance("2h")
            assert await consumer.pull(10, timeout=0) == []
            (row,) = await client.admin.groups("g")
            assert (row.filtered, row.in_retry, row.dead, row.in_flight) == (3, 0, 0, 0)
            traces = [(await client.trace(one)).groups[0] for one in ids]
            assert [one.state for one in traces] == ["filtered", "filtered", "acked", "filtered"]
            kinds = [[event.kind for event in one.events] for one in traces]
            assert kinds[0] == ["handed_out", "nacked", "handed_out", "filtered"]
            assert kinds[1] == ["filtered"]
            assert kinds[2] == ["handed_out", "acked"]


async def test_a_resend_keeps_to_the_tags_of_its_group() -> None:
    async with testing.broker(), qmq.connect() as client:
        for number in range(4):
            await client.send("a.b", b"%d" % number, tags=["red" if number % 2 == 0 else "blue"])
        async with client.subscribe("a.", group="g", tags=["red"]) as consumer:
            assert await all_of(consumer, 10) == ["0", "2"]
            await client.admin.set_group("g", tags=["blue"])
            began = time.monotonic()
            assert await client.admin.resend(prefix="a.", group="g") == 4
            assert time.monotonic() - began < 5, "it does not wait for the next checkpoint by the timer"
            assert await all_of(consumer, 10) == ["1", "3"]
            (row,) = await client.admin.groups("g")
            assert (row.filtered, row.in_retry, row.in_flight) == (2 + 2, 0, 0)

"""Filtering by a group's tags: tags with the same bits are told apart, and messages without them are acked."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

import qmq
from qmq.durations import Duration
from qmq.errors import InvalidOption
from qmq.format.hashing import tag_bits
from qmq.net.client.options import expire_at_of
from tests.broker_process import running_broker

WANTED = "vip"
#: Another tag with the same bit.
TWIN = next(f"t{number}" for number in count() if tag_bits([f"t{number}"]) == tag_bits([WANTED]))


async def test_tags_with_the_same_bits_are_told_apart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        for number in range(12):
            tags = [(WANTED,), (TWIN,), (TWIN, WANTED), ()][number % 4]
            client.send_nowait("a.x", b"%d" % number, tags=tags)
        await client.flush()
        for mode in ("reliable", "at_most_once"):
            async with client.subscribe("a.", group=f"g-{mode}", mode=mode, tags=[WANTED]) as consumer:  # type: ignore[arg-type]
                messages = await consumer.pull(6, 6, timeout=30)
                assert [int(message.body) for message in messages] == [0, 2, 4, 6, 8, 10]
                for message in messages:
                    message.ack()
                await consumer.flush()
                (info,) = await client.admin.groups(f"g-{mode}")
                assert info.in_flight == 0


async def test_matching_messages_are_found_behind_tags_with_the_same_bits(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        for _ in range(2):
            await client.send("a.x", b"first", tags=[WANTED])
            for _ in range(20):
                client.send_nowait("a.x", b"twin", tags=[TWIN])
            client.send_nowait("a.x", b"second", tags=[WANTED])
            await client.flush()
        async with client.subscribe("a.", group="g", tags=[WANTED]) as consumer:
            for _ in range(2):
                for body in (b"first", b"second"):
                    (message,) = await consumer.pull(1, timeout=0)
                    assert message.body == body
                    message.ack()
            assert await consumer.pull(1, timeout=0) == []
            for _ in range(20):
                client.send_nowait("a.x", b"twin", tags=[TWIN])
            await client.flush()
            assert await consumer.pull(1, timeout=0) == []


@pytest.mark.parametrize("expires_in", [0, -1, 1e9, float("nan"), "0s", "1x", True])
def test_an_invalid_time_to_live_is_refused(expires_in: Duration) -> None:
    with pytest.raises(InvalidOption, match="expires_in"):
        expire_at_of(expires_in)
    assert (expire_at_of(None), expire_at_of(0.5)) == (0, 500_000)


async def test_a_message_is_dead_when_it_expires_before_it_is_delivered(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        await client.send("a.x", b"short", expires_in=0.000_001)
        await client.send_many("a.x", [b"short", b"short"], expires_in=0.000_001)
        client.send_nowait("a.x", b"long", expires_in=3_600)
        await client.flush()
        async with client.subscribe("a.", group="g") as consumer:
            (message,) = await consumer.pull(timeout=30)
            assert message.body == b"long"
            message.ack()
        letters = [letter async for letter in client.admin.dead_letters("g")]
        assert [letter.reason for letter in letters] == ["expired"] * 3

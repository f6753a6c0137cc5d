"""On a slow link bytes that move extend every limit. Limits are shortened here, in proportion to the frames."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import qmq
from qmq.net.client import broker_link, connection
from qmq.net.client.consumer import pull
from qmq.net.server import slow_transfers
from tests.broker_process import running
from tests.faults.slow_link import SlowLink

#: A message takes 0.6 s at this rate, several times each limit below.
BODY_BYTES = 256 << 10
BYTES_PER_S = 400_000


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_link, "SILENCE", 0.3)
    monkeypatch.setattr(broker_link, "_TICK", 0.05)
    monkeypatch.setattr(connection, "STILL_AFTER", 0.3)
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT", 0.3)
    monkeypatch.setattr(pull, "LATE", 0.3)
    monkeypatch.setattr(pull, "GRACE", 0.05)


@asynccontextmanager
async def slow_link(path: Path) -> AsyncIterator[tuple[SlowLink, str]]:
    async with running(path) as broker, SlowLink(broker.address[1], BYTES_PER_S) as link:
        yield link, broker.url


async def test_a_send_takes_as_long_as_its_bytes_move(tmp_path: Path) -> None:
    async with slow_link(tmp_path) as (link, url):
        async with qmq.connect(link.url, send_timeout=0.4) as client:
            receipt = await client.send("s.x", bytes(BODY_BYTES))
        assert link.connections == 1
        async with qmq.connect(url) as client:
            assert [subject.messages async for subject in client.subjects("s.")] == [1]
        assert receipt.sequence == 0


@pytest.mark.parametrize("mode", ["reliable", "at_most_once"])
async def test_a_pull_gets_what_arrives_slowly(tmp_path: Path, mode: str) -> None:
    async with slow_link(tmp_path) as (link, url):
        async with qmq.connect(url) as client:
            bodies = [os.urandom(BODY_BYTES) for _ in range(4)]
            for body in bodies:
                await client.send("s.x", body)
        async with (
            qmq.connect(link.url) as client,
            client.subscribe("s.", group="g", mode=mode) as consumer,  # type: ignore[arg-type]
        ):
            pulled: list[qmq.Message] = []
            while len(pulled) < len(bodies):
                messages = await consumer.pull(100, timeout=0.2)
                assert messages, "an answer that comes in is waited for"
                pulled += messages
                if mode == "reliable":
                    for message in messages:
                        message.ack()
            assert [message.body for message in pulled] == bodies
            assert all(message.attempt == 1 for message in pulled)
        async with qmq.connect(url) as client:
            (group,) = await client.admin.groups()
            assert group.skipped == 0


async def test_what_is_lost_on_its_way_is_little_and_counted(tmp_path: Path) -> None:
    """The link is cut in the middle of an answer: an at_most_once group gets none of its messages again."""
    async with slow_link(tmp_path) as (link, url):
        async with qmq.connect(url) as client:
            for _ in range(8):
                await client.send("s.x", os.urandom(BODY_BYTES))
        pulled = 0
        async with (
            qmq.connect(link.url) as client,
            client.subscribe("s.", group="g", mode="at_most_once") as consumer,
        ):
            pulled += len(await consumer.pull(100))
            pulling = asyncio.ensure_future(consumer.pull(100))
            before = link.down
            while link.down < before + BODY_BYTES // 4:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0.01)
            link.cut()
            pulled += len(await pulling)
            while pulled < 7:
                pulled += len(await consumer.pull(100))
        async with qmq.connect(url) as client:
            (group,) = await client.admin.groups()
            assert (pulled, group.skipped) == (7, 1)


async def test_a_consumer_whose_answer_comes_in_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats are stuck, and one message takes longer than the session timeout."""
    monkeypatch.setattr(slow_transfers, "LOOK_S", 0.1)
    async with (
        running(tmp_path, session_timeout_ms=1_000) as broker,
        SlowLink(broker.address[1], BYTES_PER_S, most=1) as link,
    ):
        async with qmq.connect(broker.url) as client:
            await client.send("s.x", bytes(3 * BODY_BYTES))
        async with qmq.connect(link.url) as client, client.subscribe("s.", group="g") as consumer:
            (message,) = await consumer.pull(timeout=0.2)
            message.ack()
            await consumer.flush()
            assert link.connections > 1
        async with qmq.connect(broker.url) as client, client.subscribe("s.", group="g") as consumer:
            assert not await consumer.pull(timeout=0)


async def test_a_list_takes_as_long_as_its_bytes_move(tmp_path: Path) -> None:
    async with slow_link(tmp_path) as (link, url):
        async with qmq.connect(url) as client:
            for number in range(1_000):
                client.send_nowait(f"s.{number:0100}", b"")
        async with qmq.connect(link.url, admin_timeout=0.4) as client:
            assert len([subject async for subject in client.subjects("s.")]) == 1_000

"""Consumers, as programs use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import qmq
from qmq.format.pieces import read_answer
from qmq.format.run import Run
from qmq.net.client.consumer.feed import MAX_PREFETCH, MessageFeed
from qmq.net.client.consumer.message import Message
from qmq.net.client.consumer.pull import Puller
from tests.broker_process import broker_process, running_broker
from tests.net.client.consumer.test_pull import batch, bodies, subscribed
from tests.net.scripted import stored_batch


async def test_async_for_hands_out_message_after_message() -> None:
    async with subscribed() as s:
        came: list[bytes] = []

        async def follow() -> None:
            async for message in s.consumer:
                came.append(message.body)
                if len(came) == 3:
                    break

        following = asyncio.ensure_future(follow())
        for number in (0, 1):
            request, _ = await s.peer.pulled()
            s.peer.messages(request, batch(b"%d" % number, b"x", at=number))
        await following
        assert came == [b"0", b"x", b"1"]
        # The first message is one that the loop had not reached.
        assert bodies(await s.consumer.pull()) == [b"x"]


async def test_pull_batch_also_begins_with_what_a_loop_left() -> None:
    async with subscribed() as s:
        following = asyncio.ensure_future(anext(aiter(s.consumer)))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1", b"2", b"3"))
        assert (await following).body == b"1"
        taken = await s.consumer.pull_batch(1)
        assert taken.bodies == [b"2"]
        assert [message.sequence for message in await s.consumer.pull()] == [2]


class Bringing(Puller):
    """Returns as many messages as are requested."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ack_sender = None

    async def pull(self, max_count: int, min_count: int, timeout: float | None, max_bytes: int = 0) -> list[Run]:
        self.asked.append(max_count)
        return read_answer(memoryview(stored_batch({"a": [b""] * max_count})))[0]


async def test_fast_loops_take_many_and_slow_ones_few(monkeypatch: pytest.MonkeyPatch) -> None:
    puller = Bringing()
    feed = MessageFeed(puller, Message, set())
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    for _ in range(8):
        await feed.refill()
        list(feed.ready)
        now += 0.001
    assert puller.asked == [16, 32, 64, 128, 256, 512, 1_024, 2_048]
    now += 20.48  # 10 ms a message
    await feed.refill()
    list(feed.ready)
    assert puller.asked[-1] in (9, 10)
    now += 100
    await feed.refill()
    assert puller.asked[-1] == 1
    for _ in range(40):
        list(feed.ready)
        await feed.refill()
    assert max(puller.asked) == MAX_PREFETCH


async def test_fast_loops_take_many_also_where_batches_go_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(Bringing):
        """Returns whole batches of 100, as many as fit."""

        async def pull(self, max_count: int, min_count: int, timeout: float | None, max_bytes: int = 0) -> list[Run]:
            self.asked.append(max_count)
            count = max_count if max_count < 100 else max_count // 100 * 100
            return read_answer(memoryview(stored_batch({"a": [b""] * count})))[0]

    puller = Whole()
    feed = MessageFeed(puller, Message, set())
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)
    for _ in range(12):
        await feed.refill()
        list(feed.ready)
    assert puller.asked[-1] == 32_768


async def test_a_loop_that_another_task_shares_loses_nothing() -> None:
    puller = Bringing()
    feed = MessageFeed(puller, Message, set())
    await feed.refill()
    await feed.refill()
    assert len(list(feed.ready)) == sum(puller.asked)


async def test_who_is_in_the_middle_of_a_loop_goes_on_beside_others_in_order() -> None:
    feed = MessageFeed(Bringing(), Message, set())
    await feed.refill()
    one = iter(feed.ready)
    count = 1
    next(one)
    while feed.has_ready:
        next(one)
        count += 1
    await feed.refill()  # for another task; the first has not seen that its loop is over
    await feed.refill()
    other, found = iter(feed.ready), list[Message]()
    for loop in (one, other, one, other, other, one):
        found.append(next(loop))
    runs = list(dict.fromkeys(id(message._run) for message in found))
    assert len(runs) == 1, "no message of the second run before the last of the first"
    assert [message.sequence for message in found] == list(range(6))
    left = sum(1 for _ in one)
    assert not feed.has_ready
    assert count + len(found) + left == sum(feed._puller.asked)  # type: ignore[union-attr]


# --- a real broker ---------------------------------------------------------------------------------------------------


async def test_consumers_of_a_group_share_and_each_message_comes_once(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url, durability="append") as client:
        came: list[list[bytes]] = [[], [], []]
        every = [b"%d" % number for number in range(600)]
        done = asyncio.Event()

        async def work(number: int) -> None:
            async with client.subscribe("a.", group="g", consumer=f"c{number}") as consumer:
                async for message in consumer:
                    message.ack()
                    came[number].append(message.body)
                    if sum(map(len, came)) == len(every):
                        done.set()

        working = [asyncio.ensure_future(work(number)) for number in range(3)]
        for body in every:
            await client.send(f"a.{len(body)}", body)
        async with asyncio.timeout(60):
            await done.wait()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        assert sorted(body for part in came for body in part) == sorted(every)
        assert all(came)
        async with client.subscribe("a.", group="g") as consumer:
            assert await consumer.pull(timeout=0.02) == []


async def test_starts_of_a_follower(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        receipts = [await client.send("a", b"%d" % number) for number in range(5)]
        for start, wanted in (
            ("first", [b"0", b"1", b"2", b"3", b"4"]),
            (receipts[2].stored_at, [b"2", b"3", b"4"]),
            (3, [b"3", b"4"]),
            ("new", []),
            (None, []),
        ):
            async with client.subscribe("a", start=start) as consumer:  # type: ignore[arg-type]
                came: list[bytes] = []
                while messages := await consumer.pull(timeout=0):
                    came += bodies(messages)
                assert came == wanted, start


async def test_a_cancelled_pull_loses_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url, durability="append") as client:
        async with client.subscribe("a", group="g", start="first") as consumer:
            came: list[bytes] = []
            for number in range(50):
                pulling = asyncio.ensure_future(consumer.pull())
                await asyncio.sleep(0)
                sending = asyncio.ensure_future(client.send("a", b"%d" % number))
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                pulling.cancel()
                try:
                    came += bodies(await pulling)
                except asyncio.CancelledError:
                    pass
                await sending
            while messages := await consumer.pull(timeout=0):
                came += bodies(messages)
        assert came == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("prefixes", [("",), ("a.x", "b.")])
async def test_a_follower_misses_and_doubles_nothing_over_kills(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    with broker_process(tmp_path / "data") as broker:
        async with qmq.connect(broker.url, durability="append") as client, client.subscribe(*prefixes) as consumer:
            came: list[bytes] = []
            for one_range in range(3):
                sent = [b"%d %d" % (one_range, number) for number in range(400)]
                await asyncio.gather(
                    *(client.send("a.x" if number % 3 else "b.y", body) for number, body in enumerate(sent))
                )
                wanted = len(came) + (200 if one_range < 2 else 400) + (200 if one_range else 0)
                while len(came) < wanted:
                    came += bodies(await consumer.pull(wanted - len(came)))
                broker.kill()
                broker.start()
        assert sorted(came) == sorted(b"%d %d" % (one_range, number) for one_range in range(3) for number in range(400))

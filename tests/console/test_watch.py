"""The watch: one asker for all who look, and brokers that are away hold up nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

from qmq import BrokerStats, connect
from qmq.console.snapshot import Snapshot
from qmq.console.watch import RESTS, ClientSource, Watch, between
from qmq.errors import ConnectionLost
from tests.broker_process import BrokerProcess, running_broker
from tests.console.made_up import broker_stats


class Scripted:
    """A broker that answers when the test says so."""

    def __init__(self, broker: str, *, is_there: bool = True) -> None:
        self.broker = broker
        self.asked = 0
        self.was_asked = asyncio.Event()
        self.is_there = asyncio.Event()
        self.refuses = ""
        self.is_closed = False
        if is_there:
            self.is_there.set()

    async def stats(self) -> BrokerStats:
        self.asked += 1
        self.was_asked.set()
        await self.is_there.wait()
        if self.refuses:
            raise ConnectionLost(self.refuses)
        return broker_stats(self.asked, broker=self.broker)

    async def close(self) -> None:
        self.is_closed = True


async def test_any_number_of_waiters_cost_one_request() -> None:
    source, seen = Scripted("a:1", is_there=False), list[Snapshot]()
    async with Watch([source], [seen.append], fast_seconds=0.01, slow_seconds=0.01) as watch:
        waiters = [asyncio.create_task(watch.newer_than(0)) for _ in range(100)]
        await source.was_asked.wait()
        assert source.asked == 1
        source.is_there.set()
        assert {snapshot.number for snapshot in await asyncio.gather(*waiters)} == {1}
        assert (await watch.newer_than(0)) is watch.latest
        assert (await watch.newer_than(watch.latest.number)).number == source.asked
    assert [snapshot.number for snapshot in seen] == list(range(1, len(seen) + 1))
    assert source.is_closed


async def test_looking_makes_the_next_snapshot_come_at_once() -> None:
    source = Scripted("a:1")
    async with Watch([source], fast_seconds=0.0, slow_seconds=600) as watch:
        await watch.newer_than(0)
        assert source.asked == 1
        watch.look()
        assert (await asyncio.wait_for(watch.newer_than(1), 30)).number >= 2


async def test_a_broker_that_is_away_holds_up_nobody() -> None:
    there, away = Scripted("a:1"), Scripted("b:1", is_there=False)
    async with Watch([there, away], fast_seconds=0, slow_seconds=0, patience_seconds=0.01) as watch:
        first = await watch.newer_than(0)
        assert watch.missed == ("b:1",)
        assert first.away["b:1"].error == "no answer within 0.01 s"
        later = await watch.newer_than(first.number + 20)
        assert later.away["b:1"].since == first.away["b:1"].since
        assert away.asked == 1
        away.refuses = "refused"
        away.is_there.set()
        while watch.latest.away.get("b:1", first.away["b:1"]).error != "refused":
            await watch.newer_than(watch.latest.number)
        assert watch.latest.away["b:1"].since == first.away["b:1"].since
        away.refuses = ""
        while watch.latest.away:
            await watch.newer_than(watch.latest.number)
        assert [stats.broker for stats in watch.latest.brokers] == ["a:1", "b:1"]


async def test_a_late_answer_is_shown_at_once_also_where_the_first_attempt_fails() -> None:
    source = Scripted("a:1", is_there=False)
    async with Watch([source], fast_seconds=0.01, slow_seconds=600, patience_seconds=0.01) as watch:
        await watch.newer_than(0)
        assert watch.missed == ("a:1",)
        source.was_asked.clear()
        source.refuses = "the answer did not come in time"
        source.is_there.set()
        await source.was_asked.wait()
        source.refuses = ""
        while watch.latest.away:  # nobody looks, so no other snapshot comes for 600 s
            await asyncio.wait_for(watch.newer_than(watch.latest.number), 30)
        assert [stats.broker for stats in watch.latest.brokers] == ["a:1"]


async def test_who_waits_when_it_ends_is_cancelled() -> None:
    async with Watch([Scripted("a:1", is_there=False)], patience_seconds=600) as watch:
        waiter = asyncio.create_task(watch.newer_than(0))
        await asyncio.sleep(0)
    assert isinstance((await asyncio.gather(waiter, return_exceptions=True))[0], asyncio.CancelledError)


async def test_it_sees_what_a_broker_does(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, connect(url) as client:
        source = ClientSource(url, url.rpartition("/")[2])
        async with Watch([source], fast_seconds=0.01, slow_seconds=0.01) as watch:
            await watch.newer_than(0)
            await client.send_many("shop.order", [b"1", b"2", b"3"])
            async with client.subscribe("shop.", group="billing") as consumer:
                (message, *_) = await consumer.pull(max_count=3, timeout=30)
                snapshot = await watch.newer_than(watch.latest.number + 1)
                assert snapshot.groups["billing"].in_flight == 3
                assert snapshot.brokers[0].received == 3
                await message.ack()
            assert snapshot.brokers[0].broker == source.broker


async def test_a_broker_goes_and_comes_back(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        url = await asyncio.to_thread(broker.start)
        name = url.rpartition("/")[2]
        async with Watch([ClientSource(url, name)], fast_seconds=0.05, slow_seconds=0.05, patience_seconds=1) as watch:
            started = (await watch.newer_than(0)).brokers[0].started_at
            await asyncio.to_thread(broker.kill)
            while not watch.latest.away:
                await watch.newer_than(watch.latest.number)
            assert watch.latest.brokers == ()
            assert watch.missed == (name,)
            await asyncio.to_thread(broker.start)
            while watch.latest.away:
                await watch.newer_than(watch.latest.number)
            assert watch.latest.brokers[0].started_at > started
    finally:
        broker.close()


def test_a_console_of_many_groups_asks_less_often() -> None:
    assert between(0.01, 1.0, 10.0) == 1.0
    assert between(0.3, 1.0, 10.0) == RESTS * 0.3
    assert between(5.0, 1.0, 10.0) == 10.0
    assert between(0.3, 0.0, 0.0) == 0.0

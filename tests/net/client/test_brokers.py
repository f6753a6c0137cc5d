"""Sends of a client that knows several brokers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

import qmq
from qmq.net.client import brokers as brokers_module
from tests.broker_process import BrokerProcess
from tests.faults.proxy import Proxy, swallow_answers
from tests.net.scripted import scripted_broker
from tests.net.several import connections, several, until


async def bodies_at(url: str, prefix: str = "") -> list[bytes]:
    """All that this broker has."""
    async with qmq.connect(url) as client, client.subscribe(prefix, start="first") as follower:
        return [message.body for message in await follower.pull(max_count=100_000, timeout=0)]


async def test_sends_go_to_the_first_and_to_the_next_when_it_has_gone(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        await client.send("a", b"first")
        await brokers.stop(0)
        receipt = await client.send("a", b"second")
        assert not receipt.maybe_duplicate
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        await client.send("a", b"third")
        assert await bodies_at(brokers.one(0)) == [b"first"]
        assert await bodies_at(brokers.one(1)) == [b"second", b"third"]


async def test_a_client_begins_with_the_brokers_that_are_there(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        await brokers.stop(0)
        async with qmq.connect(brokers.url) as client:
            await client.send("a", b"x")
            await brokers.start(0)
            await until(lambda: connections(client) == [True, True], "it has found the other one")
        assert await bodies_at(brokers.one(1)) == [b"x"]


async def test_one_that_does_not_answer_at_first_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers_module, "OTHERS_WAIT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with (
            several(tmp_path, 1) as brokers,
            qmq.connect(f"qmq://127.0.0.1:{silent.getsockname()[1]},{brokers.address(0)}") as client,
        ):
            assert connections(client) == [False, True]
            await client.send("a", b"x")


async def test_two_ways_to_one_broker_are_refused(tmp_path: Path) -> None:
    async with several(tmp_path, 1) as brokers:
        port = brokers.address(0).rpartition(":")[2]
        with pytest.raises(qmq.InvalidOption, match=r"the same broker, store [0-9a-f]{12}.*qmq repair --new-id"):
            async with qmq.connect(f"qmq://127.0.0.1:{port},localhost:{port}"):
                pass


async def test_a_batch_that_a_dead_broker_may_have_goes_to_another_and_says_so(tmp_path: Path) -> None:
    """kill -9 after the broker has stored a batch, before its answer."""
    dying = BrokerProcess(tmp_path / "dying")
    try:
        dying.start()
        async with (
            several(tmp_path, 1) as brokers,
            Proxy(int(dying.url.rpartition(":")[2])) as proxy,
            qmq.connect(f"{proxy.url},{brokers.one(0)}", failover_after=0.5) as client,
        ):
            proxy.plan = swallow_answers
            unknown = asyncio.ensure_future(client.send("a", b"unknown"))
            await until(lambda: proxy.struck.total() > 0, "the first broker has stored it")
            dying.kill()
            await until(lambda: not connections(client)[0], "the client has seen it")
            fresh = await client.send("a", b"fresh")
            assert not fresh.maybe_duplicate, "what was never written has one place"
            assert (await unknown).maybe_duplicate
            assert sorted(await bodies_at(brokers.one(0))) == [b"fresh", b"unknown"]
    finally:
        dying.close()


async def test_a_batch_stays_with_its_broker_when_that_comes_back_in_time(tmp_path: Path) -> None:
    first = BrokerProcess(tmp_path / "first")
    try:
        first.start()
        async with (
            several(tmp_path, 1) as brokers,
            Proxy(int(first.url.rpartition(":")[2])) as proxy,
            qmq.connect(f"{proxy.url},{brokers.one(0)}", failover_after=60, send_timeout=90) as client,
        ):
            proxy.plan = swallow_answers
            unknown = asyncio.ensure_future(client.send("a", b"unknown"))
            await until(lambda: proxy.struck.total() > 0, "the first broker has stored it")
            first.kill()
            await until(lambda: not connections(client)[0], "the client has seen it")
            proxy.plan = None
            await client.send("a", b"fresh")
            await asyncio.to_thread(first.start)
            assert not (await unknown).maybe_duplicate
            assert await bodies_at(brokers.one(0)) == [b"fresh"]
            assert await bodies_at(first.url) == [b"unknown"]
    finally:
        first.close()


async def test_without_failover_the_outcome_stays_unknown() -> None:
    async with (
        scripted_broker() as first,
        scripted_broker(store_id=b"store2") as second,
        qmq.connect(f"{first.url},{second.url}", failover_after=None, send_timeout=1) as client,
    ):
        peer = await first.peer()
        await second.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await peer.batch()
        await first.close()
        with pytest.raises(qmq.SendUnknown):
            await sending
        await first.listen()


async def test_what_is_refused_for_now_is_taken_by_another() -> None:
    async with (
        scripted_broker() as first,
        scripted_broker(store_id=b"store2") as second,
        qmq.connect(f"{first.url},{second.url}") as client,
    ):
        full, well = await first.peer(), await second.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        frame, _ = await full.batch()
        full.refuse(frame.request, qmq.StorageFull("the disk is full"))
        frame, _ = await well.batch()
        well.stored(frame)
        assert not (await sending).maybe_duplicate


async def test_a_broker_that_refuses_us_for_good_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        scripted_broker() as first,
        scripted_broker(store_id=b"store2") as second,
        qmq.connect(f"{first.url},{second.url}") as client,
    ):
        peer = await first.peer()
        other = await second.peer()
        first.refusal = qmq.UnsupportedVersion("speak 2")
        peer.drop()
        await until(lambda: "speak 2" in caplog.text, "the refusal was told of")
        sending = asyncio.ensure_future(client.send("a", b"x"))
        frame, _ = await other.batch()
        other.stored(frame)
        await sending
        first.refusal = None
        await until(lambda: connections(client) == [True, True], "it has come back to the one that takes it again")


async def test_numbers_of_a_producer_are_asked_of_one_broker_only(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        async with qmq.connect(brokers.url, producer="job") as client:
            await client.send("a", b"x")
            with pytest.raises(qmq.InvalidOption, match="one broker"):
                await client.last_sequence()
        async with qmq.connect(brokers.one(0), producer="job") as client:
            assert await client.last_sequence() == 0


async def test_subjects_of_all_brokers_are_listed(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        await client.send("a", b"x")
        await brokers.stop(0)
        await client.send("b", b"y")
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        found = [(info.name, info.broker) async for info in client.subjects()]
        assert found == [("a", brokers.address(0)), ("b", brokers.address(1))]

        def listed() -> list[tuple[str, str]]:
            with qmq.connect_sync(brokers.url) as plain:
                return [(info.name, info.broker) for info in plain.subjects()]

        assert await asyncio.to_thread(listed) == found


async def test_with_all_brokers_gone_sends_wait_for_one(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        await brokers.stop(0)
        await brokers.stop(1)
        sending = asyncio.ensure_future(client.send("a", b"x"))
        await asyncio.sleep(0)
        await brokers.start(1)
        await sending
        assert await bodies_at(brokers.one(1)) == [b"x"]

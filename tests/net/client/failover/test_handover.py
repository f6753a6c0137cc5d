"""Messages that fail when the broker they came from is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import qmq
from qmq.net.client.consumer import pull as pulling
from qmq.net.client.failover import handover as elsewhere
from qmq.net.client.failover.spool import Spool, SpooledDispositions
from tests.broker_process import BrokerProcess
from tests.net.several import connections, put, several, until

CONSUMER = """
import asyncio, os, signal, sys, qmq

async def main(url):
    async with (
        qmq.connect(url, failover_after=0.1) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        (message,) = await consumer.pull(timeout=30)
        print("got", flush=True)
        sys.stdin.readline()
        await message.nack(delay=0.0)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1]))
"""
SESSION_TIMEOUT_MS = 600_000  # nothing expires here: what comes again was handed over


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(elsewhere, "AGAIN_AFTER", 0.05)
    return tmp_path / "state" / "spool"


def waiting(directory: Path) -> list[str]:
    """The files of what is kept."""
    return os.listdir(directory) if directory.is_dir() else []


def size_of(directory: Path, name: str) -> int:
    return os.path.getsize(directory / name)


def started(url: str) -> subprocess.Popen[str]:
    """A consumer in a process of its own, which nacks when it is told to, and is killed at once."""
    command = [sys.executable, "-c", CONSUMER, url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_another_broker_gets_the_whole_message_and_gives_it_to_its_group_only(tmp_path: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.url, failover_after=0.2) as client,
        client.subscribe("", group="g", consumer="c") as consumer,
        client.subscribe("", group="other") as other,
    ):
        await client.send("a.b", b"body", key="key", tags=["red"], properties={"p": "v"})
        (message,) = await consumer.pull(timeout=30)
        (same,) = await other.pull(timeout=30)
        same.ack()
        await other.flush()
        await brokers.stop(0)
        await message.nack(delay=0.0, reason="broke")
        (again,) = await consumer.pull(timeout=30)
        assert (again.id, again.subject, again.body, again.attempt) == (message.id, "a.b", b"body", 2)
        assert (again.key, again.tags, again.properties) == ("key", ("red",), {"p": "v"})
        assert again.created_at_us == message.created_at_us
        again.ack()
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        await consumer.flush()
        held = [row.in_flight for row in await client.admin.consumers("g")]
        assert held == [0, 0], "its own broker has the acknowledgement"
        assert await consumer.pull(timeout=0.2) == []
        assert await other.pull(timeout=0.2) == []
        with pytest.raises(qmq.Fenced):
            await message.nack()


async def test_a_handler_that_fails_and_one_that_rejects_go_there_too(tmp_path: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.url, failover_after=0.2) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        await client.send_many("a", [b"fails", b"rejected"])
        fails, rejected = await consumer.pull(min_count=2, timeout=30)
        await brokers.stop(0)
        with pytest.raises(qmq.Retry):
            async with fails:
                raise qmq.Retry("later", after=0.0)
        await rejected.reject("bad address")
        (again,) = await consumer.pull(timeout=30)
        assert (again.body, again.attempt) == (b"fails", 2)
        again.ack()
        letters = [letter async for letter in client.admin.dead_letters("g")]
        assert [(letter.subject, letter.reason) for letter in letters] == [("a", "bad address")]
        await brokers.start(0)


async def test_a_message_too_large_for_the_other_broker_waits_here_and_disturbs_no_other(
    tmp_path: Path, directory: Path
) -> None:
    large = bytes(200 << 10)
    async with several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers:
        settings = brokers._settings
        await brokers.stop(1)
        brokers._settings = settings | {"max_frame_bytes": 64 << 10, "max_message_bytes": 1 << 10}
        await brokers.start(1)
        brokers._settings = settings
        async with (
            qmq.connect(brokers.url, failover_after=0.2) as client,
            client.subscribe("a", group="g") as consumer,
        ):
            await client.send("a", large)
            (message,) = await consumer.pull(timeout=30)
            other = client._brokers.links[1].connection
            assert other is not None
            await brokers.stop(0)
            await message.nack(delay=0.0)
            assert len(waiting(directory)) == 1
            assert client._brokers.links[1].connection is other
            assert not other.closed
            await brokers.start(0)
            (again,) = await consumer.pull(timeout=30)
            assert (again.body, again.attempt) == (large, 2)
            again.ack()
            await until(lambda: not waiting(directory), "nothing waits any more")
            assert client._brokers.links[1].connection is other


async def test_a_short_absence_moves_nothing(tmp_path: Path, directory: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.url, failover_after=60) as client,
        client.subscribe("a", group="g", consumer="c") as consumer,
    ):
        await client.send("a", b"x")
        (message,) = await consumer.pull(timeout=30)
        await brokers.stop(0)
        nacking = asyncio.ensure_future(message.nack(delay=0.0))
        await brokers.start(0)
        await nacking
        (again,) = await consumer.pull(timeout=30)
        assert again.attempt == 2
        again.ack()
        assert [row.in_retry for row in await client.admin.groups()] == [0, 0]
    assert not waiting(directory)


@pytest.mark.parametrize("count", [1, 2])
async def test_without_a_broker_it_waits_here_and_is_handed_over_once(
    tmp_path: Path, directory: Path, count: int
) -> None:
    async with (
        several(tmp_path, count, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.url, failover_after=0.1) as client,
        client.subscribe("a", group="g", consumer="c") as consumer,
    ):
        await client.send_many("a", [b"1", b"2", b"3"])
        messages = await consumer.pull(min_count=3, timeout=30)
        for number in range(count):
            await brokers.stop(number)
        await asyncio.gather(*(message.nack(delay=0.0) for message in messages))
        assert len(waiting(directory)) == 1
        for number in range(count):
            await brokers.start(number)
        came: list[qmq.Message] = []
        while len(came) < 3:
            more = await consumer.pull(timeout=30)
            assert more, f"only {len(came)} came"
            came += more
        assert sorted(message.body for message in came) == [b"1", b"2", b"3"]
        assert {message.attempt for message in came} == {2}
        for message in came:
            message.ack()
        await consumer.flush()
        await until(lambda: not waiting(directory), "nothing waits any more")
        assert await consumer.pull(timeout=0.2) == []


async def test_the_spool_of_a_killed_process_is_handed_over_by_another(tmp_path: Path, directory: Path) -> None:
    """The broker is killed, then a consumer that has nacked; a second consumer's client finds what that kept."""
    broker = BrokerProcess(tmp_path / "data", session_timeout_ms=SESSION_TIMEOUT_MS)
    try:
        broker.start()
        await put(broker.url, "a", [b"body"])
        consumer = started(broker.url)
        assert consumer.stdout is not None
        assert consumer.stdout.readline() == "got\n"
        broker.kill()
        await asyncio.to_thread(consumer.communicate, "go\n", 60)
        assert consumer.returncode == -signal.SIGKILL
        await asyncio.to_thread(broker.start)
        async with qmq.connect(broker.url) as client, client.subscribe("a", group="g") as second:
            (message,) = await second.pull(timeout=30)
            assert (message.body, message.attempt) == (b"body", 2)
            message.ack()
            await until(lambda: not waiting(directory), "nothing waits any more")
    finally:
        broker.close()


async def test_messages_of_a_group_that_no_broker_knows_wait_here(tmp_path: Path, directory: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.one(0)) as alone,
        qmq.connect(brokers.url, failover_after=0.1) as client,
    ):
        await alone.send("a", b"x")
        async with client.subscribe("a", group="g") as consumer:
            (message,) = await consumer.pull(timeout=30)
            async with qmq.connect(brokers.one(1)) as other:
                await until(lambda: connections(client) == [True, True], "it is connected to both")
                await other.admin.delete_group("g")
            await brokers.stop(0)
            await message.nack(delay=0.0)
            assert len(waiting(directory)) == 1
            await brokers.start(0)
            await until(lambda: not waiting(directory), "its own broker has taken it")


async def test_its_own_broker_hears_that_it_is_handled_though_the_consumer_was_killed(
    tmp_path: Path, directory: Path
) -> None:
    """Without an id of its own a consumer never comes back: what it handed over would come again from its broker."""
    async with several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers:
        await put(brokers.one(0), "a", [b"body"])
        consumer = started(brokers.url)
        assert consumer.stdout is not None
        assert await asyncio.to_thread(consumer.stdout.readline) == "got\n"
        await brokers.stop(0)
        await asyncio.to_thread(consumer.communicate, "go\n", 60)
        assert consumer.returncode == -signal.SIGKILL
        assert len(waiting(directory)) == 1, "the acknowledgement"
        await brokers.start(0)
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as second:
            (message,) = await second.pull(timeout=30)
            assert (message.body, message.attempt) == (b"body", 2)
            message.ack()
            await second.flush()
            await until(lambda: not waiting(directory), "nothing waits any more")
            assert [(row.in_flight, row.in_retry) for row in await client.admin.groups("g")] == [(0, 0), (0, 0)]


async def test_acknowledgements_that_could_not_be_brought_to_the_broker_wait_for_it(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulling, "FLUSH_TIMEOUT", 0.05)
    async with several(tmp_path, 1, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers:
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            await client.send_many("a", [b"1", b"2", b"3"])
            messages = await consumer.pull(min_count=3, timeout=30)
            await brokers.stop(0)
            for message in messages[:2]:
                message.ack()
        assert caplog.text.count("2 acks did not reach its broker") == 1
        await brokers.start(0)
        async with qmq.connect(brokers.url) as client:
            await until(lambda: not waiting(directory), "nothing waits any more")
            (info,) = await client.admin.groups("g")
            assert info.in_flight == 1


async def test_acknowledgements_of_a_consumer_that_the_broker_forgot_do_not_wait_for_ever(
    tmp_path: Path, directory: Path
) -> None:
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        store = client._brokers.links[0].store_id
        late = SpooledDispositions(store, "g", "nobody", 1, 1, [0, 1])
        spool = Spool([brokers.address(0)])
        spool.put({"ack": late._asdict()})
        spool.put({"ack": late._replace(group="none")._asdict()})
        spool.put({"ack": late._replace(store=b"other.")._asdict()})
        spool.close()
        async with client.subscribe("a", group="g"), qmq.connect(brokers.url) as other:
            (name,) = waiting(directory)
            whole = size_of(directory, name)
            await until(lambda: size_of(directory, name) < whole, "what is for this broker is told")
            await other.admin.groups()
    (left,) = Spool([brokers.address(0)]).take()
    assert [record["ack"]["store"] for record in left.records] == [b"other."], "that broker may come yet"
    Spool.removed(left)


async def test_a_spool_that_is_handed_over_again_after_a_kill_doubles_nothing(tmp_path: Path, directory: Path) -> None:
    """The client is killed between the hand-over and the removal of its file, the broker right after it."""
    broker = BrokerProcess(tmp_path / "data", session_timeout_ms=SESSION_TIMEOUT_MS)
    try:
        broker.start()
        await put(broker.url, "a", [b"body"])
        consumer = started(broker.url)
        assert consumer.stdout is not None
        assert await asyncio.to_thread(consumer.stdout.readline) == "got\n"
        broker.kill()
        await asyncio.to_thread(consumer.communicate, "go\n", 60)
        (name,) = waiting(directory)
        kept = (directory / name).read_bytes()
        for again in range(2):
            (directory / name).write_bytes(kept)
            await asyncio.to_thread(broker.start)
            async with qmq.connect(broker.url) as client, client.subscribe("a", group="g", consumer="c") as second:
                await until(lambda: not waiting(directory), "it is handed over")
                if again == 0:
                    (message,) = await second.pull(timeout=30)
                    message.ack()
                    await second.flush()
                (info,) = await client.admin.groups("g")
                assert (info.ready, info.in_flight, info.in_retry) == (0, 0, 0)
            broker.kill()
    finally:
        broker.close()


async def test_a_member_of_a_broadcast_gets_its_own_again(tmp_path: Path, directory: Path) -> None:
    async with (
        several(tmp_path, session_timeout_ms=SESSION_TIMEOUT_MS) as brokers,
        qmq.connect(brokers.url, failover_after=0.1) as client,
        client.subscribe("a", group="g", consumer="one", mode="broadcast") as one,
        client.subscribe("a", group="g", consumer="two", mode="broadcast") as two,
    ):
        await until(lambda: connections(client) == [True, True], "it is connected to both")
        await client.send("a", b"x")
        (message,) = await one.pull(timeout=30)
        (same,) = await two.pull(timeout=30)
        same.ack()
        await two.flush()
        await brokers.stop(0)
        await message.nack(delay=0.0)
        (again,) = await one.pull(timeout=30)
        assert (again.id, again.attempt) == (message.id, 2)
        assert await two.pull(timeout=0.2) == []
        again.ack()
        await brokers.start(0)

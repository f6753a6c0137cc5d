"""A broker for tests: it is a real one, and its clock is set ahead."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest

import qmq
from qmq import testing


def test_it_runs_within_its_block_and_leaves_nothing() -> None:
    before = dict(os.environ)
    with testing.broker(max_message_bytes="1 MiB") as broker:
        assert os.environ["QMQ_SERVER"] == broker.url
        directory = broker.data_dir
        with qmq.connect_sync() as client:
            client.send("a.b", b"1")
            with client.subscribe("a.", group="g") as consumer:
                (message,) = consumer.pull(1)
                message.ack()
            with pytest.raises(qmq.MessageTooLarge):
                client.send("a.b", bytes(2 << 20))
    assert not directory.parent.exists()
    assert dict(os.environ) == before
    assert "qmq-broker" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(qmq.UsageError, match="does not run"):
        _ = broker.url
    with pytest.raises(qmq.UsageError, match="does not run"):
        broker.clock.advance(1)


async def test_two_run_side_by_side_in_asyncio() -> None:
    async with testing.broker() as one, testing.broker() as two:
        assert one.url != two.url
        async with qmq.connect(f"{one.url},{two.url.removeprefix('qmq://')}") as client:
            assert len(await client.admin.info()) == 2


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(qmq.InvalidOption, match="max_mesage_bytes"):
        testing.broker(max_mesage_bytes=1)
    with pytest.raises(qmq.UsageError, match="runs already"), testing.broker() as broker, broker:
        pass


def test_a_broker_that_cannot_start_says_why() -> None:
    with testing.broker() as broker:
        taken = broker.url.removeprefix("qmq://")
        with pytest.raises(qmq.QmqError, match="listen"), testing.broker(listen=taken):
            pass


async def test_it_goes_on_with_its_data_after_a_restart() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        await client.send("a.b", b"1")
        url = broker.url
        broker.restart()
        assert broker.url == url
        async with client.subscribe("a.", group="g") as consumer:
            assert [message.body for message in await consumer.pull(1)] == [b"1"]


async def test_delays_are_over_at_once() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        began = broker.clock.now
        await client.send("a.b", b"late", delay="2h")
        async with client.subscribe("a.", group="g") as consumer:
            broker.clock.advance("1h 59m")
            assert await consumer.pull(1, timeout=0) == []
            broker.clock.advance(timedelta(minutes=2))
            (message,) = await consumer.pull(1)
            assert message.body == b"late"
            assert message.stored_at - began > timedelta(hours=2)


async def test_retries_are_due_at_once_and_their_consumer_lives_on() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        await client.send("a.b", b"1")
        async with client.subscribe("a.", group="g", retry_delays=["10m"], ack_deadline="5d") as consumer:
            (message,) = await consumer.pull(1)
            await message.nack()
            broker.clock.advance("9m")
            assert await consumer.pull(1, timeout=0) == []
            broker.clock.advance("2m")
            (message,) = await consumer.pull(1)
            assert message.attempt == 2
            broker.clock.advance("2d")
            message.ack()
            await consumer.flush()
            assert (await client.admin.groups("g"))[0].in_flight == 0


async def test_a_pull_that_waits_gets_what_is_due() -> None:
    import asyncio

    async with testing.broker() as broker, qmq.connect() as client:
        await client.send("a.b", b"late", delay="1h")
        async with client.subscribe("a.", group="g") as consumer:
            pull = asyncio.create_task(consumer.pull(1, timeout=60))
            await client.flush()
            await asyncio.sleep(0)
            await asyncio.to_thread(broker.clock.advance, "1h")
            assert [message.body for message in await pull] == [b"late"]


async def test_messages_expire_at_once() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        await client.send("a.b", b"1", expires_in="1h")
        broker.clock.advance("61m")
        async with client.subscribe("a.", group="g") as consumer:
            assert await consumer.pull(1, timeout=0) == []
            assert [letter.reason for letter in [one async for one in client.admin.dead_letters("g")]] == ["expired"]


async def test_a_session_expires_when_its_client_is_gone() -> None:
    async with testing.broker() as broker, qmq.connect() as client:
        await client.send("a.b", b"1")
        async with client.subscribe("a.", group="g", consumer="one") as consumer:
            (message,) = await consumer.pull(1)
            broker.clock.advance("1m", heartbeats=False)
            async with client.subscribe("a.", group="g", consumer="two") as other:
                (again,) = await other.pull(1)
                assert again.id == message.id


def test_the_fixture_needs_no_conftest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import qmq

        async def test_a_message_arrives(qmq_broker):
            async with qmq.connect() as client:
                await client.send("a", b"1")
                qmq_broker.clock.advance(1)
        """
    )
    result = pytester.runpytest_subprocess(
        "-W", "error", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "qmq.testing.pytest_plugin",
        "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function",
    )  # fmt: skip
    result.assert_outcomes(passed=1)


def test_suites_without_it_load_nothing_and_are_not_warned(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import sys

        def test_nothing_heavy_is_loaded():
            assert not {"numpy", "msgpack", "uvloop", "pydantic", "qmq.net"} & set(sys.modules), sys.modules
        """
    )
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "-p", "qmq.testing.pytest_plugin")
    result.assert_outcomes(passed=1)


async def test_a_unique_text_is_free_again_when_its_time_is_over() -> None:
    async with testing.broker(unique_for_ms=60_000) as broker, qmq.connect() as client:
        first = await client.send("a.b", b"1", unique="t")
        broker.clock.advance("59s")
        assert (await client.send("a.b", b"1", unique="t")).id == first.id
        broker.clock.advance("1s")
        assert not (await client.send("a.b", b"1", unique="t")).duplicate

"""Unexpected errors in what a client does in the background: they are logged, and it goes on."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    with broker_process(tmp_path / "data", session_timeout_ms=3_000) as started:
        yield started


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.01)


async def test_a_client_connects_again_after_an_unexpected_error(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked_up, failures = socket.getaddrinfo, 0

    def fails(*args: Any, flags: int = 0, **more: Any) -> Any:
        nonlocal failures
        if not flags & socket.AI_NUMERICHOST:
            failures += 1
            raise RuntimeError("can't start new thread")
        return looked_up(*args, flags=flags, **more)

    async with qmq.connect(broker.url.replace("127.0.0.1", "localhost")) as client:
        await client.send("x.y", b"0")
        async with client.subscribe("x.", group="g") as consumer:
            assert [message.body for message in await consumer.pull(1)] == [b"0"]
            monkeypatch.setattr(socket, "getaddrinfo", fails)
            broker.kill()
            broker.start()
            await until(lambda: failures >= 3)
            monkeypatch.undo()
            async with asyncio.timeout(20):
                await client.send("x.y", b"1")
                assert [message.body for message in await consumer.pull(1)] == [b"1"]
    (record,) = [record for record in caplog.records if "failed unexpectedly" in record.message]
    assert record.exc_info
    assert "can't start new thread" in str(record.exc_info[1])
    assert record.levelno == logging.ERROR


async def test_a_program_that_fills_its_threads_holds_up_no_client(broker: BrokerProcess) -> None:
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        filling = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(3)]
        try:
            async with (
                asyncio.timeout(20),
                qmq.connect(broker.url.replace("127.0.0.1", "localhost")) as client,
                client.subscribe("x.", group="g", consumer="named") as consumer,  # it keeps a file
            ):
                await client.send("x.y", b"0")
                (message,) = await consumer.pull(1)
                message.ack()
                await consumer.flush()
                broker.kill()
                broker.start()
                await client.send("x.y", b"1")
                assert [message.body for message in await consumer.pull(1)] == [b"1"]
        finally:
            release.set()
            await asyncio.gather(*filling)


async def test_heartbeats_go_on_where_the_system_had_no_thread_for_them(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, 0

    def fails(thread: threading.Thread) -> None:
        nonlocal failures
        if thread.name == "qmq-heartbeat" and failures < 2:
            failures += 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    async with (
        qmq.connect(broker.url) as client,
        client.subscribe("x.", group="g"),
    ):
        await until(lambda: any(thread.name == "qmq-heartbeat" for thread in threading.enumerate()))
    assert failures == 2
    assert "can't start new thread" in caplog.text

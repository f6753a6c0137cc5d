"""The thread that beats ends with its client and with its loop, and who left the client open is warned."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from qmq.net.client import heartbeat
from tests.broker_process import BrokerProcess, broker_process
from tests.net.several import until

SESSION_TIMEOUT_MS = 600
LONG_SESSION_TIMEOUT_MS = 6_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(
        tmp_path_factory.mktemp("heartbeat") / "data", session_timeout_ms=SESSION_TIMEOUT_MS
    ) as started:
        yield started


def beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "qmq-heartbeat"]


def joined() -> None:
    for thread in beating():
        thread.join(60)
    assert not beating()


async def opened(url: str, group: str) -> tuple[qmq.Client, qmq.Consumer]:
    """A consumer that was given a message, of a client that nobody closes."""
    client = qmq.connect(url)
    await client.__aenter__()
    consumer = client.subscribe(group, group=group)
    await consumer.__aenter__()
    await client.send(group, b"1")
    assert [message.body for message in await consumer.pull()] == [b"1"]
    return client, consumer


def comes_again(url: str, group: str) -> None:
    with qmq.connect_sync(url) as client, client.subscribe(group, group=group) as consumer:
        assert [message.body for message in consumer.pull(timeout=60)] == [b"1"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_it_ends_with_the_loop_and_its_messages_are_for_others(broker: BrokerProcess, is_kept: bool) -> None:
    kept = list[object]()
    group = f"kept-{is_kept}"

    async def job() -> None:
        found = await opened(broker.url, group)
        assert len(beating()) == 1
        if is_kept:
            kept.extend(found)

    with warnings.catch_warnings(record=True) as warned:  # asyncio warns of the socket, too
        warnings.simplefilter("always")
        asyncio.run(job())
        joined()
        kept.clear()
        gc.collect()
    (ours,) = [one for one in warned if "was left open; use it inside `async with" in str(one.message)]
    assert ours.category is ResourceWarning
    comes_again(broker.url, group)


async def test_it_ends_with_a_client_that_was_dropped(broker: BrokerProcess) -> None:
    consumers = list[qmq.Consumer]()
    client, consumer = await opened(broker.url, "dropped")
    connection = client._brokers.links[0].connection
    assert connection is not None
    consumers.append(consumer)
    del client, consumer
    gc.collect()
    assert len(beating()) == 1, "the consumer needs the client"
    with pytest.warns(ResourceWarning, match="left open"):
        consumers.clear()
    await connection.wait_closed()
    await asyncio.to_thread(joined)
    await asyncio.to_thread(comes_again, broker.url, "dropped")


async def test_it_ends_with_a_client_that_is_closed(broker: BrokerProcess) -> None:
    client, consumer = await opened(broker.url, "closed")
    await client.__aexit__(None, None, None)
    await asyncio.to_thread(joined)
    await consumer.__aexit__(None, None, None)


def test_it_begins_again_with_a_loop_that_had_stopped(broker: BrokerProcess) -> None:
    loop = asyncio.new_event_loop()
    client, consumer = loop.run_until_complete(opened(broker.url, "resumed"))
    joined()
    loop.run_until_complete(until(lambda: len(beating()) == 1, "it beats again"))
    loop.run_until_complete(consumer.__aexit__(None, None, None))
    loop.run_until_complete(client.__aexit__(None, None, None))
    loop.close()
    comes_again(broker.url, "resumed")


async def test_nacks_end_when_their_messages_are_no_longer_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an order key no other broker takes the message, and a handler must not wait until its own is back."""
    # On a busy machine a short session would expire while the broker lives: the client gives up early only when it is
    # dead.
    with broker_process(tmp_path / "data", session_timeout_ms=LONG_SESSION_TIMEOUT_MS) as broker:
        async with qmq.connect(broker.url) as client, client.subscribe("a", group="g", start="first") as consumer:
            await client.send_many("a", [b"1", b"2"], order_keys=["order-1", "order-2"])
            messages = [message for _ in range(2) for message in await consumer.pull(1, timeout=60)]
            broker.kill()
            with monkeypatch.context() as patched:
                patched.setattr(heartbeat, "GIVE_UP", 0.0)
                async with asyncio.timeout(60):
                    nack = asyncio.ensure_future(messages[0].nack())
                    with pytest.raises(ValueError, match="broke"):
                        async with messages[1]:
                            raise ValueError("broke")
                    with pytest.raises(qmq.Fenced, match="out of reach for longer than the session timeout"):
                        await nack
            broker.start()
            again = [message for _ in range(2) for message in await consumer.pull(1, timeout=60)]
            assert sorted((message.body, message.attempt) for message in again) == [(b"1", 1), (b"2", 1)]

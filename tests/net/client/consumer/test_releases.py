"""Releases and handlers that are cancelled: what counts an attempt, and when a message comes again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import qmq
from qmq.errors import InvalidOption
from qmq.net.client.consumer.nacks import HELD_FOR, ReleaseDelays
from qmq.net.protocol.types import Disposition
from tests.broker_process import BrokerProcess, broker_process
from tests.net.test_handlers import given, handed_back

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("releases") / "data") as started:
        yield started


@asynccontextmanager
async def consuming(
    broker: BrokerProcess, group: str, **settings: Any
) -> AsyncIterator[tuple[qmq.Client, qmq.Consumer]]:
    """Enter a consumer of a group, in which one message waits."""
    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url) as client:
        await client.send(group, b"1")
        async with client.subscribe(group, group=group, **settings) as consumer:
            yield client, consumer


# --- not yet ---------------------------------------------------------------------------------------------------------


async def test_not_yet_counts_no_attempt(broker: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qmq.client")
    async with consuming(broker, "unpaid", max_attempts=2, retry_delays=[0]) as (_, consumer):
        failed, seen = list[bytes](), list[int]()
        consumer.on_failed = lambda message, error: failed.append(message.body)
        for _ in range(3):
            with suppress(qmq.Retry):
                async with (await consumer.pull(1))[0] as message:
                    seen.append(message.attempt)
                    raise qmq.Retry("not paid yet", after=0.01, counts=False)
            with suppress(qmq.Retry):
                async with await consumer.pull_batch(1) as batch:
                    seen.append(batch[0].attempt)
                    raise qmq.Retry("not paid yet", counts=False)

        async def handle(message: qmq.Message) -> None:
            seen.append(message.attempt)
            if len(seen) < 10:
                raise qmq.Retry("not paid yet", after=0, counts=False)
            consumer.stop()

        await consumer.run(handle)
        assert (seen, failed) == ([1] * 10, [])
        record = next(record for record in caplog.records if "not paid yet" in record.message)
        assert (record.levelno, record.retry_in) == (logging.INFO, 0.01)  # type: ignore[attr-defined]  # an extra field
        assert record.message.endswith("had to wait, it comes again in 10ms: not paid yet")


@pytest.mark.parametrize("whole", [False, True])
async def test_a_release_says_when_it_comes_again(whole: bool) -> None:
    async with given(b"1") as (s, (message,)):
        batch = qmq.MessageBatch([message._run])
        with pytest.raises(InvalidOption):
            message.release("soon")
        (batch if whole else message).release("10s")
        assert await handed_back(s) == (Disposition.RELEASE, 0, 10_000_000, "")


async def test_a_message_that_nobody_wants_goes_round_slowly(broker: BrokerProcess) -> None:
    async with consuming(broker, "unwanted") as (_, consumer):
        seen = 0

        async def handle(message: qmq.Message) -> None:
            nonlocal seen
            seen += 1
            message.release()

        asyncio.get_running_loop().call_later(0.5, consumer.stop)
        await consumer.run(handle)
        assert 2 <= seen <= 4  # at once, after 0.1 s, after 0.2 s more


def test_each_message_has_its_own_growing_delay() -> None:
    delays = ReleaseDelays()
    assert [delays.next_us(0, 5) for _ in range(9)] == [
        None, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000, 5_000_000, 5_000_000
    ]  # fmt: skip
    assert delays.next_us(1, 5) is delays.next_us(0, 6) is None
    for position in range(10_000):
        delays.next_us(2, position)
    assert delays.next_us(0, 5) is None, "the oldest are forgotten"


# --- handlers that are cancelled -------------------------------------------------------------------------------------


async def stuck(message: qmq.Message | qmq.MessageBatch) -> None:
    async with message:
        await asyncio.Event().wait()


async def timed_out(message: qmq.Message | qmq.MessageBatch) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stuck(message), 0.01)


async def timed_out_around(message: qmq.Message | qmq.MessageBatch) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stuck(message)


async def cancelled(message: qmq.Message | qmq.MessageBatch) -> None:
    task = asyncio.ensure_future(stuck(message))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("handle", [timed_out, timed_out_around, cancelled])
async def test_a_handler_that_is_cancelled_has_failed(
    broker: BrokerProcess, handle: Callable[[qmq.Message | qmq.MessageBatch], Awaitable[None]], whole: bool
) -> None:
    group = f"{handle.__name__}.{whole}"
    async with consuming(broker, group, max_attempts=2, retry_delays=[0]) as (client, consumer):
        attempts, failed = list[int](), list[BaseException]()
        consumer.on_failed = lambda message, error: failed.append(error)
        for _ in range(2):
            batch = await consumer.pull_batch(1)
            attempts.append(batch[0].attempt)
            await handle(batch if whole else batch[0])
        assert not await consumer.pull(1, timeout=HELD_FOR + 0.1)
        (letter,) = [letter async for letter in client.admin.dead_letters(group)]
        assert letter.reason == "CancelledError: its handler was cancelled"
        assert (attempts, [type(error) for error in failed]) == ([1, 2], [asyncio.CancelledError] * 2)


async def test_a_cancelled_handler_is_nacked_a_little_later() -> None:
    async with given(b"1") as (s, (message,)):
        started = asyncio.get_running_loop().time()
        await timed_out(message)
        reason = "CancelledError: its handler was cancelled"
        assert await handed_back(s) == (Disposition.NACK, 0, None, reason)
        assert asyncio.get_running_loop().time() - started >= HELD_FOR


@pytest.mark.parametrize("before", [False, True])
async def test_a_handler_that_a_stop_cancels_has_not_failed(before: bool) -> None:
    async with given(b"1") as (s, (message,)):
        if before:
            s.consumer.stop()
        await cancelled(message)
        s.consumer.stop()
        assert await handed_back(s) == (Disposition.RELEASE, 0, None, "")


@pytest.mark.parametrize("tasks", [1, 5])
async def test_the_end_of_a_program_counts_no_attempt(broker: BrokerProcess, tasks: int) -> None:
    group = f"end.{tasks}"
    async with qmq.connect(broker.url) as client:
        await client.send_many(group, [b"%d" % number for number in range(tasks)])
        begun = asyncio.Semaphore(0)

        async def work(message: qmq.Message) -> None:
            async with message:
                begun.release()
                await asyncio.Event().wait()

        async def program() -> None:
            async with client.subscribe(group, group=group) as consumer, asyncio.TaskGroup() as several:
                for message in await consumer.pull(tasks, tasks):
                    several.create_task(work(message))

        running = asyncio.ensure_future(program())
        for _ in range(tasks):
            await begun.acquire()
        running.cancel()
        await asyncio.wait([running])
        async with client.subscribe(group, group=group) as consumer:
            found = await consumer.pull(tasks, tasks, timeout=TIMEOUT_S)
            assert [message.attempt for message in found] == [1] * tasks


async def test_messages_of_an_order_key_come_after_a_cancelled_one(broker: BrokerProcess) -> None:
    handled = list[tuple[bytes, int]]()
    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url) as client:
        for number in range(6):
            await client.send("ordered", b"%d" % number, order_key="k")
        async with client.subscribe("ordered", group="ordered", retry_delays=[0]) as consumer:
            async for message in consumer:
                if message.body == b"2" and message.attempt < 3:
                    await timed_out(message)
                    client.send_nowait("ordered", b"6" if message.attempt == 1 else b"7", order_key="k")
                    continue
                handled.append((message.body, message.attempt))
                message.ack()
                if len(handled) == 8:
                    break
    assert [int(body) for body, _ in handled] == list(range(8))
    assert [attempt for _, attempt in handled] == [1, 1, 3, 1, 1, 1, 1, 1]

"""``Consumer.run`` and ``stop``: handlers, their failures, and how a run ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import qmq
from qmq.net.client.consumer import run as run_module
from tests.broker_process import BrokerProcess, broker_process

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("run") / "data") as started:
        yield started


@asynccontextmanager
async def consuming(
    broker: BrokerProcess, subject: str, *bodies: bytes, **options: Any
) -> AsyncIterator[tuple[qmq.Client, qmq.Consumer]]:
    """Enter a consumer of a group named as its subject, in which these messages wait."""
    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url, name="worker-1") as client:
        await client.send_many(subject, bodies)
        async with client.subscribe(subject, group=subject, retry_delays=[0], **options) as consumer:
            yield client, consumer


async def left(client: qmq.Client, group: str, count: int) -> dict[bytes, int]:
    """Return the *count* messages that the group still has, with the attempt of each."""
    found = dict[bytes, int]()
    async with client.subscribe(group, group=group) as consumer:
        while len(found) < count:
            found |= {message.body: message.attempt for message in await consumer.pull()}
        found |= {message.body: message.attempt for message in await consumer.pull(timeout=0.05)}
    return found


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_handler_that_returns_acks(broker: BrokerProcess, concurrency: int) -> None:
    subject = f"returns.{concurrency}"
    bodies = [b"%d" % number for number in range(50)]
    handled = list[bytes]()
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, subject, *bodies) as (_, consumer):

            async def handle(message: qmq.Message) -> None:
                await asyncio.sleep(0)
                handled.append(message.body)
                if len(handled) == len(bodies):
                    consumer.stop()

            await consumer.run(handle, concurrency=concurrency)
            assert consumer.stopped
        assert sorted(handled) == sorted(bodies)
        if concurrency == 1:
            assert handled == bodies, "one handler at a time keeps the order"
        assert await left(client, subject, 0) == {}


async def test_as_many_handlers_run_as_allowed(broker: BrokerProcess) -> None:
    async with consuming(broker, "many", *[b"%d" % number for number in range(30)]) as (_, consumer):
        now = most = done = 0

        async def handle(message: qmq.Message) -> None:
            nonlocal now, most, done
            now += 1
            most = max(most, now)
            for _ in range(50):
                await asyncio.sleep(0)
            now -= 1
            done += 1
            if done == 30:
                consumer.stop()

        await consumer.run(handle, concurrency=4)
    assert most == 4


async def test_a_handler_that_raises_nacks_and_the_run_goes_on(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    seen = list[tuple[bytes, int, bool]]()
    failed = list[tuple[bytes, str]]()
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "raises", max_attempts=2) as (_, consumer):
            await client.send("raises", b"bad", key="order-1")
            await client.send("raises", b"good")
            consumer.on_failed = lambda message, error: failed.append((message.body, str(error)))

            async def handle(message: qmq.Message) -> None:
                seen.append((message.body, message.attempt, message.last_attempt))
                if len(seen) == 3:
                    consumer.stop()
                if message.body == b"bad":
                    raise ValueError(f"attempt {message.attempt}")

            await consumer.run(handle)
        letters = [letter async for letter in client.admin.dead_letters("raises")]
    assert sorted(seen) == [(b"bad", 1, False), (b"bad", 2, True), (b"good", 1, False)]
    assert failed == [(b"bad", "attempt 1"), (b"bad", "attempt 2")]
    assert [(letter.attempts, letter.reason) for letter in letters] == [(2, "ValueError: attempt 2")]
    first, second = (record for record in caplog.records if hasattr(record, "message_id"))
    assert (first.levelno, second.levelno) == (logging.WARNING, logging.ERROR)
    assert first.getMessage() == (
        f"message {letters[0].id} of raises failed at attempt 1 of 2 of group raises, it comes again at once: "
        "ValueError: attempt 1"
    )
    assert second.getMessage().endswith(
        "at attempt 2 of 2 of group raises, it is a dead letter now: ValueError: attempt 2"
    )
    fields = ("message_id", "subject", "key", "attempt", "max_attempts", "retry_in")
    assert [getattr(first, name) for name in fields] == [letters[0].id, "raises", "order-1", 1, 2, 0.0]
    assert [getattr(second, name) for name in fields] == [letters[0].id, "raises", "order-1", 2, 2, None]
    assert [getattr(first, name) for name in ("group", "program")] == ["raises", "worker-1"]
    assert first.exc_info is not None
    assert first.exc_info[0] is ValueError


async def test_retry_and_dispositions_of_the_handler_decide(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qmq.client")
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "decides", b"later", b"bad", b"once more") as (_, consumer):
            count = 0

            async def handle(message: qmq.Message) -> None:
                nonlocal count
                count += 1
                if count == 4:
                    consumer.stop()
                if message.body == b"later":
                    raise qmq.Retry("the shop is closed", after="1h")
                if message.body == b"bad":
                    await message.reject("nobody can handle this")
                if message.body == b"once more" and message.attempt == 1:
                    await message.nack(0)

            await consumer.run(handle)
        (group,) = await client.admin.groups("decides")
    assert (group.ready, group.in_flight, group.in_retry, group.dead) == (0, 0, 1, 1)
    record, rejected = (record for record in caplog.records if hasattr(record, "message_id"))
    assert (record.levelno, record.exc_info) == (logging.INFO, None), "the handler has asked for it"
    assert rejected.getMessage().endswith("was rejected, and is a dead letter now: nobody can handle this")
    assert record.retry_in == 3_600  # type: ignore[attr-defined]  # an extra field


async def test_a_stop_waits_for_handlers_and_releases_the_rest(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "stops", *[b"%d" % number for number in range(20)]) as (_, consumer):
            begun, may_end = asyncio.Queue[bytes](), asyncio.Event()

            async def handle(message: qmq.Message) -> None:
                begun.put_nowait(message.body)
                await may_end.wait()

            running = asyncio.create_task(consumer.run(handle, concurrency=2))
            in_hand = {await begun.get(), await begun.get()}
            consumer.stop()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not running.done()
            may_end.set()
            await running
            assert begun.empty()
            assert await consumer.pull() == []
        found = await left(client, "stops", 18)
        assert len(found) == 18
        assert not in_hand & found.keys()
        assert set(found.values()) == {1}, "a release counts no attempt"


async def test_handlers_that_do_not_end_are_cancelled_and_their_messages_released(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "drains", b"1", b"2") as (_, consumer):
            begun = asyncio.Queue[bytes]()

            async def handle(message: qmq.Message) -> None:
                begun.put_nowait(message.body)
                await asyncio.Event().wait()

            running = asyncio.create_task(consumer.run(handle, drain="10ms"))
            await begun.get()
            consumer.stop()
            await running
        assert await left(client, "drains", 2) == {b"1": 1, b"2": 1}


async def test_the_message_of_a_cancelled_handler_is_released_at_once(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client, consuming(broker, "cut", b"1") as (_, consumer):
        begun = asyncio.Event()

        async def handle(message: qmq.Message) -> None:
            begun.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(consumer.run(handle, drain="10ms"))
        await begun.wait()
        consumer.stop()
        await running
        async with client.subscribe("cut", group="cut", consumer="other") as other:
            (again,) = await other.pull(1, timeout=20)
            assert (again.body, again.attempt) == (b"1", 1), "while the first consumer is still there"


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_run(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_module, "CANCEL_GRACE", 0.01)
    async with consuming(broker, "ignores", b"1") as (_, consumer):
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def handle(message: qmq.Message) -> None:
            begun.set()
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError:
                    continue

        running = asyncio.create_task(consumer.run(handle, drain=0))
        await begun.wait()
        consumer.stop()
        await running
        may_end.set()
    assert "goes on although it was cancelled" in caplog.text


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_cancelled_run_releases_what_it_has(broker: BrokerProcess, concurrency: int) -> None:
    subject = f"cancelled.{concurrency}"
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, subject, b"1", b"2", b"3") as (_, consumer):
            begun = asyncio.Event()

            async def handle(message: qmq.Message) -> None:
                begun.set()
                await asyncio.Event().wait()

            running = asyncio.create_task(consumer.run(handle, concurrency=concurrency))
            await begun.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert await left(client, subject, 3) == {b"1": 1, b"2": 1, b"3": 1}


async def test_a_handler_that_awaits_something_cancelled_has_failed(broker: BrokerProcess) -> None:
    async with consuming(broker, "inner", b"1") as (_, consumer):
        attempts = list[int]()

        async def handle(message: qmq.Message) -> None:
            attempts.append(message.attempt)
            if message.attempt == 2:
                consumer.stop()
                return
            other = asyncio.ensure_future(asyncio.Event().wait())
            other.cancel()
            await other

        await consumer.run(handle)
    assert attempts == [1, 2]


def not_async(message: qmq.Message) -> None:
    """Handle nothing."""


async def without_arguments() -> None:
    """Handle nothing."""


@pytest.mark.parametrize("handle", [not_async, without_arguments])
async def test_a_handler_that_cannot_be_one_ends_the_run(broker: BrokerProcess, handle: Any) -> None:
    subject = f"misuse.{handle.__name__}"
    async with consuming(broker, subject, b"1") as (_, consumer):
        with pytest.raises(qmq.UsageError, match="async function of one message"):
            await consumer.run(handle)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"concurrency": 1.5}, {"drain": -1}, {"drain": "soon"}])
async def test_wrong_options_are_refused(broker: BrokerProcess, wrong: Any) -> None:
    async def handle(message: qmq.Message) -> None:
        """Handle nothing."""

    async with consuming(broker, "options") as (_, consumer):
        with pytest.raises(qmq.InvalidOption):
            await consumer.run(handle, **wrong)
        with pytest.raises(qmq.InvalidOption):
            await consumer.run(None)  # type: ignore[arg-type]  # on purpose


async def test_a_stop_ends_a_loop_after_the_message_in_hand(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "loop", *[b"%d" % number for number in range(9)]) as (_, consumer):
            seen = list[bytes]()
            async for message in consumer:
                async with message:
                    seen.append(message.body)
                    if len(seen) == 5:
                        consumer.stop()
            assert [message async for message in consumer] == []
        assert seen == [b"%d" % number for number in range(5)]
        assert await left(client, "loop", 4) == {b"%d" % number: 1 for number in range(5, 9)}


@pytest.mark.parametrize("wait", ["loop", "pull", "run"])
async def test_a_stop_ends_what_waits_for_messages(broker: BrokerProcess, wait: str) -> None:
    async with consuming(broker, f"waits.{wait}") as (_, consumer):

        async def waits() -> list[qmq.Message]:
            if wait == "loop":
                return [message async for message in consumer]
            if wait == "pull":
                return await consumer.pull()
            await consumer.run(lambda message: asyncio.sleep(0), concurrency=3)
            return []

        waiting = asyncio.create_task(waits())
        for _ in range(10):
            await asyncio.sleep(0)
        consumer.stop()
        assert await waiting == []
        assert not waiting.cancelling()


async def test_a_cancellation_that_comes_with_a_stop_is_kept(broker: BrokerProcess) -> None:
    async with consuming(broker, "both") as (_, consumer):
        waiting = asyncio.create_task(consumer.pull())
        for _ in range(10):
            await asyncio.sleep(0)
        waiting.cancel()
        consumer.stop()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_an_at_most_once_group_loses_nothing_at_a_stop(broker: BrokerProcess) -> None:
    bodies = [b"%d" % number for number in range(40)]
    seen = list[bytes]()
    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url) as client:
        await client.send_many("once", bodies)
        async with client.subscribe("once", group="once", mode="at_most_once") as consumer:

            async def handle(message: qmq.Message) -> None:
                seen.append(message.body)
                if len(seen) == 5:
                    consumer.stop()

            await consumer.run(handle)
        async with client.subscribe("once", group="once", mode="at_most_once") as consumer:
            seen += [message.body for message in await consumer.pull(100, timeout=1)]
    assert seen == bodies


async def test_a_failure_of_a_solo_consumer_is_logged_and_the_run_goes_on(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url) as client:
        await client.send_many("solo", [b"1", b"2"])
        async with client.subscribe("solo", start="first") as consumer:

            async def handle(message: qmq.Message) -> None:
                assert message.last_attempt
                if message.body == b"1":
                    raise ValueError("no such hotel")
                consumer.stop()

            await consumer.run(handle)
    assert "it does not come again: ValueError: no such hotel" in caplog.text


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_run_and_handlers_end(broker: BrokerProcess, number: int) -> None:
    before = signal.getsignal(number)
    subject = f"signal.{number}"
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, subject, b"1", b"2", b"3") as (_, consumer):
            ended = list[bytes]()

            async def handle(message: qmq.Message) -> None:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)
                ended.append(message.body)

            await consumer.run(handle)
            assert ended == [b"1"]
        assert await left(client, subject, 2) == {b"2": 1, b"3": 1}
    assert signal.getsignal(number) is before


async def test_a_second_signal_cancels_the_handlers(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        async with consuming(broker, "second", b"1") as (_, consumer):

            async def handle(message: qmq.Message) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.Event().wait()

            await consumer.run(handle, drain="1h")
        assert await left(client, "second", 1) == {b"1": 1}


async def test_handlers_of_signals_that_the_program_has_are_called_too(broker: BrokerProcess) -> None:
    came = list[int]()
    in_loop = asyncio.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, in_loop.set)
    try:
        async with consuming(broker, "chained", b"1") as (_, consumer):

            async def handle(message: qmq.Message) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
                await in_loop.wait()

            await consumer.run(handle, drain=0.5)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


async def test_a_signal_that_is_ignored_stays_ignored(broker: BrokerProcess) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with consuming(broker, "ignored", b"1", b"2") as (_, consumer):
            seen = list[bytes]()

            async def handle(message: qmq.Message) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.01)
                seen.append(message.body)
                if len(seen) == 2:
                    consumer.stop()

            await consumer.run(handle)
            assert seen == [b"1", b"2"]
    finally:
        signal.signal(signal.SIGINT, before)


async def test_two_runs_stop_at_one_signal(broker: BrokerProcess) -> None:
    async with consuming(broker, "two.a", b"1") as (_, one), consuming(broker, "two.b") as (_, other):

        async def handle(message: qmq.Message) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        async with asyncio.TaskGroup() as group:
            group.create_task(other.run(handle))
            group.create_task(one.run(handle))
        assert one.stopped
        assert other.stopped

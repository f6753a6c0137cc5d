"""Leaving a consumer's block: the disposition of the messages that the program was given, and late dispositions."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import qmq
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.broker_process import BrokerProcess, broker_process
from tests.net.scripted import backs_of
from tests.net.several import put, several
from tests.net.test_handlers import given as pulled

MANY = 6


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("leaving") / "data") as started:
        yield started


class Broken(Exception):
    """An error of the program."""


async def attempts(client: qmq.Client, subject: str, group: str, count: int = MANY) -> dict[bytes, int]:
    """Return the current attempt of each message of the group."""
    found = dict[bytes, int]()
    async with client.subscribe(subject, group=group) as consumer, asyncio.timeout(60):
        while len(found) < count:  # redeliveries do not wait for the rest
            found |= {message.body: message.attempt for message in await consumer.pull()}
    return found


async def test_a_message_that_ends_its_program_each_time_dies(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("poison", b"bad")
        found = []
        for _ in range(2):
            with suppress(Broken):
                async with client.subscribe("poison", group="poison", max_attempts=2, retry_delays=[0]) as consumer:
                    async for message in consumer:
                        found.append(message.attempt)
                        raise Broken("no such hotel")
        assert found == [1, 2]
        letters = [letter async for letter in client.admin.dead_letters("poison")]
        assert [(letter.attempts, letter.reason) for letter in letters] == [(2, "Broken: no such hotel")]


async def test_a_loop_fails_its_given_messages_and_releases_those_not_reached(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("loop", [b"%d" % number for number in range(MANY)])
        with suppress(Broken):
            async with client.subscribe("loop", group="loop", retry_delays=[0]) as consumer:
                async for message in consumer:
                    if message.body == b"4":
                        raise Broken
                    if message.body in (b"0", b"2"):
                        message.ack()
        # 1 and 3 were given too, and had no disposition; 5 was not given.
        assert await attempts(client, "loop", "loop", 4) == {b"1": 2, b"3": 2, b"4": 2, b"5": 1}


@pytest.mark.parametrize("columns", [False, True])
async def test_all_of_a_pulled_list_was_given(broker: BrokerProcess, columns: bool) -> None:
    subject = f"listed.{columns}"
    async with qmq.connect(broker.url) as client:
        await client.send_many(subject, [b"%d" % number for number in range(MANY)])
        with suppress(Broken):
            async with client.subscribe(subject, group=subject, retry_delays=[0]) as consumer:
                some = await (consumer.pull_batch if columns else consumer.pull)(4, 4, timeout=30)
                some[0].ack()
                await some[1].nack(delay=0, reason="by hand")
                some[2].release()
                raise Broken
        assert await attempts(client, subject, subject, 5) == {b"1": 2, b"2": 1, b"3": 2, b"4": 1, b"5": 1}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()])
async def test_errors_that_end_tasks_and_programs_release_all_messages(
    broker: BrokerProcess, error: BaseException
) -> None:
    subject = f"ended.{type(error).__name__}"
    async with qmq.connect(broker.url) as client:
        await client.send_many(subject, [b"%d" % number for number in range(MANY)])
        with suppress(type(error)):
            async with client.subscribe(subject, group=subject) as consumer:
                await consumer.pull(4, 4, timeout=30)
                raise error
        assert set((await attempts(client, subject, subject)).values()) == {1}


async def test_a_message_whose_own_block_has_failed_is_not_failed_twice(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("twice", [b"0", b"1"])
        with suppress(Broken):
            async with client.subscribe("twice", group="twice", retry_delays=[0]) as consumer:
                first, _ = await consumer.pull(2, 2, timeout=30)
                with suppress(ValueError):
                    async with first:
                        raise ValueError("its own")
                raise Broken
        assert await attempts(client, "twice", "twice", 2) == {b"0": 2, b"1": 2}


async def test_retry_picks_the_delay_of_messages_that_the_program_was_given(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send("later", b"0")
        with suppress(qmq.Retry):
            async with client.subscribe("later", group="later", retry_delays=[3_600]) as consumer:
                await consumer.pull(1, timeout=30)
                raise qmq.Retry("not yet", after=0)
        assert await attempts(client, "later", "later", 1) == {b"0": 2}


async def test_the_error_of_a_task_is_the_reason_not_that_of_its_group(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("tasks", [b"0", b"1"])

        async def work(message: qmq.Message) -> None:
            if message.body == b"0":
                raise Broken("no such hotel")
            async with message:
                await asyncio.Event().wait()

        with suppress(ExceptionGroup):
            async with client.subscribe("tasks", group="tasks", max_attempts=1) as consumer:
                messages = await consumer.pull(2, 2, timeout=30)
                async with asyncio.TaskGroup() as tasks:
                    for message in reversed(messages):
                        tasks.create_task(work(message))
        letters = [letter async for letter in client.admin.dead_letters("tasks")]
        assert [(letter.id, letter.reason) for letter in letters] == [(messages[0].id, "Broken: no such hotel")]
        assert await attempts(client, "tasks", "tasks", 1) == {b"1": 1}, "it was cancelled, and released"


async def test_given_messages_fail_also_where_delivery_sequences_have_gaps(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("gaps", [b"%d" % number for number in range(MANY)])
        options = {"group": "gaps", "consumer": "c"}
        lost = qmq.connect(broker.url)
        await lost.__aenter__()  # and its process ends: it never leaves
        before = lost.subscribe("gaps", **options, retry_delays=[0])  # type: ignore[arg-type]
        await before.__aenter__()
        some = await before.pull(MANY, MANY, timeout=30)
        for number in (1, 3):
            some[number].ack()
        await before.flush()
        with suppress(Broken):
            async with client.subscribe("gaps", **options) as consumer:  # type: ignore[arg-type]
                came = await consumer.pull(4, 4, timeout=30)
                assert [message.body for message in came] == [b"0", b"2", b"4", b"5"]
                raise Broken
        assert set((await attempts(client, "gaps", "gaps", 4)).values()) == {2}
        await before.__aexit__(None, None, None)
        await lost.__aexit__(None, None, None)


async def test_one_refused_message_does_not_keep_others_from_failing() -> None:
    """The broker refuses a range because one message has a disposition: the rest of it is sent again."""
    async with pulled(b"0", b"1", b"2", b"3") as (s, messages):
        messages[0].ack()
        leaving = asyncio.ensure_future(s.consumer.__aexit__(Broken, Broken("no such hotel"), None))
        frame = await s.peer.frame(FrameKind.HAND_BACK)
        assert backs_of(frame) == [(1, 4, Disposition.NACK, None, "Broken: no such hotel")]
        s.peer.answer(FrameKind.HANDED_BACK, frame.request, payload=struct.pack("<I", 0))
        frame = await s.peer.frame(FrameKind.HAND_BACK)
        assert [back[:2] for back in backs_of(frame)] == [(1, 2), (2, 4)]
        s.peer.answer(FrameKind.HANDED_BACK, frame.request, payload=struct.pack("<I", 0))
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
        await s.peer.unsubscribed()
        await leaving


async def test_given_messages_fail_at_each_of_several_brokers(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"%d-%d" % (number, i) for i in range(3)])
        with suppress(Broken):
            async with client.subscribe("a", group="g", retry_delays=[0]) as consumer:
                for message in await consumer.pull(4, 4, timeout=30):
                    if message.body.endswith(b"-0"):
                        message.ack()
                raise Broken
        found = await attempts(client, "a", "g", 4)
        assert sorted(found.values()) == [1, 1, 2, 2]


async def test_messages_of_another_tasks_pull_are_released(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        await put(brokers.one(0), "a", [b"0", b"1"])
        with suppress(Broken):
            async with client.subscribe("a", group="g", retry_delays=[0]) as consumer:
                (given,) = await consumer.pull(1, timeout=30)
                waiting = asyncio.ensure_future(consumer.pull(5, min_count=5))
                while not consumer._puller._taken:  # type: ignore[union-attr]  # noqa: ASYNC110  # it has no event
                    await asyncio.sleep(0)
                raise Broken
        with pytest.raises(qmq.QmqError):
            await waiting
        found = await attempts(client, "a", "g", 2)
        assert found == {given.body: 2, (b"1" if given.body == b"0" else b"0"): 1}


def given(consumer: qmq.SyncConsumer, count: int) -> dict[bytes, int]:
    """Return the next messages, and the current attempt of each."""
    found = dict[bytes, int]()
    while len(found) < count:
        pulled = consumer.pull(timeout=30)
        assert pulled, f"{len(found)} of {count}"
        found |= {message.body: message.attempt for message in pulled}
    return found


def test_the_sync_client_fails_messages_that_its_program_was_given(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("sync.loop", [b"%d" % number for number in range(MANY)])
        options = {"max_attempts": 2, "retry_delays": [0]}
        with suppress(Broken), client.subscribe("sync.loop", group="sync", **options) as consumer:  # type: ignore[arg-type]
            for message in consumer:
                if message.body == b"1":
                    raise Broken("no such hotel")
                message.ack()
        with suppress(Broken), client.subscribe("sync.loop", group="sync") as consumer:
            assert given(consumer, 5) == {b"1": 2, b"2": 1, b"3": 1, b"4": 1, b"5": 1}
            raise Broken("no such hotel")
        (letter,) = client.admin.dead_letters("sync")
        assert (letter.attempts, letter.reason) == (2, "Broken: no such hotel")
        with suppress(KeyboardInterrupt), client.subscribe("sync.loop", group="sync") as consumer:
            assert set(given(consumer, 4).values()) == {2}
            raise KeyboardInterrupt
        with client.subscribe("sync.loop", group="sync") as consumer:
            assert set(given(consumer, 4).values()) == {2}


# --- too late --------------------------------------------------------------------------------------------------------


async def late(client: qmq.Client, subject: str, consumer: str = "c") -> list[qmq.Message]:
    """Messages of a consumer whose block has ended."""
    await client.send_many(subject, [b"%d" % number for number in range(MANY)])
    async with client.subscribe(subject, group=subject, consumer=consumer) as subscription:
        return await subscription.pull(MANY, MANY, timeout=30)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "after its block ended" in record.getMessage()]


async def use(message: qmq.Message, error: BaseException | None = None) -> None:
    async with message:
        if error is not None:
            raise error


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("call", ["ack", "release", "use"])
async def test_a_late_disposition_is_logged_once(
    broker: BrokerProcess, call: str, closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subject = f"late.{call}.{closed}"
    async with qmq.connect(broker.url) as client:
        async with qmq.connect(broker.url) as other:
            messages = await late(other if closed else client, subject)
        assert warnings(caplog) == []
        for message in messages:
            if call == "use":
                await use(message)
            else:
                getattr(message, call)()
        (said,) = warnings(caplog)
        assert said.startswith(f"consumer c: {'`async with message`' if call == 'use' else call + '()'} of <Message ")
        assert messages[0].id in said
        assert "inside the block of `client.subscribe(...)`" in said
        assert set((await attempts(client, subject, subject)).values()) == {1}


async def test_a_handler_that_outlives_its_block_is_logged(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with qmq.connect(broker.url) as client:
        for subject, error in (("outlives.well", None), ("outlives.badly", ValueError("no such hotel"))):
            await client.send(subject, b"1")
            may_end = asyncio.Event()

            async def work(message: qmq.Message, may_end: asyncio.Event, error: Exception | None) -> None:
                async with message:
                    await may_end.wait()
                    if error is not None:
                        raise error

            async with client.subscribe(subject, group=subject) as consumer:
                (message,) = await consumer.pull(1, timeout=30)
                working = asyncio.create_task(work(message, may_end, error))
                await asyncio.sleep(0)
            caplog.clear()
            may_end.set()
            with suppress(ValueError):
                await working
            (said,) = warnings(caplog)
            assert message.id in said


async def test_a_nack_or_reject_that_comes_too_late_is_refused(broker: BrokerProcess) -> None:
    async with qmq.connect(broker.url) as client:
        messages = await late(client, "late.nack")
        for disposition in (messages[0].nack(), messages[1].reject("bad address")):
            with pytest.raises(qmq.Fenced, match=r"consumer c has left .* inside the block"):
                await disposition
        assert set((await attempts(client, "late.nack", "late.nack")).values()) == {1}


async def test_a_late_ack_of_a_batch_is_logged(broker: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("late.batch", [b"%d" % number for number in range(MANY)])
        async with client.subscribe("late.batch", group="late.batch", consumer="c") as consumer:
            batch = await consumer.pull_batch(MANY, MANY, timeout=30)
            batch[0].ack()
        batch.ack()
        (said,) = warnings(caplog)
        assert said.startswith("consumer c: ack() of 5 messages")


async def test_late_dispositions_at_several_brokers_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"x"])
        async with client.subscribe("a", group="g") as consumer:
            messages = await consumer.pull(2, 2, timeout=30)
        for message in messages:
            message.ack()
        assert len(warnings(caplog)) == 1


async def test_a_second_disposition_after_the_block_is_not_logged(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with qmq.connect(broker.url) as client:
        await client.send_many("done", [b"1", b"2"])
        async with client.subscribe("done", group="done") as consumer:
            messages = await consumer.pull(2, 2, timeout=30)
            messages[0].ack()
            await messages[1].nack()
        for message in messages:
            message.ack()
            message.release()
        assert warnings(caplog) == []


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("call", ["ack", "release", "use", "fail"])
def test_the_sync_client_logs_it_too(
    broker: BrokerProcess, call: str, closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subject = f"late.sync.{call}.{closed}"
    with qmq.connect_sync(broker.url) as client:
        client.send_many(subject, [b"0", b"1"])
        with client.subscribe(subject, group=subject, consumer="c") as consumer:
            messages = consumer.pull(2, 2, timeout=30)
        if not closed:
            dispose(messages, call)
    if closed:
        dispose(messages, call)
    (said,) = warnings(caplog)
    assert said.startswith("consumer c: ")
    assert messages[0].id in said


def dispose(messages: list[qmq.SyncMessage], call: str) -> None:
    for message in messages:
        if call == "ack":
            message.ack()
        elif call == "release":
            message.release()
        else:
            with suppress(ValueError), message:
                if call == "fail":
                    raise ValueError("no such hotel")

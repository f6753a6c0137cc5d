"""`async with message`: the disposition of a message, by the way that its handler ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.errors import Fenced
from qmq.net.client.consumer import pull as pulling
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.broker_process import running_broker
from tests.net.client.consumer.test_pull import Subscribed, batch, subscribed
from tests.net.scripted import TIMEOUT_S, backs_of


@asynccontextmanager
async def given(*wanted: bytes) -> AsyncIterator[tuple[Subscribed, list[qmq.Message]]]:
    """Enter a consumer of a group that was given these messages."""
    async with subscribed(group="g", consumer="c") as s:
        task = asyncio.ensure_future(s.consumer.pull(max(len(wanted), 100)))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(*wanted))
        yield s, await task


async def acked(s: Subscribed) -> memoryview:
    """Take the next frame, which has acks, and confirm them: a consumer that leaves waits for that. Return the acks."""
    frame = await s.peer.frame(FrameKind.ACK)
    s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
    return frame.payload[frames.ACK.size :]


async def handed_back(s: Subscribed) -> tuple[Disposition, int, int | None, str]:
    """Take the next frame, which sends one message back: return disposition, sequence, delay and reason."""
    frame = await s.peer.frame(FrameKind.HAND_BACK)
    (back,) = backs_of(frame)
    assert back.end == back.start + 1
    s.peer.answer(FrameKind.HANDED_BACK, frame.request)
    return Disposition(back.disposition), back.start, back.delay_us, back.reason


async def handle(message: qmq.Message, raising: BaseException | None = None) -> None:
    async with message:
        if raising is not None:
            raise raising


async def test_a_handler_that_ends_normally_acks() -> None:
    async with given(b"1") as (s, (message,)):
        await handle(message)
        assert await acked(s) == frames.pack_numbers([0, 1])[0]


async def test_a_handler_that_raises_nacks_and_raises_on(caplog: pytest.LogCaptureFixture) -> None:
    async with given(b"1", b"2", b"3") as (s, messages):
        failed = list[qmq.Message]()
        s.consumer.on_failed = lambda message, error: failed.append(message)
        for message in messages:
            handling = asyncio.ensure_future(handle(message, ValueError("no such hotel")))
            found = await handed_back(s)
            assert found[:3] == (Disposition.NACK, messages.index(message), None)
            assert found[3] == "ValueError: no such hotel"
            with pytest.raises(ValueError, match="no such hotel"):
                await handling
        assert failed == messages
        assert [record.message_id for record in caplog.records] == [message.id for message in messages]  # type: ignore[attr-defined]  # an extra field


class Mute(Exception):
    """An error whose text raises an error."""

    def __str__(self) -> str:
        raise AttributeError("no such field")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(os.fsdecode(b"caf\xe9.txt")), "FileNotFoundError: caf\\udce9.txt"),
        (Mute(), "Mute: its text is not available: AttributeError"),
    ],
)
async def test_any_error_of_a_handler_nacks_and_reaches_the_program(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "qmq")  # xdist cannot transfer text that UTF-8 cannot encode
    async with given(b"1") as (s, (message,)):
        handling = asyncio.ensure_future(handle(message, error))
        assert await handed_back(s) == (Disposition.NACK, 0, None, reason)
        with pytest.raises(type(error)):
            await handling


async def test_a_delay_that_is_none_is_a_failure_of_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    async with given(b"1") as (s, (message,)):
        handling = asyncio.ensure_future(handle(message, qmq.Retry("soon", after=-0.1)))
        disposition, number, delay_us, reason = await handed_back(s)
        assert (disposition, number, delay_us) == (Disposition.NACK, 0, None), "after the delay of the group"
        assert reason.startswith("InvalidOption: delay must be from 0 to below 1e12 seconds, not -0.1")
        with pytest.raises(qmq.Retry):
            await handling
        assert "it comes again: InvalidOption: delay must be" in caplog.text


async def test_retry_picks_the_delay_and_is_logged_as_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qmq.client")
    async with given(b"1") as (s, (message,)):
        errors = list[BaseException]()
        s.consumer.on_failed = lambda message, error: errors.append(error)
        asked = qmq.Retry(after="2.5s")
        handling = asyncio.ensure_future(handle(message, asked))
        assert (await handed_back(s))[:3] == (Disposition.NACK, 0, 2_500_000)
        with pytest.raises(qmq.Retry):
            await handling
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert record.retry_in == 2.5  # type: ignore[attr-defined]  # an extra field
        assert errors == [asked]


async def test_an_on_failed_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: qmq.Message, error: BaseException) -> None:
        raise RuntimeError("not my day")

    async with given(b"1") as (s, (message,)):
        s.consumer.on_failed = fail
        handling = asyncio.ensure_future(handle(message, ValueError("no such hotel")))
        assert (await handed_back(s))[:2] == (Disposition.NACK, 0)
        with pytest.raises(ValueError, match="no such hotel"):
            await handling
        assert "not my day" in caplog.text


@pytest.mark.parametrize("error", [GeneratorExit()])
async def test_errors_that_end_a_task_release_and_propagate(error: BaseException) -> None:
    async with given(b"1") as (s, (message,)):
        with pytest.raises(type(error)):
            await handle(message, error)
        assert (await handed_back(s))[:2] == (Disposition.RELEASE, 0)


async def test_a_cancelled_nack_still_reaches_the_broker() -> None:
    async with given(b"1") as (s, (message,)):
        nacking = asyncio.ensure_future(message.nack())
        frame = await s.peer.frame(FrameKind.HAND_BACK)
        nacking.cancel()
        await asyncio.gather(nacking, return_exceptions=True)
        s.peer.drop()  # before it is answered
        s = s._replace(peer=await s.broker.peer())
        await s.peer.subscribed()
        assert backs_of(frame)[0].disposition == Disposition.NACK
        assert (await handed_back(s))[:2] == (Disposition.NACK, 0)


async def test_leaving_flushes_acknowledgements_over_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "FLUSH_TIMEOUT", 60)
    async with given(b"1", b"2") as (s, messages):
        messages[0].ack()
        s.peer.drop()
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        peer = await s.broker.peer()
        await peer.subscribed()
        frame = await peer.frame(FrameKind.ACK)
        assert frame.payload[frames.ACK.size :] == frames.pack_numbers([0, 1])[0]
        peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
        await peer.unsubscribed()
        await leaving


async def test_many_acknowledgements_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.consumer.acks.ACK_DELAY", 1_000)
    monkeypatch.setattr("qmq.net.client.consumer.acks.ACK_COUNT", 3)
    async with given(*[b"%d" % number for number in range(10)]) as (s, messages):
        for number in (0, 2, 4, 6):
            messages[number].ack()
        assert await acked(s) == frames.pack_numbers([0, 1, 2, 3, 4, 5, 6, 7])[0]


async def test_flush_raises_how_many_were_refused() -> None:
    async with given(b"1", b"2", b"3") as (s, messages):
        for message in messages:
            message.ack()
        flushing = asyncio.ensure_future(s.consumer.flush())
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(2))
        with pytest.raises(Fenced, match="2 acks"):
            await flushing
        await s.consumer.flush()  # raised once


async def test_acks_are_refused_when_another_consumer_has_taken_over() -> None:
    async with given(b"1", b"2", b"3") as (s, messages):
        for message in messages:
            message.ack()
        flushing = asyncio.ensure_future(s.consumer.flush())
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.refuse(frame.request, Fenced("another"))
        with pytest.raises(Fenced, match="3 acks"):
            await flushing
        pull = asyncio.ensure_future(s.consumer.pull())
        frame = await s.peer.frame(FrameKind.SUBSCRIBE)
        assert frames.unpack_meta(frame.meta)["known"][2] == 1, "it says as whom it comes back"
        s.peer.refuse(frame.request, Fenced("another program has taken over"))
        with pytest.raises(Fenced, match="taken over"):
            await pull


async def test_acks_from_before_the_disconnect_count_when_the_session_lasted() -> None:
    async with given(b"1", b"2") as (s, messages):
        messages[0].ack()
        s.consumer._puller.ack_senders[0].fence(Fenced("out of touch"), for_good=False)
        flushing = asyncio.ensure_future(s.consumer.flush())
        said = await s.peer.subscribed()
        assert said["known"][4:] == [0, 1]
        await flushing
        messages[1].ack()
        with pytest.raises(Fenced, match="1 acks"):
            await s.consumer.flush()


async def test_a_flush_during_a_disconnect_ends_after_the_reconnect() -> None:
    async with given(b"1", b"2") as (s, messages):
        messages[0].ack()
        flushing = asyncio.ensure_future(s.consumer.flush())
        await s.peer.frame(FrameKind.ACK)  # which is not answered
        s.consumer._puller.ack_senders[0].fence(Fenced("out of touch"), for_good=False)
        said = await s.peer.subscribed()
        assert said["known"][4:] == [0, 1]
        async with asyncio.timeout(TIMEOUT_S):
            await flushing


# --- no longer in flight ---------------------------------------------------------------------------------------------


async def waits(stopped: asyncio.Event) -> None:
    await stopped.wait()


async def swallows(stopped: asyncio.Event) -> None:
    try:
        await stopped.wait()
    except asyncio.CancelledError:
        pass


async def fails(stopped: asyncio.Event) -> None:
    try:
        await stopped.wait()
    finally:
        raise ValueError("in the end")


@pytest.mark.parametrize("body", [waits, swallows, fails])
async def test_a_handler_of_a_message_not_in_flight_is_stopped_and_the_program_continues(
    body: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    async with given(b"1", b"2") as (s, messages):
        went_on = list[bytes]()
        stopped = asyncio.Event()

        async def work() -> str:
            for message in messages:
                async with message:
                    await body(stopped)
                    if body is waits:
                        went_on.append(message.body)
            await asyncio.sleep(0)
            return "through"

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        s.consumer._puller.ack_senders[0].fence(Fenced("silent"))
        assert await working == "through"
        assert went_on == []
        assert not working.cancelling()


async def test_a_handler_that_never_waits_leaves_no_cancellation_behind() -> None:
    async with given(b"1") as (s, (message,)):
        s.consumer._puller.ack_senders[0].fence(Fenced("silent"))

        async def work() -> str:
            async with message:
                pass
            await asyncio.sleep(0)
            return "through"

        assert await asyncio.create_task(work()) == "through"


async def test_a_task_that_is_cancelled_for_another_reason_too_ends() -> None:
    async with given(b"1") as (s, (message,)):

        async def work() -> None:
            async with message:
                await asyncio.Event().wait()

        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        s.consumer._puller.ack_senders[0].fence(Fenced("silent"))
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working


async def test_messages_without_a_disposition_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with given(b"1", b"2") as (s, messages):
        messages[0].ack()
        messages.clear()
        task = asyncio.ensure_future(s.consumer.pull())
        while "without a disposition" not in caplog.text:  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0)
        assert "the program dropped 1 messages" in caplog.text
        await acked(s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- a real broker ---------------------------------------------------------------------------------------------------


async def test_each_way_to_end_has_its_outcome(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a", [b"good", b"fails", b"later", b"bad", b"unstarted"])
        async with client.subscribe("a", group="g", consumer="c") as consumer:
            good, fails_once, later, bad, unstarted = await consumer.pull(10, 5)
            await handle(good)
            for message, after in ((fails_once, "0s"), (later, "1h")):
                with pytest.raises(qmq.Retry):
                    await handle(message, qmq.Retry(after=after))
            await bad.reject("nobody can handle this")
            unstarted.release()
            came = {}
            while len(came) < 2:
                for message in await consumer.pull(10):
                    came[message.body] = message.attempt
                    message.ack()
            assert came == {b"fails": 2, b"unstarted": 1}
            await consumer.flush()
            with pytest.raises(Fenced):
                await good.nack()
        (group,) = await client.admin.groups("g")
        assert (group.ready, group.in_flight, group.in_retry, group.dead) == (0, 0, 1, 1)


async def test_leaving_releases_messages_that_were_not_started(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a", [b"1", b"2", b"3"])
        async with client.subscribe("a", group="g", consumer="c") as consumer:
            (await consumer.pull(10, 3))[0].ack()
        async with client.subscribe("a", group="g", consumer="d") as consumer:
            messages = await consumer.pull(10, 2)
            assert [(message.body, message.attempt) for message in messages] == [(b"2", 1), (b"3", 1)]


async def test_a_disposition_after_leaving_is_refused_at_once_and_sends_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a", [b"1", b"2", b"3", b"4"])
        async with client.subscribe("a", group="g", consumer="c") as consumer:
            messages = await consumer.pull(10, 4)
        messages[0].ack()
        messages[1].release()
        async with asyncio.timeout(TIMEOUT_S):
            for disposition in (messages[2].nack(), messages[3].reject("no")):
                with pytest.raises(Fenced, match="consumer c has left"):
                    await disposition
            with pytest.raises(Fenced, match="1 acks"):
                await consumer.flush()
            await consumer.flush()
        async with client.subscribe("a", group="g", consumer="d") as consumer:
            assert [message.attempt for message in await consumer.pull(10, 4)] == [1, 1, 1, 1]


async def test_a_waiting_nack_is_refused_when_its_consumer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "FLUSH_TIMEOUT", 0.05)
    async with given(b"1") as (s, (message,)):
        waiting = asyncio.ensure_future(message.nack())
        await s.peer.frame(FrameKind.HAND_BACK)  # and no answer
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        with pytest.raises(Fenced, match="consumer c has left"):
            await waiting
        frame = await s.peer.frame(FrameKind.UNSUBSCRIBE)
        s.peer.answer(FrameKind.UNSUBSCRIBED, frame.request)
        await leaving


async def test_a_seek_drops_messages_in_flight_and_consumers_continue(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send_many("a", [b"1", b"2"])
        async with client.subscribe("a", group="g", consumer="c") as consumer:
            before = await consumer.pull(10, 2)
            await client.admin.seek("g", "first")
            before[0].ack()
            with pytest.raises(Fenced, match="1 acks"):
                await consumer.flush()
            assert [message.body for message in await consumer.pull(10, 2)] == [b"1", b"2"]

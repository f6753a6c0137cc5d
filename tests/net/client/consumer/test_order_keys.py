"""Order keys in the client: what follows a failed message goes back with it, and no two handlers have one key."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import qmq
from qmq.format.build import make_header
from qmq.net.client.connection import Answer
from qmq.net.client.consumer.pull_request import PullRequest
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.broker_process import broker_process, running_broker
from tests.net.client.consumer.test_message_tags import TWIN, WANTED
from tests.net.client.consumer.test_pull import subscribed
from tests.net.scripted import backs_of, stored_batch
from tests.net.several import several, until


async def send(client: qmq.Client, *bodies: str) -> None:
    """Send messages; the first word of each is its order key."""
    for body in bodies:
        client.send_nowait("a.b", body.encode(), order_key=body.split()[0])
    await client.flush()


async def test_a_loop_skips_what_follows_a_failed_message(tmp_path: Path) -> None:
    found = list[str]()
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, *(f"k {number}" for number in range(8)), "l 0")
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            async with asyncio.timeout(20):
                async for message in consumer:
                    found.append(f"{message.body.decode()} {message.attempt}")
                    if len(found) in (3, 6):
                        await message.nack()
                        continue
                    message.ack()
                    if len([one for one in found if one.startswith("k")]) >= 10 and len(found) >= 11:
                        break
            await consumer.flush()
    keys = [one for one in found if one.startswith("k")]
    handled = list(dict.fromkeys(one.rsplit(" ", 1)[0] for one in keys))
    assert handled == [f"k {number}" for number in range(8)]
    assert [one.split()[1] for one in keys] == sorted(one.split()[1] for one in keys)
    assert sum(int(one.split()[2]) > 1 for one in keys) == len(keys) - 8, "only what failed counts an attempt"


async def test_a_pull_skips_what_follows_a_failed_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, *(f"k {number}" for number in range(4)))
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0.5]) as consumer:
            async with asyncio.timeout(20):
                async for message in consumer:
                    if message.body == b"k 1":  # the loop has taken k 2 with it
                        break
                    message.ack()
                await message.nack()
                found = await consumer.pull(10, timeout=0)
                assert not found
                while len(found) < 3:
                    found += await consumer.pull(10)
            assert [(one.body, one.attempt) for one in found] == [(b"k 1", 2), (b"k 2", 1), (b"k 3", 1)]


async def test_a_pull_skips_what_comes_while_an_earlier_message_is_on_its_way_back() -> None:
    header = make_header(order_key="k")
    async with subscribed(group="g", consumer="c") as s:
        for at, body in enumerate((b"1", b"2")):
            pull = asyncio.ensure_future(s.consumer.pull(1))
            request, _ = await s.peer.pulled()
            answer = stored_batch({"a.b": [body]}, position=5_000 + 1_000 * at, first_sequence=at, header=header)
            s.peer.messages(request, answer)
            if body == b"1":
                (first,) = await pull
                nack = asyncio.ensure_future(first.nack())
                nacked = await s.peer.frame(FrameKind.HAND_BACK)  # and not answered
        returned = await s.peer.frame(FrameKind.HAND_BACK)
        assert [(back.start, back.disposition) for back in backs_of(returned)] == [(1, Disposition.RELEASE)]
        for frame in (nacked, returned):
            s.peer.answer(FrameKind.HANDED_BACK, frame.request)
        await nack
        request, _ = await s.peer.pulled()  # the pull asks for more
        s.peer.messages(request, stored_batch({"a.b": [b"other"]}, position=9_000))
        assert [message.body for message in await pull] == [b"other"]


async def test_a_pull_waits_for_the_release_of_what_came_too_early() -> None:
    """The broker would take back with that what it sends meanwhile, though it knows of the first failure by then."""
    header = make_header(order_key="k")

    def content(body: bytes, at: int) -> bytes:
        return stored_batch({"a.b": [body]}, position=5_000 + 1_000 * at, first_sequence=at, header=header)

    async with subscribed(group="g", consumer="c") as s:
        pull = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, content(b"2", 1))
        (message,) = await pull
        nack = asyncio.ensure_future(message.nack())
        nacked = await s.peer.frame(FrameKind.HAND_BACK)  # and not answered
        pull = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, content(b"1", 0))  # it was sent again, and comes before the other
        returned = await s.peer.frame(FrameKind.HAND_BACK)  # and no pull, which would get what goes back with it
        assert [(back.start, back.disposition) for back in backs_of(returned)] == [(1, Disposition.RELEASE)]
        s.peer.answer(FrameKind.HANDED_BACK, nacked.request)
        await nack
        s.peer.answer(FrameKind.HANDED_BACK, returned.request)
        request, _ = await s.peer.pulled()
        s.peer.messages(request, content(b"1", 0))
        assert [message.body for message in await pull] == [b"1"]


async def test_a_pull_skips_what_an_earlier_one_brought_late_once_it_went_back() -> None:
    """The broker had sent it before the earlier message failed, and took it back then."""
    header = make_header(order_key="k")
    async with subscribed(group="g", consumer="c") as s:
        pull = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"1"]}, position=5_000, header=header))
        (first,) = await pull
        late = asyncio.ensure_future(s.consumer.pull(1))
        withdrawn, _ = await s.peer.pulled()
        late.cancel()
        await s.peer.frame(FrameKind.WITHDRAW)
        nack = asyncio.ensure_future(first.nack())
        nacked = await s.peer.frame(FrameKind.HAND_BACK)
        s.peer.messages(withdrawn, stored_batch({"a.b": [b"2"]}, position=6_000, first_sequence=1, header=header))
        s.peer.answer(FrameKind.HANDED_BACK, nacked.request)
        await nack
        pull = asyncio.ensure_future(s.consumer.pull(1))
        frame = asyncio.ensure_future(s.peer.frame(FrameKind.HAND_BACK))
        await asyncio.wait({pull, frame}, return_when=asyncio.FIRST_COMPLETED)
        assert not pull.done(), "the program gets it too early"
        returned = await frame
        assert [(back.start, back.disposition) for back in backs_of(returned)] == [(1, Disposition.RELEASE)]
        s.peer.answer(FrameKind.HANDED_BACK, returned.request)
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"other"]}, position=9_000))
        assert [message.body for message in await pull] == [b"other"]


async def test_what_came_when_its_pull_was_cancelled_goes_back_with_an_earlier_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a consumer at several brokers does once it has enough messages of others."""
    header = make_header(order_key="k")
    async with subscribed(group="g", consumer="c") as s:
        pull = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"1"]}, position=5_000, header=header))
        (first,) = await pull
        came = PullRequest._answer_came

        def came_and_cancelled(self: PullRequest, answer: Answer | qmq.QmqError) -> None:
            came(self, answer)
            cancelled.cancel()

        monkeypatch.setattr(PullRequest, "_answer_came", came_and_cancelled)
        cancelled = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        nack = asyncio.ensure_future(first.nack())
        nacked = await s.peer.frame(FrameKind.HAND_BACK)
        s.peer.messages(request, stored_batch({"a.b": [b"2"]}, position=6_000, first_sequence=1, header=header))
        s.peer.answer(FrameKind.HANDED_BACK, nacked.request)
        await nack
        monkeypatch.undo()
        assert cancelled.cancelled()
        pull = asyncio.ensure_future(s.consumer.pull(1))
        frame = asyncio.ensure_future(s.peer.frame(FrameKind.HAND_BACK))
        await asyncio.wait({pull, frame}, return_when=asyncio.FIRST_COMPLETED)
        assert not pull.done(), "the program gets it too early"
        returned = await frame
        assert [(back.start, back.disposition) for back in backs_of(returned)] == [(1, Disposition.RELEASE)]
        s.peer.answer(FrameKind.HANDED_BACK, returned.request)
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"other"]}, position=9_000))
        assert [message.body for message in await pull] == [b"other"]


async def test_a_pull_waits_for_a_nack_whose_answer_was_lost_with_the_connection() -> None:
    """The broker may have handed the message out again by then: nothing tells the client what is newer."""
    header = make_header(order_key="k")
    async with subscribed(group="g", consumer="c") as s:
        pull = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"1"]}, position=5_000, header=header))
        (first,) = await pull
        nack = asyncio.ensure_future(first.nack())
        await s.peer.frame(FrameKind.HAND_BACK)
        s.peer.drop()
        pull = asyncio.ensure_future(s.consumer.pull(1))
        peer = await s.broker.peer()
        await peer.subscribed()
        frame = await peer.any_frame()
        assert frame is not None
        assert frame.kind == FrameKind.HAND_BACK
        peer.answer(FrameKind.HANDED_BACK, frame.request, payload=b"\0\0\0\0")
        await nack
        request, _ = await peer.pulled()
        again = stored_batch({"a.b": [b"1"]}, position=5_000, header=header)
        peer.answer_pull(request, again, [(1, 1, 2)])
        (message,) = await pull
        assert (message.attempt, message.in_flight) == (2, True)


async def test_what_follows_a_dead_message_does_not_wait_for_the_delay_of_its_nack(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0", "k 1")
        async with client.subscribe("a.", group="g", start="first", max_attempts=1) as consumer:
            first, _ = await consumer.pull(2, min_count=2, timeout=20)
            await first.nack(delay=60)
            (again,) = await consumer.pull(1, timeout=20)
            assert (again.body, again.attempt) == (b"k 1", 1)


async def test_what_the_broker_sent_before_a_message_died_comes_again_before_newer_ones(tmp_path: Path) -> None:
    """The client gives it back, since it does not know that the message is dead."""
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0", "k 1", "k 2")
        async with client.subscribe("a.", group="g", start="first", max_attempts=1) as consumer:
            (first,) = await consumer.pull(1, timeout=20)
            nack = asyncio.ensure_future(first.nack())
            for number in (1, 2):
                (message,) = await consumer.pull(1, timeout=20)
                assert message.body == b"k %d" % number
                assert message.in_flight
                message.ack()
            await nack
            await consumer.flush()


async def test_handlers_that_run_beside_each_other_have_different_keys(tmp_path: Path) -> None:
    busy, handled, failed = set[str](), list[str](), set[str]()

    async def handle(message: qmq.Message) -> None:
        body = message.body.decode()
        key = body.split()[0]
        assert key not in busy
        busy.add(key)
        try:
            await asyncio.sleep(0.001)
            if body.endswith(" 3") and body not in failed:
                failed.add(body)
                raise ValueError("the first time")
            handled.append(body)
        finally:
            busy.remove(key)
        if len(handled) == 40:
            consumer.stop()

    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, *(f"{key} {number}" for number in range(10) for key in "klmn"))
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            async with asyncio.timeout(30):
                await consumer.run(handle, concurrency=8)
    for key in "klmn":
        assert [body for body in handled if body[0] == key] == [f"{key} {number}" for number in range(10)]


def test_threads_have_different_keys(tmp_path: Path) -> None:
    from qmq.testing import broker

    busy, handled, lock = set[str](), list[str](), threading.Lock()

    def handle(message: qmq.SyncMessage) -> None:
        body = message.body.decode()
        with lock:
            assert body[0] not in busy
            busy.add(body[0])
        if body == "k 3" and message.attempt == 1:
            with lock:
                busy.remove(body[0])
            raise ValueError("the first time")
        with lock:
            busy.remove(body[0])
            handled.append(body)
            if len(handled) == 20:
                consumer.stop()

    with broker() as running, qmq.connect_sync(running.url) as client:
        for number in range(10):
            for key in "kl":
                client.send_nowait("a.b", f"{key} {number}".encode(), order_key=key)
        client.flush()
        with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            consumer.run(handle, concurrency=4)
    for key in "kl":
        assert [body for body in handled if body[0] == key] == [f"{key} {number}" for number in range(10)]


async def test_a_program_with_a_pull_loop_sees_what_was_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qmq.client")
    handled = list[bytes]()
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0", "k 1", "l 0", "k 2", "k 3")
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0.05]) as consumer:
            messages = await consumer.pull(5, min_count=5, timeout=20)
            assert all(message.in_flight for message in messages)
            by_body = {message.body: message for message in messages}
            await by_body[b"k 0"].nack()
            assert [body for body, message in by_body.items() if message.in_flight] == [b"l 0"]
            with pytest.raises(qmq.Fenced, match="an earlier one of its order key failed"):
                await by_body[b"k 1"].ack()
            await by_body[b"k 2"].nack("1h", "too late")
            await by_body[b"k 3"].reject("too late")
            await by_body[b"k 3"].release()
            async with by_body[b"k 2"]:
                pass
            by_body[b"k 3"].ack()
            await by_body[b"l 0"].ack()
            assert not by_body[b"l 0"].in_flight
            with pytest.raises(qmq.Fenced, match="3 acks of consumer"):
                await consumer.flush()
            while len(handled) < 4:
                for message in await consumer.pull(5, timeout=20):
                    if message.in_flight:
                        await message.ack()
                        handled.append(message.body)
        assert handled == [b"k 0", b"k 1", b"k 2", b"k 3"]
        (group,) = await client.admin.groups("g")
        assert (group.dead, group.in_flight, group.ready, group.in_retry) == (0, 0, 0, 0)
    texts = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, text in texts if "changes nothing" in text] == ["INFO", "WARNING"]


async def test_of_a_batch_what_was_taken_back_keeps_that(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0", "k 1", "l 0", "k 2")
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            batch = await consumer.pull_batch(4, min_count=4, timeout=20)
            await batch[batch.bodies.index(b"k 0")].nack()
            assert [message.body for message in batch if message.in_flight] == [b"l 0"]
            await batch.ack()
            await consumer.flush()
            found = list[bytes]()
            while len(found) < 3:
                async for message in consumer:
                    message.ack()
                    found.append(message.body)
                    break
            assert found == [b"k 0", b"k 1", b"k 2"]


def test_a_sync_program_sees_what_was_taken_back(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker, qmq.connect_sync(broker.url) as client:
        for body in ("k 0", "k 1", "l 0"):
            client.send_nowait("a.b", body.encode(), order_key=body[0])
        client.flush()
        with client.subscribe("a.", group="g", start="first", retry_delays=[0]) as consumer:
            pulled = consumer.pull(3, min_count=3, timeout=20)
            first, second, other = sorted(pulled, key=lambda message: message.body)
            first.nack()
            assert [message.in_flight for message in (first, second, other)] == [False, False, True]
            with pytest.raises(qmq.Fenced, match="an earlier one of its order key failed"):
                second.ack(wait=True)
            second.nack()
            second.release(wait=True)
            second.ack()
            other.ack()
            with pytest.raises(qmq.Fenced, match="2 acks of consumer"):
                consumer.flush()
            bodies = list[bytes]()
            while len(bodies) < 2:
                for message in consumer.pull(3, timeout=20):
                    message.ack(wait=True)
                    bodies.append(message.body)
            assert bodies == [b"k 0", b"k 1"]


async def test_where_there_are_no_dispositions_a_message_may_always_be_handled(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0")
        async with client.subscribe("a.", start="first") as consumer:
            (message,) = await consumer.pull(timeout=20)
            assert message.in_flight
            message.ack()
            assert message.in_flight


@pytest.mark.parametrize("gives_back", ["nack", "release", "leave"])
async def test_an_ack_counts_that_came_before_an_earlier_message_failed(tmp_path: Path, gives_back: str) -> None:
    """It waits when the earlier message of its order key goes back; the broker gets it first all the same."""
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await send(client, "k 0", "k 1", "l 0")
        with suppress(ValueError):
            async with client.subscribe("a.", group="g", start="first", retry_delays=[60]) as consumer:
                several = await consumer.pull(3, min_count=3, timeout=20)
                first, second, third = sorted(several, key=lambda message: message.body)
                second.ack()
                third.ack()
                if gives_back == "nack":
                    await first.nack()
                elif gives_back == "release":
                    await first.release(after=60)
                else:
                    raise ValueError
                await consumer.flush()
        (group,) = await client.admin.groups("g")
        assert (group.in_flight, group.in_retry) == (0, 1)


async def test_what_was_taken_back_without_a_tag_of_the_group_is_no_refused_ack(tmp_path: Path) -> None:
    """The broker sent it before it knew that an earlier one of its order key goes back; the program does not get it."""
    async with running_broker(tmp_path / "data") as url, qmq.connect(url) as client:
        await client.send("a.b", b"0", order_key="k", tags=[WANTED])
        await client.send("a.b", b"1", order_key="k", tags=[TWIN])
        async with client.subscribe("a.", group="g", start="first", retry_delays=[0], tags=[WANTED]) as consumer:
            (message,) = await consumer.pull(1, timeout=20)
            nack = asyncio.ensure_future(message.nack())
            (again,) = await consumer.pull(1, timeout=20)
            await nack
            again.ack()
            await consumer.flush()


async def test_an_ack_reaches_the_broker_before_what_a_cancelled_handler_releases(tmp_path: Path) -> None:
    """The second message goes back with the first; the broker would take back the third behind it, which was acked."""
    async with several(tmp_path, 1) as brokers, qmq.connect(brokers.url) as client:
        await client.send_many("a", [b"1", b"2", b"3"], order_keys=["k"] * 3)
        async with client.subscribe("a", group="g", retry_delays=[0]) as consumer:
            first, _, third = await consumer.pull(3, 3)
            third.ack()
            with suppress(TimeoutError):
                async with asyncio.timeout(0), first:
                    await asyncio.sleep(30)
            sender = third._run.in_flight.owner.nack_sender
            await until(lambda: not sender._unanswered, "the broker has the release")
            await consumer.flush()  # raises if the ack was refused
            messages = await consumer.pull(3, 2, timeout=30)
            assert [message.body for message in messages] == [b"1", b"2"]

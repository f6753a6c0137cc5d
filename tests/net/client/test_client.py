"""The asyncio client against a broker that the test plays, and against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any, Literal

import msgpack
import pytest

import qmq
from qmq.errors import (
    BadBatch,
    InvalidName,
    InvalidOption,
    MessageTooLarge,
    QueueFull,
    StorageFull,
    TooManySubjects,
    UnsupportedVersion,
)
from qmq.format.layout import HAS_KEY_HASH, HAS_TAGS
from qmq.format.pieces import read_answer
from qmq.net.client import client as client_module
from qmq.net.client.admin.results import SubjectInfo
from qmq.net.client.consumer.message import each_message
from qmq.net.client.options import producer_id_of
from qmq.net.protocol import frames
from qmq.net.protocol.frames import Frame, FrameKind
from tests.broker_process import broker_process, running_broker
from tests.net.frames import on_uvloop
from tests.net.scripted import STORE, Peer, scripted_broker


def messages_in(frame: Frame) -> list[qmq.Message]:
    return list(each_message(read_answer(frame.payload)[0]))


async def answer_batches(peer: Peer) -> None:
    """Acknowledge every batch from now on."""
    while True:
        frame, _ = await peer.batch()
        peer.stored(frame)


# --- sends -----------------------------------------------------------------------------------------------------------


async def test_sends_in_flight_together_go_as_one_batch() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        calls = [client.send(f"s{number % 3}", b"%d" % number) for number in range(9)]
        sending = asyncio.gather(*calls, client.send_many("s1", [b"many", b"more"]))
        peer = await broker.peer()
        frame, batch = await peer.batch(flush=True)
        assert batch.names == ("s0", "s1", "s2")
        assert [message.body for message in messages_in(frame)] == [
            *(b"0", b"3", b"6"), *(b"1", b"4", b"7", b"many", b"more"), *(b"2", b"5", b"8"),
        ]  # fmt: skip
        peer.stored(frame, position=500, first_sequence=10)
        *receipts, many = await sending
        assert isinstance(many, qmq.Receipts)
        assert [receipt.sequence for receipt in many] == [1_013, 1_014]
        singles = [receipt for receipt in receipts if isinstance(receipt, qmq.Receipt)]
        assert [receipt.sequence for receipt in singles[:3]] == [10, 1_010, 2_010]
        assert [receipt.id[-16:] for receipt in singles[:3]] == [f"{at:016x}" for at in (500, 503, 508)]
        assert many[0].id.startswith(STORE.hex())


async def test_a_send_while_nothing_is_on_its_way_is_written_at_once() -> None:
    """The others of the same turn go as one batch."""
    async with scripted_broker() as broker, qmq.connect(broker.url, durability="append") as client:
        first = asyncio.ensure_future(client.send("a", b"0"))
        peer = await broker.peer()
        peer.stored((await peer.batch())[0])
        await first
        sending = asyncio.gather(*(client.send("a", b"%d" % number) for number in range(1, 10)))
        frame, _ = await peer.batch(flush=False)
        assert [message.body for message in messages_in(frame)] == [b"1"]
        others, _ = await peer.batch()
        assert [message.body for message in messages_in(others)] == [b"%d" % number for number in range(2, 10)]
        peer.stored(frame, position=500, first_sequence=10)
        peer.stored(others, position=900, first_sequence=11)
        receipts = await sending
        assert [receipt.sequence for receipt in receipts] == list(range(10, 19))
        assert [receipt.id[-16:] for receipt in receipts[:2]] == [f"{at:016x}" for at in (500, 900)]


async def test_a_send_that_was_written_at_once_is_sent_again_on_the_next_connection() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        first = asyncio.ensure_future(client.send("a", b"0"))
        peer = await broker.peer()
        peer.stored((await peer.batch())[0])
        await first
        sending = asyncio.ensure_future(client.send("a", b"1"))
        frame, _ = await peer.batch(flush=True)
        before = bytes(frame.payload)
        peer.drop()
        peer = await broker.peer()
        frame, _ = await peer.batch(flush=True)
        assert bytes(frame.payload) == before
        peer.stored(frame, first_sequence=7)
        assert (await sending).sequence == 7


async def test_everything_of_a_message_travels() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        sending = asyncio.ensure_future(
            client.send("a.b", bytearray(b"body"), key="order-1", tags=["vip", "eu"], properties={"price": "125"})
        )
        peer = await broker.peer()
        frame, batch = await peer.batch()
        assert batch.header.flags == HAS_TAGS | HAS_KEY_HASH
        (message,) = messages_in(frame)
        assert (message.subject, message.body, message.key) == ("a.b", b"body", "order-1")
        assert (message.tags, message.properties) == (("vip", "eu"), {"price": "125"})
        peer.stored(frame)
        assert (await sending).subject == "a.b"


async def test_durability_of_the_client_and_of_the_call() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, durability="append") as client:
        peer = await broker.peer()
        choices: list[tuple[Literal["flush", "append"] | None, bool]] = [
            (None, False),
            ("flush", True),
            ("append", False),
        ]
        for durability, flush in choices:
            for call in (
                lambda: client.send("a", b"x", durability=durability),  # noqa: B023
                lambda: client.send_many("a", [b"x"], durability=durability),  # noqa: B023
            ):
                sending = asyncio.ensure_future(call())
                frame, _ = await peer.batch(flush=flush)
                peer.stored(frame)
                await sending
            client.send_nowait("a", b"x", durability=durability)
            frame, _ = await peer.batch(flush=flush)
            peer.stored(frame)


async def test_linger_gathers_over_turns() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, linger=0.03) as client:
        peer = await broker.peer()
        for number in range(3):
            client.send_nowait("a", b"%d" % number)
            await asyncio.sleep(0)
        frame, batch = await peer.batch()
        assert batch.header.messages == 3
        peer.stored(frame)


async def test_flush_does_not_linger() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, linger=20) as client:
        peer = await broker.peer()
        client.send_nowait("a", b"1")
        flushing = asyncio.ensure_future(client.flush())
        frame, _ = await peer.batch()
        peer.stored(frame)
        await flushing


async def test_a_large_send_many_goes_in_parts_while_the_broker_works() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        bodies = [b"%07d" % number + bytes(1_000) for number in range(5_000)]
        sending = asyncio.ensure_future(client.send_many("a", bodies))
        peer = await broker.peer()
        came: list[bytes] = []
        while len(came) < len(bodies):
            frame, _ = await peer.batch()
            assert len(frame.payload) <= 1 << 20
            peer.stored(frame, position=10_000 * len(came), first_sequence=len(came))
            came += [message.body for message in messages_in(frame)]
        assert came == bodies
        receipts = await sending
        assert [receipt.sequence for receipt in receipts] == list(range(5_000))


async def test_producer_sequences_follow_one_another() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        producers, sequence = set(), 0
        for count in (1, 3, 2):
            sending = asyncio.ensure_future(client.send_many("a", [b"x"] * count))
            frame, batch = await peer.batch()
            assert batch.header.producer_sequence == sequence
            producers.add(batch.header.producer_id)
            sequence += count
            peer.stored(frame)
            await sending
        assert len(producers) == 1


async def test_producer_ids_are_random_by_client() -> None:
    ids = set()
    async with scripted_broker() as broker:
        for _ in range(2):
            async with qmq.connect(broker.url) as client:
                client.send_nowait("a", b"x")
                peer = await broker.peer()
                frame, batch = await peer.batch()
                ids.add(batch.header.producer_id)
                peer.stored(frame)
    assert len(ids) == 2


async def test_a_named_producer_goes_on_with_its_sequence() -> None:
    async with scripted_broker() as broker:

        async def play() -> None:
            peer = await broker.peer()
            frame = await peer.frame(FrameKind.CLAIM)
            assert bytes(frame.payload[:16]) == producer_id_of("job-7")
            peer.answer(FrameKind.CLAIMED, frame.request)
            frame = await peer.frame(FrameKind.LAST_SEQUENCE)
            assert bytes(frame.payload) == producer_id_of("job-7")
            peer.answer(FrameKind.LAST_SEQUENCE_IS, frame.request, {"sequence": 41})
            frame, batch = await peer.batch()
            assert (batch.header.producer_id, batch.header.producer_sequence) == (producer_id_of("job-7"), 42)
            peer.stored(frame)

        # The question is asked before anybody may send, so the test's broker has to greet by itself.
        greeted = broker.greet

        def greet(peer: Peer, frame: Frame) -> None:
            greeted(peer, frame)

        broker.greet = greet  # type: ignore[method-assign]
        playing = asyncio.ensure_future(play())
        async with qmq.connect(broker.url, producer="job-7") as client:
            await client.send("a", b"x")
        await playing


@pytest.mark.parametrize(
    "bad", [
        {"durability": "maybe"}, {"key": 7}, {"key": ""}, {"keys": ["a", ""]}, {"keys": ["k" * 1_025]},
        {"keys": [f"{number}" for number in range(17)]}, {"keys": "k"}, {"keys": {"k"}}, {"key": "k", "keys": ["k"]},
        {"key": "k", "keys": []}, {"tags": "vip"}, {"properties": {"a": 1}},
    ],
)  # fmt: skip
async def test_bad_options_are_refused_at_the_call(bad: dict[str, Any]) -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        with pytest.raises(InvalidOption):
            await client.send("a", b"x", **bad)
        with pytest.raises(InvalidOption):
            client.send_nowait("a", b"x", **bad)
        await client.flush()
        assert not peer.has_frame()


async def test_bad_messages_are_refused_at_the_call() -> None:
    async with scripted_broker(max_message_bytes=5_000) as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        with pytest.raises(InvalidName):
            await client.send("a..b", b"x")
        with pytest.raises(MessageTooLarge, match="5000"):
            await client.send("a", bytes(5_001))
        with pytest.raises(MessageTooLarge):
            await client.send_many("a", [b"x", bytes(5_001)])
        with pytest.raises(MessageTooLarge):
            client.send_nowait("a", bytes(5_001))
        with pytest.raises(TypeError, match="encode"):
            await client.send("a", "text")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await client.send_many("a", ["text"])  # type: ignore[list-item]
        with pytest.raises(qmq.UsageError, match="needs a body"):
            client.send_nowait("a", None)
        assert list(await client.send_many("a", [])) == []
        await client.flush()
        assert not peer.has_frame()


# --- failures --------------------------------------------------------------------------------------------------------


async def test_a_refused_send_says_why() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        sending = asyncio.ensure_future(client.send("a", b"x", key="k"))
        frame, _ = await peer.batch()
        peer.refuse(frame.request, TooManySubjects("nonsense"))
        with pytest.raises(qmq.SendFailed, match="nonsense") as caught:
            await sending
        (failure,) = caught.value.failures
        assert (failure.subject, failure.key, failure.outcome) == ("a", "k", "refused")
        assert type(failure.error) is TooManySubjects
        await client.flush()  # the failure was reported before


async def test_bytes_that_are_called_bad_are_sent_once_more() -> None:
    """They may have been damaged on the way."""
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        for answer in ("stored", "refused"):
            sending = asyncio.ensure_future(client.send("a", b"x"))
            frame, _ = await peer.batch()
            peer.refuse(frame.request, BadBatch("nonsense"))
            again, _ = await peer.batch()
            assert again.payload == frame.payload
            if answer == "stored":
                peer.stored(again)
                await sending
            else:
                peer.refuse(again.request, BadBatch("nonsense"))
                with pytest.raises(qmq.SendFailed, match="nonsense"):
                    await sending


async def test_a_refusal_that_can_pass_is_tried_again() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        frame, batch = await peer.batch()
        peer.refuse(frame.request, StorageFull("full"))
        frame, _ = await peer.batch()
        peer.refuse(frame.request, StorageFull("full"))
        again, same = await peer.batch()
        assert again.payload == frame.payload
        assert same.header.producer_sequence == batch.header.producer_sequence
        peer.stored(again)
        await sending


async def test_send_timeout_ends_the_tries_with_the_last_cause() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, send_timeout=3) as client:
        peer = await broker.peer()

        async def refuse() -> None:
            while True:
                frame, _ = await peer.batch()
                peer.refuse(frame.request, StorageFull("no room on /data"))

        refusing = asyncio.ensure_future(refuse())
        with pytest.raises(qmq.SendFailed, match=r"3 s, last: no room on /data") as caught:
            await client.send("a", b"x")
        assert type(caught.value) is qmq.SendFailed
        refusing.cancel()


async def test_an_unanswered_send_is_unknown_and_does_not_stop_later_ones() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, send_timeout=3) as client:
        peer = await broker.peer()
        with pytest.raises(qmq.SendUnknown):
            await client.send("a", b"never answered")
        await peer.batch()
        sending = asyncio.ensure_future(client.send("a", b"x"))
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending


async def test_flush_reports_each_failure_once() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        tickets = [client.send_nowait("a", b"%d" % number, key=f"k{number}") for number in range(3)]
        good = client.send_nowait("b", b"x", durability="append")
        assert good not in tickets
        frame, _ = await peer.batch(flush=True)
        peer.refuse(frame.request, TooManySubjects("no"))
        frame, _ = await peer.batch(flush=False)
        peer.stored(frame)
        with pytest.raises(qmq.SendFailed, match="3 messages") as caught:
            await client.flush()
        assert [(failure.ticket, failure.key) for failure in caught.value.failures] == [
            (ticket, f"k{number}") for number, ticket in enumerate(tickets)
        ]
        await client.flush()


async def test_closing_flushes_then_raises(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_broker() as broker, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(qmq.connect(broker.url))
        peer = await broker.peer()
        client.send_nowait("a", b"x")
        closing = asyncio.ensure_future(stack.aclose())
        frame, _ = await peer.batch()
        peer.refuse(frame.request, TooManySubjects("no"))
        with pytest.raises(qmq.SendFailed, match="1 message"):
            await closing
        await peer.gone()


async def test_an_error_in_the_block_is_not_replaced_by_one_of_closing(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_broker() as broker:
        playing = asyncio.ensure_future(_refuse_one(broker))

        async def use() -> None:
            async with qmq.connect(broker.url) as client:
                client.send_nowait("a", b"x")
                raise KeyError("mine")

        with caplog.at_level(logging.ERROR, "qmq.client"), pytest.raises(KeyError, match="mine"):
            await use()
        assert "while the client closed" in caplog.text
        await playing


async def _refuse_one(broker: Any) -> None:
    peer = await broker.peer()
    frame, _ = await peer.batch()
    peer.refuse(frame.request, TooManySubjects("no"))


async def test_a_cancelled_block_does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CANCELLED_FLUSH", 0.02)
    async with scripted_broker() as broker:
        inside = asyncio.Event()

        async def use() -> None:
            async with qmq.connect(broker.url) as client:
                client.send_nowait("a", b"x")
                inside.set()
                await asyncio.Event().wait()

        using = asyncio.ensure_future(use())
        await inside.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using


async def test_a_cancelled_send_leaves_the_others_alone() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        first, second = (asyncio.ensure_future(client.send("a", body)) for body in (b"1", b"2"))
        peer = await broker.peer()
        frame, _ = await peer.batch()
        first.cancel()
        await asyncio.sleep(0)
        peer.stored(frame, first_sequence=3)
        assert (await second).sequence == 4
        assert first.cancelled()


async def test_the_queue_fills_and_drains() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url, max_queued_bytes=100_000) as client:
        peer = await broker.peer()
        await client.drain()
        with pytest.raises(QueueFull):  # noqa: PT012  # the one that does not fit
            for _ in range(1_000):
                client.send_nowait("a", bytes(1_000))
        draining = asyncio.ensure_future(client.drain())
        frame, _ = await peer.batch()
        assert not draining.done()
        peer.stored(frame)
        await draining
        client.send_nowait("a", bytes(1_000))
        answering = asyncio.ensure_future(answer_batches(peer))
        await client.flush()
        answering.cancel()


async def test_draining_in_a_loop_lets_batches_go_out_on_the_way() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        answering = asyncio.ensure_future(answer_batches(peer))
        for _ in range(8_000):
            client.send_nowait("a", bytes(1_000))
            await client.drain()
        assert not client._accumulator.has_sealed()
        assert client._accumulator.queued_bytes > 0
        await client.flush()
        answering.cancel()


async def test_drain_does_not_wait_for_messages_that_can_never_be_sent() -> None:
    async with scripted_broker() as broker:
        client = qmq.connect(broker.url, max_queued_bytes=10_000)
        await client.__aenter__()
        peer = await broker.peer()
        for _ in range(9):
            client.send_nowait("a", bytes(1_000))
        draining = asyncio.ensure_future(client.drain())
        await peer.batch()
        broker.refusal = UnsupportedVersion("speak 2")
        peer.drop()
        await draining
        with pytest.raises(UnsupportedVersion):
            client.send_nowait("a", b"")
        with pytest.raises(UnsupportedVersion):
            await client.__aexit__(None, None, None)


# --- lists -----------------------------------------------------------------------------------------------------------


async def test_subjects_are_listed_page_by_page() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()

        async def play() -> None:
            for after, rows, following in (
                (0, [["a.x", 0, 5, 5, 0, 0, 0, 0]], 17),
                (17, [["a.y", 2, 9, 6, 1, 3, 2, 1]], None),
            ):
                frame = await peer.frame(FrameKind.SUBJECTS)
                meta = frames.unpack_meta(frame.meta)
                assert (meta["prefix"], meta["after"]) == ("a.", after)
                payload = msgpack.packb({"rows": rows, "after": following})
                peer.answer(FrameKind.SUBJECT_LIST, frame.request, payload=payload)

        playing = asyncio.ensure_future(play())
        where = broker.url.removeprefix("qmq://")
        assert [info async for info in client.subjects("a.")] == [
            SubjectInfo("a.x", 0, 5, 5, 0, where),
            SubjectInfo("a.y", 2, 9, 6, 1, where, high=3, low=2, ordered=1),
        ]
        await playing
        with pytest.raises(InvalidName):
            await anext(client.subjects("a..b"))


# --- forks -----------------------------------------------------------------------------------------------------------


async def test_in_a_fork_the_client_is_the_parents() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        client.send_nowait("a", b"1")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                client.send_nowait("a", b"2")
            except qmq.UsageError as error:
                code = 0 if "async with" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
        frame, batch = await peer.batch()
        assert batch.header.messages == 1
        peer.stored(frame)
        await client.flush()


# --- a real broker ---------------------------------------------------------------------------------------------------


async def exercise(url: str) -> None:
    """Sends of every kind, and everything comes out once, in order."""
    async with qmq.connect(url, durability="append") as client:
        bodies = [b"%d" % number for number in range(25_000)]
        receipts = await client.send_many("many", bodies)
        assert [receipts[0].sequence, receipts[-1].sequence] == [0, 24_999]
        singles = await asyncio.gather(*(client.send("single", b"%d" % number, key="k") for number in range(500)))
        assert [receipt.sequence for receipt in singles] == list(range(500))
        for number in range(5_000):
            client.send_nowait(f"nowait.{number % 7}", b"%d" % number)
            await client.drain()
        await client.flush()
        assert {info.name: info.messages async for info in client.subjects("")} == {
            "many": 25_000,
            "single": 500,
            **{f"nowait.{k}": len(range(k, 5_000, 7)) for k in range(7)},
        }
        assert await client.last_sequence() == 30_499
        came: dict[str, list[bytes]] = {}
        ids: dict[str, str] = {}
        async with client.subscribe("", start="first") as consumer:
            while len(ids) < 30_500:
                for message in await consumer.pull(4_000):
                    came.setdefault(message.subject, []).append(message.body)
                    ids[message.id] = message.subject
        assert came["many"] == bodies
        assert came["single"] == bodies[:500]
        for k in range(7):
            assert came[f"nowait.{k}"] == bodies[k:5_000:7]
        assert {receipt.id for receipt in [*receipts, *singles]} <= ids.keys()


async def test_everything_goes_through_a_real_broker(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", partitions=2) as url:
        await exercise(url)


@on_uvloop
async def test_the_same_on_uvloop(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url:
        await exercise(url)


async def test_a_job_resumes_where_it_was(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data") as url:
        for first in (0, 3):
            async with qmq.connect(url, producer="job-7") as client:
                last = await client.last_sequence()
                assert last == (None if first == 0 else first - 1)
                for number in range(first, first + 3):
                    await client.send("a", b"%d" % number)
        async with qmq.connect(url) as client:
            assert await client.last_sequence("job-7") == 5
            assert await client.last_sequence("job-8") is None
            async with client.subscribe("a", start="first") as consumer:
                bodies: list[bytes] = []
                while len(bodies) < 6:
                    bodies += [message.body for message in await consumer.pull()]
        assert bodies == [b"%d" % number for number in range(6)]


async def test_a_broker_killed_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker:
        async with qmq.connect(broker.url, durability="append") as client:
            acknowledged: list[bytes] = []
            kills = asyncio.Semaphore(0)

            async def send(name: str) -> None:
                for number in range(100):
                    body = f"{name} {number}".encode()
                    await client.send(f"load.{name}", body)
                    acknowledged.append(body)
                    if len(acknowledged) in (500, 1_000, 1_500):
                        kills.release()

            sending = [asyncio.ensure_future(send(f"s{k}")) for k in range(20)]
            for _ in range(3):
                async with asyncio.timeout(60):
                    await kills.acquire()
                broker.kill()  # with up to 20 sends in flight
                broker.start()
            await asyncio.gather(*sending)
            assert len(acknowledged) == 2_000
            came: list[bytes] = []
            async with client.subscribe("load.", start="first") as consumer:
                while batch := await consumer.pull_batch(timeout=0):
                    came += batch.bodies
        assert sorted(came) == sorted(acknowledged)


@pytest.mark.parametrize("guilty", ["new subject", "too late"])
async def test_one_refused_message_takes_no_others_with_it(tmp_path: Path, guilty: str) -> None:
    async with running_broker(tmp_path / "data", max_subjects=1_001) as url, qmq.connect(url) as client:
        await client.send("s.1000", b"first")
        calls: list[Any] = [client.send(f"s.{number}", b"x", delay=0.001) for number in range(1_000)]
        if guilty == "new subject":
            calls.insert(500, client.send("new.one", b"x", delay=0.001))
            calls.insert(700, client.send("new.two", b"x"))
        else:
            calls.insert(500, client.send("s.0", b"x", deliver_at=time.time() + 731.5 * 86_400))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [error for error in answers if isinstance(error, Exception)]
        assert len(answers) - len(failed) == 1_000
        for error in failed:
            assert isinstance(error, qmq.SendFailed)
            assert not isinstance(error, qmq.SendUnknown)
            assert isinstance(error.__cause__, TooManySubjects if guilty == "new subject" else InvalidOption)
        async with client.subscribe("", group="g") as consumer:
            got = 0
            while got < 1_001:
                got += len(await consumer.pull(10_000, timeout=20))
            assert await consumer.pull(10, timeout=0.05) == []

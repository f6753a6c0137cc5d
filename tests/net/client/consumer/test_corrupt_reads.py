"""Damaged parts of an answer, against a broker that the test scripts: reported, and pulled again."""

from __future__ import annotations

import asyncio
import logging

import pytest

import qmq
from qmq.errors import Overloaded, QmqError, UnknownSubscription
from qmq.format.build import MessageHeader
from qmq.format.pieces import AnswerDamage, read_answer
from qmq.net.client.consumer.corrupt_reads import sequences_of
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.net.client.consumer.test_pull import batch, bodies, subscribed
from tests.net.scripted import Peer, ScriptedBroker, backs_of, stored_batch


@pytest.fixture(autouse=True)
def _connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.broker_link.GOOD_AFTER", 0.0)  # else the waits between connections grow


async def pulled(peer: Peer, *, checks: bool, expected: int | None = None) -> int:
    """Take a PULL; return its request."""
    frame = await peer.frame(FrameKind.PULL)
    assert frame.flags == (frames.CHECK if checks else 0)
    if expected is not None:
        assert frames.PULL.unpack(frame.payload)[-1] == expected
    return frame.request


async def reported(peer: Peer, place: tuple[int, int, int, int], found: object) -> None:
    """Take a REPORT of (position, first, messages, partition), and answer it."""
    frame = await peer.frame(FrameKind.REPORT)
    assert frames.REPORT.unpack(frame.payload) == place
    assert frames.unpack_meta(frame.meta)["reason"]
    peer.answer(FrameKind.REPORTED, frame.request, {"found": found})


async def subscribed_again(peer: Peer, broker: ScriptedBroker) -> Peer:
    """Wait until the client has ended its connection and subscribed on another."""
    await peer.gone()
    peer = await broker.peer()
    await peer.subscribed()
    return peer


def again(peer: Peer, request: int, *batches: bytes) -> None:
    """Give a consumer of a group the messages of its first pull again."""
    peer.next_sequence = 0
    peer.messages(request, *batches)


def last_flipped(data: bytes) -> bytes:
    """Return *data* with a bit of its last byte flipped."""
    return data[:-1] + bytes([data[-1] ^ 1])


def header_flipped(data: bytes) -> bytes:
    """Return *data* with a bit of its position flipped."""
    return data[:24] + bytes([data[24] ^ 1]) + data[25:]


UNDECODABLE = stored_batch({"a.b": [b"1"]}, header=MessageHeader(b"\xc1", 0, 0))


# --- groups ----------------------------------------------------------------------------------------------------------


async def test_a_message_damaged_on_the_way_is_pulled_again() -> None:
    sound = batch(b"1", b"2", at=1)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), batch(b"0"), last_flipped(sound), count=3)
        await reported(s.peer, (6_000, 1, 1, 0), "sound")
        again(s.peer, await pulled(s.peer, checks=True, expected=0), batch(b"0"), sound)
        messages = await pulling
        assert bodies(messages) == [b"0", b"1", b"2"]
        assert [message.attempt for message in messages] == [1, 1, 1]
        assert s.consumer.damaged == 0
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False, expected=3), batch(b"3", at=2))
        assert bodies(await pulling) == [b"3"]


async def test_a_message_bad_on_disk_is_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    told = list[QmqError]()
    async with subscribed(group="g") as s:
        s.consumer.on_unreadable = told.append
        with caplog.at_level(logging.WARNING, "qmq.client"):
            pulling = asyncio.ensure_future(s.consumer.pull())
            rotten = [last_flipped(batch(b"rotten", at=at)) for at in (1, 2)]
            s.peer.messages(await pulled(s.peer, checks=False), batch(b"good"), *rotten, count=3)
            await reported(s.peer, (6_000, 0, 1, 0), "bad")
            await reported(s.peer, (7_000, 0, 1, 0), "bad")
            again(s.peer, await pulled(s.peer, checks=True, expected=0), batch(b"good"))
            assert bodies(await pulling) == [b"good"]
        assert s.consumer.damaged == len(told) == 2
        assert all(isinstance(error, qmq.BadBatch) for error in told)
        (record,) = caplog.records  # at a limited rate
        assert "position 6000 of partition 0" in record.getMessage()


async def test_a_bad_header_ends_the_connection() -> None:
    """The frame may have announced a wrong size, so the bytes after it cannot be parsed."""
    sound = batch(b"1", at=1)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request = await pulled(s.peer, checks=False)
        s.peer.messages(request, batch(b"0"), header_flipped(sound), batch(b"2", at=2), count=3)
        peer = await subscribed_again(s.peer, s.broker)
        again(peer, await pulled(peer, checks=True, expected=0), batch(b"0"), sound, batch(b"2", at=2))
        assert bodies(await pulling) == [b"0", b"1", b"2"]
        assert s.consumer.damaged == 0


async def test_a_report_that_gets_no_answer_is_made_again_with_the_pull() -> None:
    sound = batch(b"1")
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), last_flipped(sound), count=1)
        frame = await s.peer.frame(FrameKind.REPORT)
        s.peer.refuse(frame.request, Overloaded("too many reports"))
        again(s.peer, await pulled(s.peer, checks=True, expected=0), sound)
        assert bodies(await pulling) == [b"1"]


async def test_a_cancelled_pull_loses_nothing() -> None:
    sound = batch(b"1")
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), last_flipped(sound), batch(b"2", at=1), count=2)
        await s.peer.frame(FrameKind.REPORT)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        pulling = asyncio.ensure_future(s.consumer.pull())
        again(s.peer, await pulled(s.peer, checks=True, expected=0), sound, batch(b"2", at=1))
        assert bodies(await pulling) == [b"1", b"2"]


async def test_a_pull_ends_in_time_without_an_answer_to_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.consumer.pull.GRACE", 0.5)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull(timeout=0.01))
        s.peer.messages(await pulled(s.peer, checks=False), last_flipped(batch(b"1")), count=1)
        await s.peer.frame(FrameKind.REPORT)
        assert await pulling == []


async def test_a_message_that_only_this_client_cannot_read_is_failed() -> None:
    """Otherwise the same message would come for ever; another consumer may read it, or it becomes a dead letter."""
    told = list[QmqError]()
    async with subscribed(group="g") as s:
        s.consumer.on_unreadable = told.append
        pulling = asyncio.ensure_future(s.consumer.pull())
        request = await pulled(s.peer, checks=False)
        for _ in range(3):
            again(s.peer, request, batch(b"0", at=1), UNDECODABLE, batch(b"2", at=2))
            await reported(s.peer, (5_000, 0, 1, 0), "sound")
            request = await pulled(s.peer, checks=True, expected=0)
        again(s.peer, request, batch(b"0", at=1), UNDECODABLE, batch(b"2", at=2))
        came = {
            frame.kind: frame for frame in (await s.peer.any_frame(), await s.peer.any_frame()) if frame is not None
        }
        (back,) = backs_of(came[FrameKind.HAND_BACK])
        assert (back.start, back.end, back.disposition) == (1, 2, 1)
        s.peer.answer(FrameKind.HANDED_BACK, came[FrameKind.HAND_BACK].request)
        both = batch(b"0", at=1) + batch(b"2", at=2)
        s.peer.answer_pull(came[FrameKind.PULL].request, both, [(0, 1, 1), (2, 1, 1)])
        assert bodies(await pulling) == [b"0", b"2"]
        assert s.consumer.damaged == len(told) == 1


async def test_leaving_waits_for_no_report() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), last_flipped(batch(b"1")), count=1)
        await s.peer.frame(FrameKind.REPORT)
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        await s.peer.unsubscribed()
        await leaving
        with pytest.raises(UnknownSubscription):
            await pulling


async def test_an_on_unreadable_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: QmqError) -> None:
        raise RuntimeError("not my day")

    async with subscribed(group="g") as s:
        s.consumer.on_unreadable = fail
        pulling = asyncio.ensure_future(s.consumer.pull())
        request = await pulled(s.peer, checks=False)
        s.peer.messages(request, last_flipped(batch(b"1")), batch(b"2", at=1), count=2)
        await reported(s.peer, (5_000, 0, 1, 0), "bad")
        again(s.peer, await pulled(s.peer, checks=True), batch(b"2", at=1))
        assert bodies(await pulling) == [b"2"]
        assert "not my day" in caplog.text


async def test_the_reports_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq.net.client.consumer.pull.MAX_REPORTS", 3)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request = await pulled(s.peer, checks=False)
        s.peer.messages(request, *(last_flipped(batch(b"1", at=at)) for at in range(5)), batch(b"2", at=5), count=6)
        for at in range(3):
            await reported(s.peer, (5_000 + 1_000 * at, 0, 1, 0), "bad")
        request = await pulled(s.peer, checks=True)
        again(s.peer, request, *(last_flipped(batch(b"1", at=at)) for at in (3, 4)), batch(b"2", at=5))
        for at in (3, 4):
            await reported(s.peer, (5_000 + 1_000 * at, 0, 1, 0), "bad")
        again(s.peer, await pulled(s.peer, checks=True), batch(b"2", at=5))
        assert bodies(await pulling) == [b"2"]
        assert s.consumer.damaged == 5


def test_the_delivery_sequences_of_damage_are_found_over_ranges() -> None:
    runs, _ = read_answer(memoryview(batch(b"0") + batch(b"3", b"4", at=1)))
    damaged = [AnswerDamage("", 0, 5_000, 1, 2, 1), AnswerDamage("", 0, 7_000, 0, 3, 2)]
    ranges = [10, 2, 1, 20, 4, 1, 30, 2, 2]
    assert sequences_of(runs, damaged, 0, ranges) == [(11, 12), (20, 21)]
    assert sequences_of(runs, damaged, 1, ranges) == [(23, 24), (30, 32)]
    with pytest.raises(qmq.QmqError, match="other messages"):
        sequences_of(runs, damaged, 1, ranges[:6])


# --- solo and at_most_once consumers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["sound", "bad"])
async def test_a_solo_consumer_begins_again_where_it_was(found: str) -> None:
    sound = batch(b"1", b"2", at=1)
    async with subscribed(start="first") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), batch(b"0"))
        assert bodies(await pulling) == [b"0"]
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(await pulled(s.peer, checks=False), last_flipped(sound), batch(b"3", at=2))
        await reported(s.peer, (6_000, 1, 1, 0), found)
        peer = await subscribed_again(s.peer, s.broker)
        request = await pulled(peer, checks=True)
        peer.messages(request, batch(b"0"), *([sound] if found == "sound" else []), batch(b"3", at=2))
        assert bodies(await pulling) == ([b"1", b"2", b"3"] if found == "sound" else [b"3"])
        assert s.consumer.damaged == (found == "bad")


async def test_a_solo_consumer_skips_messages_that_only_it_cannot_read() -> None:
    async with subscribed() as s:
        peer = s.peer
        pulling = asyncio.ensure_future(s.consumer.pull())
        for checks in (False, True, True):
            peer.messages(await pulled(peer, checks=checks), UNDECODABLE, batch(b"2", at=1))
            await reported(peer, (5_000, 0, 1, 0), "sound")
            peer = await subscribed_again(peer, s.broker)
        peer.messages(await pulled(peer, checks=True), UNDECODABLE, batch(b"2", at=1))
        assert bodies(await pulling) == [b"2"]
        assert s.consumer.damaged == 1


async def test_at_most_once_the_rest_is_accepted_and_the_pull_is_not_repeated() -> None:
    told = list[QmqError]()
    async with subscribed(group="g", mode="at_most_once") as s:
        s.peer.numbers = False
        s.consumer.on_unreadable = told.append
        pulling = asyncio.ensure_future(s.consumer.pull())
        request = await pulled(s.peer, checks=False)
        s.peer.messages(request, batch(b"0"), header_flipped(batch(b"1", at=1)), last_flipped(batch(b"2", at=2)))
        await reported(s.peer, (7_000, 0, 1, 0), "sound")
        assert bodies(await pulling) == [b"0"]
        assert s.consumer.damaged == len(told) == 2
        assert "bytes of an answer cannot be read" in str(told[0])
        await s.peer.gone()
        await s.broker.peer()

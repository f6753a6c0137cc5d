"""What cannot be verified or decoded of an answer, against a broker that the test plays: reported, and got again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

import qmq
from qmq.errors import Overloaded, QmqError, UnknownSubscription
from qmq.format.build import MessageHeader
from qmq.format.pieces import piece_of_run
from qmq.net.client.consumer import corrupt_reads as mending
from qmq.net.protocol import frames as wire
from qmq.net.protocol.frames import Kind
from tests.net.scripted import START_US, Peer, stored_batch
from tests.net.test_pulling import batch, bodies, subscribed


async def answer_report(peer: Peer, expected: tuple[int, ...], found: object, *batches: bytes) -> None:
    """Take a REPORT of (position, first, messages, partition), and say what was found."""
    frame = await peer.frame(Kind.REPORT)
    assert wire.REPORT.unpack(frame.payload) == expected
    assert wire.unpack_meta(frame.meta)["reason"]
    peer.answer(Kind.REPORTED, frame.request, {"found": found}, b"".join(batches))


def last_flipped(data: bytes) -> bytes:
    """*data* with a bit of its last byte turned over."""
    return data[:-1] + bytes([data[-1] ^ 1])


def overwritten(data: bytes, start: int, stop: int) -> bytes:
    return data[:start] + bytes(byte ^ 0x5A for byte in data[start:stop]) + data[stop:]


async def test_damaged_pieces_are_reported_left_out_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    rotten = last_flipped(batch(b"rotten", at=1))
    told = list[QmqError]()
    async with subscribed() as s:
        s.consumer.on_error = told.append
        with caplog.at_level(logging.WARNING, "qmq.client"):
            pulling = asyncio.ensure_future(s.consumer.pull())
            request, _ = await s.peer.pulled()
            s.peer.messages(request, rotten)
            await answer_report(s.peer, (6_000, 0, 1, 0), "bad")
            request, _ = await s.peer.pulled()  # nothing good was in it: on
            s.peer.messages(request, batch(b"good"), rotten, batch(b"too", at=2))
            await answer_report(s.peer, (6_000, 0, 1, 0), "unknown")
            assert bodies(await pulling) == [b"good", b"too"]
        assert s.consumer.damaged == len(told) == 2
        assert all(isinstance(error, qmq.BadBatch) for error in told)
        (record,) = caplog.records  # at a limited rate
        assert "position 6000 of partition 0" in record.getMessage()
        assert record.levelno == logging.WARNING


async def test_what_was_damaged_on_the_way_comes_in_its_place() -> None:
    sound = batch(b"1", b"2", b"3", at=1)
    bad = overwritten(sound, len(sound) - 2, len(sound) - 1)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"0"), bad, batch(b"4", at=2))
        await answer_report(s.peer, (6_000, 1, 1, 0), "sound", sound)
        assert bodies(await pulling) == [b"0", b"1", b"2", b"3", b"4"]
        assert s.consumer.damaged == 0


async def test_what_a_cancelled_pull_had_mended_comes_with_the_next() -> None:
    sound = batch(b"1")
    bad = last_flipped(sound)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bad, batch(b"2", at=1))
        frame = await s.peer.frame(Kind.REPORT)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        s.peer.answer(Kind.REPORTED, frame.request, {"found": "sound"}, sound)
        assert bodies(await s.consumer.pull()) == [b"1", b"2"]


async def test_a_report_is_sent_again_over_a_new_connection() -> None:
    sound = batch(b"1")
    bad = last_flipped(sound)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bad, count=1)
        await s.peer.frame(Kind.REPORT)
        s.peer.drop()
        peer = await s.broker.peer()
        came = {frame.kind: frame for frame in (await peer.any_frame(), await peer.any_frame()) if frame is not None}
        peer.subscribe(came[Kind.SUBSCRIBE])  # whichever was first
        peer.refuse(came[Kind.REPORT].request, Overloaded("too many reports"))
        await answer_report(peer, (5_000, 0, 1, 0), "sound", sound)
        assert bodies(await pulling) == [b"1"]
        assert s.consumer.damaged == 0


async def test_without_an_answer_to_a_report_the_rest_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "REPORT_TIMEOUT", 0.02)
    bad = last_flipped(batch(b"1"))
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bad, batch(b"2", at=1))
        assert bodies(await pulling) == [b"2"]
        assert s.consumer.damaged == 1


async def test_an_on_error_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: QmqError) -> None:
        raise RuntimeError("not my day")

    bad = last_flipped(batch(b"1"))
    async with subscribed() as s:
        s.consumer.on_error = fail
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bad, batch(b"2", at=1))
        await answer_report(s.peer, (5_000, 0, 1, 0), "bad")
        assert bodies(await pulling) == [b"2"]
        assert "not my day" in caplog.text


async def test_messages_that_nobody_can_decode_are_left_out() -> None:
    header = MessageHeader(b"\xc1", 0, 0)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"1"]}, header=header), batch(b"2", at=1))
        await answer_report(s.peer, (5_000, 0, 1, 0), "sound", stored_batch({"a.b": [b"1"]}, header=header))
        assert bodies(await pulling) == [b"2"]  # whatever the broker says of it
        assert s.consumer.damaged == 1


async def test_leaving_waits_for_no_report() -> None:
    bad = last_flipped(batch(b"1"))
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bad)
        await s.peer.frame(Kind.REPORT)
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        await s.peer.unsubscribed()
        await leaving
        with pytest.raises(UnknownSubscription):
            await pulling


# --- bad headers -----------------------------------------------------------------------------------------------------


def chain() -> list[bytes]:
    """Three batches that lie one behind the other, the second one of another subject, all with one body."""
    found, position = list[bytes](), 5_000
    for number, subject in enumerate(("a.b", "c.d", "a.b", "a.b")):
        found.append(stored_batch({subject: [b"same"]}, position=position, stored_at_us=START_US + number))
        position += len(found[-1])
    return found


async def test_where_a_header_says_nothing_its_neighbour_tells_the_place() -> None:
    first, _, third, fourth = chain()
    place = 5_000 + 2 * len(first)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, overwritten(third, 20, 28), fourth)
        said = await s.peer.frame(Kind.REPORT)
        assert wire.REPORT.unpack(said.payload)[0] != place
        s.peer.answer(Kind.REPORTED, said.request, {"found": "unknown"})
        await answer_report(s.peer, (place, 0, 0, 0), "sound", third)
        assert [message.id for message in await pulling] == [
            f"{b'store1'.hex()}0000{place:016x}",
            f"{b'store1'.hex()}0000{place + len(third):016x}",
        ]
        assert s.consumer.damaged == 0


async def test_the_batch_beside_is_not_taken_for_the_bad_one() -> None:
    """It has the same size and the same body, and another subject."""
    first, second, third, _ = chain()
    told = list[QmqError]()
    async with subscribed() as s:
        s.consumer.on_error = told.append
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, first, overwritten(third, 20, 28))
        said = await s.peer.frame(Kind.REPORT)
        s.peer.answer(Kind.REPORTED, said.request, {"found": "unknown"})
        await answer_report(s.peer, (5_000 + len(first), 0, 0, 0), "sound", second)
        assert [message.subject for message in await pulling] == ["a.b"]
        assert f"{len(third)} bytes of an answer were left out" in str(told[0])
        assert s.consumer.damaged == len(told) == 1


@pytest.mark.parametrize("field", [16, 40])
async def test_a_piece_with_a_bad_header_is_found_by_what_that_says(field: int) -> None:
    lies = memoryview(stored_batch({"a.b": [b"1", b"2", b"3"], "c": [b"4"]}))
    piece = b"".join(piece_of_run(lies, 0, 1, 3)[0])
    whole = b"".join(piece_of_run(lies, 0, 0, None)[0])
    bit = bytearray(piece)
    bit[field] ^= 1
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bytes(bit), batch(b"5", at=1))
        await answer_report(s.peer, (5_000, 1, 2, 0), "sound", whole)
        assert bodies(await pulling) == [b"2", b"3", b"5"]


async def test_what_cannot_be_decoded_behind_a_bad_header_is_reported_too() -> None:
    sound = stored_batch({"a.b": [b"1"]}, header=MessageHeader(b"\xc1", 0, 0))
    bad = bytearray(sound)
    bad[24] ^= 1
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, bytes(bad), batch(b"2", at=1))
        await answer_report(s.peer, (5_000, 0, 0, 0), "sound", sound)
        await answer_report(s.peer, (5_000, 0, 1, 0), "bad")
        assert bodies(await pulling) == [b"2"]
        assert s.consumer.damaged == 1


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [(bytes, [b"1", b"2", b"3"]), (lambda batch: b"".join(piece_of_run(batch, 0, 0, None)[0]), [b"1", b"2"])],
    ids=["batch", "piece"],
)
async def test_a_connection_is_left_whose_frames_may_not_be_understood(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[memoryview], bytes], expected: list[bytes]
) -> None:
    """An answer that ends within a batch may be one whose frame said too small a size."""
    monkeypatch.setattr(mending, "SUSPECT_TIMEOUT", 0.01)
    monkeypatch.setattr("qmq.net.client.broker_link._TICK", 0.01)
    monkeypatch.setattr("qmq.net.client.broker_link.GOOD_AFTER", 0.0)  # else it waits before it connects again
    sent = make(memoryview(stored_batch({"a.b": [b"1", b"2"], "c": [b"3"]})))
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, sent[:-1], count=len(expected))
        await s.peer.frame(Kind.REPORT)
        await s.peer.gone()
        monkeypatch.setattr(mending, "SUSPECT_TIMEOUT", 20)
        peer = await s.broker.peer()
        await peer.subscribed()
        report = await peer.frame(Kind.REPORT)
        assert wire.REPORT.unpack(report.payload)[0] == 5_000
        peer.answer(Kind.REPORTED, report.request, {"found": "sound"}, sent)
        assert bodies(await pulling) == expected
        assert s.consumer.damaged == 0


async def test_an_answer_that_is_damaged_too_is_asked_for_again() -> None:
    sound = batch(b"1")
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, last_flipped(sound))
        await answer_report(s.peer, (5_000, 0, 1, 0), "sound", last_flipped(sound))
        await answer_report(s.peer, (5_000, 0, 1, 0), ["sound"], sound)
        await answer_report(s.peer, (5_000, 0, 1, 0), "sound", sound)
        assert bodies(await pulling) == [b"1"]
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, last_flipped(sound), batch(b"2", at=1))
        for _ in range(3):
            await answer_report(s.peer, (5_000, 0, 1, 0), "sound", last_flipped(sound))
        assert bodies(await pulling) == [b"2"]
        assert s.consumer.damaged == 1


async def test_the_reports_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "MOST_REPORTS", 3)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, *(last_flipped(batch(b"1", at=at)) for at in range(5)), batch(b"2", at=5))
        for at in range(3):
            await answer_report(s.peer, (5_000 + 1_000 * at, 0, 1, 0), "sound", batch(b"1", at=at))
        assert bodies(await pulling) == [b"1", b"1", b"1", b"2"]
        assert s.consumer.damaged == 2


async def test_another_store_is_told_nothing() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.broker.welcome["store_id"] = b"store2"
        s.peer.messages(request, last_flipped(batch(b"1")), batch(b"2", at=1))
        await s.peer.frame(Kind.REPORT)
        s.peer.drop()
        peer = await s.broker.peer()
        assert bodies(await pulling) == [b"2"]
        assert not peer.has_frame()
        assert s.consumer.damaged == 1

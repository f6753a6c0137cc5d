"""Dispositions other than acks: those of one turn are one frame, and each is answered on its own."""

from __future__ import annotations

import asyncio
import struct

import pytest

import qmq
from qmq.broker.ports import commands
from qmq.errors import Fenced, Overloaded
from qmq.net.client.consumer.nacks import MAX_PER_FRAME
from qmq.net.protocol.frames import Frame, FrameKind
from qmq.net.protocol.types import Disposition, cut_reason
from tests.net.client.consumer.test_pull import Subscribed
from tests.net.scripted import backs_of
from tests.net.test_handlers import given


async def handed_back(s: Subscribed) -> tuple[Frame, list[commands.DispositionRange]]:
    frame = await s.peer.frame(FrameKind.HAND_BACK)
    return frame, backs_of(frame)


def answer(s: Subscribed, frame: Frame, *refused: int) -> None:
    s.peer.answer(FrameKind.HANDED_BACK, frame.request, payload=struct.pack(f"<{len(refused)}I", *refused))


async def test_nacks_of_one_turn_are_one_frame() -> None:
    async with given(*(b"%d" % number for number in range(6))) as (s, messages):
        waiting = asyncio.gather(
            messages[0].nack(reason="broke"), messages[1].nack(delay=2.5), messages[2].reject("bad address"),
            messages[4].nack(reason="broke"), return_exceptions=True,
        )  # fmt: skip
        frame, backs = await handed_back(s)
        assert backs == [
            (0, 1, Disposition.NACK, None, "broke"),
            (1, 2, Disposition.NACK, 2_500_000, ""),
            (2, 3, Disposition.REJECT, None, "bad address"),
            (4, 5, Disposition.NACK, None, "broke"),
        ]
        answer(s, frame, 1, 3)
        said = await waiting
        assert [type(error) for error in said] == [type(None), Fenced, type(None), Fenced]
        messages[3].release()
        messages[5].release()
        frame, backs = await handed_back(s)
        assert backs == [(number, number + 1, Disposition.RELEASE, None, "") for number in (3, 5)]
        answer(s, frame)


async def test_a_cancelled_nack_does_not_cancel_others() -> None:
    async with given(b"1", b"2") as (s, messages):
        first, second = (asyncio.ensure_future(message.nack()) for message in messages)
        await asyncio.sleep(0)  # they are queued, and not sent
        first.cancel()
        frame, backs = await handed_back(s)
        assert [back.start for back in backs] == [0, 1]
        answer(s, frame)
        await second
        assert first.cancelled()


async def test_a_refused_second_attempt_means_that_the_first_succeeded() -> None:
    async with given(b"1", b"2") as (s, messages):
        waiting = asyncio.gather(*(message.nack() for message in messages))
        frame, _ = await handed_back(s)
        s.peer.refuse(frame.request, Overloaded("full"))
        frame, backs = await handed_back(s)
        assert len(backs) == 2
        answer(s, frame, 0)
        await waiting


async def test_all_are_refused_where_the_frame_is() -> None:
    async with given(b"1", b"2") as (s, messages):
        waiting = asyncio.gather(*(message.nack() for message in messages), return_exceptions=True)
        frame, _ = await handed_back(s)
        s.peer.refuse(frame.request, Fenced("another has taken over"))
        assert [type(error) for error in await waiting] == [Fenced, Fenced]


@pytest.mark.parametrize(("reason", "frames"), [("broke", 2), ("é" * 300, 4)])
async def test_many_are_several_frames(reason: str, frames: int) -> None:
    count = MAX_PER_FRAME + 1 if reason == "broke" else 700
    async with given(*(b"%d" % number for number in range(count))) as (s, messages):
        reasons = [reason if reason == "broke" else f"{number} {reason}" for number in range(count)]
        pairs = zip(messages, reasons, strict=True)
        waiting = asyncio.gather(*(message.nack(reason=why) for message, why in pairs))
        found = list[commands.DispositionRange]()
        for _ in range(frames):
            frame, backs = await handed_back(s)
            found += backs
            answer(s, frame)
        await waiting
        assert [back.start for back in found] == list(range(count))
        assert [back.reason for back in found] == [cut_reason(why) for why in reasons]


async def test_a_reason_that_is_no_text_is_refused_and_changes_nothing() -> None:
    async with given(b"1") as (s, (message,)):
        with pytest.raises(qmq.QmqError, match="reason must be a str, not 5"):
            await message.reject(5)  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(message.reject("bad \udce9"))
        frame, (back,) = await handed_back(s)
        assert back.reason == "bad \\udce9", "what UTF-8 cannot hold is told as Python shows it"
        answer(s, frame)
        await waiting


async def test_a_bug_of_the_client_is_raised_and_not_a_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with given(b"1") as (s, (message,)):
        monkeypatch.setattr("qmq.net.client.consumer.nacks.packed", broken)
        with pytest.raises(ZeroDivisionError):
            await message.nack()
        assert s.consumer


def broken(*_: object) -> None:
    raise ZeroDivisionError


async def test_a_message_has_one_disposition_only() -> None:
    async with given(b"1") as (s, (message,)):
        waiting = asyncio.ensure_future(message.nack())
        frame, _ = await handed_back(s)
        with pytest.raises(qmq.Fenced):
            await message.reject("no")
        answer(s, frame)
        await waiting


@pytest.mark.parametrize("turns", range(5))
async def test_a_waiting_nack_is_refused_when_the_consumer_leaves_at_once(turns: int) -> None:
    async with given(b"1", b"2") as (s, messages):
        waiting = asyncio.gather(*(message.nack() for message in messages), return_exceptions=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(60):
            assert [type(one) for one in await waiting] == [Fenced, Fenced]

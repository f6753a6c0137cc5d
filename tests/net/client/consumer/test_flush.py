"""``flush`` of several tasks and threads: each that takes messages is told of all refused acks, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import qmq
from qmq.errors import Fenced
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.net.client.consumer.test_pull import Subscribed
from tests.net.test_handlers import given


async def flushed(consumer: qmq.Consumer) -> str:
    """Flush; return what it raised."""
    try:
        await consumer.flush()
    except Fenced as error:
        return str(error).split(" of ")[0]
    return ""


@asynccontextmanager
async def refused_to_another() -> AsyncIterator[tuple[Subscribed, list[qmq.Message]]]:
    """Take two messages; the ack of the first is refused, and the flush of another task is told so."""
    async with given(b"1", b"2") as (s, messages):
        messages[0].ack()
        other = asyncio.ensure_future(flushed(s.consumer))
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(1))
        assert await other == "1 acks"
        yield s, messages


async def test_a_task_that_takes_messages_is_told_what_another_was_told() -> None:
    told, has_pulled, may_flush = list[str](), asyncio.Event(), asyncio.Event()
    async with given(b"1", b"2") as (s, messages):

        async def take() -> None:
            await s.consumer.pull(1, timeout=0)
            has_pulled.set()
            await may_flush.wait()
            told.extend([await flushed(s.consumer), await flushed(s.consumer)])

        taking = asyncio.ensure_future(take())
        request, _ = await s.peer.pulled()
        s.peer.messages(request)
        await has_pulled.wait()
        messages[0].ack()
        other = asyncio.ensure_future(flushed(s.consumer))
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(1))
        assert await other == "1 acks"
        may_flush.set()
        await taking
    assert told == ["1 acks", ""]


async def test_a_task_that_takes_none_is_told_what_nobody_was_told() -> None:
    async with refused_to_another() as (s, _):
        assert await asyncio.ensure_future(flushed(s.consumer)) == ""


async def test_flushes_that_wait_together_are_all_told() -> None:
    async with given(b"1") as (s, (message,)):
        message.ack()
        flushes = [asyncio.ensure_future(flushed(s.consumer)) for _ in range(3)]
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(1))
        assert await asyncio.gather(*flushes) == ["1 acks"] * 3


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_flush_after_the_refusal_is_told(is_first: bool) -> None:
    async with refused_to_another() as (s, messages):
        messages[1].ack()
        flushing = asyncio.ensure_future(flushed(s.consumer))
        frame = await s.peer.frame(FrameKind.ACK)
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(int(is_first)))
        assert await flushing == ("1 acks" if is_first else "")

"""Calls from a wrong thread, which asyncio refuses in its debug mode, leave the client working."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import qmq
from qmq.broker.ports.commands import DispositionRange
from qmq.net.client.consumer import acks
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.net.scripted import backs_of, scripted_broker
from tests.net.test_handlers import acked, given


async def refused(call: Callable[[], object]) -> None:
    """Make the call in another thread, where it raises."""
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    try:
        with pytest.raises(RuntimeError, match="Non-thread-safe"):
            await asyncio.to_thread(call)
    finally:
        loop.set_debug(False)


async def test_a_send() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        await refused(lambda: client.send_nowait("a", b"1"))
        sending = asyncio.ensure_future(client.send("a", b"2"))
        frame, _ = await peer.batch()
        peer.stored(frame)
        await sending


async def test_an_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "ACK_COUNT", 2)
    async with given(b"1", b"2", b"3") as (s, messages):
        messages[0].ack()
        await refused(messages[2].ack)
        assert len(await acked(s)) // 16 == 2, "both of them"


async def test_a_release() -> None:
    async with given(b"1", b"2") as (s, messages):
        await refused(messages[0].release)
        messages[1].release()
        frame = await s.peer.frame(FrameKind.HAND_BACK)
        assert backs_of(frame) == [
            DispositionRange(number, number + 1, Disposition.RELEASE, None, "") for number in range(2)
        ]
        s.peer.answer(FrameKind.HANDED_BACK, frame.request)

"""The messages that a loop has taken and not reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from qmq.errors import Fenced
from qmq.net.client.consumer import feed as feed_module
from qmq.net.client.consumer import pull as pulling_module
from qmq.net.client.consumer.feed import Prefetch
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.net.client.consumer.test_pull import Subscribed, batch, bodies, subscribed
from tests.net.scripted import Peer, backs_of


@pytest.fixture(autouse=True)
def leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers here answer nothing at the end."""
    monkeypatch.setattr(pulling_module, "FLUSH_TIMEOUT", 0.02)


async def released(peer: Peer) -> tuple[int, int]:
    """Return the delivery sequences of the next frame, which must release messages."""
    frame = await peer.frame(FrameKind.HAND_BACK)
    (back,) = backs_of(frame)
    assert back.disposition == Disposition.RELEASE
    peer.answer(FrameKind.HANDED_BACK, frame.request)
    return back.start, back.end


@asynccontextmanager
async def looping(count: int) -> AsyncIterator[tuple[Subscribed, asyncio.Queue[bytes], asyncio.Event]]:
    """Run a loop over messages of a group that waits in each handler; it has taken *count* and is at the first."""
    async with subscribed(group="g") as s:
        came, may_go_on = asyncio.Queue[bytes](), asyncio.Event()

        async def work() -> None:
            async for message in s.consumer:
                async with message:
                    came.put_nowait(message.body)
                    await may_go_on.wait()

        working = asyncio.ensure_future(work())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(*(b"%d" % number for number in range(count))))
        assert await came.get() == b"0"
        yield s, came, may_go_on
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_messages_that_a_stuck_loop_has_not_reached_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STUCK_AFTER", 0.02)
    monkeypatch.setattr(pulling_module, "UNUSED_AFTER", 600)
    monkeypatch.setattr(Prefetch, "wanted", lambda self, now: 4)  # as after many fast handlers
    async with looping(4) as (s, came, may_go_on):
        assert await released(s.peer) == (1, 4)
        may_go_on.set()
        request, _ = await acked_then_pulled(s.peer)
        s.peer.messages(request, batch(b"4", at=1))
        assert await came.get() == b"4"


async def acked_then_pulled(peer: Peer) -> tuple[int, tuple[int, ...]]:
    """Take the next frames: an ack, and a pull, which is returned."""
    await peer.frame(FrameKind.ACK)
    return await peer.pulled()


async def test_messages_no_longer_in_flight_are_removed_from_the_loop() -> None:
    async with looping(4) as (s, came, _):
        ack_sender = s.consumer._puller.ack_senders[0]
        ack_sender.fence(Fenced("silent for too long"))  # the handler is stopped, and the loop continues
        await s.peer.subscribed()
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"again", at=1))
        assert await came.get() == b"again"


async def test_messages_of_a_cancelled_pull_are_released_when_no_pull_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "UNUSED_AFTER", 0.02)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull(5))
        request, _ = await s.peer.pulled()
        pulling.cancel()
        await s.peer.frame(FrameKind.WITHDRAW)
        s.peer.messages(request, batch(b"1", b"2", b"3"))
        assert await released(s.peer) == (0, 3)
        pulling = asyncio.ensure_future(s.consumer.pull(5))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"4", at=1))
        assert bodies(await pulling) == [b"4"]


async def test_messages_that_a_left_loop_had_not_reached_are_released_when_no_pull_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "STUCK_AFTER", 0.02)
    async with subscribed(group="g") as s:
        following = asyncio.ensure_future(anext(aiter(s.consumer)))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1", b"2", b"3"))
        assert (await following).body == b"1"
        assert await released(s.peer) == (1, 3)

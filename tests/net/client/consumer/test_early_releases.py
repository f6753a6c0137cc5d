"""What the client releases by itself: all messages without a disposition of a range, though others of it have one."""

from __future__ import annotations

import asyncio

import pytest

import qmq
from qmq.format.build import make_header
from qmq.net.client.consumer import feed as feed_module
from qmq.net.client.consumer import pull as pulling_module
from qmq.net.client.consumer.feed import Prefetch
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.types import Disposition
from tests.net.client.consumer.test_pull import Subscribed, subscribed
from tests.net.scripted import backs_of, stored_batch

#: Order keys of the messages of an answer: the fourth goes back with the first.
KEYS = "kllkl"


def answer_pull(s: Subscribed, request: int) -> None:
    batches = list[bytes]()
    for at, key in enumerate(KEYS):
        content, header = {"a.b": [b"%d" % at]}, make_header(order_key=key)
        batches.append(stored_batch(content, position=5_000 + 1_000 * at, first_sequence=at, header=header))
    s.peer.messages(request, *batches)


async def handed_back(s: Subscribed, count: int) -> list[tuple[int, int, Disposition]]:
    """Return the next *count* dispositions, in the order of the messages."""
    found = list[tuple[int, int, Disposition]]()
    while len(found) < count:
        frame = await s.peer.any_frame()
        assert frame is not None
        if frame.kind == FrameKind.HAND_BACK:
            found += [(back.start, back.end, Disposition(back.disposition)) for back in backs_of(frame)]
            s.peer.answer(FrameKind.HANDED_BACK, frame.request)
    return sorted(found)


#: The first fails, the fourth follows it, and the others were not reached.
ALL = [
    (0, 1, Disposition.NACK),
    (1, 3, Disposition.RELEASE),
    (3, 4, Disposition.RELEASE),
    (4, 5, Disposition.RELEASE),
]


async def test_messages_that_no_pull_took_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "UNUSED_AFTER", 0.02)
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull(1))
        request, _ = await s.peer.pulled()
        answer_pull(s, request)
        (message,) = await pulling
        nacking = asyncio.ensure_future(message.nack())
        assert await handed_back(s, 4) == ALL
        await nacking


@pytest.mark.parametrize("stop", [False, True])
async def test_messages_that_a_loop_has_not_reached_are_released(monkeypatch: pytest.MonkeyPatch, stop: bool) -> None:
    monkeypatch.setattr(feed_module, "STUCK_AFTER", 600 if stop else 0.02)
    monkeypatch.setattr(Prefetch, "wanted", lambda self, now: 5)  # as after many fast handlers
    async with subscribed(group="g") as s:

        async def work() -> None:
            async for message in s.consumer:
                nacking = asyncio.ensure_future(message.nack())
                await asyncio.sleep(0)
                if stop:
                    s.consumer.stop()
                await nacking
                await asyncio.Event().wait()

        working = asyncio.ensure_future(work())
        request, _ = await s.peer.pulled()
        answer_pull(s, request)
        assert await handed_back(s, 4) == ALL
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_messages_that_a_loop_has_not_reached_are_released_when_its_block_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Prefetch, "wanted", lambda self, now: 5)
    async with subscribed(group="g") as s:

        async def work() -> None:
            try:
                async for message in s.consumer:
                    asyncio.ensure_future(message.nack())  # noqa: RUF006  # the loop holds it long enough
                    await asyncio.sleep(0)
                    raise ValueError("no such room")
            except ValueError as error:
                await s.consumer.__aexit__(type(error), error, None)

        working = asyncio.ensure_future(work())
        request, _ = await s.peer.pulled()
        answer_pull(s, request)
        assert await handed_back(s, 4) == ALL
        s.peer.answer(FrameKind.UNSUBSCRIBED, (await s.peer.frame(FrameKind.UNSUBSCRIBE)).request)
        await working


async def test_a_batch_of_order_keys_fails_as_a_whole() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull_batch(5))
        request, _ = await s.peer.pulled()
        answer_pull(s, request)
        batch = await pulling
        nacking = asyncio.ensure_future(batch.nack(reason="closed"))
        assert await handed_back(s, 5) == [(at, at + 1, Disposition.NACK) for at in range(5)]
        await nacking


@pytest.mark.parametrize("refusals", [(0,), (1,)])
async def test_an_awaited_release_waits_for_all_of_its_range(refusals: tuple[int, ...]) -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull_batch(2))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, stored_batch({"a.b": [b"0", b"1"]}))
        batch = await pulling
        batch.release()
        await asyncio.sleep(0)  # it is on its way
        waiting = asyncio.ensure_future(_awaited(batch))
        frame = await s.peer.frame(FrameKind.HAND_BACK)
        s.peer.answer(FrameKind.HANDED_BACK, frame.request, payload=(0).to_bytes(4, "little"))
        frame = await s.peer.frame(FrameKind.HAND_BACK)  # each half by itself
        assert not waiting.done()
        payload = b"".join(number.to_bytes(4, "little") for number in refusals)
        s.peer.answer(FrameKind.HANDED_BACK, frame.request, payload=payload)
        with pytest.raises(qmq.Fenced, match="has a disposition already"):
            await waiting


async def _awaited(batch: qmq.MessageBatch) -> None:
    await batch

"""Sizes and texts at each limit, and one over: through a real broker and client, and found again as they were sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

import qmq
from qmq import Client, Message
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.layout import MAX_KEY_BYTES
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker_process import running
from tests.net.frames import RawClient, frame, sent_fields

#: Both small, so that what a client makes can reach them.
FRAME_BYTES: Final = 256 << 10
MESSAGE_BYTES: Final = 100_000
SMALL: Final = {"max_frame_bytes": FRAME_BYTES, "max_message_bytes": MESSAGE_BYTES}

Send = Callable[[Client, bytes], Awaitable[Any]]


async def one(client: Client, body: bytes) -> None:
    await client.send("a.b", body)


async def many(client: Client, body: bytes) -> None:
    await client.send_many("a.b", [b"before", body, b"after"])


async def unawaited(client: Client, body: bytes) -> None:
    client.send_nowait("a.b", body)
    await client.flush()


async def everything(client: Client, prefix: str = "") -> list[Message]:
    """All that can be pulled now."""
    messages: list[Message] = []
    async with client.subscribe(prefix, start="first") as consumer:
        while came := await consumer.pull(max_count=100_000, timeout=0):
            messages += came
    return messages


@pytest.mark.parametrize("send", [one, many, unawaited])
@pytest.mark.parametrize("size", [0, 1, MESSAGE_BYTES - 1, MESSAGE_BYTES])
async def test_bodies_up_to_the_limit_come_out_as_they_went_in(tmp_path: Path, send: Send, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await send(client, body)
        assert body in [message.body for message in await everything(client)]
    assert verify(tmp_path / "data", Disk()).is_good


@pytest.mark.parametrize("send", [one, many, unawaited])
async def test_a_body_one_over_the_limit_is_refused_and_nothing_else(tmp_path: Path, send: Send) -> None:
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        with pytest.raises(qmq.MessageTooLarge, match=f"{MESSAGE_BYTES + 1} bytes.*at most {MESSAGE_BYTES} "):
            await send(client, bytes(MESSAGE_BYTES + 1))
        await client.send("a.b", b"good")
        assert [message.body for message in await everything(client)] == [b"good"]


async def test_header_and_body_share_the_limit(tmp_path: Path) -> None:
    header = len(make_header("k").packed)
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send("a", bytes(MESSAGE_BYTES - header), key="k")
        with pytest.raises(qmq.MessageTooLarge):
            await client.send("a", bytes(MESSAGE_BYTES - header + 1), key="k")
        (message,) = await everything(client)
    assert (len(message.body), message.key) == (MESSAGE_BYTES - header, "k")


#: Lower than what is stored, each of them.
LOWERED: Final = {
    "max_frame_bytes": 64 << 10,
    "max_message_bytes": 1 << 10,
    "max_pull_bytes": 64 << 10,
    "max_inflight_bytes": 64 << 10,
    "max_buffered_bytes": 1 << 20,
    "segment_bytes": 128 << 10,
    "checkpoint_bytes": 64 << 10,
}
LARGE: Final = b"large" * 600_000


@pytest.mark.parametrize("partitions", [1, 2])
async def test_messages_over_limits_that_were_lowered_since_are_delivered(tmp_path: Path, partitions: int) -> None:
    data = tmp_path / "data"
    async with (
        running(data, max_message_bytes=4 << 20, partitions=partitions) as broker,
        qmq.connect(broker.url) as client,
    ):
        await client.send("a.b", LARGE)
        await client.send("a.later", LARGE, delay=3)
        await client.send("a.b", b"behind")
    async with running(data, **LOWERED, partitions=partitions) as broker, qmq.connect(broker.url) as client:
        with pytest.raises(qmq.MessageTooLarge):
            await client.send("a.b", bytes(2_000))
        async with client.subscribe("a.", group="g", consumer="c", retry_delays=[0], max_attempts=2) as consumer:
            (first,) = await consumer.pull(1, timeout=20)
            assert (first.body, first.attempt) == (LARGE, 1)
            await first.nack()
            came = [(await consumer.pull(1, timeout=20))[0] for _ in range(3)]
            assert sorted(message.body for message in came) == sorted([LARGE, LARGE, b"behind"])
            assert [message.attempt for message in came if message.subject == "a.b" and message.body == LARGE] == [2]
            for message in came:
                await message.reject("no")
        assert await client.admin.redrive("g", all=True) == 3
        async with client.subscribe("a.", group="g", consumer="c") as consumer:
            again = [(await consumer.pull(1, timeout=20))[0] for _ in range(3)]
            assert sorted(message.body for message in again) == sorted([LARGE, LARGE, b"behind"])
            for message in again:
                message.ack()
    async with running(data, **LOWERED, partitions=partitions) as broker, qmq.connect(broker.url) as client:
        assert len(await everything(client)) == 3
    assert verify(data, Disk()).is_good


LONGEST_KEY: Final = "k" * MAX_KEY_BYTES


@pytest.mark.parametrize("key", [None, " ", "\t", "x", "\0", "ключ", "😀", "k" * 255, "k" * 256, LONGEST_KEY])
async def test_keys_of_every_kind(tmp_path: Path, key: str | None) -> None:
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send("a", b"1", key=key)
        client.send_nowait("a", b"2", key=key)
        await client.flush()
        first, second = await everything(client)
    assert (first.key, second.key) == (key, key)


async def test_tags_and_properties_of_every_kind(tmp_path: Path) -> None:
    tags, properties = ("", " ", "x", "😀", "t" * 300), {"": "", " ": "\0", "p": "😀", "long": "v" * 40_000}
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send("a", b"1", tags=tags, properties=properties)
        (message,) = await everything(client)
    assert (message.tags, message.properties) == (tags, properties)


async def test_a_key_one_over_the_longest_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        with pytest.raises(qmq.UsageError, match="a key has 1 to 1,024 bytes as UTF-8, not 1,025"):
            await client.send("a", b"", key=LONGEST_KEY + "k")


@pytest.mark.parametrize("size", [1, 199, 200])
async def test_names_up_to_the_longest(tmp_path: Path, size: int) -> None:
    name = "n" * size
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send(name, b"x")
        async with client.subscribe(name, group=name, consumer=name) as consumer:
            (message,) = await consumer.pull()
        assert message.subject == name
        with pytest.raises(qmq.InvalidName, match="at most 200"):
            await client.send("n" * 201, b"x")


async def test_no_messages_make_no_batch(tmp_path: Path) -> None:
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        assert len(await client.send_many("a", [])) == 0
        await client.flush()
        assert await everything(client) == []
        assert [info async for info in client.subjects()] == []


def largest_batch() -> tuple[bytes, int]:
    """The batch of the most messages that fits a frame: empty ones."""
    rest = len(b"".join(build_batch([RunContent("a", [b""], None)], **_MADE))) - 10
    count = (FRAME_BYTES - frames.FRAME_SIZE - rest) // 10
    return b"".join(build_batch([RunContent("a", [b""] * count, None)], **_MADE)), count


_MADE: Final[dict[str, Any]] = {"created_at_us": 1, "producer_id": b"p" * 16, "producer_sequence": 0}


async def test_the_batch_of_the_largest_count_and_one_more(tmp_path: Path) -> None:
    batch, count = largest_batch()
    async with running(tmp_path / "data", **SMALL) as broker:
        raw = await RawClient.connect(broker.address)
        raw.send(frame(FrameKind.SEND, 2, batch))
        assert sent_fields(await raw.read())[4] == (0,)
        more = b"".join(build_batch([RunContent("a", [b""] * (count + 1), None)], **_MADE))
        assert len(more) + frames.FRAME_SIZE > FRAME_BYTES
        raw.send(frame(FrameKind.SEND, 3, more)[:1_000])
        assert await raw.error() == (0, "protocol_error")
        await raw.close()
        async with qmq.connect(broker.url) as client:
            messages = await everything(client)
            assert [message.sequence for message in messages] == list(range(count))
            assert {message.body for message in messages} == {b""}
    assert verify(tmp_path / "data", Disk()).is_good


@pytest.mark.parametrize("count", [1, 99, 100, 101])
async def test_a_pull_brings_at_most_what_it_asks_for(tmp_path: Path, count: int) -> None:
    async with running(tmp_path / "data", **SMALL) as broker, qmq.connect(broker.url) as client:
        await client.send_many("a", [b"%d" % number for number in range(count)])
        async with client.subscribe("a", group="g") as consumer:
            first = await consumer.pull(max_count=100, timeout=0)
            rest = await consumer.pull(max_count=100, timeout=0)
    assert [len(first), len(rest)] == [min(count, 100), count - min(count, 100)]
    assert [message.sequence for message in first + rest] == list(range(count))

"""Pulling for a consumer, against a broker that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import qmq
from qmq.errors import (
    BrokerStopping,
    GroupMismatch,
    InvalidName,
    InvalidOption,
    Overloaded,
    ProtocolError,
    UnknownSubscription,
    UsageError,
)
from qmq.names import check_consumer
from qmq.net.client.consumer import pull as pulling_module
from qmq.net.client.options import check_pull, make_consumer_id, start_of
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind
from qmq.net.protocol.messages import HEAD, encode_messages
from tests.net.scripted import START_US, Peer, ScriptedBroker, scripted_broker, stored_batch
from tests.net.several import several


class Subscribed(NamedTuple):
    """A consumer and the broker's side of its connection."""

    broker: ScriptedBroker
    client: qmq.Client
    consumer: qmq.Consumer
    peer: Peer
    said: dict[str, Any]


@asynccontextmanager
async def subscribed(*prefixes: str, **options: Any) -> AsyncIterator[Subscribed]:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        consumer = client.subscribe(*(prefixes or ("a.",)), **options)
        entering = asyncio.ensure_future(consumer.__aenter__())
        said = await peer.subscribed()
        await entering
        yield Subscribed(broker, client, consumer, peer, said)


def batch(*bodies: bytes, at: int = 0) -> bytes:
    """Return a batch of subject a.b, stored *at* microseconds after the start."""
    return stored_batch(
        {"a.b": bodies}, position=5_000 + 1_000 * at, stored_at_us=START_US + at, first_sequence=10 * at
    )


def bodies(messages: Sequence[qmq.Message]) -> list[bytes]:
    return [message.body for message in messages]


# --- subscribing -----------------------------------------------------------------------------------------------------


async def test_a_subscription_sends_its_options() -> None:
    async with subscribed("a.", "b", group="billing", consumer="billing-1", start=5) as s:
        assert len(s.said.pop("nonce")) == len(s.said.pop("client")) == 16
        assert s.said == {
            "group": "billing",
            "prefixes": ["a.", "b"],
            "consumer": "billing-1",
            "start": ["sequence", 5],
            "transient": False,
            "mode": "reliable",
            "settings": {},
            "asks": "follow",
            "session": 1,
        }
        assert s.consumer.id == "billing-1"


@pytest.mark.parametrize("mode", ["reliable", "broadcast"])
async def test_an_id_that_the_client_made_is_sent_as_transient(mode: str) -> None:
    async with subscribed(group="g", mode=mode) as s:
        assert (s.said["consumer"], s.said["transient"]) == (s.consumer.id, True)
    async with subscribed(group="g", consumer="c", mode=mode) as s:
        assert (s.said["consumer"], s.said["transient"]) == ("c", False)


async def test_a_solo_consumer_subscribes_to_each_prefix_once() -> None:
    async with subscribed("a.", "a.b", "c") as s:
        assert (s.said["group"], s.said["prefixes"], s.said["start"]) == (None, ["a.", "c"], None)


async def test_leaving_unsubscribes() -> None:
    async with subscribed() as s:
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        frame = await s.peer.frame(FrameKind.UNSUBSCRIBE)
        assert frames.UNSUBSCRIBE.unpack(frame.payload) == (7,)
        s.peer.answer(FrameKind.UNSUBSCRIBED, frame.request)
        await leaving
        with pytest.raises(UnknownSubscription, match="async with"):
            await s.consumer.pull()


async def test_leaving_does_not_wait_long_for_a_silent_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "LEAVE_TIMEOUT", 0.01)
    async with subscribed() as s:
        await s.consumer.__aexit__(None, None, None)


async def test_leaving_ends_a_pull_that_waits() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        leaving = asyncio.ensure_future(s.consumer.__aexit__(None, None, None))
        frame = await s.peer.frame(FrameKind.WITHDRAW)
        assert frames.WITHDRAW.unpack(frame.payload) == (request,)
        await s.peer.unsubscribed()
        await leaving
        with pytest.raises(UnknownSubscription):
            await pulling


async def test_a_refused_subscription_is_raised_and_one_that_can_pass_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        entering = asyncio.ensure_future(client.subscribe("a.", group="g").__aenter__())
        frame = await peer.frame(FrameKind.SUBSCRIBE)
        peer.refuse(frame.request, Overloaded("too many subscriptions"))
        frame = await peer.frame(FrameKind.SUBSCRIBE)
        peer.refuse(frame.request, GroupMismatch("another mode"))
        with pytest.raises(GroupMismatch, match="another mode"):
            await entering
    assert caplog.text.count("cannot subscribe yet: too many subscriptions; trying again") == 1


async def test_one_consumer_too_many_is_refused_at_once(tmp_path: Path) -> None:
    async with several(tmp_path, 1, max_consumers_per_connection=2) as brokers, qmq.connect(brokers.url) as client:
        async with client.subscribe("a.", group="g"), client.subscribe("a.") as alone:
            with pytest.raises(qmq.TooManyConsumers, match="max_consumers_per_connection"):
                await client.subscribe("a.", group="g").__aenter__()
            await client.send("a.b", b"1")
            assert bodies(await alone.pull()) == [b"1"]
        async with client.subscribe("a.", group="g"), client.subscribe("a."):
            assert len([one for one in await client.admin.consumers("g") if one.online]) == 1


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (None, None),
        ("first", "first"),
        ("new", "new"),
        (0, ["sequence", 0]),
        (datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC), ["time", 1_000_005]),
        (datetime(2023, 11, 14, 23, 13, 20, tzinfo=timezone(timedelta(hours=1))), ["time", START_US]),
        (datetime(1969, 1, 1, tzinfo=UTC), ["time", 0]),
    ],
)
def test_starts(start: Any, said: Any) -> None:
    assert start_of(start) == said


@pytest.mark.parametrize("start", ["middle", -1, 1.5, True, datetime(2020, 1, 1), 1 << 63, ["time", 5]])  # noqa: DTZ001
def test_bad_starts_are_refused(start: Any) -> None:
    with pytest.raises(InvalidOption, match="start"):
        start_of(start)


async def test_bad_names_are_refused_at_the_call() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        for bad in (
            lambda: client.subscribe(),
            lambda: client.subscribe("a..b"),
            lambda: client.subscribe("a", group="a b"),
            lambda: client.subscribe("a", consumer=""),
        ):
            with pytest.raises(InvalidName):
                bad()


def test_consumer_ids_differ_and_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "büro.host!" * 30)
    assert make_consumer_id() != make_consumer_id()
    assert len(make_consumer_id()) <= 200
    check_consumer(make_consumer_id())


# --- pulling ---------------------------------------------------------------------------------------------------------


async def test_a_pull_sends_its_limits_and_returns_messages() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(50, 2, timeout=15))
        request, (subscription, most, least, size, timeout_ms) = await s.peer.pulled()
        assert (subscription, most, least, size) == (7, 50, 2, 4 << 20)
        assert 5_000 <= timeout_ms <= 15_001
        s.peer.messages(request, batch(b"1", b"2"), batch(b"3", at=1))
        assert bodies(await pulling) == [b"1", b"2", b"3"]


async def test_limits_of_the_broker_are_kept() -> None:
    async with scripted_broker(max_pull_count=10, max_pull_bytes=100_000) as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        consumer = client.subscribe("a.")
        entering = asyncio.ensure_future(consumer.__aenter__())
        await peer.subscribed()
        await entering
        pulling = asyncio.ensure_future(consumer.pull(50, 20))
        request, (_, most, least, size, _) = await peer.pulled()
        assert (most, least, size) == (10, 10, 100_000)
        peer.messages(request, batch(b"1"))
        assert len(await pulling) == 1


async def test_nothing_until_the_time_is_up_is_an_empty_list() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(timeout=0))
        request, (*_, timeout_ms) = await s.peer.pulled()
        assert timeout_ms == 0
        s.peer.messages(request)
        assert await pulling == []


async def test_a_pull_without_end_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "ROUND", 0.0)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(10, 3))
        request, (_, most, least, _, _) = await s.peer.pulled()
        assert (most, least) == (10, 3)
        s.peer.messages(request, batch(b"1", b"2"))
        request, (_, most, least, _, _) = await s.peer.pulled()
        assert (most, least) == (8, 1)
        s.peer.messages(request, batch(b"3", at=1))
        assert bodies(await pulling) == [b"1", b"2", b"3"]


async def test_a_pull_does_not_wait_for_a_broker_that_overruns_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "GRACE", 0.01)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(timeout=0.01))
        request, _ = await s.peer.pulled()
        assert await pulling == []
        await s.peer.frame(FrameKind.WITHDRAW)
        pulling = asyncio.ensure_future(s.consumer.pull(timeout=5))
        s.peer.messages(request, batch(b"late"))
        assert bodies(await pulling) == [b"late"]


async def test_messages_of_a_cancelled_pull_come_first_with_the_next() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(5))
        request, _ = await s.peer.pulled()
        pulling.cancel()
        frame = await s.peer.frame(FrameKind.WITHDRAW)
        assert frames.WITHDRAW.unpack(frame.payload) == (request,)
        s.peer.messages(request, batch(b"1", b"2", b"3"))
        assert bodies(await s.consumer.pull(2)) == [b"1", b"2"]
        pulling = asyncio.ensure_future(s.consumer.pull(5, 3))
        request, (_, most, least, _, _) = await s.peer.pulled()
        assert (most, least) == (4, 2)
        s.peer.messages(request, batch(b"4", b"5", at=1))
        assert bodies(await pulling) == [b"3", b"4", b"5"]


async def test_a_withdrawn_pull_that_brings_nothing_is_followed_by_another() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        withdrawn, _ = await s.peer.pulled()
        pulling.cancel()
        await s.peer.frame(FrameKind.WITHDRAW)
        pulling = asyncio.ensure_future(s.consumer.pull())
        s.peer.messages(withdrawn)
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1"))
        assert bodies(await pulling) == [b"1"]


async def test_a_solo_consumer_that_lags_pulls_ahead() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull(2))
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1", b"2"))
        assert len(await pulling) == 2
        request, (_, most, least, _, timeout_ms) = await s.peer.pulled()
        assert (most, least, timeout_ms) == (2, 1, 0)
        s.peer.messages(request, batch(b"3", b"4", at=1))
        pulling = asyncio.ensure_future(s.consumer.pull(5))
        request, (_, most, least, _, timeout_ms) = await s.peer.pulled()  # more are wanted than were asked ahead
        assert (most, least, timeout_ms) == (3, 1, 0)
        s.peer.messages(request)
        assert bodies(await pulling) == [b"3", b"4"]
        pulling = asyncio.ensure_future(s.consumer.pull(1, timeout=0))
        request, (_, most, least, _, timeout_ms) = await s.peer.pulled()  # that was all: asked when wanted
        s.peer.messages(request, batch(b"5", at=2))
        assert bodies(await pulling) == [b"5"]
        request, _ = await s.peer.pulled()
        s.peer.messages(request)
        pulling = asyncio.ensure_future(s.consumer.pull(1, timeout=0))
        request, _ = await s.peer.pulled()  # what was asked ahead brought nothing, but by now there may be
        s.peer.messages(request, batch(b"6", at=3))
        assert bodies(await pulling) == [b"6"]


async def test_in_a_group_nothing_is_taken_ahead() -> None:
    async with subscribed(group="g") as s:
        for number in range(2):
            pulling = asyncio.ensure_future(s.consumer.pull(1))
            request, (_, most, _, _, _) = await s.peer.pulled()
            assert most == 1
            s.peer.messages(request, batch(b"x", at=number))
            await pulling
            assert not s.peer.has_frame()


async def test_pulls_of_several_tasks_go_one_after_another() -> None:
    async with subscribed() as s:
        first = asyncio.ensure_future(s.consumer.pull())
        second = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        assert await s.consumer.pull(timeout=0.01) == []
        assert not s.peer.has_frame()
        s.peer.messages(request, batch(b"1"))
        assert bodies(await first) == [b"1"]
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"2", at=1))
        assert bodies(await second) == [b"2"]


@pytest.mark.parametrize(
    ("max_count", "min_count", "timeout"),
    [
        (0, 1, None),
        (1, 0, None),
        (1, 2, None),
        (1.0, 1, None),
        (1, 1, -1),
        (1, 1, "1x"),
        (1, 1, "20000d"),
        (1, 1, float("nan")),
    ],
)
def test_bad_pulls_are_refused(max_count: Any, min_count: Any, timeout: Any) -> None:
    with pytest.raises(InvalidOption):
        check_pull(max_count, min_count, timeout)


async def test_a_refusal_that_can_pass_is_waited_out_and_another_is_raised() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.refuse(request, Overloaded("too many waiting pulls"))
        request, _ = await s.peer.pulled()
        s.peer.refuse(request, GroupMismatch("another mode"))
        with pytest.raises(GroupMismatch, match="another mode"):
            await pulling


@pytest.mark.parametrize("error", [InvalidOption("1 to 0"), UnknownSubscription("number 7")])
async def test_a_refusal_of_a_valid_request_is_raised_the_third_time(error: qmq.QmqError) -> None:
    """The request, or the answer to the subscription, may have been damaged on the way."""
    async with subscribed(group="g") as s:
        for tries in (2, 3):
            pulling = asyncio.ensure_future(s.consumer.pull())
            for number in range(tries):
                request, _ = await s.peer.pulled()
                s.peer.refuse(request, error)
                if isinstance(error, UnknownSubscription) and number < 2:
                    await s.peer.subscribed()
            if tries == 2:
                request, _ = await s.peer.pulled()
                s.peer.messages(request, batch(b"1"))
                assert bodies(await pulling) == [b"1"]
        with pytest.raises(type(error), match=str(error)):
            await pulling


async def test_a_subscription_without_a_number_is_made_again() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        await s.peer.pulled()
        s.peer.drop()
        peer = await s.broker.peer()
        for meta in ({"subscriptiom": 7}, {"subscription": "7"}):
            frame = await peer.frame(FrameKind.SUBSCRIBE)
            peer.answer(FrameKind.SUBSCRIBED, frame.request, meta)
            peer = await s.broker.peer()
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert bodies(await pulling) == [b"1"]


# --- reconnects ------------------------------------------------------------------------------------------------------


async def test_a_pull_and_a_flush_wait_for_the_same_subscription() -> None:
    async with subscribed(group="billing", consumer="billing-1") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"m"))
        (message,) = await pulling
        s.peer.drop()
        message.ack()
        pulling, flushing = asyncio.ensure_future(s.consumer.pull()), asyncio.ensure_future(s.consumer.flush())
        peer = await s.broker.peer()
        peer.next_sequence = s.peer.next_sequence
        await peer.subscribed()
        peer.next_sequence = s.peer.next_sequence
        ack = await peer.frame(FrameKind.ACK)
        peer.answer(FrameKind.ACKED, ack.request, payload=frames.ACKED.pack(0))
        await flushing
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"n", at=1))
        assert bodies(await pulling) == [b"n"]


async def test_the_answer_to_acknowledgements_may_wait_where_a_pull_follows() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1", b"2"))
        first, second = await pulling
        first.ack()
        pulling = asyncio.ensure_future(s.consumer.pull())
        waits = await s.peer.frame(FrameKind.ACK)
        assert waits.flags == frames.MAY_WAIT
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"3", at=2))
        s.peer.answer(FrameKind.ACKED, waits.request, payload=frames.ACKED.pack(0))
        await pulling
        second.ack()
        flushing = asyncio.ensure_future(s.consumer.flush())
        frame = await s.peer.frame(FrameKind.ACK)
        assert frame.flags == 0
        s.peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
        await flushing


async def test_a_fault_of_another_request_ends_no_pull() -> None:
    """The broker ends the connection, say because another request on it was damaged on the way."""
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        await s.peer.pulled()
        peer = s.peer
        for _ in range(2):
            peer.refuse(0, ProtocolError("what is that"))
            await peer.gone()
            peer = await s.broker.peer()
            await peer.frame(FrameKind.SUBSCRIBE)
        peer.refuse(0, ProtocolError("what is that"))
        peer = await s.broker.peer()
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert bodies(await pulling) == [b"1"]


async def test_a_subscription_that_ends_each_connection_is_given_up() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        await s.peer.pulled()
        s.peer.drop()
        for _ in range(3):
            peer = await s.broker.peer()
            await peer.frame(FrameKind.SUBSCRIBE)
            peer.refuse(0, ProtocolError("what is that"))
        with pytest.raises(ProtocolError, match="what is that"):
            await pulling


async def test_an_invalid_frame_ends_the_connection_and_not_the_pull() -> None:
    async with subscribed(group="g") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.transport.write(frames.encode_frame(FrameKind.MESSAGES, request, b"\xc1"))
        await s.peer.gone()
        peer = await s.broker.peer()
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert bodies(await pulling) == [b"1"]


async def test_a_pull_waits_while_no_broker_can_be_reached_and_goes_on() -> None:
    async with subscribed(group="g", consumer="c1") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        await s.peer.pulled()
        await s.broker.close()
        assert await asyncio.wait({pulling}, timeout=0.02) == (set(), {pulling})
        await s.broker.listen()
        peer = await s.broker.peer()
        said = await peer.subscribed(9)
        numbers = said.pop("known")
        assert numbers == [START_US, 1, 1, 0], "since when, generation, epoch, what is expected"
        assert said.pop("known_crc") == frames.pack_numbers(numbers)[1]
        assert said == s.said | {"asks": "again"}
        request, (subscription, *_) = await peer.pulled()
        assert subscription == 9
        peer.messages(request, batch(b"1"))
        assert bodies(await pulling) == [b"1"]


@pytest.mark.parametrize("timeout", [0, 0.02])
async def test_a_pull_returns_at_its_time_while_no_broker_can_be_reached(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with subscribed() as s:
        noticed = asyncio.Event()
        lost = s.client._brokers.links[0].lost
        monkeypatch.setattr(s.client._brokers.links[0], "lost", lambda *what: (lost(*what), noticed.set()))
        await s.broker.close()
        await noticed.wait()
        assert await s.consumer.pull(timeout=timeout) == []
        await s.broker.listen()
        peer = await s.broker.peer()
        await peer.subscribed()  # it has gone on trying
        pulling = asyncio.ensure_future(s.consumer.pull(timeout=5))
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert len(await pulling) == 1


async def test_a_stopping_broker_is_left_for_the_next_one() -> None:
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.refuse(request, BrokerStopping("shutting down"))
        s.peer.drop()
        peer = await s.broker.peer()
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert len(await pulling) == 1


async def test_a_solo_consumer_resumes_where_it_was() -> None:
    async with subscribed("a.", start="first") as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        s.peer.messages(request, batch(b"1"), batch(b"2", b"3", at=1))
        assert len(await pulling) == 3
        s.peer.drop()
        peer = await s.broker.peer()
        pulling = asyncio.ensure_future(s.consumer.pull())
        assert (await peer.subscribed())["start"] == ["time", START_US + 1]
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"2", b"3", at=1))
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"2", b"3", at=1), batch(b"4", at=2))
        assert bodies(await pulling) == [b"4"]


async def test_a_solo_consumer_from_the_last_on_misses_nothing_while_away() -> None:
    async with subscribed("a.") as s:
        assert s.said["start"] is None
        s.peer.drop()
        peer = await s.broker.peer()
        pulling = asyncio.ensure_future(s.consumer.pull())
        assert (await peer.subscribed())["start"] == ["time", 4_711], "by the broker's clock"
        pulling.cancel()


async def test_an_answer_that_stays_out_too_long_means_a_dead_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling_module, "ROUND", 0.02)
    monkeypatch.setattr(pulling_module, "LATE", 0.02)
    monkeypatch.setattr("qmq.net.client.broker_link._TICK", 0.02)
    async with subscribed() as s:
        pulling = asyncio.ensure_future(s.consumer.pull())
        await s.peer.pulled()
        await s.client.flush()
        peer = await s.broker.peer()  # the tick was set before; the next one sees it
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        assert len(await pulling) == 1


async def test_a_closed_client_ends_its_pulls() -> None:
    async with scripted_broker() as broker:
        async with qmq.connect(broker.url) as client:
            peer = await broker.peer()
            consumer = client.subscribe("a.")
            entering = asyncio.ensure_future(consumer.__aenter__())
            await peer.subscribed()
            await entering
            pulling = asyncio.ensure_future(consumer.pull())
            await peer.pulled()
        with pytest.raises(UsageError, match="closed"):
            await pulling
        await consumer.__aexit__(None, None, None)


@pytest.mark.parametrize("at", [FRAME_SIZE, FRAME_SIZE + 4, FRAME_SIZE + HEAD.size, FRAME_SIZE + HEAD.size + 8])
async def test_a_pull_is_repeated_when_the_head_of_its_answer_is_damaged(at: int) -> None:
    """Acks with wrong delivery sequences would remove messages that were not handled."""
    async with subscribed(group="g") as s:
        task = asyncio.ensure_future(s.consumer.pull())
        request, _ = await s.peer.pulled()
        damaged = bytearray(encode_messages(request, len(batch(b"1")), [(0, 1, 1)]) + batch(b"1"))
        damaged[at] ^= 4
        s.peer.transport.write(bytes(damaged))
        await s.peer.gone()
        peer = await s.broker.peer()
        await peer.subscribed()
        request, _ = await peer.pulled()
        peer.messages(request, batch(b"1"))
        (message,) = await task
        message.ack()
        flushing = asyncio.ensure_future(s.consumer.flush())
        frame = await peer.frame(FrameKind.ACK)
        assert frame.payload[frames.ACK.size :] == frames.pack_numbers([0, 1])[0]
        peer.answer(FrameKind.ACKED, frame.request, payload=frames.ACKED.pack(0))
        await flushing

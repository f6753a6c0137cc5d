"""Leaving, entering and closing, cancelled at every wait: nothing is left behind, at the broker or in the client."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.net.client import broker_link
from qmq.net.client.consumer import pull as pulling
from qmq.net.client.consumer.ack_file import StateFile, state_directory
from qmq.net.client.sync.loop_thread import _Call
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import broker_process
from tests.net.client.consumer.test_pull import batch
from tests.net.scripted import STORE, Peer, scripted_broker
from tests.net.several import TIMEOUT_S, several, until
from tests.net.stepping import CancelledAt, run, run_turns


async def holding_three(client: qmq.Client, peer: Peer, **options: Any) -> tuple[qmq.Consumer, list[qmq.Message]]:
    """Enter a consumer that was given three messages and has acked the first."""
    consumer = client.subscribe("a.", group="g", **options)
    entering = asyncio.ensure_future(consumer.__aenter__())
    await peer.subscribed()
    await entering
    pulling = asyncio.ensure_future(consumer.pull())
    request, _ = await peer.pulled()
    peer.messages(request, batch(b"0", b"1", b"2"))
    messages = await pulling
    messages[0].ack()
    return consumer, messages


async def frames_until_unsubscribe(peer: Peer) -> list[FrameKind]:
    """Return the frames up to UNSUBSCRIBE, which comes once."""
    kinds = list[FrameKind]()
    while FrameKind.UNSUBSCRIBE not in kinds:
        frame = await peer.any_frame()
        assert frame is not None
        kinds.append(FrameKind(frame.kind))
    return kinds


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for a broker that does not answer."""
    monkeypatch.setattr(pulling, "FLUSH_TIMEOUT", 0.05)
    monkeypatch.setattr(pulling, "LEAVE_TIMEOUT", 0.05)


@pytest.mark.parametrize("named", [False, True])
async def test_wherever_leaving_is_cancelled_the_broker_hears_of_it(named: bool) -> None:
    """The broker answers nothing; acks are sent first, and the state file is unlocked and has them."""
    for number in itertools.count(1):
        async with scripted_broker() as broker, qmq.connect(broker.url) as client:
            peer = await broker.peer()
            consumer, messages = await holding_three(client, peer, consumer="c1" if named else None)
            leaving = CancelledAt(consumer.__aexit__(None, None, None), number)
            task = asyncio.ensure_future(run(leaving))
            kinds = await frames_until_unsubscribe(peer)
            assert FrameKind.ACK in kinds
            with pytest.raises(qmq.Fenced):
                await messages[1].nack()
            if named:
                file = StateFile.open(state_directory(), STORE, "g", "c1")
                known = file.read()
                file.close()
                assert known is not None
                assert known.handled == (0, 1)
            if leaving.waits < number:
                peer.drop()
                assert not await task
                break
            assert await task
            peer.drop()
            again = await broker.peer()
            frame = await again.frame(FrameKind.ADMINISTER)
            assert frames.unpack_meta(frame.meta)["action"] == "handled"
            assert frames.unpack_meta(frame.meta)["handled"] == [0, 1]
            meta = frames.unpack_meta((await again.frame(FrameKind.ADMINISTER)).meta)
            assert (meta["action"], meta["group"], meta["consumer"]) == ("leave", "g", consumer.id)
    assert number > 2


async def online(client: qmq.Client, group: str = "g") -> list[str]:
    return [one.name for one in await client.admin.consumers(group) if one.online]


async def nothing_is_left(client: qmq.Client, group: str = "g") -> None:
    """Assert that no consumer of the group is left, and no message is in flight."""

    async def nobody() -> bool:
        return not await online(client, group)

    await until(nobody, "nobody is online")
    assert {one.in_flight for one in await client.admin.groups() if one.name == group} == {0}


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
async def test_wherever_leaving_is_cancelled_its_messages_are_released(
    tmp_path: Path, count: int, cancels: int
) -> None:
    async with several(tmp_path, count) as brokers, qmq.connect(brokers.url) as client:
        for one in range(count):
            async with qmq.connect(brokers.one(one)) as sender:
                await sender.send_many("a.b", [b"%d" % number for number in range(10)])
        async with client.subscribe("a.", group="g", consumer="stays"):  # one heartbeat counts for all
            for turns in itertools.count(1):
                consumer = client.subscribe("a.", group="g")
                await consumer.__aenter__()
                messages = await consumer.pull(10 * count, 10 * count)
                assert {message.attempt for message in messages} == {1}
                if not await run_turns(consumer.__aexit__(None, None, None), turns, cancels):
                    break
                await until(_only(client, "stays"), "who has left is offline")
        await nothing_is_left(client)
        assert turns > 3


def _only(client: qmq.Client, *names: str) -> Callable[[], Any]:
    async def found() -> bool:
        return set(await online(client)) == set(names)

    return found


async def test_consumers_whose_time_is_over_while_the_broker_stands_still_leave_nothing(tmp_path: Path) -> None:
    """Ten tasks, each with a time limit around its consumer, leave while the broker is stopped."""
    with broker_process(tmp_path / "data") as broker:
        async with qmq.connect(broker.url) as client, client.subscribe("a", group="g", consumer="stays"):
            await client.send_many("a", [b"%d" % number for number in range(50)])
            ready, stopped = asyncio.Semaphore(0), asyncio.Event()

            async def left_in_time() -> None:
                async with asyncio.timeout(None) as limit:
                    async with client.subscribe("a", group="g") as consumer:
                        for message in (await consumer.pull(5, 5))[:2]:
                            message.ack()
                        ready.release()
                        await stopped.wait()
                        limit.reschedule(asyncio.get_running_loop().time() + 0.01)

            tasks = [asyncio.ensure_future(left_in_time()) for _ in range(10)]
            for _ in tasks:
                await ready.acquire()
            broker.send_signal(signal.SIGSTOP)
            stopped.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            broker.send_signal(signal.SIGCONT)
            assert [type(result) for result in results] == [TimeoutError] * 10
            await until(_only(client, "stays"), "who has left is offline")
            (group,) = await client.admin.groups()
            assert (group.in_flight, group.ready + group.in_retry) == (0, 30)


# --- subscribing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["reliable", "at_most_once", "broadcast", "alone"])
async def test_wherever_subscribing_is_cancelled_nothing_is_subscribed(
    tmp_path: Path, mode: Any, count: int, cancels: int
) -> None:
    options: dict[str, Any] = {} if mode == "alone" else {"group": "g", "mode": mode}
    async with (
        several(tmp_path, count, max_consumers_per_connection=4) as brokers,
        qmq.connect(brokers.url) as client,
    ):
        async with client.subscribe("a.", consumer="c1", **options):
            cancelled = 0
        for turns in itertools.count(1):
            consumer = client.subscribe("a.", consumer="c1", **options)
            if not await run_turns(consumer.__aenter__(), turns, cancels):
                await consumer.__aexit__(None, None, None)
                break
            cancelled += 1
            for _ in range(2):  # the answer to SUBSCRIBE comes first, then that to UNSUBSCRIBE
                await client.admin.groups()
        assert cancelled > 4
        if mode in ("reliable", "broadcast"):
            await nothing_is_left(client, "g" if mode == "reliable" else "g@c1")


async def test_a_cancelled_subscription_is_undone_when_its_answer_comes() -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        entering = asyncio.ensure_future(client.subscribe("a.", group="g", consumer="c1").__aenter__())
        frame = await peer.frame(FrameKind.SUBSCRIBE)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        StateFile.open(state_directory(), STORE, "g", "c1").close()
        peer.subscribe(frame, 9)
        frame = await peer.frame(FrameKind.UNSUBSCRIBE)
        assert frames.UNSUBSCRIBE.unpack(frame.payload) == (9,)
        peer.answer(FrameKind.UNSUBSCRIBED, frame.request)


@pytest.mark.parametrize("mode", ["reliable", "broadcast"])
async def test_a_cancelled_subscription_whose_answer_is_lost_is_undone_on_the_next_connection(mode: Any) -> None:
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        entering = asyncio.ensure_future(client.subscribe("a.", group="g", consumer="c1", mode=mode).__aenter__())
        said = frames.unpack_meta((await peer.frame(FrameKind.SUBSCRIBE)).meta)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        request = 0
        for _ in range(2):  # until it is answered
            peer.drop()
            peer = await broker.peer()
            frame = await peer.frame(FrameKind.ADMINISTER)
            assert frames.unpack_meta(frame.meta) == {
                "action": "leave",
                "group": "g" if mode == "reliable" else "g@c1",
                "consumer": "c1",
                "nonce": said["nonce"],
            }
            request = frame.request
        peer.answer(FrameKind.ADMINISTERED, request, payload=b"\x81\xa4left\xc3")
        receipt = asyncio.ensure_future(client.send("a", b""))
        frame, _ = await peer.batch()
        peer.drop()
        peer = await broker.peer()
        frame, _ = await peer.batch()
        peer.stored(frame)
        await receipt


async def test_a_consumer_that_left_while_its_broker_was_away_is_gone_afterwards(tmp_path: Path) -> None:
    async with (
        several(tmp_path, 1) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a.", group="g", consumer="stays"),
    ):
        leaves = client.subscribe("a.", group="g", consumer="leaves")
        await leaves.__aenter__()
        await brokers.stop(0)
        await leaves.__aexit__(None, None, None)
        await brokers.start(0)
        await until(_only(client, "stays"), "who has left is offline")


# --- without asyncio -------------------------------------------------------------------------------------------------


@contextmanager
def interrupted_soon() -> Iterator[None]:
    """Send Ctrl-C after a moment; it must arrive within this block."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


def held(client: qmq.SyncClient) -> int:
    (group,) = client.admin.groups()
    return group.in_flight


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"it has not come to hold that {what}"


def test_an_interrupt_while_it_subscribes_leaves_no_subscription(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker, qmq.connect_sync(broker.url) as client:
        with client.subscribe("a", group="g", consumer="stays"):
            broker.send_signal(signal.SIGSTOP)
            with interrupted_soon(), client.subscribe("a", group="g", consumer="c1"):
                pass
            broker.send_signal(signal.SIGCONT)
            wait_until(
                lambda: [one.name for one in client.admin.consumers("g") if one.online] == ["stays"],
                "only who stays is online",
            )
        store_id = client._current_thread().parts.brokers.links[0].store_id
        StateFile.open(state_directory(), store_id, "g", "c1").close()


def test_an_interrupt_while_it_leaves_releases_its_messages(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker, qmq.connect_sync(broker.url) as client:
        client.send_many("a", [b"1", b"2", b"3"])
        with client.subscribe("a", group="g", consumer="stays"):
            with interrupted_soon(), client.subscribe("a", group="g") as consumer:
                assert len(consumer.pull(3, 3)) == 3
                broker.send_signal(signal.SIGSTOP)
            broker.send_signal(signal.SIGCONT)
            wait_until(lambda: held(client) == 0, "nothing is in flight")


def test_messages_of_an_interrupted_pull_come_with_the_next(tmp_path: Path) -> None:
    """The interrupt comes when the messages have arrived and the program does not have them yet."""
    with broker_process(tmp_path / "data") as broker, qmq.connect_sync(broker.url) as client:
        client.send_many("a", [b"1", b"2", b"3"])
        with client.subscribe("a", group="g") as consumer:

            def interrupted(call: _Call[Any]) -> Any:
                patch.undo()
                call.result()
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_Call, "result", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    consumer.pull(3, 3)
            assert [message.body for message in consumer.pull(3, 3)] == [b"1", b"2", b"3"]


# --- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [1, 3])
async def test_wherever_closing_is_cancelled_its_connections_end(cancels: int) -> None:
    """The brokers read nothing, and answer nothing."""
    for turns in itertools.count(1):
        async with scripted_broker() as one, scripted_broker(store_id=b"store2") as two:
            client = qmq.connect(f"{one.url},{two.url.removeprefix('qmq://')}")
            await client.__aenter__()
            links, peers = client._brokers.links, [await one.peer(), await two.peer()]
            connections = [link.connection for link in links if link.connection is not None]
            closing = client.__aexit__(None, None, None)
            was_cancelled = await run_turns(closing, turns, cancels)
            assert [link.connection for link in links] == [None, None]
            for peer in peers:
                await peer.gone()
            for connection in connections:
                await connection.wait_closed()
            if not was_cancelled:
                break
    assert turns > 2


async def test_a_connection_that_is_not_read_ends_though_no_task_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qmq.net.client.connection.CLOSE_TIMEOUT", 0.01)
    async with scripted_broker() as broker:
        client = qmq.connect(broker.url, max_queued_bytes=1 << 30)
        await client.__aenter__()
        peer = await broker.peer()
        peer.transport.pause_reading()
        connection = client._brokers.links[0].connection
        assert connection is not None
        for _ in range(16):
            client.send_nowait("a", bytes(3 << 20))
        await until(lambda: not connection.writable, "more is written than is read")
        closing = asyncio.ensure_future(client.__aexit__(None, None, None))
        for _ in range(3):
            await asyncio.sleep(0)
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await until(lambda: connection._lost, "the connection has ended")


async def test_departures_while_the_broker_was_away_are_sent_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_link, "DEPARTURES_AT_ONCE", 2)
    async with scripted_broker() as broker, qmq.connect(broker.url) as client:
        peer = await broker.peer()
        entering = [asyncio.ensure_future(client.subscribe("a.", group="g").__aenter__()) for _ in range(5)]
        said = [frames.unpack_meta((await peer.frame(FrameKind.SUBSCRIBE)).meta) for _ in entering]
        for one in entering:
            one.cancel()
        await asyncio.wait(entering)
        peer.drop()
        peer = await broker.peer()
        left = list[str]()
        while len(left) < len(said):
            found = [await peer.frame(FrameKind.ADMINISTER) for _ in range(min(2, len(said) - len(left)))]
            await asyncio.sleep(0)
            assert not peer.has_frame()
            for frame in found:
                left.append(frames.unpack_meta(frame.meta)["consumer"])
                peer.answer(FrameKind.ADMINISTERED, frame.request, payload=b"\x81\xa4left\xc3")
        assert sorted(left) == sorted(one["consumer"] for one in said)

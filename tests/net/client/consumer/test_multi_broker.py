"""One consumer at several brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import qmq
from qmq.net.client.consumer.multi_broker import MultiBrokerPuller
from qmq.net.client.consumer.pull import Puller
from tests.broker_process import BrokerProcess
from tests.net.several import Several, connections, put, several, until
from tests.net.stepping import run_turns


def bodies(messages: list[qmq.Message]) -> list[bytes]:
    return sorted(message.body for message in messages)


async def test_messages_of_all_brokers_come(tmp_path: Path) -> None:
    async with several(tmp_path, 3) as brokers:
        for number in range(3):
            await put(brokers.one(number), "a", [b"%d-%d" % (number, i) for i in range(10)])
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            messages = await consumer.pull(max_count=100, min_count=30, timeout=30)
            assert bodies(messages) == sorted(b"%d-%d" % (number, i) for number in range(3) for i in range(10))
            for message in messages:
                message.ack()
            await consumer.flush()
            assert await consumer.pull(timeout=0) == []


async def test_a_pull_that_waits_leaves_out_what_goes_back_meanwhile(tmp_path: Path) -> None:
    """It has the second message of an order key when the first one fails, so it gets both again, in order."""
    async with several(tmp_path, 2) as brokers, qmq.connect(brokers.url) as client:
        await client.send_many("a", [b"first", b"second"], order_keys=["k", "k"])
        async with client.subscribe("a", group="g", retry_delays=[0]) as consumer:
            (first,) = await consumer.pull(1)
            pulling = asyncio.ensure_future(consumer.pull(10, 2, timeout=30))
            await until(lambda: first._run.in_flight.expected == 2, "the pull has the second one")
            await first.nack()
            messages = await pulling
            assert [(message.body, message.in_flight) for message in messages] == [(b"first", True), (b"second", True)]


async def test_refusals_of_all_brokers_are_raised(tmp_path: Path) -> None:
    async with several(tmp_path, 2) as brokers, qmq.connect(brokers.url) as client:
        for number in range(2):
            await put(brokers.one(number), "a", [b"x"])
        async with client.subscribe("a", group="g") as consumer:
            messages = await consumer.pull(min_count=2, timeout=30)
        for message in messages:
            message.ack()
        with pytest.raises(qmq.Fenced) as told:
            await consumer.flush()
        assert str(told.value).startswith("2 acks")
        await consumer.flush()


async def test_an_arrival_at_any_broker_ends_a_waiting_pull(tmp_path: Path) -> None:
    async with (
        several(tmp_path, 3) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        for number in (2, 0, 1, 1):
            pulling = asyncio.ensure_future(consumer.pull())
            await until(lambda: len(consumer._puller._tasks) == 3, "it waits everywhere")  # type: ignore[union-attr]
            await put(brokers.one(number), "a", [b"%d" % number])
            (message,) = await pulling
            assert message.body == b"%d" % number
            message.ack()


async def test_no_more_is_taken_than_is_asked_for(tmp_path: Path) -> None:
    async with several(tmp_path, 3) as brokers:
        for number in range(3):
            await put(brokers.one(number), "a", [b"x"] * 10)
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            for _ in range(3):
                assert len(await consumer.pull(max_count=2, timeout=30)) == 2
            held = [row.in_flight for row in await client.admin.consumers("g")]
            assert held == [2, 2, 2], "each broker is asked in its turn, and for no more"


async def test_messages_beyond_the_request_come_first_in_the_next_pull(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        pulling = asyncio.ensure_future(consumer.pull(max_count=5, min_count=5))
        await until(lambda: len(consumer._puller._tasks) == 2, "it waits everywhere")  # type: ignore[union-attr]
        await asyncio.gather(*(put(brokers.one(number), "a", [b"%d" % number] * 4) for number in range(2)))
        first = await pulling
        assert len(first) == 5
        rest = await consumer.pull(max_count=5, min_count=3, timeout=30)
        assert bodies(first + rest) == [b"0"] * 4 + [b"1"] * 4
        assert len({message.id for message in first + rest}) == 8


async def test_an_at_most_once_group_is_never_given_more_than_was_asked_for(tmp_path: Path) -> None:
    """Messages beyond the request would be lost when the consumer leaves."""
    async with several(tmp_path, 3) as brokers, qmq.connect(brokers.url) as client:
        for count in (1, 2, 4):
            async with client.subscribe("a", group="g", mode="at_most_once") as consumer:
                pulling = asyncio.ensure_future(consumer.pull(max_count=count, min_count=count))
                await until(lambda: bool(consumer._puller._tasks), "it waits")  # type: ignore[union-attr]
                await asyncio.gather(*(put(brokers.one(number), "a", [b"%d" % number] * 4) for number in range(3)))
                assert len(await pulling) == count
            async with client.subscribe("a", group="g", mode="at_most_once") as consumer:
                rest = 12 - count
                assert len(await consumer.pull(max_count=100, min_count=rest, timeout=30)) == rest
                assert await consumer.pull(timeout=0) == []


@asynccontextmanager
async def late_answers(address: str, delay: Callable[[], float]) -> AsyncIterator[str]:
    """Forward an address of its own to *address*; answers come *delay()* seconds late."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")

    async def copy(reader: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        while data := await reader.read(65_536):
            write(data)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.wait(
                {
                    loop.create_task(copy(reader, to_broker.write)),
                    loop.create_task(copy(from_broker, lambda data: loop.call_later(delay(), writer.write, data))),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            to_broker.close()
            writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("count", [1, 5])
async def test_an_at_most_once_group_loses_nothing_to_late_answers(tmp_path: Path, count: int) -> None:
    """Each broker answers later than its turn lasts: the next one is asked only for what the last one did not give."""
    async with several(tmp_path, 3) as brokers, AsyncExitStack() as stack:
        for number in range(3):
            await put(brokers.one(number), "a", [b"%d" % number] * 4)
        late = [
            await stack.enter_async_context(late_answers(brokers.address(number), lambda: 0.15)) for number in range(3)
        ]
        async with (
            qmq.connect("qmq://" + ",".join(late)) as client,
            client.subscribe("a", group="g", mode="at_most_once") as consumer,
        ):
            await until(lambda: len(consumer._puller._entered) == 3, "it has subscribed")  # type: ignore[union-attr]
            assert len(await consumer.pull(max_count=count, min_count=count, timeout=30)) == count
        async with (
            qmq.connect(brokers.url) as client,
            client.subscribe("a", group="g", mode="at_most_once") as consumer,
        ):
            assert len(await consumer.pull(max_count=100, min_count=12 - count, timeout=10)) == 12 - count


async def test_a_broker_that_hangs_holds_an_at_most_once_group_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, settle, delay = list[Puller](), Puller.settle, 0.0

    async def counted(puller: Puller, timeout: float) -> None:
        if puller.is_waiting and delay:
            waited.append(puller)
        await settle(puller, 0.01)

    monkeypatch.setattr(Puller, "settle", counted)
    async with (
        several(tmp_path) as brokers,
        late_answers(brokers.address(0), lambda: delay) as hanging,
        qmq.connect(f"qmq://{hanging},{brokers.address(1)}") as client,
        client.subscribe("a", group="g", mode="at_most_once") as consumer,
    ):
        puller = consumer._puller
        assert isinstance(puller, MultiBrokerPuller)
        await until(lambda: len(puller._entered) == 2, "it has subscribed")
        delay = 3_600.0
        for body in (b"0", b"1", b"2"):
            assert await consumer.pull(timeout=0.6) == []  # two turns
            await put(brokers.one(1), "a", [body])
            assert [message.body for message in await consumer.pull(timeout=30)] == [body]
        assert waited.count(puller.pullers[0]) == 1
        puller.leave_now()


async def test_none_starves_beside_a_broker_with_a_backlog(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        await put(brokers.one(0), "a", [b"backlog"] * 1_000)
        await put(brokers.one(1), "a", [b"few"] * 5)
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            came = [message for _ in range(10) for message in await consumer.pull(max_count=1, timeout=30)]
            assert bodies(came) == [b"backlog"] * 5 + [b"few"] * 5


async def test_a_broker_that_restarts_does_not_disturb_the_other_brokers(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group="g", consumer="c") as consumer,
    ):
        await put(brokers.one(0), "a", [b"old"] * 3)
        held = await consumer.pull(max_count=3, min_count=3, timeout=30)
        await brokers.stop(0)
        await put(brokers.one(1), "a", [b"new"])
        (message,) = await consumer.pull(timeout=30)
        assert message.body == b"new"
        message.ack()
        await brokers.start(0)
        await until(lambda: connections(client) == [True, True], "it is connected to both again")
        await put(brokers.one(0), "a", [b"later"])
        (message,) = await consumer.pull(timeout=30)
        assert message.body == b"later", "what is held is not handed out again"
        for one in (message, *held):
            one.ack()
        await consumer.flush()


async def test_pull_gives_nothing_while_no_broker_is_there_and_goes_on_later(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        for number in range(2):
            await brokers.stop(number)
        assert await consumer.pull(timeout=0.1) == []
        pulling = asyncio.ensure_future(consumer.pull())
        await brokers.start(1)
        await put(brokers.one(1), "a", [b"x"])
        assert bodies(await pulling) == [b"x"]


async def test_a_broker_that_is_away_at_first_is_followed_once_it_is_there(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        await brokers.stop(1)
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            pulling = asyncio.ensure_future(consumer.pull())
            await brokers.start(1)
            await put(brokers.one(1), "a", [b"x"])
            assert bodies(await pulling) == [b"x"]


async def test_a_pull_that_waits_for_a_late_broker_does_not_spin(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        await brokers.stop(1)
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            puller = consumer._puller
            assert isinstance(puller, MultiBrokerPuller)
            pulling = asyncio.ensure_future(consumer.pull())
            await brokers.start(1)
            await until(lambda: not puller._entering, "it has noticed that the other one is there")
            await put(brokers.one(1), "a", [b"x"])
            assert bodies(await pulling) == [b"x"]


async def test_a_cancelled_pull_loses_nothing(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group="g") as consumer,
    ):
        came: list[qmq.Message] = []
        for number in range(30):
            pulling = asyncio.ensure_future(consumer.pull(max_count=1))
            await put(brokers.one(number % 2), "a", [b"%02d" % number])
            pulling.cancel()
            try:
                came += await pulling
            except asyncio.CancelledError:
                came += await consumer.pull(max_count=1, timeout=30)
        assert bodies(came) == [b"%02d" % number for number in range(30)]


@pytest.mark.parametrize("cancels", [1, 4])
@pytest.mark.parametrize("group", ["g", None])
async def test_wherever_a_pull_is_cancelled_it_loses_nothing(tmp_path: Path, group: str | None, cancels: int) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", group=group, start="first") as consumer,
    ):
        came, sent = list[bytes](), list[bytes]()
        for turns in range(1, 30):
            new = [b"%02d-%d" % (turns, number) for number in range(2)]
            sent += new
            for number, body in enumerate(new):
                await put(brokers.one(number), "a", [body])
            if not await run_turns(consumer.pull(4, 4), turns, cancels):
                raise AssertionError("there is too little for it to return")
            while len(came) < len(sent) and (more := await consumer.pull(max_count=100, timeout=30)):
                came += bodies(more)
        assert sorted(came) == sent


async def test_async_for_takes_from_all_and_messages_left_over_come_next(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers:
        for number in range(2):
            await put(brokers.one(number), "a", [b"%d-%02d" % (number, i) for i in range(20)])
        async with qmq.connect(brokers.url) as client, client.subscribe("a", group="g") as consumer:
            came = []
            async for message in consumer:
                message.ack()
                came.append(message)
                if len(came) == 25:
                    break
            while len(came) < 40:
                more = await consumer.pull(timeout=30)
                assert more, f"only {len(came)} came"
                came += more
            assert len({message.body for message in came}) == 40


@pytest.mark.parametrize("group", ["g", None])
async def test_the_sync_client_pulls_from_all_too(tmp_path: Path, group: str | None) -> None:
    async with several(tmp_path) as brokers:
        for number in range(2):
            await put(brokers.one(number), "a", [b"%d" % number] * 5)

        def consume() -> list[bytes]:
            with (
                qmq.connect_sync(brokers.url) as client,
                client.subscribe("a", group=group, start="first") as consumer,
            ):
                messages = consumer.pull(max_count=10, min_count=10, timeout=30)
                for message in messages:
                    message.ack()
                consumer.flush()
                return sorted(message.body for message in messages)

        assert await asyncio.to_thread(consume) == [b"0"] * 5 + [b"1"] * 5


async def test_a_solo_consumer_gets_each_message_once_over_an_end_of_one_broker(tmp_path: Path) -> None:
    async with (
        several(tmp_path) as brokers,
        qmq.connect(brokers.url) as client,
        client.subscribe("a", start="first") as consumer,
    ):
        await put(brokers.one(0), "a", [b"0"])
        await put(brokers.one(1), "a", [b"1"])
        came = await consumer.pull(min_count=2, timeout=30)
        await brokers.stop(0)
        await brokers.start(0)
        await put(brokers.one(0), "a", [b"2"])
        came += await consumer.pull(timeout=30)
        assert bodies(came) == [b"0", b"1", b"2"]


async def test_a_broker_that_is_killed_gives_its_messages_later(tmp_path: Path) -> None:
    """After kill -9 of one of two brokers its messages arrive once it is back, and each is acked."""
    dying = BrokerProcess(tmp_path / "dying")
    brokers = Several(tmp_path, 1)
    try:
        dying.start()
        await brokers.start(0)
        await put(dying.url, "a", [b"d%02d" % number for number in range(50)])
        await put(brokers.one(0), "a", [b"w%02d" % number for number in range(50)])
        async with (
            qmq.connect(f"{dying.url},{brokers.one(0)}") as client,
            client.subscribe("a", group="g", consumer="c") as consumer,
        ):
            seen: list[bytes] = []
            while len(seen) < 20:
                for message in await consumer.pull(max_count=5, timeout=30):
                    seen.append(message.body)
                    message.ack()
            dying.kill()
            while len([body for body in seen if body.startswith(b"w")]) < 50:
                for message in await consumer.pull(max_count=5, timeout=30):
                    seen.append(message.body)
                    message.ack()
            await asyncio.to_thread(dying.start)
            while len(set(seen)) < 100:
                for message in await consumer.pull(max_count=5, timeout=30):
                    seen.append(message.body)
                    message.ack()
            await consumer.flush()
            assert len(seen) == 100, "none came twice: the acknowledgements were sent again"
    finally:
        await brokers.stop(0)
        dying.close()

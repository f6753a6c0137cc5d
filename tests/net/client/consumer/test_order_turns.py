"""Workers and order keys: each slot has one worker, and a hot key holds up no other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qmq
from qmq import testing
from qmq.net.client.consumer.order_turns import MAX_ASIDE, OrderTurns
from tests.broker_process import BrokerProcess, broker_process

TIMEOUT_S = 60
HOT = 60
OTHERS = 20
#: Seconds that a handler takes.
TAKES = 0.02


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("turns") / "data") as started:
        yield started


def send(broker: BrokerProcess, subject: str) -> None:
    """Send messages of one hot order key, then one of each of several others."""
    with qmq.connect_sync(broker.url) as client:
        client.send_many(subject, [b"%d" % number for number in range(HOT)], order_key="hot")
        client.send_many(
            subject, [b"k"] * OTHERS, order_keys=[f"k{number}" for number in range(OTHERS)]
        )  # fmt: skip


class Handled:
    """What was handled, in its order; stops the consumers at the end."""

    def __init__(self, hot: int = HOT) -> None:
        self.keys: list[str] = []
        self.hot: list[int] = []
        self.consumers: list[qmq.Consumer | qmq.SyncConsumer] = []
        self._busy = set[str]()
        self._expected = hot
        self._lock = threading.Lock()

    def begins(self, message: qmq.Message) -> None:
        with self._lock:
            assert message.order_key is not None
            assert message.order_key not in self._busy, "two have one key"
            self._busy.add(message.order_key)

    def ends(self, message: qmq.Message, *, failed: bool = False) -> None:
        with self._lock:
            assert message.order_key is not None
            self._busy.remove(message.order_key)
            if failed:
                return
            self.keys.append(message.order_key)
            if message.order_key == "hot":
                self.hot.append(int(message.body))
            done = len(self.hot) == self._expected and len(self.keys) == self._expected + OTHERS
        for consumer in self.consumers if done else ():
            consumer.stop()

    def check(self) -> None:
        """Check that the others were handled beside the first of the hot key, and the hot key in order."""
        assert self.hot == list(range(self._expected))
        last = max(at for at, key in enumerate(self.keys) if key != "hot")
        assert self.keys[:last].count("hot") <= HOT // 2, self.keys


@pytest.mark.parametrize("count", [1, 2])
async def test_a_hot_key_holds_up_no_other(broker: BrokerProcess, count: int) -> None:
    subject, handled = f"hot.{count}", Handled()
    await asyncio.to_thread(send, broker, subject)

    async def handle(message: qmq.Message) -> None:
        handled.begins(message)
        await asyncio.sleep(TAKES)
        handled.ends(message)

    async def work(client: qmq.Client) -> None:
        async with client.subscribe(subject, group=subject) as consumer:
            handled.consumers.append(consumer)
            await consumer.run(handle, concurrency=4)

    async with asyncio.timeout(TIMEOUT_S), qmq.connect(broker.url) as client:
        await asyncio.gather(*(work(client) for _ in range(count)))
    handled.check()


async def test_a_hot_key_that_fails_holds_up_no_other(broker: BrokerProcess) -> None:
    handled = Handled()
    await asyncio.to_thread(send, broker, "failing")

    async def handle(message: qmq.Message) -> None:
        handled.begins(message)
        failed = message.attempt == 1 and int(message.body) % 20 == 0 if message.order_key == "hot" else False
        await asyncio.sleep(TAKES / 10)
        handled.ends(message, failed=failed)
        if failed:
            raise qmq.Retry(after=0.1)

    async with (
        asyncio.timeout(TIMEOUT_S),
        qmq.connect(broker.url) as client,
        client.subscribe("failing", group="failing") as consumer,
    ):
        handled.consumers.append(consumer)
        await consumer.run(handle, concurrency=4)
    handled.check()


def test_a_hot_key_holds_up_no_thread(broker: BrokerProcess) -> None:
    handled = Handled()
    send(broker, "threads")

    def handle(message: qmq.SyncMessage) -> None:
        handled.begins(message)
        time.sleep(TAKES)
        handled.ends(message)

    with qmq.connect_sync(broker.url) as client, client.subscribe("threads", group="threads") as consumer:
        handled.consumers.append(consumer)
        consumer.run(handle, concurrency=4)
    handled.check()


async def test_messages_set_aside_are_released_by_a_stop(broker: BrokerProcess) -> None:
    await asyncio.to_thread(send, broker, "stopped")
    others, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def handle(message: qmq.Message) -> None:
        if message.order_key == "hot":
            await may_end.wait()
        others.release()

    async with (
        asyncio.timeout(TIMEOUT_S),
        qmq.connect(broker.url) as client,
        client.subscribe("stopped", group="stopped") as consumer,
    ):
        running = asyncio.ensure_future(consumer.run(handle, concurrency=4))
        for _ in range(OTHERS):  # those behind the hot ones
            await others.acquire()
        consumer.stop()
        may_end.set()
        await running
        async with client.subscribe("stopped", group="stopped") as other:
            found = list[bytes]()
            while len(found) < HOT - 1:
                found += [message.body for message in await other.pull(HOT)]
    assert found == [b"%d" % number for number in range(1, HOT)]


async def test_a_group_without_acks_takes_all_in_order(broker: BrokerProcess) -> None:
    handled = Handled()
    await asyncio.to_thread(send, broker, "fleeting.b")

    async def handle(message: qmq.Message) -> None:
        handled.begins(message)
        await asyncio.sleep(TAKES / 10)
        handled.ends(message)

    async with (
        asyncio.timeout(TIMEOUT_S),
        qmq.connect(broker.url) as client,
        client.subscribe("fleeting.", group="fleeting", mode="at_most_once") as consumer,
    ):
        handled.consumers.append(consumer)
        await consumer.run(handle, concurrency=4)
    assert handled.hot == list(range(HOT))


# --- without I/O -----------------------------------------------------------------------------------------------------


def made(key: str, number: int) -> testing.RecordedMessage:
    return testing.message(b"%d" % number, subject=key, order_key=key)


def turns() -> OrderTurns[testing.RecordedMessage]:
    return OrderTurns()


def test_about_a_second_of_work_is_set_aside() -> None:
    order, hot = turns(), [made("hot", number) for number in range(3_000)]
    assert order.begin(hot[0], 0.0, goes_back=True) is None
    waits = [order.begin(message, 0.0, goes_back=True) for message in hot[1:20]]
    assert waits == [0.0] * 16 + [0.5] * 3, "nothing is known of the handler"
    assert order.begin(made("other", 0), 0.0, goes_back=True) is None
    assert order.end(hot[0], 0.1) is hot[1]
    assert order.begin(hot[20], 0.1, goes_back=True) == 0.5, "it takes 0.1 s"
    assert order.count == 15
    late = order.surplus(0.1)
    assert late == [(hot[12], 0.5)]
    assert order.count == 10
    assert order.surplus(2.0) == [(hot[2], 1.0)], "the handler is stuck"
    assert order.count == 0
    assert order.end(hot[1], 2.0) is None
    assert order.begin(hot[2], 2.0, goes_back=True) is None
    assert order.end(hot[2], 2.0001) is None


def test_few_go_back_from_a_fast_handler() -> None:
    order, hot = turns(), [made("hot", number) for number in range(MAX_ASIDE + 3)]
    order.begin(hot[0], 0.0, goes_back=True)
    order.begin(hot[1], 0.0, goes_back=True)
    assert order.end(hot[0], 0.0001) is hot[1]
    waits = [order.begin(message, 0.0001, goes_back=True) for message in hot[2:]]
    assert waits == [0.0] * MAX_ASIDE + [0.05]
    assert order.begin(hot[0], 0.0001, goes_back=False) == 0.05
    assert order.take()[-1] is hot[0], "it could not go back"
    assert order.count == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 0.3)), max_size=60))
def test_each_slot_has_one_worker_and_keeps_its_order(steps: list[tuple[str, bool, float]]) -> None:
    order, busy, given_out, now = turns(), dict[str, testing.RecordedMessage](), dict[str, list[int]](), 0.0
    for number, (key, ends, took) in enumerate(steps):
        now += took
        if ends and key in busy:
            following = order.end(busy.pop(key), now)
            if following is not None:
                busy[key] = following
                given_out.setdefault(key, []).append(int(following.body))
            continue
        message = made(key, number)
        if order.begin(message, now, goes_back=True) is None:
            assert key not in busy
            busy[key] = message
            given_out.setdefault(key, []).append(number)
        else:
            assert key in busy
        for late, seconds in order.surplus(now):
            assert int(late.body) > given_out[late.subject][-1]
            assert 0.05 <= seconds <= 1.0
    for numbers in given_out.values():
        assert numbers == sorted(numbers)

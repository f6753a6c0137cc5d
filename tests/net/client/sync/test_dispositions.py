"""Dispositions that threads give without waiting: each message keeps the first one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process

COUNT = 400
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("sync") / "data") as started:
        yield started


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_message_that_its_handler_releases_comes_again(broker: BrokerProcess, concurrency: int) -> None:
    subject, seen, handled, lock = f"run.{concurrency}", Counter[bytes](), set[bytes](), threading.Lock()

    def handle(message: qmq.SyncMessage) -> None:
        with lock:
            seen[message.body] += 1
            if seen[message.body] == 1 and int(message.body) % 10 == 0:
                message.release()
                return
            handled.add(message.body)
            if len(handled) == COUNT:
                consumer.stop()

    with qmq.connect_sync(broker.url) as client:
        client.send_many(subject, [b"%d" % number for number in range(COUNT)])
        with client.subscribe(subject, group=subject) as consumer:
            stopping = threading.Timer(TIMEOUT_S, consumer.stop)
            stopping.start()
            consumer.run(handle, concurrency=concurrency)
            stopping.cancel()
    assert len(handled) == COUNT, sorted(set(seen) - handled)


def test_a_block_does_not_ack_what_it_has_released(broker: BrokerProcess) -> None:
    handled, released = set[bytes](), set[bytes]()
    with qmq.connect_sync(broker.url) as client:
        client.send_many("blocks", [b"%d" % number for number in range(COUNT)])
        with client.subscribe("blocks", group="blocks") as consumer:
            while messages := consumer.pull(100, timeout=1.0 if len(handled) == COUNT else TIMEOUT_S):
                for message in messages:
                    with message:
                        if int(message.body) % 10 == 0 and message.body not in released:
                            released.add(message.body)
                            message.release()
                        else:
                            handled.add(message.body)
    assert len(handled) == COUNT


def test_the_first_of_a_batch_and_its_messages_counts(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("batches", [b"%d" % number for number in range(COUNT)])
        with client.subscribe("batches", group="batches") as consumer:
            batch = consumer.pull_batch(COUNT, min_count=COUNT, timeout=TIMEOUT_S)
            for number in range(0, COUNT, 4):
                batch[number].ack()
                batch[number + 1 : number + 3].release("1h")
                batch[number + 2].ack()
                batch[number + 3].release("1h")
                batch[number + 3].ack(wait=number > COUNT - 8)
            consumer.flush()
            (group,) = client.admin.groups("batches")
            assert (group.in_flight, group.in_retry) == (0, COUNT * 3 // 4)


def test_not_yet_counts_no_attempt(broker: BrokerProcess) -> None:
    seen, failed = list[int](), list[bytes]()

    def handle(message: qmq.SyncMessage) -> None:
        seen.append(message.attempt)
        if len(seen) <= 5:
            raise qmq.Retry("not paid yet", after=0.01, counts=False)
        consumer.stop()

    with qmq.connect_sync(broker.url) as client:
        client.send("unpaid", b"1")
        with client.subscribe("unpaid", group="unpaid", max_attempts=2, retry_delays=[0]) as consumer:
            consumer.on_failed = lambda message, error: failed.append(message.body)
            with pytest.raises(qmq.Retry), consumer.pull(1, timeout=TIMEOUT_S)[0]:
                raise qmq.Retry(counts=False)
            with pytest.raises(qmq.Retry), consumer.pull_batch(1, timeout=TIMEOUT_S):
                raise qmq.Retry("not paid yet", counts=False)
            consumer.run(handle)
        (group,) = client.admin.groups("unpaid")
    assert (seen, failed, group.dead) == ([1] * 6, [], 0)

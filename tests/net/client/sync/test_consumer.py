"""The consumer without asyncio, against a real broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import qmq
from qmq.errors import Fenced, UsageError
from tests.broker_process import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("consumer") / "data") as started:
        yield started


def test_what_a_loop_left_comes_with_the_next_pull(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("left", [b"0", b"1", b"2"])
        with client.subscribe("left", start="first") as consumer:
            assert next(iter(consumer)).body == b"0"
            assert next(iter(consumer)).body == b"1"
            assert [message.body for message in consumer.pull(1, timeout=30)] == [b"2"]


def test_the_dispositions_are_plain_calls_and_done_when_they_return(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("dispositions", [b"failed", b"nacked", b"rejected", b"released", b"acked"])
        with client.subscribe("dispositions", group="judges", consumer="judge") as consumer:
            failed, nacked, rejected, released, acked = consumer.pull(5, min_count=5, timeout=30)
            with pytest.raises(ValueError, match="room"), failed:
                raise ValueError("no such room")
            nacked.nack(delay=60.0, reason="later")
            rejected.reject("bad address")
            acked.ack()
            consumer.flush()
            (group,) = client.admin.groups()
            assert (group.in_retry, group.dead) == (2, 1)
            assert [letter.reason for letter in client.admin.dead_letters("judges")] == ["bad address"]
            released.release()
            (again,) = consumer.pull(5, timeout=30)
            assert (again.body, again.attempt) == (b"released", 1)
            with pytest.raises(KeyboardInterrupt), again:
                raise KeyboardInterrupt
            (again,) = consumer.pull(5, timeout=30)
            assert (again.body, again.attempt) == (b"released", 1)
            with again:
                pass
            consumer.flush()


def test_a_batch_has_messages_without_asyncio(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("batch", [b"nacked", b"rejected", b"released", b"failed", b"acked", b"acked"])
        with client.subscribe("batch", group="batch", retry_delays=[3_600]) as consumer:
            batch = consumer.pull_batch(6, min_count=6, timeout=30)
            assert type(batch) is qmq.SyncMessageBatch
            assert {type(message) for message in (*batch, *batch[:2], batch[-1], *reversed(batch))} == {qmq.SyncMessage}
            batch[0].nack(reason="later")
            batch[1].reject("bad address")
            batch[2].release()
            with pytest.raises(ValueError, match="room"), batch[3]:
                raise ValueError("no such room")
            for message in batch[4:]:
                message.ack()
            consumer.flush()
            (group,) = client.admin.groups("batch")
            assert (group.in_retry, group.dead, group.in_flight) == (3, 1, 0)
            (again,) = consumer.pull_batch(timeout=30)
            assert (again.body, again.attempt) == (b"released", 1)


def test_a_batch_is_acknowledged_on_the_thread_of_its_loop(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")  # so that the loop refuses calls of other threads
    with qmq.connect_sync(broker.url) as client:
        client.send_many("whole", [b"%d" % number for number in range(10)])
        with client.subscribe("whole", group="whole") as consumer:
            for _ in range(2):
                consumer.pull_batch(5, min_count=5, timeout=30).ack()
                consumer.flush()
            (group,) = client.admin.groups("whole")
            assert (group.ready, group.in_flight) == (0, 0)
        with client.subscribe("whole", start="first") as alone:
            alone.pull_batch(5, min_count=5, timeout=30).ack()


@pytest.mark.parametrize("closed", [False, True])
def test_a_batch_that_is_acknowledged_too_late_is_warned_of(
    broker: BrokerProcess, closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subject = f"late.batch.{closed}"
    with qmq.connect_sync(broker.url) as client:
        client.send_many(subject, [b"0", b"1"])
        with client.subscribe(subject, group=subject, consumer="c") as consumer:
            batch = consumer.pull_batch(2, min_count=2, timeout=30)
        if not closed:
            batch.ack()
            with pytest.raises(Fenced, match="2 acks"):
                consumer.flush()
    if closed:
        batch.ack()
    (said,) = [record.getMessage() for record in caplog.records if "after its block" in record.getMessage()]
    assert said.startswith("consumer c: ack() of ")
    assert "2 messages" in said


def test_who_follows_alone_can_hand_nothing_back(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send("alone", b"0")
        with client.subscribe("alone", start="first") as consumer:
            (message,) = consumer.pull(1, timeout=30)
            message.ack()
            message.release()
            with pytest.raises(UsageError, match="solo consumers"):
                message.nack()
            with pytest.raises(ValueError, match="mine"), message:
                raise ValueError("mine")


def test_dispositions_after_the_client_is_closed(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("late", [b"0", b"1"])
        with client.subscribe("late", group="late") as consumer:
            messages = consumer.pull(2, min_count=2, timeout=30)
        with pytest.raises(Fenced, match="has left"):
            messages[0].nack()
    messages[0].ack()
    messages[1].release()
    with pytest.raises(Fenced, match="closed"):
        messages[1].nack()
    with pytest.raises(ValueError, match="room"), messages[1]:
        raise ValueError("no such room")


def test_a_loop_reaches_no_message_behind_one_of_its_order_key_that_was_released(broker: BrokerProcess) -> None:
    """Even where the client's thread is busy, and hears of the release late."""
    busy = threading.Event()
    with qmq.connect_sync(broker.url) as client:
        client.send_many("released", [b"%d" % number for number in range(16)], order_key="k")
        with client.subscribe("released", group="released") as consumer:
            messages = iter(consumer)
            message = next(messages)
            while not consumer._feed.has_ready:
                message.ack()
                message = next(messages)
            client._current_thread().call_soon(lambda: busy.wait(30))
            ends = threading.Timer(0.05, busy.set)
            ends.start()
            message.release()
            assert next(messages).body == message.body
            ends.join()

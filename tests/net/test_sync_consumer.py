"""The consumer without asyncio, against a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import qmq
from qmq.errors import Fenced, InvalidOption
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


def test_the_verdicts_are_plain_calls_and_done_when_they_return(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send_many("verdicts", [b"failed", b"nacked", b"rejected", b"released", b"acked"])
        with client.subscribe("verdicts", group="judges", consumer="judge") as consumer:
            failed, nacked, rejected, released, acked = consumer.pull(5, min_count=5, timeout=30)
            with failed:
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


def test_who_follows_alone_can_hand_nothing_back(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        client.send("alone", b"0")
        with client.subscribe("alone", start="first") as consumer:
            (message,) = consumer.pull(1, timeout=30)
            message.ack()
            message.release()
            with pytest.raises(InvalidOption, match="alone"):
                message.nack()
            with pytest.raises(ValueError, match="mine"), message:
                raise ValueError("mine")


def test_verdicts_after_the_client_is_closed(broker: BrokerProcess) -> None:
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
    with messages[1]:
        raise ValueError("no such room")

"""The client without asyncio, against a real broker."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import qmq
from qmq.errors import InvalidName, InvalidOption, MessageTooLarge, QueueFull, UsageError
from tests.broker_process import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("sync") / "data", max_message_bytes=100_000) as started:
        yield started


def bodies(consumer: qmq.SyncConsumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        messages = consumer.pull(count - len(found), timeout=10)
        assert messages, f"{len(found)} of {count}"
        found += [message.body for message in messages]
    return found


def test_a_client_without_a_block_connects_at_its_first_call(broker: BrokerProcess) -> None:
    client = qmq.connect_sync(broker.url, name="web")
    threads = [threading.Thread(target=client.send, args=("lazy", b"1")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (info,) = client.admin.info()
    assert [one.name for one in info.connections].count("web") == 1
    client.send_nowait("lazy", b"2")
    client.close()
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.send("lazy", b"3")
    with qmq.connect_sync(broker.url) as other:
        assert [subject.messages for subject in other.subjects("lazy")] == [5]


def test_every_call_works_without_asyncio(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url, durability="append") as client:
        receipt = client.send("every.one", b"0", key="k", tags=["t"], properties={"p": "v"})
        assert (receipt.subject, receipt.sequence) == ("every.one", 0)
        assert [each.sequence for each in client.send_many("every.one", [b"1", b"2"])] == [1, 2]
        assert [client.send_nowait("every.two", b"%d" % number) for number in range(3)] == [1, 2, 3]
        client.drain()
        client.flush()
        assert client.last_sequence() == 5
        assert client.last_sequence("nobody") is None
        assert [(info.name, info.messages) for info in client.subjects("every.")] == [
            ("every.one", 3),
            ("every.two", 3),
        ]
        with client.subscribe("every.one", start="first") as consumer:
            (message, *_) = consumer.pull(1)
            assert (message.key, message.tags, message.properties) == ("k", ("t",), {"p": "v"})
            assert consumer.pull_batch().bodies == [b"1", b"2"]
            assert consumer.pull(timeout=0) == []
            assert consumer.id
            assert consumer.damaged == 0
        with client.subscribe("every.", group="g") as consumer:
            found = []
            for message in consumer:
                found.append(message.body)
                if len(found) == 6:
                    break
            assert sorted(found) == sorted([b"0", b"1", b"2"] * 2)


def test_errors_are_raised_at_the_call(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client:
        for wrong, error in (
            (lambda: client.send("a..b", b""), InvalidName),
            (lambda: client.send_nowait("a..b", b""), InvalidName),
            (lambda: client.send_nowait("a", bytes(100_001)), MessageTooLarge),
            (lambda: client.send_nowait("a", b"", durability="maybe"), InvalidOption),  # type: ignore[arg-type]
            (lambda: client.send_nowait("a", b"", key=7), InvalidOption),  # type: ignore[arg-type]
            (lambda: client.send_nowait("a", "text"), TypeError),  # type: ignore[arg-type]
            (lambda: client.subscribe("a", group="no group"), InvalidName),
            (lambda: list(client.subjects("a..b")), InvalidName),
        ):
            with pytest.raises(error):
                wrong()
        assert client.last_sequence() is None  # nothing was sent
    with pytest.raises(InvalidOption, match="linger"):
        qmq.connect_sync(broker.url, linger=-1)


def test_after_its_block_there_is_no_client(broker: BrokerProcess) -> None:
    before = threading.enumerate()
    client = qmq.connect_sync(broker.url)
    with client:
        client.send("outside", b"")
    with pytest.raises(UsageError):
        client.send_nowait("a", b"")
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_loop_of_send_nowait_and_drain_keeps_the_bounds_and_the_order(broker: BrokerProcess) -> None:
    sent = [b"%06d" % number + bytes(200) for number in range(20_000)]
    with qmq.connect_sync(broker.url, linger=20, max_queued_bytes=100_000) as client:
        for body in sent[:430]:
            client.send_nowait("bounded.first", body)
        with pytest.raises(QueueFull):
            client.send_nowait("bounded.first", bytes(2_000))
        client.flush()
    with qmq.connect_sync(broker.url, durability="append", max_queued_bytes=1_000_000) as client:
        for body in sent:
            client.send_nowait("bounded.second", body)
            client.drain()
        client.flush()
        with client.subscribe("bounded.second", start="first") as consumer:
            assert bodies(consumer, len(sent)) == sent


def test_threads_share_a_client(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url, durability="append") as client:

        def work(name: str) -> None:
            for number in range(200):
                if number % 50:
                    client.send_nowait(f"threads.{name}", b"%d" % number)
                else:
                    client.send(f"threads.{name}", b"%d" % number)

        threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.flush()
        for number in range(4):
            with client.subscribe(f"threads.t{number}", start="first") as consumer:
                assert bodies(consumer, 200) == [b"%d" % each for each in range(200)]


def in_child(work: Connection, client: qmq.SyncClient, consumer: qmq.SyncConsumer) -> None:
    """Use the parent's client in the child of a fork."""
    try:
        client.send_nowait("fork.child", b"queued by the child")
        receipt = client.send("fork.child", b"sent by the child")
        client.flush()
        message = consumer.pull(1, timeout=10)[0]
        work.send((receipt.sequence, client.last_sequence(), message.body, consumer.id))
    except BaseException as error:
        work.send(repr(error))
        raise


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # from Python 3.12 on
def test_a_fork_gets_a_connection_and_a_producer_of_its_own(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client, client.subscribe("fork.", start="first") as consumer:
        client.send("fork.parent", b"from the parent")
        assert bodies(consumer, 1) == [b"from the parent"]
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(theirs, client, consumer))
        child.start()
        assert ours.poll(30)
        sequence, last, body, consumer_id = ours.recv()
        child.join(30)
        assert child.exitcode == 0
        assert (sequence, last, body) == (
            1,
            1,
            b"from the parent",
        )  # a producer that sent two, a follower from the start
        assert consumer_id != consumer.id
        assert client.send("fork.parent", b"still here").sequence == 1
        assert client.last_sequence() == 1
        assert bodies(consumer, 3) == [b"queued by the child", b"sent by the child", b"still here"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inside_the_block_may_leave_it(broker: BrokerProcess) -> None:
    client = qmq.connect_sync(broker.url)
    with client:
        client.send_nowait("leave", b"once")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                client.__exit__(None, None, None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.flush()
        assert [info.messages for info in client.subjects("leave")] == [1]


def test_it_connects_again_like_the_other_client(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as own, qmq.connect_sync(own.url) as client:
        client.send("again", b"0")
        with client.subscribe("again", start="first") as consumer:
            assert bodies(consumer, 1) == [b"0"]
            own.kill()
            own.start()
            client.send("again", b"1")
            assert bodies(consumer, 1) == [b"1"]

"""The thread with the client in it: it ends with the client, and an interrupt ends a wait in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

import qmq
from qmq.errors import ConnectionLost
from tests.broker_process import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("session") / "data") as started:
        yield started


def test_an_unreachable_broker_is_a_clear_error_and_leaves_no_thread() -> None:
    before = threading.enumerate()
    with pytest.raises(ConnectionLost, match="qmq serve"), qmq.connect_sync("qmq://127.0.0.1:1"):
        pass
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_an_interrupt_ends_a_wait_and_loses_nothing(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client, client.subscribe("interrupt", group="of-its-own") as consumer:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                consumer.pull()
        finally:
            signal.signal(signal.SIGALRM, before)
        client.send("interrupt", b"after")
        assert [message.body for message in consumer.pull(1, timeout=30)] == [b"after"]

"""The thread with the client in it: it ends with the client, and an interrupt ends a wait in it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

import qmq
from qmq.errors import ConnectionLost, UsageError
from qmq.net.client.sync.loop_thread import _Call, _run
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


def _call_until_it_fails(
    call: str, client: qmq.SyncClient, errors: list[BaseException], begun: threading.Event
) -> None:  # fmt: skip
    try:
        if call == "pull":
            with client.subscribe("nothing.", group="closed") as consumer:
                begun.set()
                while True:
                    consumer.pull()
        while True:
            client.send("of-two-threads", b"x")
            begun.set()
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("call", ["send", "pull"])
def test_a_close_by_another_thread_ends_the_calls_of_a_client(broker: BrokerProcess, call: str) -> None:
    for _ in range(10):
        client, errors, begun = qmq.connect_sync(broker.url), list[BaseException](), threading.Event()

        thread = threading.Thread(target=_call_until_it_fails, args=(call, client, errors, begun))
        thread.start()
        assert begun.wait(30)
        client.close()
        thread.join(30)
        assert not thread.is_alive()
        (error,) = errors
        assert isinstance(error, UsageError | ConnectionLost), error


def test_a_call_that_comes_after_the_loop_has_ended_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may end between the moment when a call is queued and the moment when it would begin."""
    monkeypatch.setattr(_Call, "begin", lambda call: None)  # as if it came too late
    loop, calls = asyncio.new_event_loop(), set[_Call[None]]()

    async def never() -> None:
        raise AssertionError("it began")

    call = _Call(never(), loop)
    calls.add(call)
    loop.call_soon(loop.stop)
    _run(loop, calls)
    assert call.gate.acquire(timeout=30)
    with pytest.raises(ConnectionLost, match="closed by another thread"):
        call.result()


def test_an_interrupt_before_a_call_has_begun_cancels_it() -> None:
    """The loop begins it a moment later, and nobody would take its result."""
    loop = asyncio.new_event_loop()
    call = _Call(asyncio.Event().wait(), loop)
    had_failed = call.has_failed
    loop.call_soon(call.begin)
    loop.call_soon(call.give_up, None)
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    assert (had_failed, call.has_failed) == (False, True)
    loop.close()

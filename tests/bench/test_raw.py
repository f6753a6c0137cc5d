"""Prepared batches over a bare socket, and the loops that they are compared with."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from qmq.bench import raw
from qmq.bench.context import Bench
from qmq.bench.processes import BrokerProcess, broker_in
from qmq.bench.values import BenchFailed
from qmq.format.batch import BatchLimits, check_batch
from qmq.format.build import RunContent
from qmq.net.protocol.frames import FLUSH, FRAME_SIZE, split_frames
from tests.bench.conftest import no_gate


def test_frames_are_batches_that_go_on_where_the_one_before_ended() -> None:
    frames = raw.Frames([RunContent("a.b", raw.bodies_of(10, 30), None)], 5, flush=True)
    assert len(frames) == 5
    for number, (head, data) in enumerate(frames):
        assert len(head) + len(data) == frames.size
        (frame,) = split_frames(memoryview(head + data), 1 << 20)
        assert (frame.flags, frame.request, len(frame.payload)) == (FLUSH, number + 1, frames.size - FRAME_SIZE)
        header = check_batch(frame.payload, BatchLimits()).header
        assert (header.producer_sequence, header.messages) == (10 * number, 10)


def test_bodies_are_all_different() -> None:
    assert len(set(raw.bodies_of(1_000, 100))) == 1_000
    assert {len(body) for body in raw.bodies_of(10, 1_024)} == {1_024}


def test_what_is_ingested_is_there(bench: Bench, broker: BrokerProcess) -> None:
    subject = bench.prefix() + "x"
    result = raw.ingest(no_gate, url=broker.url, subject=subject, size=50, count=100, batches=100, flush=True)
    assert result["messages"] == 10_000
    bench.check_content(broker.url, subject, 50, 10_000, 100)
    with pytest.raises(BenchFailed, match=r"message 99, of .* is not what was sent"):
        bench.check_content(broker.url, subject, 50, 10_000, 99)
    with pytest.raises(BenchFailed, match=r"message 9999, of .* instead of None"):
        bench.check_content(broker.url, subject, 50, 9_999, 100)


def test_ingest_to_many_subjects(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    result = raw.ingest_many(no_gate, url=broker.url, prefix=prefix, subjects=300, size=50, count=100, batches=7)
    assert result["messages"] == 900
    options = {"url": broker.url, "prefix": prefix, "size": 50}
    assert bench.run("checking.spread", subjects=300, messages=900, **options) == {"messages": 900}
    for subjects, messages in ((300, 600), (299, 897)):
        with pytest.raises(BenchFailed, match="is not what was sent"):
            bench.run("checking.spread", subjects=subjects, messages=messages, **options)
    raw.ingest(no_gate, url=broker.url, subject=prefix + "000007", size=50, count=1, batches=1, flush=True)
    with pytest.raises(BenchFailed, match=r"message 900, of .*\.000007, is not what was sent"):
        bench.run("checking.spread", subjects=300, messages=1_200, **options)


def test_a_broker_that_is_killed_tells_how_far_it_came(tmp_path: Path) -> None:
    with broker_in(tmp_path, {}) as broker, ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        ingesting = pool.submit(
            raw.ingest_until_killed,
            lambda **_: started.set(),
            url=broker.url,
            subject="a.b",
            size=1_024,
            count=100,
            batches=20_000,
        )
        assert started.wait(60)
        broker.kill()
        sent = ingesting.result(60)
    assert 0 <= sent["acknowledged"] < 2_000_000
    assert sent["most"] == sent["acknowledged"] + 100 * raw.WINDOW


def test_an_echo_of_something_else_is_noticed() -> None:
    def twist(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(50)[::-1])
            assert connection.recv(1) == b""

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        twisted = pool.submit(twist, server)
        with pytest.raises(BenchFailed, match=r"the echo of .* was"):
            asyncio.run(raw.ask_echo(no_gate, port=server.getsockname()[1], size=50, messages=1))
        twisted.result()


def test_a_refused_batch_ends_the_worker_with_the_brokers_word(broker: BrokerProcess) -> None:
    with pytest.raises(BenchFailed, match=r"the broker refused a batch: .*'not a name'"):
        raw.ingest(no_gate, url=broker.url, subject="not a name", size=50, count=1, batches=1, flush=False)


@pytest.mark.parametrize("write", [False, True])
def test_the_plain_loop_receives_every_byte(tmp_path: Path, write: bool) -> None:
    ports: SimpleQueue[Any] = SimpleQueue()
    results: SimpleQueue[Any] = SimpleQueue()
    path = str(tmp_path / "plain") if write else None
    thread = threading.Thread(
        target=lambda: results.put(raw.sink(lambda **prepared: ports.put(prepared["port"]), write_to=path))
    )
    thread.start()
    sent = raw.send_plain(no_gate, port=ports.get(), size=100, count=1_000, batches=20)
    thread.join()
    received = results.get()
    assert received["bytes"] == sent["bytes"] > 2_000_000
    assert received["crc"] == (sent["crc"] if write else 0)
    assert list(tmp_path.iterdir()) == []

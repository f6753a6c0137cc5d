"""Ready batches over a bare socket, and the loops they are held against."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from qmq.bench import raw
from qmq.bench.children import BrokerProcess
from qmq.bench.context import Bench
from qmq.bench.errors import BenchFailed
from qmq.format.batch import BatchLimits, check_batch
from qmq.format.build import RunContent
from qmq.net.wire import FRAME_SIZE, split_frames


def no_gate(**_: object) -> None:
    """Nobody waits."""


def test_frames_are_batches_that_go_on_where_the_one_before_ended() -> None:
    frames = raw.Frames([RunContent("a.b", raw.bodies_of(10, 30), None)], 5, flush=True)
    assert len(frames) == 5
    for number, (head, data) in enumerate(frames):
        assert len(head) + len(data) == frames.size
        (frame,) = split_frames(memoryview(head + data), 1 << 20)
        assert (frame.flags, frame.request, len(frame.payload)) == (1, number + 1, frames.size - FRAME_SIZE)
        header = check_batch(frame.payload, BatchLimits()).header
        assert (header.producer_sequence, header.messages) == (10 * number, 10)


def test_bodies_are_all_different() -> None:
    assert len(set(raw.bodies_of(1_000, 100))) == 1_000
    assert {len(body) for body in raw.bodies_of(10, 1_024)} == {1_024}


def test_what_is_ingested_is_there(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    result = raw.ingest(no_gate, url=broker.url, subject=prefix + "x", size=50, count=100, batches=100, flush=True)
    assert result["messages"] == 10_000
    bench.check_content(broker.url, prefix, 50, 10_000, 100)
    with pytest.raises(BenchFailed, match="with another body than was sent"):
        bench.check_content(broker.url, prefix, 50, 10_000, 99)
    with pytest.raises(BenchFailed, match="10000 messages came, 9999 were sent"):
        bench.check_content(broker.url, prefix, 50, 9_999, 100)


def test_ingest_to_many_subjects(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    result = raw.ingest_many(no_gate, url=broker.url, prefix=prefix, subjects=300, size=50, count=100, batches=7)
    assert result["messages"] == 900
    assert bench.run("receiving.last_stored", url=broker.url, prefix=prefix) == {"messages": 900}


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
    assert bool(received["crc"]) == write
    assert list(tmp_path.iterdir()) == []

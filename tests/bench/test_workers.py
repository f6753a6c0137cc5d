"""The workers that use the client, in this process, on next to nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from qmq.bench import checking, receiving, sending, worker
from qmq.bench.context import Bench, rate
from qmq.bench.processes import BrokerProcess, run_together
from tests.bench.conftest import no_gate

Job = tuple[str, dict[str, Any], int, int]
SENDS: dict[str, Job] = {  # function, options, messages, bodies in a cycle
    "many": ("many", {"count": 100, "calls": 20, "in_flight": 4}, 2_000, 100),
    "nowait": ("nowait", {"messages": 3_000}, 3_000, 1_000),
    "nowait with keys": ("nowait", {"messages": 2_000, "fields": "key", "drain_every": 500}, 2_000, 1_000),
    "awaited": ("awaited", {"messages": 1_500, "in_flight": 100}, 1_500, 1_000),
    "tasks": ("tasks", {"messages": 350, "in_flight": 100}, 300, 100),
    "one at a time": ("one_at_a_time", {"messages": 20}, 120, 1),
    "paced": ("paced", {"rate": 20_000, "seconds": 0.03}, 0, 100),
}


@pytest.mark.parametrize("durability", ["append", "flush"])
@pytest.mark.parametrize(("function", "options", "messages", "count"), SENDS.values(), ids=list(SENDS))
async def test_what_a_worker_sends_is_there(
    bench: Bench,
    broker: BrokerProcess,
    function: str,
    options: dict[str, Any],
    messages: int,
    count: int,
    durability: str,
) -> None:
    common: dict[str, Any] = {"url": broker.url, "subject": bench.prefix() + "x", "size": 100}
    result = await getattr(sending, function)(no_gate, durability=durability, **common, **options)
    assert result["messages"] == messages or not messages
    checked = await checking.cycles(no_gate, count=count, messages=result["messages"], **common)
    assert checked["messages"] == result["messages"] > 0
    if "seconds" in result:
        assert rate(result) > 0
    else:
        assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["p99.9_ms"] <= result["most_ms"]


@pytest.mark.parametrize("count", [1, 3])
async def test_producers_count_what_each_sent(bench: Bench, broker: BrokerProcess, count: int) -> None:
    options: dict[str, Any] = {"url": broker.url, "prefix": bench.prefix(), "size": 50, "count": count}
    result = await sending.producers(no_gate, durability="append", clients=4, seconds=0.05, **options)
    assert sum(result["sent"]) == result["messages"] > 0
    checked = await checking.producers(no_gate, sent=result["sent"], **options)
    assert checked["messages"] == result["messages"]


async def test_arrivals_are_timed_from_when_they_were_due(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    options: dict[str, Any] = {"url": broker.url, "size": 100, "rate": 1_000}
    ready = asyncio.Event()
    arriving = asyncio.create_task(
        receiving.arrivals(lambda **_: ready.set(), prefix=prefix, messages=50, skip=5, **options)
    )
    await ready.wait()
    sent = await sending.open_loop(no_gate, subject=prefix + "x", durability="append", seconds=0.05, **options)
    came = await arriving
    assert came["messages"] == sent["messages"] == 50
    assert came["first_due_ns"] == sent["first_due_ns"]
    assert 0 < came["p50_ms"] <= came["most_ms"]
    assert sent["latest_ms"] >= 0


def test_a_worker_is_prepared_then_waits_for_its_word(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    options = {"url": broker.url, "subject": prefix + "x", "size": 50, "count": 10, "batches": 5, "flush": False}
    jobs = ("raw.ingest", options), ("raw.ingest", options)
    one, other = run_together(bench.directory, *jobs, writes_bytes=100_000)
    assert one["messages"] == other["messages"] == 50
    assert [path.name for path in bench.directory.iterdir() if path.suffix != ".errors"] == []
    assert bench.run("receiving.last_stored", url=broker.url, prefix=prefix)["messages"] == 100
    assert bench.run("receiving.waiting_pulls", url=broker.url, clients=2, consumers=3) == {"waiting": 6}


def test_a_worker_whose_bench_is_gone_ends() -> None:
    options = {"port": 1, "write_to": None}
    done = subprocess.run(
        [sys.executable, "-m", "qmq.bench.worker", "raw.sink", json.dumps({"write_to": None})],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "port" in json.loads(done.stdout)
    assert "the bench is gone" in done.stderr
    with pytest.raises(TypeError):
        worker.run("raw.sink", options)

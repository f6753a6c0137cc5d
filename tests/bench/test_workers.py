"""The workers that use the client, in this process, on next to nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from qmq.bench import receiving, sending, worker
from qmq.bench.children import BrokerProcess, run_together
from qmq.bench.context import Bench, rate
from qmq.bench.errors import BenchFailed
from qmq.bench.raw import bodies_of


def no_gate(**_: object) -> None:
    """Nobody waits."""


Job = tuple[str, dict[str, Any], int, int]
SENDS: dict[str, Job] = {  # function, options, messages, bodies in a cycle
    "many": ("many", {"count": 100, "calls": 20, "in_flight": 4}, 2_000, 100),
    "nowait": ("nowait", {"messages": 3_000, "rich": False}, 3_000, 1_000),
    "nowait rich": ("nowait", {"messages": 2_000, "rich": True}, 2_000, 1_000),
    "awaited": ("awaited", {"messages": 1_500, "in_flight": 100}, 1_500, 1_000),
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
    prefix = bench.prefix()
    send = getattr(sending, function)
    result = await send(no_gate, url=broker.url, subject=prefix + "x", durability=durability, size=100, **options)
    assert result["messages"] == messages or not messages
    checked = await receiving.pull_batch(
        no_gate,
        url=broker.url,
        prefix=prefix,
        size=100,
        count=count,
        messages=result["messages"],
        max_count=500,
        check=True,
    )
    assert checked["messages"] == result["messages"] > 0
    if "seconds" in result:
        assert rate(result) > 0
    else:
        assert 0 < result["p50_ms"] <= result["p99_ms"] <= result["p99.9_ms"] <= result["most_ms"]


@pytest.mark.parametrize("count", [1, 3])
async def test_producers_count_what_each_sent(bench: Bench, broker: BrokerProcess, count: int) -> None:
    prefix = bench.prefix()
    result = await sending.producers(
        no_gate, url=broker.url, prefix=prefix, durability="append", size=50, clients=4, count=count, seconds=0.05
    )
    assert sum(result["sent"]) == result["messages"] > 0
    assert await receiving.last_stored(no_gate, url=broker.url, prefix=prefix) == {"messages": result["messages"]}


async def test_spray_reaches_every_subject(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    sent = await sending.spray(no_gate, url=broker.url, prefix=prefix, subjects=50, size=20, messages=2_000, seed=3)
    assert (sent["messages"], sent["timed"]) == (2_050, 2_000)
    came = await receiving.count_all(
        no_gate, url=broker.url, prefix=prefix, messages=2_050, size=20, max_count=300, check=True
    )
    assert came["messages"] == 2_050


@pytest.mark.parametrize("function", ["pull", "pull_batch", "async_for"])
async def test_receivers_check_count_and_content(bench: Bench, broker: BrokerProcess, function: str) -> None:
    prefix = bench.prefix()
    bench.fill(broker.url, prefix + "x", 60, 3_000)
    receive = getattr(receiving, function)
    options: dict[str, Any] = {"url": broker.url, "prefix": prefix, "size": 60, "count": 1_000}
    if function != "async_for":
        options["max_count"] = 700
    if function == "pull_batch":
        options["check"] = False
    assert (await receive(no_gate, messages=3_000, **options))["messages"] == 3_000
    with pytest.raises(BenchFailed):
        await receive(no_gate, messages=3_000, **{**options, "count": 700})


async def test_arrivals_are_timed_from_when_they_were_due(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    options: dict[str, Any] = {"url": broker.url}
    ready = asyncio.Event()
    arriving = asyncio.create_task(
        receiving.arrivals(lambda **_: ready.set(), prefix=prefix, messages=50, skip=5, **options)
    )
    await ready.wait()
    sent = await sending.open_loop(
        no_gate, subject=prefix + "x", durability="append", size=100, rate=1_000, seconds=0.05, **options
    )
    came = await arriving
    assert came["messages"] == sent["messages"] == 50
    assert 0 < came["p50_ms"] <= came["most_ms"]
    assert sent["latest_ms"] >= 0


def test_bodies_are_compared_from_any_place() -> None:
    expected = bodies_of(10, 20)
    receiving.check_bodies(expected[7:] + expected + expected[:4], expected, 27)
    with pytest.raises(BenchFailed, match="message 28 came with another body"):
        receiving.check_bodies([expected[7], expected[7]], expected, 27)


def test_a_worker_is_prepared_then_waits_for_its_word(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    options = {"url": broker.url, "subject": prefix + "x", "size": 50, "count": 10, "batches": 5, "flush": False}
    jobs = ("raw.ingest", options), ("raw.ingest", options)
    one, other = run_together(bench.directory, *jobs, writes_bytes=100_000)
    assert one["messages"] == other["messages"] == 50
    assert [path.name for path in bench.directory.iterdir() if path.suffix != ".errors"] == []
    assert bench.run("receiving.last_stored", url=broker.url, prefix=prefix)["messages"] == 100
    assert bench.run("receiving.park", url=broker.url, clients=2, consumers=3) == {"parked": 6}


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

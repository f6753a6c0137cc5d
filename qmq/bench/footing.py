"""What a broker costs: processor while idle, memory while the log grows, time to start after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator

from qmq.bench.children import BrokerProcess, Worker
from qmq.bench.context import Bench
from qmq.bench.errors import BenchFailed
from qmq.bench.values import Value

MIB = 1 << 20


def parked(bench: Bench) -> Iterator[Value]:
    """1,000 pulls wait: share of one processor that the broker takes."""
    with bench.broker() as broker:
        options = {"url": broker.url, "clients": 10, "consumers": 100}
        with Worker(bench.directory, "receiving.park", options) as worker:
            time.sleep(0.5)
            before, started = broker.cpu_s(), time.perf_counter()
            time.sleep(max(bench.size.seconds, 2.0))
            share = (broker.cpu_s() - before) / (time.perf_counter() - started)
            memory = broker.anonymous_bytes()
            worker.go()
            waiting = worker.result()["parked"]
    if waiting != 1_000:
        raise BenchFailed(f"{waiting} of 1,000 pulls were parked")
    yield Value("1,000 pulls, cpu", share, "cores")
    yield Value("1,000 pulls, RssAnon", memory / MIB, "MiB")


def restart(bench: Bench) -> Iterator[Value]:
    """Kill -9 in the middle of sends, with that many bytes of log and subjects: until the broker serves again."""
    with bench.broker() as broker:
        prefix = bench.prefix()
        subjects = bench.size.subjects
        each = _spread(bench, broker, prefix + "small.", subjects // 1_000)
        per_batch = 1_000 * 1_034
        batches = max(bench.size.restart_bytes // per_batch, 1)
        bench.fill(broker.url, prefix + "large", 1_024, batches * 1_000)
        acknowledged = each + batches * 1_000
        with Worker(
            bench.directory,
            "raw.ingest",
            {
                "url": broker.url,
                "subject": prefix + "tail",
                "size": 1_024,
                "count": 100,
                "batches": 200_000,
                "flush": False,
            },
        ) as load:
            load.go()
            time.sleep(min(bench.size.seconds, 1.0))
            broker.kill()
        again = BrokerProcess(broker.directory, bench.settings)
        with again:
            log_bytes = sum(path.stat().st_size for path in again.directory.rglob("*.messages"))
            found = bench.run("receiving.last_stored", url=again.url, prefix=prefix)["messages"]
            memory = again.anonymous_bytes()
    if found < acknowledged:
        raise BenchFailed(f"{found} messages are left of {acknowledged} that were acknowledged")
    yield Value("to serving", 1e3 * again.ready_after_s, "ms")
    yield Value("log", log_bytes / (1 << 30), "GiB")
    yield Value("RssAnon", memory / MIB, "MiB")


def memory(bench: Bench) -> Iterator[Value]:
    """RssAnon after a tenth of the log and at its end, with batches of 1,000 runs to 1,000 subjects."""
    settle_s = min(bench.size.seconds, 1.5)  # for a checkpoint
    with bench.broker() as broker:
        prefix = bench.prefix()
        per_batch = 1_000 * 150
        tenth = max(bench.size.memory_bytes // per_batch // 10, 1)
        sent = _spread(bench, broker, prefix, tenth, subjects=1_000)
        time.sleep(settle_s)
        early = broker.anonymous_bytes()
        sent += _spread(bench, broker, prefix, 9 * tenth, subjects=1_000)
        time.sleep(settle_s)
        late = broker.anonymous_bytes()
        found = bench.run("receiving.last_stored", url=broker.url, prefix=prefix)["messages"]
    if found != sent:
        raise BenchFailed(f"{found} messages are kept, {sent} were acknowledged")
    yield Value("RssAnon", late / MIB, "MiB")
    yield Value("growth", (late - early) / MIB, "MiB")


def _spread(bench: Bench, broker: BrokerProcess, prefix: str, batches: int, subjects: int | None = None) -> int:
    """Send batches of one message to each of 1,000 subjects; returns how many messages."""
    result = bench.run(
        "raw.ingest_many",
        url=broker.url,
        prefix=prefix,
        subjects=subjects if subjects is not None else bench.size.subjects,
        size=100,
        count=1_000,
        batches=batches,
    )
    return int(result["messages"])

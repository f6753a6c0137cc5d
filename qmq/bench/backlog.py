"""Measure what waiting messages cost: a long backlog, many subjects, a full error log, a cold log read from disk."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from qmq import connect
from qmq.bench.checking import SILENCE_S, missing
from qmq.bench.context import KIB, Bench, rate
from qmq.bench.processes import BrokerProcess, broker_in, run_together
from qmq.bench.throughput import stored_bytes
from qmq.bench.values import BenchFailed, Value
from qmq.bench.worker import Gate

_MIB: Final = 1 << 20
#: Messages a pull.
PULL: Final = 100
_PULLS: Final = 300
_PAIRS: Final = 5
#: How many single messages of a round stand for one pull, and for one pair of runs.
_A_PULL: Final = 10
_A_PAIR: Final = 500
#: Bodies of one byte, so that a long log takes little space.
_BATCH: Final = 10_000
_SUBJECTS: Final = 1_000
_NACKS_IN_FLIGHT: Final = 500
_LATER_S: Final = 3_600.0


def _repetitions(bench: Bench) -> tuple[int, int]:
    """Return how many pulls a run makes, and how many pairs of runs there are."""
    singles = bench.size.singles
    return min(max(singles // _A_PULL, 2), _PULLS), min(max(singles // _A_PAIR, 1), _PAIRS)


def backlog(bench: Bench) -> Iterator[Value]:
    """Time a pull of 100 and its acks with many messages waiting, relative to nearly none; and measure memory.

    Both logs have the same batches, were written just before, and are in the page cache.
    """
    pulls, pairs = _repetitions(bench)
    few = pairs * pulls * PULL
    messages = -(-max(bench.size.backlog, few) // _BATCH) * _BATCH
    with bench.broker() as long, bench.broker() as short:
        for broker, count in ((long, messages), (short, few)):
            subject, batches = "bench.waiting", -(-count // _BATCH)
            bench.run("raw.ingest", url=broker.url, subject=subject, size=1, count=_BATCH, batches=batches, flush=False)
        times = _in_turn(bench, [long.url, short.url], pairs, prefix="bench.", pulls=pulls)
        yield Value("messages waiting", messages, "")
        yield Value("pull and ack, p50", median(times[long.url]), "ms")
        yield Value(
            "pull and ack, p50, relative to none waiting", median(_ratios(times[long.url], times[short.url])), ""
        )
        yield Value("RssAnon", long.anonymous_bytes() / _MIB, "MiB")
        bench.check_content(long.url, "bench.waiting", 1, messages, _BATCH)


def ready_subjects(bench: Bench) -> Iterator[Value]:
    """Measure a pull over 1,000 ready subjects relative to one over a single subject: processor time of the broker, and
    latency.

    Of 1,000 subjects a client decodes 1,000 runs instead of one: that is its time, not the broker's.
    """
    pulls, pairs = _repetitions(bench)
    batches = pairs * pulls // 2 + 1
    with bench.broker() as broker:
        many, one = bench.prefix(), bench.prefix()
        options: dict[str, Any] = {"url": broker.url, "size": 100, "count": _SUBJECTS, "batches": batches}
        bench.run("raw.ingest_many", prefix=many, subjects=_SUBJECTS, **options)
        bench.run("raw.ingest", subject=one + "single", flush=False, **options)
        times: dict[str, list[float]] = {many: [], one: []}
        cpu_s = {many: 0.0, one: 0.0}
        for _ in range(pairs):
            for prefix in times:
                before = broker.cpu_s()
                found = bench.run("backlog.pulls", url=broker.url, prefix=prefix, pulls=pulls // 2, count=_SUBJECTS)
                cpu_s[prefix] += broker.cpu_s() - before
                times[prefix].append(found["p50_ms"])
        messages = batches * _SUBJECTS
        bench.run("checking.spread", url=broker.url, prefix=many, subjects=_SUBJECTS, size=100, messages=messages)
        bench.check_content(broker.url, one + "single", 100, messages)
    yield Value("cpu of the broker, relative to one subject", cpu_s[many] / max(cpu_s[one], 0.01), "")
    yield Value("pull of 1,000 and ack, p50", median(times[many]), "ms")
    ratio = median(_ratios(times[many], times[one]))
    yield Value("pull of 1,000 and ack, p50, relative to one subject", ratio, "")


def errors(bench: Bench) -> Iterator[Value]:
    """Measure the rate of fresh messages, 1,000 a pull, beside a full error log relative to an empty one."""
    nacked, (pulls, pairs) = bench.size.errors, _repetitions(bench)
    fresh = pairs * pulls * 1_000
    before = -(-nacked // 1_000) * 1_000
    with bench.broker() as full, bench.broker() as empty:
        for broker, messages in ((full, before + fresh), (empty, fresh)):
            bench.fill(broker.url, "bench.fresh", 100, messages)
        took = bench.run("backlog.nacks", url=full.url, prefix="bench.", messages=nacked)
        times = _in_turn(bench, [full.url, empty.url], pairs, prefix="bench.", pulls=pulls, count=1_000)
        bench.check_content(full.url, "bench.fresh", 100, before + fresh)
    yield Value("messages in the error log", nacked, "")
    yield Value("nacks", nacked / took["seconds"], "msg/s")
    yield Value("fresh, relative to an empty error log", median(_ratios(times[empty.url], times[full.url])), "")


def _in_turn(bench: Bench, urls: list[str], pairs: int, **options: Any) -> dict[str, list[float]]:
    """Return the p50 of pulls and acks for each broker in ms, *pairs* times; the order of brokers alternates."""
    times: dict[str, list[float]] = {url: [] for url in urls}
    for number in range(pairs):
        for url in urls if number % 2 else urls[::-1]:
            times[url].append(bench.run("backlog.pulls", url=url, **options)["p50_ms"])
    return times


def _ratios(times: list[float], others: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(times, others, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Workers


async def pulls(gate: Gate, *, url: str, prefix: str, pulls: int, count: int = PULL) -> dict[str, Any]:
    """Pull *count* messages and acknowledge them, *pulls* times; the next pull waits for the acks. All are of one
    group.
    """
    took = []
    async with connect(url) as client, client.subscribe(prefix, group="bench", consumer="c", start="first") as consumer:
        gate()
        for number in range(pulls):
            started = time.perf_counter()
            batch = await consumer.pull_batch(count, count, timeout=SILENCE_S)
            batch.ack()
            await consumer.flush()
            took.append(1e3 * (time.perf_counter() - started))
            if len(batch) != count:
                raise missing(number * count + len(batch), pulls * count)
    return {"p50_ms": median(took)}


async def nacks(gate: Gate, *, url: str, prefix: str, messages: int) -> dict[str, Any]:
    """Nack *messages* messages, with a long delay."""
    came = 0
    async with connect(url) as client, client.subscribe(prefix, group="bench", consumer="c", start="first") as consumer:
        gate()
        started = time.perf_counter()
        while came < messages:
            pulled = await consumer.pull(min(_NACKS_IN_FLIGHT, messages - came), timeout=SILENCE_S)
            if not pulled:
                raise missing(came, messages)
            await asyncio.gather(*(message.nack(delay=_LATER_S, reason="bench") for message in pulled))
            came += len(pulled)
        seconds = time.perf_counter() - started
    return {"messages": came, "seconds": seconds}


_RATE: Final = 1_000
#: The reader has a low priority, so that the broker is measured and not the reader.
_NICE: Final = 19
#: A reader of cold files is slower than this; the arrivals are measured for as long as it would take.
_SLOW_READER_BYTES_S: Final = 700 * _MIB


def cold(bench: Bench) -> Iterator[Value]:
    """Time messages from when they are due to their arrival: alone, beside a process that only computes, beside a
    reader of a cold log, and beside a reader of the same log, now warm.

    The process that only computes shows what sharing the processors costs. The log is written, the broker stopped, its
    files dropped from the page cache, and the broker started again.
    """
    messages = max(bench.size.restart_bytes // stored_bytes(1, KIB) // 1_000, 1) * 1_000
    with broker_in(bench.directory, bench.settings) as broker:
        old = bench.prefix()
        bench.fill(broker.url, old + "old", KIB, messages)
        broker.end()
        forget(broker.directory)
        with BrokerProcess(broker.directory, bench.settings) as again:
            size = stored_bytes(messages, KIB)
            yield from _times("alone", _arrival_times(bench, again, size, None))
            untrusted = "receiving.compute", {"seconds": size / _SLOW_READER_BYTES_S, "nice": _NICE}
            yield from _times("beside an untrusted client", _arrival_times(bench, again, size, untrusted))
            early = again.anonymous_bytes()
            options = {"url": again.url, "prefix": old, "messages": messages, "max_count": 50_000, "nice": _NICE}
            reader = "receiving.pull_batch", options
            for how in ("cold", "warm"):
                faults = disk_faults(again)
                yield from _times(f"beside a {how} reader", found := _arrival_times(bench, again, size, reader))
                yield Value(f"the {how} reader", rate(found["reader"]) * KIB / _MIB, "MiB/s")
                yield Value(f"the {how} reader, waits of the loop for the disk", disk_faults(again) - faults, "")
            yield Value("growth of RssAnon", (again.anonymous_bytes() - early) / _MIB, "MiB")
            bench.check_content(again.url, old + "old", KIB, messages)


def _times(beside: str, found: Mapping[str, Any]) -> Iterator[Value]:
    for name in ("p50", "p99", "p99.9", "most"):
        yield Value(f"{beside} {name}", found[f"{name}_ms"], "ms")


def _arrival_times(
    bench: Bench, broker: BrokerProcess, size: int, beside: tuple[str, Mapping[str, object]] | None
) -> dict[str, Any]:
    """Return the latencies of messages that are sent on a schedule, and the result of the worker *beside* them."""
    subject = bench.prefix()
    seconds = max(size / _SLOW_READER_BYTES_S, bench.size.seconds / 3)
    messages = max(int(_RATE * seconds), 10)
    came, sent, *others = run_together(
        bench.directory,
        (
            "receiving.arrivals",
            {
                "url": broker.url,
                "prefix": subject,
                "size": 100,
                "rate": _RATE,
                "messages": messages,
                "skip": messages // 10,
            },
        ),
        (
            "sending.open_loop",
            {
                "url": broker.url,
                "subject": subject + "timed",
                "durability": "append",
                "size": 100,
                "rate": _RATE,
                "seconds": messages / _RATE,
            },
        ),
        *([] if beside is None else [beside]),
    )
    if (came["messages"], came["first_due_ns"]) != (sent["messages"], sent["first_due_ns"]):
        raise BenchFailed(f"the messages received differ from those sent: {came}, {sent}")
    return {**came, "reader": others[0] if others else None}


def disk_faults(broker: BrokerProcess) -> int:
    """Return the major page faults of the broker's loop: how often it touched a page that had to be read from disk."""
    stat = Path(f"/proc/{broker.pid}/task/{broker.pid}/stat").read_text("ascii")
    return int(stat.rpartition(")")[2].split()[9])


def forget(directory: Path) -> None:
    """Drop the files of a directory from the page cache; no process may have them open."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

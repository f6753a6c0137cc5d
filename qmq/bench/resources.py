"""Measure the resources of a broker: processor while idle, memory while the log grows, time to start after a kill, and
what untrusted clients cost a good one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from qmq.bench.attacks import ATTACKS
from qmq.bench.context import KIB, Bench, rate
from qmq.bench.processes import BrokerProcess, LoadWorker
from qmq.bench.values import BenchFailed, Value

_MIB: Final = 1 << 20


def waiting_pulls(bench: Bench) -> Iterator[Value]:
    """Measure the processor share and memory of 1,000 waiting pulls, of solo consumers and of a group with
    heartbeats.
    """
    for group, what in ((None, "pulls"), ("bench", "consumers")):
        cpu, rss = _with_waiting_pulls(bench, group)
        yield Value(f"1,000 {what}, cpu", cpu, "cores")
        yield Value(f"1,000 {what}, RssAnon", rss / _MIB, "MiB")


def _with_waiting_pulls(bench: Bench, group: str | None) -> tuple[float, int]:
    """Return the broker's share of a core, and its memory in bytes."""
    with bench.broker() as broker:
        options = {"url": broker.url, "clients": 10, "consumers": 100, "group": group}
        with LoadWorker(bench.directory, "receiving.waiting_pulls", options) as worker:
            time.sleep(0.5)
            before, started = broker.cpu_s(), time.perf_counter()
            time.sleep(max(bench.size.seconds, 2.0))
            share = (broker.cpu_s() - before) / (time.perf_counter() - started)
            memory = broker.anonymous_bytes()
            worker.go()
            waiting = worker.result()["waiting"]
    if waiting != 1_000:
        raise BenchFailed(f"{waiting} of 1,000 pulls were waiting")
    return share, memory


def restart(bench: Bench) -> Iterator[Value]:
    """Kill the broker in the middle of sends, with a long log and many subjects; time it until it serves again."""
    with bench.broker() as broker:
        prefix = bench.prefix()
        small, large, tail = prefix + "small.", prefix + "large.all", prefix + "tail.all"
        subjects = bench.size.subjects
        in_small = _spread(bench, broker, small, subjects // 1_000, subjects)
        in_large = max(bench.size.restart_bytes // (1_000 * 1_034), 1) * 1_000
        bench.fill(broker.url, large, 1_024, in_large)
        with LoadWorker(
            bench.directory,
            "raw.ingest_until_killed",
            {"url": broker.url, "subject": tail, "size": 1_024, "count": 100, "batches": 200_000},
        ) as load:
            load.go()
            time.sleep(min(bench.size.seconds, 1.0))
            broker.kill()
            sent = load.result()
        again = BrokerProcess(broker.directory, bench.settings)
        with again:
            log_bytes = sum(path.stat().st_size for path in again.directory.rglob("*.messages"))
            found = bench.run("receiving.last_stored", url=again.url, prefix=prefix)["messages"]
            memory = again.anonymous_bytes()
            in_tail = found - in_small - in_large
            check_left(in_tail, sent["acknowledged"], sent["most"])
            _check_spread(bench, again, small, subjects, in_small)
            bench.check_content(again.url, large, 1_024, in_large)
            bench.check_content(again.url, tail, 1_024, in_tail, 100)
    yield Value("to serving", 1e3 * again.ready_after_s, "ms")
    yield Value("log", log_bytes / (1 << 30), "GiB")
    yield Value("RssAnon", memory / _MIB, "MiB")


def check_left(found: int, acknowledged: int, most: int) -> None:
    """Raise BenchFailed if acknowledged messages are missing after a kill, or there are more than were sent."""
    if not acknowledged <= found <= most:
        raise BenchFailed(f"{found} messages are left; {acknowledged} were acknowledged, and at most {most} sent")


def memory(bench: Bench) -> Iterator[Value]:
    """Measure RssAnon after a tenth of the log and at its end, with batches of 1,000 runs to 1,000 subjects."""
    settle_s = min(bench.size.seconds, 1.5)  # long enough for a checkpoint
    with bench.broker() as broker:
        prefix = bench.prefix()
        subjects, per_batch = 1_000, 1_000 * 150
        tenth = max(bench.size.memory_bytes // per_batch // 10, 1)
        sent = _spread(bench, broker, prefix, tenth, subjects)
        time.sleep(settle_s)
        early = broker.anonymous_bytes()
        sent += _spread(bench, broker, prefix, 9 * tenth, subjects)
        time.sleep(settle_s)
        late = broker.anonymous_bytes()
        _check_spread(bench, broker, prefix, subjects, sent)
    yield Value("RssAnon", late / _MIB, "MiB")
    yield Value("growth", (late - early) / _MIB, "MiB")


def _spread(bench: Bench, broker: BrokerProcess, prefix: str, batches: int, subjects: int) -> int:
    """Send batches of one message to each of 1,000 subjects; return how many messages that were."""
    result = bench.run(
        "raw.ingest_many",
        url=broker.url,
        prefix=prefix,
        subjects=subjects,
        size=100,
        count=1_000,
        batches=batches,
    )
    return int(result["messages"])


def _check_spread(bench: Bench, broker: BrokerProcess, prefix: str, subjects: int, messages: int) -> None:
    """Read back what `_spread` sent, and compare every body."""
    bench.run("checking.spread", url=broker.url, prefix=prefix, subjects=subjects, size=100, messages=messages)


#: The clients that do not read pull this part of the log of the restart measurement.
_PART: Final = 16


def untrusted_clients(bench: Bench) -> Iterator[Value]:
    """Send and pull one message at a time, alone and under each attack; then measure the broker's memory."""
    most = 0
    with bench.broker() as broker:
        large = bench.prefix()
        bench.fill(broker.url, large + "large", KIB, max(bench.size.restart_bytes // _PART // KIB // 1_000, 1) * 1_000)
        options = {"url": broker.url, "connections": bench.size.subjects // 11, "prefix": large}
        _rounds(bench, broker)  # not measured: it warms the broker up
        before = _rounds(bench, broker)
        for how in ATTACKS:
            with LoadWorker(bench.directory, "attacks.run", {"how": how, **options}) as attack:
                under = _rounds(bench, broker)
                most = max(most, broker.anonymous_bytes())
                attack.go()
                found = attack.result()
            after = _rounds(bench, broker)
            yield Value(f"{how}: rate, relative to alone", 2 * rate(under) / (rate(before) + rate(after)), "")
            yield Value(f"{how}: p99", under["p99_ms"], "ms")
            yield Value(f"{how}: p99 alone", (before["p99_ms"] + after["p99_ms"]) / 2, "ms")
            a_round_s = (before["cpu_s"] + after["cpu_s"]) / (before["messages"] + after["messages"])
            for_untrusted_s = max(under["cpu_s"] - a_round_s * under["messages"], 0)
            yield Value(f"{how}: cpu of the broker for the attack", for_untrusted_s / under["all_s"], "cores")
            yield Value(f"{how}: cpu of the attackers", found["cores"], "cores")
            yield Value(f"{how}: strikes", found["struck"], "")
            before = after
    yield Value("RssAnon", most / _MIB, "MiB")


def _rounds(bench: Bench, broker: BrokerProcess) -> dict[str, Any]:
    """Return the result of the good client, with the broker's processor time and the time in all, in seconds."""
    subject = bench.prefix() + "rounds"
    cpu_s, started = broker.cpu_s(), time.perf_counter()
    found = bench.run("sending.rounds", url=broker.url, subject=subject, size=100, seconds=bench.size.seconds)
    found |= {"cpu_s": broker.cpu_s() - cpu_s, "all_s": time.perf_counter() - started}
    bench.check_content(broker.url, subject, 100, found["messages"], 1)
    return found

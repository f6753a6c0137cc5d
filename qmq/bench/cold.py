"""One group reads an old log from the disk while another waits for each message: what that costs the other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from qmq.bench.children import BrokerProcess, broker_in, run_together
from qmq.bench.context import KIB, Bench, rate
from qmq.bench.throughput import stored_bytes
from qmq.bench.values import BenchFailed, Value

_MIB: Final = 1 << 20
_RATE: Final = 1_000
#: The reader leaves the processors to others: what is measured is the broker.
_NICE: Final = 19
#: A reader that the disk feeds takes longer than this; the other one is measured for as long.
_SLOW_READER_BYTES_S: Final = 700 * _MIB


def cold(bench: Bench) -> Iterator[Value]:
    """From the moment a message is due to its arrival: alone, beside an untrusted client to the broker that computes,
    beside a reader of a cold log, and of the same one warm.

    What the untrusted client costs is how the system shares its processors out. The log is written, the broker stopped,
    the page cache emptied of it, and the broker started again.
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
    """The times of messages sent on a schedule, and what the worker beside them found."""
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
        raise BenchFailed(f"what came was not what was sent: {came}, {sent}")
    return {**came, "reader": others[0] if others else None}


def disk_faults(broker: BrokerProcess) -> int:
    """How often the broker's loop touched a page that had to be read from the disk first: its major page faults."""
    stat = Path(f"/proc/{broker.pid}/task/{broker.pid}/stat").read_text("ascii")
    return int(stat.rpartition(")")[2].split()[9])


def forget(directory: Path) -> None:
    """Have the system let go of what it keeps in memory of these files, which nobody may have open."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

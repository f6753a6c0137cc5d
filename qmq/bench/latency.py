"""Measure how long a message takes, alone and beside other load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qmq.bench.context import DURABILITIES, Bench
from qmq.bench.processes import LoadWorker, run_together
from qmq.bench.throughput import WINDOWS, windowed
from qmq.bench.values import BenchFailed, Value

MS = "ms"


def _percentiles(what: str, result: Mapping[str, float]) -> Iterator[Value]:
    for name in ("p50", "p99", "p99.9"):
        yield Value(f"{what} {name}".strip(), result[f"{name}_ms"], MS)


def send_one(bench: Bench) -> Iterator[Value]:
    """Time one send at a time, from the call to the receipt; and an echo of as many bytes by a bare loop."""
    with LoadWorker(bench.directory, "raw.echo", {}) as echo:
        echo.go()
        port = echo.prepared["port"]
        result = bench.run("raw.ask_echo", port=port, size=250, messages=bench.size.singles)
        echo.result()
    yield from _percentiles("bare echo", result)
    for durability in DURABILITIES:
        with bench.target() as target:
            prefix = bench.prefix()
            result = bench.run(
                "sending.one_at_a_time",
                url=target.url,
                subject=prefix + "one",
                durability=durability,
                size=100,
                messages=bench.size.singles,
            )
            bench.check_content(target.url, prefix + "one", 100, result["messages"], 1)
        yield from _percentiles(durability, result)


def flush_under_load(bench: Bench) -> Iterator[Value]:
    """Time one flushed send at a time while another client sends 500,000 flushed messages a second."""
    load_rate = 500_000
    with bench.target() as target:
        alone, beside = bench.prefix() + "one", bench.prefix() + "load"
        result, load = run_together(
            bench.directory,
            (
                "sending.one_at_a_time",
                {
                    "url": target.url,
                    "subject": alone,
                    "durability": "flush",
                    "size": 100,
                    "messages": bench.size.singles,
                },
            ),
            (
                "sending.paced",
                {
                    "url": target.url,
                    "subject": beside,
                    "durability": "flush",
                    "size": 100,
                    "rate": load_rate,
                    # long enough to last while the other client sends
                    "seconds": max(bench.size.singles * 0.002, 2.0),
                },
            ),
        )
        bench.check_content(target.url, alone, 100, result["messages"], 1)
        bench.check_content(target.url, beside, 100, load["messages"], int(load_rate * 0.005))
    yield from _percentiles("", result)
    yield Value("load", load["messages"] / load["seconds"], "msg/s")


def end_to_end(bench: Bench) -> Iterator[Value]:
    """Time messages from when they are due to their arrival in another process, at a fixed rate; alone, and in a group.

    The largest delay of the generator is reported too: if it is more than a part of a millisecond, the machine was
    busy, or sending itself took so long.
    """
    for rate, rate_name in ((1_000, "1 k"), (10_000, "10 k")):
        for durability, window in (*((one, None) for one in DURABILITIES), ("append", WINDOWS[0])):
            messages = int(rate * bench.size.seconds)
            with bench.target() as target:
                prefix = bench.prefix()
                came, sent = run_together(
                    bench.directory,
                    (
                        "receiving.arrivals",
                        {
                            "url": target.url,
                            "prefix": prefix,
                            "size": 100,
                            "rate": rate,
                            "messages": messages,
                            "skip": messages // 10,
                            "window": window,
                        },
                    ),
                    (
                        "sending.open_loop",
                        {
                            "url": target.url,
                            "subject": prefix + "timed",
                            "durability": durability,
                            "size": 100,
                            "rate": rate,
                            "seconds": bench.size.seconds,
                        },
                    ),
                )
            # The times of all messages count from that of the first.
            if (came["messages"], came["first_due_ns"]) != (sent["messages"], sent["first_due_ns"]):
                raise BenchFailed(f"the messages received differ from those sent: {came}, {sent}")
            what = f"{rate_name} msg/s {durability}{windowed(window)}"
            yield from _percentiles(what, came)
            yield Value(f"{what}, generator behind", sent["latest_ms"], MS)

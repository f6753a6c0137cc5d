"""A good client beside strangers of every kind: what they cost it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from qmq.bench.attacks import ATTACKS
from qmq.bench.children import BrokerProcess, Worker
from qmq.bench.context import KIB, Bench, rate
from qmq.bench.values import Value

_MIB: Final = 1 << 20
#: What those who do not read pull: so small a part of the log that others restart from.
_PART: Final = 16


def strangers(bench: Bench) -> Iterator[Value]:
    """Rounds of a send and a pull, one at a time, alone and under each attack; then the broker's memory of its own."""
    most = 0
    with bench.broker() as broker:
        large = bench.prefix()
        bench.fill(broker.url, large + "large", KIB, max(bench.size.restart_bytes // _PART // KIB // 1_000, 1) * 1_000)
        options = {"url": broker.url, "connections": bench.size.subjects // 11, "prefix": large}
        _rounds(bench, broker)  # what is warm stays so
        before = _rounds(bench, broker)
        for how in ATTACKS:
            with Worker(bench.directory, "attacks.run", {"how": how, **options}) as attack:
                under = _rounds(bench, broker)
                most = max(most, broker.anonymous_bytes())
                attack.go()
                found = attack.result()
            after = _rounds(bench, broker)
            yield Value(f"{how}: rate, of alone", 2 * rate(under) / (rate(before) + rate(after)), "")
            yield Value(f"{how}: p99", under["p99_ms"], "ms")
            yield Value(f"{how}: p99 alone", (before["p99_ms"] + after["p99_ms"]) / 2, "ms")
            a_round_s = (before["cpu_s"] + after["cpu_s"]) / (before["messages"] + after["messages"])
            for_strangers_s = max(under["cpu_s"] - a_round_s * under["messages"], 0)
            yield Value(f"{how}: cpu of the broker for it", for_strangers_s / under["all_s"], "cores")
            yield Value(f"{how}: cpu of the strangers themselves", found["cores"], "cores")
            yield Value(f"{how}: strikes", found["struck"], "")
            before = after
    yield Value("RssAnon", most / _MIB, "MiB")


def _rounds(bench: Bench, broker: BrokerProcess) -> dict[str, Any]:
    """What the good client found, and the broker's processor time for all and the time it took, in seconds."""
    subject = bench.prefix() + "rounds"
    cpu_s, started = broker.cpu_s(), time.perf_counter()
    found = bench.run("sending.rounds", url=broker.url, subject=subject, size=100, seconds=bench.size.seconds)
    found |= {"cpu_s": broker.cpu_s() - cpu_s, "all_s": time.perf_counter() - started}
    bench.check_content(broker.url, subject, 100, found["messages"], 1)
    return found

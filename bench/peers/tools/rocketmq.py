"""Run RocketMQ's own benchmark: Producer, BatchProducer and Consumer, without the proxy.

They report over a window of up to ten seconds, and run until they are stopped (Producer: until it has sent enough).
Their rate is the highest reported; how much was moved is what the broker says of the topic and of the group.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

from bench.peers.tools import Load, said
from qmq.bench.values import BenchFailed

_EXAMPLES: Final = "org.apache.rocketmq.example.benchmark"
_REPORT_MS: Final = 500
#: Long enough to warm up the compilers of both, and to fill the window of the report after that: with 8 s it reported
#: half as much as with 20 s.
_SENDS_S: Final = 20.0
_CONSUMES_MOST_S: Final = 40.0
#: After so many reports of nothing new the consumer has finished: it tells the broker its progress every five seconds.
_SILENT_REPORTS: Final = 14
_WAYS: Final = {"16 threads": ("Producer", "-w", "16"), "batches": ("BatchProducer", "-w", "4", "-b", "32")}


def send(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Send as many messages as it can in a fixed time."""
    name, *options = _WAYS[way]
    deadline = time.monotonic() + _SENDS_S
    rates = _reports(
        target, name, ["-t", _plain(topic), "-s", str(size), *options], lambda _: time.monotonic() > deadline
    )
    # Messages in flight when it was stopped arrive within moments, or never.
    before, count = -1, _stored(target, topic)
    while count != before:
        before, count = count, _stored(target, topic)
    return Load(count, max(rates))


def _stored(target: Mapping[str, Any], topic: str) -> int:
    return _sum_of(_asked(target, "topicStatus", "-t", _plain(topic)), column=3)


def consume(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Consume until nothing more arrives."""
    group = f"{_plain(topic)}-one"
    deadline = time.monotonic() + _CONSUMES_MOST_S

    def is_done(rates: list[float]) -> bool:
        last = rates[-_SILENT_REPORTS:]
        falls = all(after <= before for before, after in pairwise(last))
        return time.monotonic() > deadline or (len(last) == _SILENT_REPORTS and last[0] > 0 and falls)

    rates = _reports(target, "Consumer", ["-t", _plain(topic), "-g", group], is_done)
    came = _sum_of(_asked(target, "consumerProgress", "-g", group), column=4, of=_plain(topic))
    if came != messages:
        raise BenchFailed(f"the broker says that the group has handled {came} of {messages} messages")
    return Load(messages, max(rates))


def _plain(name: str) -> str:
    return name.replace(".", "-")


def _reports(
    target: Mapping[str, Any], name: str, options: list[str], is_done: Callable[[list[float]], bool]
) -> list[float]:
    """Return the rates that a benchmark reports until *is_done* returns True for them."""
    more = target["more"]
    command = [*more["java"], f"{_EXAMPLES}.{name}", "-n", more["names"], "-ri", str(_REPORT_MS), *options]
    rates: list[float] = []
    environment = {**os.environ, "ROCKETMQ_HOME": more["home"]}
    deadline = time.monotonic() + 2 * _CONSUMES_MOST_S
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as run:
        assert run.stdout is not None
        text = b""
        try:
            while not rates or not is_done(rates):
                ready, _, _ = select.select([run.stdout], [], [], 1.0)
                read = os.read(run.stdout.fileno(), 1 << 16) if ready else b""
                text += read
                if (ready and not read) or (not rates and time.monotonic() > deadline):
                    break
                rates = rates_in(text.decode("utf-8", "replace"))
        finally:
            run.kill()  # otherwise the end of the block would wait for a process that may never end
    if not rates:
        raise BenchFailed(f"{name} reported nothing: {text[-300:].decode('utf-8', 'replace')!r}")
    return rates


def rates_in(text: str) -> list[float]:
    """Return messages a second of each whole line; a batch producer reports batches. Raises BenchFailed at a
    failure.
    """
    lines = [line for line in text.split("\n")[:-1] if "TPS" in line]
    for line in lines:
        if any(int(count) for count in re.findall(r"Fail(?:ed)?: (\d+)", line)):
            raise BenchFailed(f"its own benchmark failed: {line}")
    found = (re.search(r"Send MPS: (\d+)", line) or re.search(r"TPS: (\d+)", line) for line in lines)
    return [float(one[1]) for one in found if one is not None]


def _asked(target: Mapping[str, Any], *words: str) -> str:
    more = target["more"]
    return said([*more["admin"], *words, "-n", more["names"]], more={"ROCKETMQ_HOME": str(more["home"])})


def _sum_of(table: str, column: int, of: str = "broker-a") -> int:
    """Return the sum of a *column* of the admin tool's table, over its lines that begin with *of*."""
    lines = (line.split() for line in table.splitlines())
    return sum(int(fields[column]) for fields in lines if fields and fields[0] == of)

"""Run Kafka's own ProducerPerformance and ConsumerPerformance."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.peers.tools import Load, counted, said
from bench.peers.workers.tally import text_of
from qmq.bench.values import BenchFailed

_TOOLS: Final = "org.apache.kafka.tools"
_PRODUCER: Final = ("acks=all", "linger.ms=50", "batch.size=1000000", "buffer.memory=134217728")
_CONSUMER: Final = ("max.partition.fetch.bytes=4194304", "max.poll.records=10000")
_HEAP: Final = "-Xmx512m"
#: The part of the messages that is sent before the tool begins to count, to warm up its compiler.
_WARM_ONE_OF: Final = 3
_MEGABYTE: Final = 1 << 20


def send(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Send with ProducerPerformance; all messages have one body."""
    java, *rest = target["more"]["java"]
    with tempfile.TemporaryDirectory() as directory:
        payload = Path(directory) / "payload"
        payload.write_text(text_of(size), "utf-8")
        told = said([
            java, _HEAP, *rest, f"{_TOOLS}.ProducerPerformance", "--bootstrap-server", target["address"],
            "--topic", topic, "--num-records", messages, "--warmup-records", messages // _WARM_ONE_OF,
            "--throughput", "-1", "--payload-file", payload, "--command-property", *_PRODUCER,
        ])  # fmt: skip
    return Load(messages, sent_rate(told, messages), text_of(size))


def sent_rate(told: str, messages: int) -> float:
    """Return messages a second from the last line of ProducerPerformance. Raises BenchFailed."""
    totals = re.findall(r"^(\d+) (.*)records sent, ([\d.]+) records/sec .* 99\.9th\.$", told, re.MULTILINE)
    if not totals:
        raise BenchFailed(f"ProducerPerformance did not say what it sent: {told[-200:]!r}")
    counted(int(totals[0][0]), messages)
    return float(totals[-1][2])


def consume(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Consume with ConsumerPerformance; the time of joining the group is left out."""
    java, *rest = target["more"]["java"]
    told = said([
        java, _HEAP, *rest, f"{_TOOLS}.ConsumerPerformance", "--bootstrap-server", target["address"], "--topic", topic,
        "--num-records", messages, "--group", f"{topic}.load", "--hide-header", "--command-property", *_CONSUMER,
    ])  # fmt: skip
    return Load(messages, came_rate(told, size, messages))


def came_rate(told: str, size: int, messages: int) -> float:
    """Return messages a second from the line of ConsumerPerformance. Raises BenchFailed unless all bytes arrived."""
    fields = [field.strip() for field in told.strip().rpartition("\n")[2].split(",")]
    try:
        megabytes, count, rate = float(fields[2]), int(fields[4]), float(fields[9])
    except (IndexError, ValueError):
        raise BenchFailed(f"ConsumerPerformance did not say what came: {told[-200:]!r}") from None
    counted(count, messages)
    counted(round(megabytes * _MEGABYTE / size), messages)
    return rate

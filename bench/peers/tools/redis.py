"""Run redis-benchmark: XADD over 8 connections, 64 in a pipeline. It cannot consume with a group."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any, Final

from bench.peers.tools import Load, said
from bench.peers.workers.tally import text_of
from qmq.bench.values import BenchFailed

_CONNECTIONS: Final = 8
_PIPELINE: Final = 64


def send(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Send messages with one body."""
    host, port = target["address"].split(":")
    # It sends whole pipelines, equally many on each connection.
    messages = -(-messages // (_CONNECTIONS * _PIPELINE)) * _CONNECTIONS * _PIPELINE
    told = said(
        [
            "redis-benchmark", "-h", host, "-p", port, "-c", _CONNECTIONS, "-P", _PIPELINE, "-n", messages, "--csv",
            "-x", "XADD", topic, "*", "b",
        ],
        text_of(size).encode(),
    )  # fmt: skip
    return Load(messages, sent_rate(told), text_of(size))


def sent_rate(told: str) -> float:
    """Return messages a second from its output with ``--csv``. Raises BenchFailed."""
    try:
        return float(list(csv.DictReader(io.StringIO(told)))[-1]["rps"])
    except (IndexError, KeyError, TypeError, ValueError):
        raise BenchFailed(f"redis-benchmark did not say what it sent: {told[-200:]!r}") from None


def consume(target: Mapping[str, Any], way: str, topic: str, size: int, messages: int) -> Load:
    """Raise BenchFailed: it cannot consume."""
    raise NotImplementedError("redis-benchmark does not consume")

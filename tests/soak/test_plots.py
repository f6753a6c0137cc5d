"""What the picture of a soak shows."""

from __future__ import annotations

from typing import Any

from tests.soak.plots import panels


def sample(at: float, pid: int, cpu: float, got: int, *, running: bool = True) -> dict[str, Any]:
    seen = {"rss_anon": 50 << 20, "files": 60, "threads": 11, "cpu": cpu}
    return {
        "at": at, "kills": [], "load": 1.5, "state files": 0,
        "processes": {"broker-1": {**seen, "pid": pid}} if running else {},
        "groups": {"copy": {"ready": 5, "in_flight": 2, "in_retry": 1, "dead": 3}} if running else {},
        "disk": {"broker-1": {"files": {"log": 4, "due": 0}, "bytes": {"log": 8 << 20, "due": 0}}},
        "latency": {"send": {"p50": 1.0, "p99": 2.0}, "end to end": {"p50": None, "p99": None}},
        "counts": {"copy": {"got": got}},
    }  # fmt: skip


def test_panels_have_a_line_for_each_and_gaps_where_a_broker_was_away() -> None:
    rows = [
        sample(5, 7, 1.0, 100), sample(10, 7, 2.0, 200), sample(15, 7, 2.0, 200, running=False), sample(20, 8, 0.5, 700)
    ]  # fmt: skip
    shown = {title: lines for title, lines, _ in panels(rows)}
    assert shown["brokers: own memory (RssAnon), MiB"] == {"broker-1": [50, 50, None, 50]}
    assert shown["CPU, processors"]["broker-1"] == [None, 0.2, None, None]
    assert shown["messages a second"]["handed out"] == [None, 20, 0, 100]
    assert shown["not handled yet, by group"] == {"copy": [8, 8, None, 8]}
    assert shown["broker-1: disk, MiB"] == {"log": [8, 8, 8, 8]}
    assert shown["end to end, ms"] == {"p50": [None] * 4, "p99": [None] * 4}

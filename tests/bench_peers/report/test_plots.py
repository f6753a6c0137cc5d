"""Pictures: the best is first, and only numbers of several brokers are drawn."""

from __future__ import annotations

from typing import Any

from bench.peers.report.plots import panels


def number(peer: str, what: str, median: float, unit: str = "msg/s", work: str = "send") -> dict[str, Any]:
    spread = {"least": median * 0.9, "most": median * 1.2}
    return {
        "peer": peer, "client": peer, "way": "bulk", "work": work, "what": what, "unit": unit, "promise": "fsync",
        "median": median, **spread,
    }  # fmt: skip


def found(*numbers: dict[str, Any]) -> dict[str, Any]:
    return {"peers": [{"name": "qmq", "title": "QMQ"}, {"name": "redis", "title": "Redis"}], "numbers": list(numbers)}


def test_of_rates_the_most_comes_first_and_of_times_the_least() -> None:
    told = found(
        number("redis", "100 B", 5), number("qmq", "100 B", 9),
        number("redis", "p50", 5, "ms"), number("qmq", "p50", 9, "ms"),
    )  # fmt: skip
    rates, times = panels(told, "send")
    assert (rates.title, rates.unit) == ("100 B, fsync: more is better", "msg/s")
    assert [bar.label for bar in rates.bars] == ["QMQ: bulk", "Redis: bulk"]
    assert times.title == "p50, fsync: less is better"
    assert [bar.is_ours for bar in times.bars] == [False, True]
    assert (rates.bars[0].least, rates.bars[0].value, rates.bars[0].most) == (9 * 0.9, 9, 9 * 1.2)


def test_what_one_broker_alone_has_is_no_picture() -> None:
    told = found(number("qmq", "100 B", 9), number("redis", "1 KiB", 9), number("redis", "x p99.9", 1, "ms"))
    assert panels(told, "send") == []
    assert panels(told, "consume") == []

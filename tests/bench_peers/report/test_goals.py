"""Which goals were reached: from the numbers of the rounds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.peers import registry
from bench.peers.report import goals
from bench.peers.report.results import numbers
from bench.peers.running import Row

PAGE = "page cache"


def found(*rounds: tuple[int, Row]) -> dict[str, Any]:
    return {"numbers": [number.as_json() for number in numbers(rounds, list(registry.PEERS.values()))]}


def lines(*founds: dict[str, Any]) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in goals.summary(founds)]
    return {row[0]: " | ".join(row[2:]) for row in rows}


def send(peer: str, way: str, value: float) -> Row:
    client = {"qmq": "qmq", "kafka": "confluent-kafka"}[peer]
    return Row("send", peer, client, way, PAGE, "100 B", value, "msg/s")


SEND_MANY = "`send_many`, 100 B, page cache: Kafka's best bulk send from Python's C client"


def test_the_best_of_theirs_in_the_same_round_counts() -> None:
    told = lines(
        found(
            (0, send("qmq", "bulk", 300)), (0, send("kafka", "bulk", 90)), (0, send("kafka", "queued", 100)),
            (1, send("qmq", "bulk", 60)), (1, send("kafka", "bulk", 30)), (1, send("kafka", "queued", 10)),
            (2, send("qmq", "bulk", 1_000)),
        )
    )  # fmt: skip
    assert told[SEND_MANY] == "2.5 | yes"
    assert told["`send_nowait`, 100 B: Kafka's `produce`"] == "not measured"


def test_of_times_the_least_of_all_others_counts() -> None:
    what = "1 k msg/s end to end p50"
    rows = [
        Row("latency", "qmq", "qmq", "paced", PAGE, what, 0.5, "ms"),
        Row("latency", "qmq", "qmq", "awaited", PAGE, what, 0.4, "ms"),
        Row("latency", "redis", "redis", "paced", PAGE, what, 0.3, "ms"),
        Row("latency", "kafka", "confluent-kafka", "linger 0", PAGE, what, 5.0, "ms"),
    ]
    told = lines(found(*((0, row) for row in rows)))
    assert told["end to end at 1 k msg/s, p50, page cache: the best of all others"] == "0.75 | **no**"


def test_the_bare_copy_is_none_of_the_others() -> None:
    rows = [
        Row("consume", "qmq", "qmq", "bulk", PAGE, "1 KiB", 800_000, "msg/s"),
        Row("consume", "loopback", "two sockets", "copy", PAGE, "1 KiB", 1_000_000, "msg/s"),
    ]
    told = found(*((0, row) for row in rows))
    assert lines(told)["`pull_batch`, acked, 1 KiB: a bare copy over loopback"] == "0.8 | yes"
    assert not goals.Who().has("loopback", "two sockets", "copy")
    (copy,) = [one for one in told["numbers"] if one["peer"] == "loopback"]
    assert copy["qmq_is_better_by"] == 0.8


@pytest.mark.parametrize(("most", "reached"), [(140 << 20, "yes"), (160 << 20, "**no**")])
def test_the_worst_of_all_runs_counts_where_less_is_better(most: int, reached: str) -> None:
    founds = [
        found((0, Row("server", "qmq", "server", "", PAGE, f"{work}: most memory of its own", own, "bytes")))
        for work, own in (("move", 50 << 20), ("latency", most), ("churn", 60 << 20))
    ]
    assert lines(*founds)["memory of the broker, at its most in any work"] == f"{most >> 20} | {reached}"


def test_what_waits_and_many_subjects() -> None:
    alone = "of the same without"
    rows = [
        Row("backlog", "qmq", "qmq", "bulk", PAGE, "send, 10 waiting", 0.99, alone),
        Row("backlog", "qmq", "qmq", "bulk", PAGE, "send, 100 waiting", 0.89, alone),
        Row("backlog", "qmq", "qmq", "bulk", PAGE, "send, 100 waiting", 5.0, "msg/s"),
        Row("subjects", "qmq", "qmq", "paced", PAGE, "1,000 subjects", 1_000.0, "msg/s"),
        Row("subjects", "qmq", "qmq", "paced", PAGE, "100,000 subjects", 850.0, "msg/s"),
        Row("churn", "qmq", "qmq", "paced", PAGE, "longest gap", 42.0, "ms"),
    ]
    told = lines(found(*((0, row) for row in rows)))
    assert told["sends beside a backlog, of the same without"] == "0.89 | **no**"
    assert told["rate with the most subjects, of that with a hundredth"] == "0.85 | yes"
    assert told["longest gap while consumers come and go"] == "42 | yes"


def test_every_goal_says_what_is_wanted() -> None:
    wanted = [goal.wanted() for goal in goals.GOALS]
    assert len({goal.says for goal in goals.GOALS}) == len(wanted) > 20
    assert {"at least 2.5 times", "at most 150 MiB", "at most 100 ms"} <= set(wanted)

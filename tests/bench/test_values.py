"""Numbers of rounds, goals, and how they are shown."""

from __future__ import annotations

import json

import pytest

from qmq.bench import suite
from qmq.bench.values import GOALS, Goal, Value, latencies, percentile, shown, summarize


def test_rounds_come_to_a_median_in_the_order_of_their_first_value() -> None:
    rounds = [
        ("send_one", Value("append p50", 0.3, "ms")),
        ("pull", Value("1 KiB", 5.0, "msg/s")),
        ("send_one", Value("append p50", 0.1, "ms")),
        ("send_one", Value("append p50", 0.11, "ms")),
    ]
    one, other = summarize(rounds)
    assert (one.measurement, one.what, one.median, one.values) == ("send_one", "append p50", 0.11, (0.3, 0.1, 0.11))
    assert one.reached is True
    assert (other.goal, other.reached, other.median) == (None, None, 5.0)


def test_goals_are_at_least_or_at_most() -> None:
    assert Goal(5).reached(5)
    assert not Goal(5).reached(4.9)
    assert Goal(5, at_most=True).reached(5)
    assert not Goal(5, at_most=True).reached(5.1)
    assert str(Goal(8e6)) == "≥ 8 M"
    assert str(Goal(0.12, at_most=True)) == "≤ 0.12"


def test_every_goal_is_of_a_measurement() -> None:
    assert {measurement for measurement, _ in GOALS} <= set(suite.MEASUREMENTS)


def test_a_summary_is_plain_json() -> None:
    (summary,) = summarize([("ingest", Value("100 B append", 9e6, "msg/s"))])
    assert json.loads(json.dumps(summary.as_json())) == {
        "measurement": "ingest",
        "what": "100 B append",
        "unit": "msg/s",
        "median": 9e6,
        "least": 9e6,
        "most": 9e6,
        "rounds": [9e6],
        "goal": {"value": 8e6, "at_most": False},
        "reached": True,
    }


@pytest.mark.parametrize(("share", "value"), [(0.0, 0), (0.5, 50), (0.99, 99), (0.999, 99), (1.0, 99)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile(list(range(100)), share) == value
    assert percentile([7], share) == 7


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.1235"),
        (3, "3"),
        (1_234.5, "1,234"),
        (9_999, "9,999"),
        (9_999.6, "10 k"),
        (12_345, "12.35 k"),
        (8_123_456, "8.123 M"),
        (999_999.9, "1 M"),
        (0.00001234, "0.00001234"),
    ],
)
def test_numbers_are_shown_short(value: float, text: str) -> None:
    assert shown(value) == text


def test_latencies_are_percentiles_in_milliseconds() -> None:
    assert latencies([0.003, 0.001, 0.002]) == {"p50_ms": 2.0, "p99_ms": 3.0, "p99.9_ms": 3.0, "most_ms": 3.0}

"""Medians, spread, and how many times better."""

from __future__ import annotations

import pytest

from bench.peers import registry
from bench.peers.report.results import numbers
from bench.peers.running import Row


def row(peer: str, way: str, value: float, unit: str = "msg/s", work: str = "send") -> Row:
    client = {"qmq": "qmq", "kafka": "confluent-kafka"}[peer]
    return Row(work, peer, client, way, "page cache", "100 B", value, unit)


def found(*rounds: tuple[int, Row]) -> dict[tuple[str, str], tuple[float, float | None]]:
    made = numbers(rounds, list(registry.PEERS.values()))
    return {(number.row.peer, number.row.way): (number.median, number.beside) for number in made}


def test_ratios_are_of_the_same_round() -> None:
    """The machine was three times slower in the second round, for both; QMQ was twice as fast in each."""
    told = found(
        (0, row("qmq", "bulk", 600)), (0, row("kafka", "bulk", 300)),
        (1, row("kafka", "bulk", 100)), (1, row("qmq", "bulk", 200)),
        (2, row("kafka", "bulk", 310)),
    )  # fmt: skip
    assert told == {("qmq", "bulk"): (400, None), ("kafka", "bulk"): (300, 2.0)}


def test_a_way_is_held_against_the_one_that_a_user_would_take_instead() -> None:
    told = found(
        (0, row("qmq", "bulk", 900, work="consume")), (0, row("qmq", "each", 600, work="consume")),
        (0, row("kafka", "share each", 300, work="consume")), (0, row("kafka", "share bulk", 300, work="consume")),
    )  # fmt: skip
    assert told["kafka", "share each"] == (300, 2.0)
    assert told["kafka", "share bulk"] == (300, 3.0)


def test_of_times_less_is_better() -> None:
    told = found((0, row("qmq", "paced", 0.25, "ms")), (0, row("kafka", "linger 0", 0.5, "ms")))
    assert told["kafka", "linger 0"] == (0.5, 2.0)


def test_a_rate_is_held_against_a_rate() -> None:
    """A backlog has both under one name: the rate of sends, and the ratio to the rate without a backlog."""
    both = [row(peer, "bulk", rate) for peer, rate in (("qmq", 900), ("kafka", 300))]
    shares = [row(peer, "bulk", share, "of the same without") for peer, share in (("qmq", 0.9), ("kafka", 0.6))]
    made = numbers([(0, one) for one in (*both, *shares)], list(registry.PEERS.values()))
    assert [number.beside for number in made] == [None, pytest.approx(3.0), None, pytest.approx(1.5)]


def test_what_was_asked_for_has_no_ratio() -> None:
    for unit in ("cpu s", "messages", "consumers"):
        told = found((0, row("qmq", "bulk", 900, unit)), (0, row("kafka", "bulk", 300, unit)))
        assert told["kafka", "bulk"] == (300, None)
    both = [row(peer, "bulk", 900)._replace(what="1 k msg/s sent") for peer in ("qmq", "kafka")]
    assert found(*((0, one) for one in both))["kafka", "bulk"] == (900, None)


def test_there_is_no_ratio_to_what_was_not_measured() -> None:
    assert found((0, row("kafka", "bulk", 300)), (1, row("qmq", "queued", 10))) == {
        ("kafka", "bulk"): (300, None), ("qmq", "queued"): (10, None)
    }  # fmt: skip


def test_json_has_median_spread_and_rounds() -> None:
    (number,) = numbers([(at, row("qmq", "bulk", value)) for at, value in enumerate([5.0, 1.0, 3.0])], [])
    told = number.as_json()
    assert (told["median"], told["least"], told["most"], told["rounds"]) == (3.0, 1.0, 5.0, [5.0, 1.0, 3.0])
    assert "value" not in told
    assert number.median == pytest.approx(3)

"""What is flat over a soak and what is not."""

from __future__ import annotations

import math

import pytest

from tests.soak.flatness import TOLERANCES, Series, judge, table

SECONDS = 3_600.0
EVERY = 5
MIB = 1 << 20


def series(value_at: object, kind: str = "memory", life_s: float = SECONDS, name: str = "broker-1") -> Series:
    """Samples of an hour; *value_at* says what is seen at a time of a life that is so old."""
    assert callable(value_at)
    points = [(float(at), float(value_at(at, at % life_s)), int(at // life_s)) for at in range(0, int(SECONDS), EVERY)]
    return Series(name, kind, points)


@pytest.mark.parametrize(
    "value_at",
    [
        lambda at, _: 60 * MIB,
        lambda at, _: 60 * MIB + 5 * MIB * math.sin(at),
        lambda at, _: min(60 * MIB, at * MIB),  # it fills up at the beginning
        lambda at, _: 60 * MIB + (200 * MIB if at % 300 < 10 else 0),  # peaks at each kill
        lambda at, _: 100 * MIB - at * 1_000,
    ],
    ids=["still", "wave", "filling up", "peaks", "less and less"],
)
def test_what_stays_flat(value_at: object) -> None:
    assert judge(series(value_at), SECONDS).is_flat


def test_a_leak_is_found() -> None:
    found = judge(series(lambda at, _: 60 * MIB + at * 20 * MIB / SECONDS), SECONDS)
    assert not found.is_flat
    assert found.second_quarter == pytest.approx(67.5 * MIB, rel=0.01)
    assert found.last_quarter == pytest.approx(77.5 * MIB, rel=0.01)
    assert found.most == pytest.approx(67.5 * 1.05 * MIB + 4 * MIB, rel=0.01)
    assert found.peak == max(value for _, value, _ in series(lambda at, _: 60 * MIB + at * 20 * MIB / SECONDS).points)


def test_a_leak_of_a_process_that_is_killed_every_five_minutes_is_found() -> None:
    found = judge(series(lambda _, age: 60 * MIB + age * 30 * MIB / 300, life_s=300), SECONDS)
    assert found.last_quarter == found.second_quarter
    assert found.within == pytest.approx(15 * MIB, rel=0.1)
    assert not found.is_flat


def test_a_process_that_fills_its_caches_in_each_life_is_flat() -> None:
    found = judge(series(lambda _, age: min(60 + age, 80) * MIB, life_s=300), SECONDS)
    assert found.within == 0
    assert found.is_flat


@pytest.mark.parametrize("kind", TOLERANCES)
def test_each_kind_has_room_and_an_end_of_it(kind: str) -> None:
    tolerance = TOLERANCES[kind]
    grown = tolerance.most(1_000.0)
    assert judge(series(lambda at, _: 1_000 if at < SECONDS * 0.6 else grown, kind), SECONDS).is_flat
    assert not judge(series(lambda at, _: 1_000 if at < SECONDS * 0.6 else grown + 1, kind), SECONDS).is_flat


@pytest.mark.parametrize("points", [[], [(10.0, 1.0, 0)], [(float(at), 1.0, 0) for at in range(1_700)]])
def test_too_few_samples_show_nothing(points: list[tuple[float, float, int]]) -> None:
    found = judge(Series("files", "files", points), SECONDS)
    assert not found.is_flat
    assert found.last_quarter is None


def test_the_table_has_a_line_for_each_and_says_which_is_not_flat() -> None:
    flat = judge(series(lambda *_: 12, "threads", name="threads broker-1"), SECONDS)
    leaking = judge(series(lambda at, _: at * MIB, name="memory broker-1"), SECONDS)
    slow = judge(series(lambda *_: 2.5, "latency", name="send p50"), SECONDS)
    head, *lines = table([flat, leaking, slow]).splitlines()
    assert head.split()[:3] == ["first", "2nd", "quarter"]
    assert [line.split("  ")[0] for line in lines] == ["threads broker-1", "memory broker-1", "send p50"]
    assert lines[0].endswith("12  flat")
    assert lines[1].endswith("NOT FLAT")
    assert "2.5 ms" in lines[2]

"""qmq/cli/common/formatting.py: numbers and times for tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from qmq.cli.common.formatting import age, age_of, iso, number


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3, "0s"), (0.4, "0s"), (119, "119s"), (120, "2m"), (7_199, "119m"), (7_200, "2h"), (172_800, "2d")],
)
def test_an_age_is_a_number_and_a_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999_999, "999,999"), (1_000_000, "1.0 M"), (12_345_678, "12.3 M"), (12_345_678_901, "12,345 M")],
)
def test_a_large_number_is_short(count: int, shown: str) -> None:
    assert number(count) == shown


def test_things_are_counted_in_their_number() -> None:
    assert [number(count, "group") for count in (0, 1, 1_000)] == ["0 groups", "1 group", "1,000 groups"]
    assert [number(count, "range", "ranges") for count in (0, 1, 2)] == ["0 ranges", "1 range", "2 ranges"]


def test_times_are_ages_and_texts() -> None:
    assert age_of(None) == ""
    assert age_of(datetime.now(UTC) - timedelta(hours=5, minutes=1)) == "5h"
    assert iso(None) is None
    assert iso(datetime(2026, 1, 31, 12, tzinfo=UTC)) == "2026-01-31T12:00:00.000000Z"

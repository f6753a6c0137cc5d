"""qmq/cli/ages.py: how long ago something was, for tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from qmq.cli.ages import age, age_of, iso


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "119 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_an_age_is_a_number_and_a_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_times_are_ages_and_texts() -> None:
    assert age_of(None) == ""
    assert age_of(datetime.now(UTC) - timedelta(hours=5, minutes=1)) == "5 h"
    assert iso(None) is None
    assert iso(datetime(2026, 1, 31, 12, tzinfo=UTC)) == "2026-01-31T12:00:00+00:00"

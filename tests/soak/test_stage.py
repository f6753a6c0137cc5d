"""The brokers of a soak: settings that a broker takes, whatever the rate and the length of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.settings import Settings
from tests.soak.plan import MEAN_BYTES, Plan
from tests.soak.stage import broker_settings


@pytest.mark.parametrize("rate", [1.0, 500.0, 50_000.0])
@pytest.mark.parametrize("seconds", [12.0, 180.0, 3_600.0])
@pytest.mark.parametrize("brokers", [1, 2])
def test_settings_fit_together_and_retention_drops_many_segments(
    tmp_path: Path, rate: float, seconds: float, brokers: int
) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, **broker_settings(rate, seconds, brokers)})
    assert settings.retention_bytes >= 6 * settings.segment_bytes
    if seconds * rate > 100_000:
        assert settings.retention_bytes < seconds * rate * MEAN_BYTES / 2


def test_retention_goes_by_what_messages_take() -> None:
    plan = Plan(1)
    bodies = [len(plan.message(number).body) for number in range(10_000)]
    assert sum(bodies) / len(bodies) == pytest.approx(MEAN_BYTES, rel=0.2)

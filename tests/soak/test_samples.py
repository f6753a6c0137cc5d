"""Samples of a soak: counts and latencies of processes, files of a data directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.broker_process import running_broker
from tests.soak.samples import COUNTED, Meter, disk, percentile_ms, process


def test_a_meter_goes_on_where_the_one_before_it_ended(tmp_path: Path) -> None:
    first = Meter(tmp_path, "worker")
    first.count("got", 3)
    first.took(1_000)
    second = Meter(tmp_path, "worker")
    second.count("got")
    assert {name: first.counts()[name] for name in COUNTED if first.counts()[name]} == {"got": 4}
    assert first.latencies().sum() == 1


@pytest.mark.parametrize("milliseconds", [0.1, 1.0, 7.0, 250.0, 90_000.0])
def test_percentiles_are_right_within_a_tenth(tmp_path: Path, milliseconds: float) -> None:
    meter = Meter(tmp_path, "worker")
    for _ in range(98):
        meter.took(milliseconds * 1_000)
    for _ in range(2):
        meter.took(milliseconds * 10_000)
    assert percentile_ms(meter.latencies(), 50) == pytest.approx(milliseconds, rel=0.1)
    assert percentile_ms(meter.latencies(), 99) == pytest.approx(milliseconds * 10, rel=0.1)


def test_latencies_beyond_the_last_bucket_count_in_it_and_none_have_no_percentile(tmp_path: Path) -> None:
    meter = Meter(tmp_path, "worker")
    assert percentile_ms(meter.latencies(), 50) is None
    meter.took(-5)
    meter.took(1e15)
    found = meter.latencies()
    assert (found[0], found[-1]) == (1, 1)
    assert found.dtype == np.int64


def test_a_process_is_sampled_and_one_that_is_gone_is_not() -> None:
    found = process(os.getpid())
    assert found is not None
    assert found.rss_anon > 1 << 20
    assert found.peak_rss >= found.rss_anon
    assert found.files >= 3
    assert found.threads >= 1
    assert process(1 << 23) is None


async def test_a_data_directory_is_counted_by_kind(tmp_path: Path) -> None:
    async with running_broker(tmp_path / "data", partitions=2):
        pass
    found = disk(tmp_path / "data")
    assert {"log", "consumer-log", "pulls", "delayed", "checkpoint", "other"} >= set(found.files) >= {"log", "other"}
    assert found.bytes["other"] > 0
    assert len(found.segments) == 2
    assert all(name.startswith("log-") for name in found.segments)

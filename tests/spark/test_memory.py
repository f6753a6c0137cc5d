"""Memory does not depend on the size of segments: the same messages are in small ones, and in one large one.

The memory of a process is its highest RssAnon, less that of a process with nearly nothing to do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

from bench.history.orders import Amount, write_orders
from tests.forks import SHARED
from tests.spark.memory import CODE, watched

_MIB: Final = 1 << 20
#: Of small segments, which have room for the largest batch; and what the one large segment has at least.
SMALL_BYTES: Final = 17 * _MIB
LARGE_BYTES: Final = 240 * _MIB
#: What the large one may take more than small ones.
MORE_BYTES: Final = 32 * _MIB
FEW: Final = 1_000
MANY: Final = 240_000
BODY_BYTES: Final = 1_000

Peaks = dict[str, int]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return data directories by their contents."""
    found = {}
    for name, messages, segment_bytes in (
        ("tiny", FEW, SMALL_BYTES), ("small", MANY, SMALL_BYTES), ("large", MANY, 1 << 30),
    ):  # fmt: skip
        amount = Amount(messages, BODY_BYTES, subjects=8, batch=500, runs=4, headers=True, segment_bytes=segment_bytes)
        found[name] = tmp_path_factory.mktemp("memory") / name
        write_orders(found[name], amount)
    sizes = {name: sorted(path.stat().st_size for path in found[name].glob("log-0/*.messages")) for name in found}
    assert sizes["large"][-1] > LARGE_BYTES
    assert sizes["small"][-1] <= SMALL_BYTES
    return found


def check(what: str, most_bytes: int, peaks: Peaks) -> None:
    small, large = peaks["small"] - peaks["tiny"], peaks["large"] - peaks["tiny"]
    print(f"{what}: {small / _MIB:.0f} MiB for small segments, {large / _MIB:.0f} for a large one")
    assert large <= small + MORE_BYTES
    assert large < most_bytes


def test_reading(spark: SparkSession, places: dict[str, Path]) -> None:
    """One task reads everything, so that its memory would show; the processes that plan it are measured, too."""
    root, peaks = spark.sparkContext._gateway.proc.pid, Peaks()  # type: ignore[union-attr]
    for name, place in places.items():
        frame = spark.read.format("qmq").option("part_bytes", 1 << 30).load(str(place))
        with watched(root) as peak:
            (row,) = frame.selectExpr("count(*)", "sum(length(body))").collect()
        messages = FEW if name == "tiny" else MANY
        assert tuple(row) == (messages, BODY_BYTES * messages)
        peaks[name] = peak.size
    check("reading", 96 * _MIB, peaks)


@pytest.mark.usefixtures("spark")  # so that it comes where the stores are
@pytest.mark.parametrize(("form", "most_bytes"), [("segments", 48 * _MIB), ("parquet", 150 * _MIB)])
def test_archiving(form: str, most_bytes: int, places: dict[str, Path], tmp_path: Path) -> None:
    """A restore that reads such an archive is measured too."""
    check(f"archiving {form}", most_bytes, {name: _peak(form, places[name], tmp_path / name) for name in places})
    if form == "segments":
        check("restoring", 48 * _MIB, {name: _peak("restore", tmp_path / name, tmp_path) for name in places})


def _peak(task: str, source: Path, to: Path) -> int:
    """Return the peak of a process that does this; it has to report all messages."""
    with SHARED.python(["-c", CODE, task, str(source), str(to)], sys.stderr, text=True) as process:
        with watched(process.pid) as peak:
            said = process.stdout.read()
        assert process.wait(60) == 0
    assert int(said) == (FEW if source.name == "tiny" else MANY)
    return peak.size

"""Measured copies are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.history import archives
from bench.history.orders import Amount, write_orders
from qmq.archive.files import LocalFiles
from qmq.bench.values import BenchFailed


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("orders") / "data"
    write_orders(directory, Amount(10_000, subjects=20))
    return directory


def test_copies_and_archives(source: Path, tmp_path: Path) -> None:
    for synced in (False, True):
        seconds, cpu_s, memory = archives.copy_plainly(source, tmp_path / "plain", synced=synced)
        assert seconds > 0 <= cpu_s
        assert memory
    assert not (tmp_path / "plain").exists()
    assert archives.archive(source, str(tmp_path / "archive"))[0] > 0
    assert archives.segment_bytes(source) > 2_000_000


def test_a_copy_that_is_another_is_no_number(source: Path, tmp_path: Path) -> None:
    archives.archive(source, str(tmp_path))
    path = max(tmp_path.rglob("*.messages"), key=lambda found: found.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BenchFailed, match="other bytes"):
        archives._compare(source, LocalFiles(tmp_path))
    path.with_suffix(".manifest").unlink()
    with pytest.raises(BenchFailed, match="as a whole"):
        archives._compare(source, LocalFiles(tmp_path))


def test_parquet(source: Path, tmp_path: Path) -> None:
    assert archives.archive_as_parquet(source, tmp_path)[0] > 0
    assert list(tmp_path.rglob("*.parquet"))

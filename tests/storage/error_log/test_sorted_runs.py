"""Runs: two files each, where one replaces the other's rot; removed when no checkpoint knows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.format.layout import SCHEDULE_HEADER_SIZE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import sorted_runs, timer_queue
from qmq.storage.error_log.sorted_runs import run_paths, sweep
from tests.storage.error_log.test_timer_queue import DTYPE, filled, pairs_of, restarted


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 20)
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 1 << 40)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)


@pytest.mark.parametrize("copies", [(0,), (1,), (0, 1)])
def test_a_rotten_item_is_read_from_the_other_file_and_reported(tmp_path: Path, copies: tuple[int, ...]) -> None:
    found, pairs = filled(tmp_path)
    found = restarted(tmp_path, found)
    for copy in copies:
        path = run_paths(tmp_path / "s", 0)[copy]
        data = bytearray(path.read_bytes())
        data[SCHEDULE_HEADER_SIZE + 9 * DTYPE.itemsize + 3] ^= 1
        path.write_bytes(data)
    got = pairs_of(found.pop(100, 100))
    assert got == ([pair for pair in pairs if pair[0] != 10] if copies == (0, 1) else pairs)
    damaged = found._damaged
    assert len(damaged) == {(0,): 1, (1,): 0, (0, 1): 1}[copies]
    assert all(str(tmp_path) in str(told) for told in damaged)


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("left", [0, 10, SCHEDULE_HEADER_SIZE + 5 * DTYPE.itemsize + 1, None])
def test_a_file_that_was_cut_or_is_gone_is_read_from_the_other(tmp_path: Path, copy: int, left: int | None) -> None:
    found, pairs = filled(tmp_path)
    found = restarted(tmp_path, found)
    path = run_paths(tmp_path / "s", 0)[copy]
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    assert pairs_of(found.pop(100, 100)) == pairs
    assert bool(found._damaged) is (copy == 0)


def test_runs_that_no_checkpoint_knows_are_removed(tmp_path: Path) -> None:
    found, pairs = filled(tmp_path)
    for path in run_paths(tmp_path / "s", 77):
        path.write_bytes(b"")
    (tmp_path / "s" / "README").write_bytes(b"mine")
    sweep(Disk(), tmp_path / "s", {run.number for run in found.claim().runs}, set)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["00000000.a", "00000000.b", "README"]
    assert pairs_of(found.pop(100, 100)) == pairs

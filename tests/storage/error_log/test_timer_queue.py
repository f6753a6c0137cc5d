"""A schedule against a sorted list; restarts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import sorted_runs, timer_queue
from qmq.storage.error_log.items import Items
from qmq.storage.error_log.timer_queue import Schedule
from tests.fake_disk import FakeDisk

DTYPE = np.dtype([("due_us", "<u8"), ("number", "<u8"), ("what", "<u4"), ("crc", "<u4")])
STORE = b"store!"


def items_of(pairs: list[tuple[int, int]]) -> Items:
    return np.array([(due, number, number & 0xFFFF, 0) for due, number in pairs], DTYPE)


def pairs_of(items: Items) -> list[tuple[int, int]]:
    assert (items["what"] == items["number"] & 0xFFFF).all()
    return list(zip(items["due_us"].tolist(), items["number"].tolist(), strict=True))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MEMORY_ITEMS", 20)
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 1 << 40)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)


def made(tmp_path: Path) -> Schedule:
    (tmp_path / "s").mkdir(exist_ok=True)
    return Schedule(Disk(), tmp_path / "s", STORE, DTYPE, [])


def restarted(tmp_path: Path, before: Schedule) -> Schedule:
    claim = before.claim()
    before.begin_sync().run()
    after = made(tmp_path)
    after.restore(claim)
    return after


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_sorted_list(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    found, model, number, now = made(tmp_path), list[tuple[int, int]](), 0, 0
    for _ in range(200):
        what = chance.random()
        if what < 0.5:
            pairs = []
            for _ in range(chance.randrange(1, 8)):
                number += 1
                pairs.append((now + chance.randrange(50), number))
            found.push(items_of(pairs))
            model = sorted(model + pairs)
        elif what < 0.9:
            now += chance.randrange(20)
            limit = chance.randrange(1, 30)
            due = [pair for pair in model if pair[0] <= now][:limit]
            assert found.is_due(now) == bool(due)
            assert pairs_of(found.pop(now, limit)) == due
            model = model[len(due) :]
        else:
            found = restarted(tmp_path, found)
        assert len(found) == len(model)
        assert found.next_due_us() == (model[0][0] if model else None)
    assert found._damaged == []
    assert pairs_of(found.pop(10**9, 10**6)) == model


def test_only_a_part_is_in_memory(tmp_path: Path) -> None:
    found = made(tmp_path)
    pairs = [(number * 7919 % 10_007, number) for number in range(1, 5_000)]
    for start in range(0, len(pairs), 10):
        found.push(items_of(pairs[start : start + 10]))
    assert len(found._heap) <= 5_000 // timer_queue.RUNS + 10
    assert 20 < len(found._runs) < 150
    assert pairs_of(found.pop(10**9, 10**6)) == sorted(pairs)


def filled(tmp_path: Path) -> tuple[Schedule, list[tuple[int, int]]]:
    found = made(tmp_path)
    pairs = [(number, number) for number in range(1, 22)]
    found.push(items_of(pairs))
    return restarted(tmp_path, found), pairs


def test_one_pop_reads_only_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "MOST_BLOCKS", 4)
    disk = FakeDisk("boot-1")
    found = Schedule(disk, tmp_path, STORE, DTYPE, [])
    pairs = [(number * 7919 % 10_007, number) for number in range(1, 2_000)]
    for start in range(0, len(pairs), 10):
        found.push(items_of(pairs[start : start + 10]))
    assert len(found._runs) > 20
    got = list[tuple[int, int]]()
    while found.is_due(10**9):
        before = disk.calls["open"]
        some = pairs_of(found.pop(10**9, 10**6))
        assert some
        assert disk.calls["open"] - before <= 5
        got += some
    assert got == sorted(pairs)

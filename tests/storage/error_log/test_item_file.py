"""Items by number, compared with a model, whichever are taken out; the files stay in proportion to the items."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import StorageError
from qmq.format.layout import RETRY_DTYPE
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import item_file, sorted_runs
from qmq.storage.error_log.item_file import ItemLog
from qmq.storage.error_log.items import RETRY_ITEMS, Items
from qmq.storage.error_log.sorted_runs import sweep
from tests.effort import part_of

_MEMORY = 20
_STORE = b"storeid"[:6]
_OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30)),
        st.tuples(st.just("take out"), st.integers(1, 200), st.integers(1, 60)),
        st.tuples(st.just("thin"), st.integers(2, 9)),
        st.tuples(st.just("skip"), st.integers(0, 5)),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_file, "MEMORY_ITEMS", _MEMORY)
    monkeypatch.setattr(sorted_runs, "BLOCK_ITEMS", 7)


def items_of(values: list[int]) -> Items:
    items = np.zeros(len(values), RETRY_ITEMS)
    items["due_us"] = values
    return items


class Life:
    """An item log, and a dict with its items."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[StorageError] = []
        self.log = self._opened()
        self.there: dict[int, int] = {}
        self.next = 1
        self.value = 0

    def _opened(self) -> ItemLog:
        return ItemLog(Disk(), self.directory, _STORE, RETRY_DTYPE, self.damaged)

    def add(self, count: int) -> None:
        values = [self.value + at for at in range(count)]
        self.log.add(items_of(values))
        self.there.update(zip(range(self.next, self.next + count), values, strict=True))
        self.next, self.value = self.next + count, self.value + count

    def take_out(self, start: int, count: int) -> None:
        gone = [number for number in self.there if start <= number < start + count]
        assert self.log.take_out(start, start + count) == len(gone)
        for number in gone:
            del self.there[number]

    def checkpoint(self) -> None:
        claim = self.log.claim()
        self.log.begin_sync().run()
        if self.directory.exists():
            sweep(Disk(), self.directory, {run for run, *_ in claim.runs}, self.log.unclaimed)

    def restart(self) -> None:
        self.checkpoint()
        claim = self.log.claim()
        self.log = self._opened()
        self.log.restore(claim)

    def check(self, after: int) -> None:
        found = [(int(item["number"]), int(item["due_us"])) for block in self.log.after(after) for item in block]
        assert found == [pair for pair in sorted(self.there.items()) if pair[0] > after]
        assert len(self.log) == len(self.there)
        assert all(self.log.has(number) is (number in self.there) for number in range(1, self.next + 1))
        assert self.damaged == []

    def file_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("*")) if self.directory.exists() else 0


@settings(max_examples=part_of(300), deadline=None)
@given(_OPERATIONS, st.integers(0, 300))
def test_the_log_has_all_items_that_were_not_taken_out(operations: list[tuple[str | int, ...]], after: int) -> None:
    with TemporaryDirectory() as directory:
        life = Life(Path(directory) / "dead")
        for what, *numbers in operations:
            match what, numbers:
                case "add", [int(count)]:
                    life.add(count)
                case "take out", [int(start), int(count)]:
                    life.take_out(start, count)
                case "thin", [int(step)]:
                    for number in [number for number in life.there if number % step]:
                        life.take_out(number, 1)
                case "skip", [int(count)]:
                    life.log.skip_to(life.next + count)
                    life.next += count
                case "checkpoint", []:
                    life.checkpoint()
                case "restart", []:
                    life.restart()
            life.check(after)


@settings(max_examples=part_of(100), deadline=None)
@given(st.lists(st.one_of(_OPERATIONS.map(lambda several: several[:3]), st.just("walk")), max_size=40))
def test_a_walk_meets_all_that_stay_whatever_comes_and_goes_meanwhile(steps: list[Any]) -> None:
    with TemporaryDirectory() as directory:
        life = Life(Path(directory) / "dead")
        life.add(60)
        left, walk, met = set(life.there), life.log.after(0), list[int]()
        for step in [*steps, *["walk"] * 1_000]:
            if step == "walk":
                met += next(walk, items_of([]))["number"].tolist()
                continue
            for name, *numbers in step:
                match name, numbers:
                    case "add", [int(count)]:
                        life.add(count)
                    case "take out", [int(start), int(count)]:
                        life.take_out(start, count)
                    case "checkpoint", []:
                        life.checkpoint()
            left &= set(life.there)
        assert left <= set(met)
        assert met == sorted(set(met))
        assert life.damaged == []


@pytest.mark.parametrize("left_of", [0, 10, 50])
def test_files_go_with_their_items(tmp_path: Path, left_of: int) -> None:
    """Of 2,000 items none is left, or each tenth or fiftieth: the files have no more than those."""
    life = Life(tmp_path / "dead")
    for count in (500, *[10] * 150):
        life.add(count)
    for number in range(1, 2_001):
        if not left_of or number % left_of:
            life.take_out(number, 1)
    for _ in range(2_000 // _MEMORY):
        life.checkpoint()
    life.check(0)
    size = 2 * len(life.there) * RETRY_DTYPE.itemsize
    assert life.file_bytes() <= 3 * size + 10_000
    if not left_of:
        assert list(life.directory.iterdir()) == []


def test_items_that_come_and_go_need_no_file(tmp_path: Path) -> None:
    life = Life(tmp_path / "dead")
    for _ in range(100):
        life.add(10)
        life.take_out(life.next - 10, 10)
    life.checkpoint()
    assert life.file_bytes() == 0


def test_items_rotten_in_both_files_are_reported_and_do_not_prevent_a_merge(tmp_path: Path) -> None:
    life = Life(tmp_path / "dead")
    life.add(_MEMORY)
    life.add(_MEMORY)
    for path in life.directory.glob("00000000.*"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    life.take_out(1, _MEMORY - 2)
    life.take_out(_MEMORY + 1, _MEMORY - 2)
    life.checkpoint()
    assert len(life.damaged) == 1
    life.damaged.clear()
    del life.there[_MEMORY]
    life.check(0)
    assert len(list(life.directory.iterdir())) == 2

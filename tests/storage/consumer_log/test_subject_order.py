"""Rows sorted by subject: in memory by blocks, in files, always the same as a plain sort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, ENTRY_DTYPE
from qmq.storage.consumer_log import subject_order
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.consumer_log.subject_order import Order, derive_order, open_order, order_block, sort_block, write_order
from qmq.storage.disk.disk import Disk
from tests.effort import part_of
from tests.fake_disk import FakeDisk

#: (subject, lane) by row
KEYS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=60)


def rows_of(keys: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    rows = np.zeros(len(keys), ENTRY_DTYPE)
    rows["subject"] = [subject for subject, _ in keys]
    rows["lane"] = [lane for _, lane in keys]
    return rows


def header_of(count: int) -> DerivedHeader:
    return DerivedHeader(1, b"store1", True, 4096, 9999, count, 17, 0)


@given(keys=KEYS)
def test_a_block_is_sorted_by_subject_lane_and_index(keys: list[tuple[int, int]]) -> None:
    wanted = sorted(range(len(keys)), key=lambda index: (*keys[index], index))
    assert sort_block(rows_of(keys)).tolist() == wanted


@given(keys=KEYS, block_rows=st.integers(1, 16), lanes=st.booleans())
@settings(max_examples=part_of(150))
def test_a_segment_is_sorted_block_by_block(keys: list[tuple[int, int]], block_rows: int, lanes: bool) -> None:
    keys = keys if lanes else [(subject, 0) for subject, _ in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject_order, "BLOCK_ROWS", block_rows)
        columns = derive_order(rows_of(keys))
    assert columns.permutation.tolist() == sorted(range(len(keys)), key=lambda index: (*keys[index], index))
    subjects = sorted({subject for subject, _ in keys})
    assert columns.subjects.tolist() == subjects
    assert columns.starts.tolist() == [sum(s < subject for s, _ in keys) for subject in subjects] + [len(keys)]


@given(keys=KEYS.filter(bool))
@settings(max_examples=part_of(50))
def test_spans(keys: list[tuple[int, int]]) -> None:
    keys = [(subject, 0) for subject, _ in keys]
    for columns in (derive_order(rows_of(keys)), order_block(rows_of(keys))):
        found = Order(columns)
        for subject in range(11):
            assert list(found.span(subject)) == [i for i, (s, _) in enumerate(keys) if s == subject]


def test_large_numbers_and_many_rows() -> None:
    random = np.random.default_rng(1)
    rows = np.zeros(200_000, ENTRY_DTYPE)
    rows["subject"] = random.integers(0, 100_000, len(rows))
    columns = derive_order(rows)
    assert np.array_equal(columns.permutation, np.argsort(rows["subject"], kind="stable"))


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.order"
    rows = rows_of([(7, 0), (3, 0), (7, 0)])
    write_order(Disk(), path, header_of(3), derive_order(rows))
    assert path.read_bytes()[DERIVED_HEADER_SIZE:] == np.array([3, 7, 0, 1, 3, 1, 0, 2], "<u4").tobytes()
    opened = Order(open_order(Disk(), path, header_of(3), check=True))
    assert (list(opened.span(7)), list(opened.span(3)), list(opened.span(5))) == ([0, 2], [1], [])
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_segment(tmp_path: Path) -> None:
    write_order(Disk(), tmp_path / "x.order", header_of(0), derive_order(rows_of([])))
    opened = Order(open_order(Disk(), tmp_path / "x.order", header_of(0), check=True))
    assert list(opened.span(0)) == []


def test_files_that_do_not_belong_or_are_rotten_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.order"
    write_order(Disk(), path, header_of(3), derive_order(rows_of([(7, 0), (3, 0), (7, 0)])))
    good = path.read_bytes()
    for other in (header_of(2), header_of(3)._replace(base=8192), header_of(3)._replace(first_row=18)):
        with pytest.raises(BadBytes, match="does not belong"):
            open_order(Disk(), path, other, check=True)
    path.write_bytes(good[:-1] + b"\7")
    with pytest.raises(BadBytes, match="checksum"):
        open_order(Disk(), path, header_of(3), check=True)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(BadBytes, match=r"x\.order"):
            open_order(Disk(), path, header_of(3), check=True)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = FakeDisk()
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        write_order(disk, tmp_path / "x.order", header_of(1), derive_order(rows_of([(1, 0)])))
    assert list(tmp_path.iterdir()) == []

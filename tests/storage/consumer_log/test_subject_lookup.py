"""Blocks of ranges against a plain list of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.storage.consumer_log import subject_lookup
from qmq.storage.consumer_log.subject_lookup import SHELF_RANGES, RangeBlocks, SubjectRows, no_touch, take
from qmq.storage.consumer_log.subject_order import Rows
from tests.effort import part_of
from tests.storage.rows import Feed, Row, as_array


class Listed:
    """A range of given rows."""

    def __init__(self, first_row: int, rows: list[Row]) -> None:
        self.first_row = first_row
        self.count = len(rows)
        self._rows = as_array(rows)
        self.times_marked = 0

    def rows(self) -> Rows:
        return self._rows

    def data(self) -> memoryview:
        return self._rows.data.cast("B")

    def span(self, subject: int) -> Sequence[int]:
        found: list[int] = np.flatnonzero(self._rows["subject"] == subject).tolist()
        return found

    def subjects(self) -> npt.NDArray[np.uint32]:
        self.times_marked += 1
        return np.asarray(self._rows["subject"])

    def need(self, first: int, stop: int) -> None:
        assert 0 <= first < stop <= self.count


def shelved(pieces: list[list[int]]) -> tuple[RangeBlocks, list[Row], list[Listed]]:
    """Make ranges with a row of 3 messages for each subject given."""
    feed = Feed()
    touched: list[Listed] = []
    shelves = RangeBlocks(lambda row_range: touched.append(cast(Listed, row_range)))
    for piece in pieces:
        first = len(feed.rows)
        rows = [feed.batch([(subject, 3)], stride=subject % 3)[0] for subject in piece]
        shelves.add(Listed(first, rows))
    return shelves, feed.rows, touched


def mark_all(shelves: RangeBlocks) -> None:
    for _ in range(200):
        list(shelves.from_sequence(1, 0))


def gather(found: list[SubjectRows]) -> list[Row]:
    parts = [take(each, 1 << 40, 1_000) for each in found]
    return [row for part in parts if part is not None for row in part.tolist()]


PIECES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=12)


@pytest.mark.no_cover
@given(pieces=PIECES, repeats=st.sampled_from([1, 1, 8, 20]))
@settings(max_examples=part_of(40))
def test_rows_of_a_subject_while_ranges_are_marked_in_pieces(pieces: list[list[int]], repeats: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject_lookup, "_MARKED_AT_ONCE", 2)
        patch.setattr(subject_lookup, "ASKED_A_MARK", 8)
        check_rows(pieces, repeats)


@pytest.mark.no_cover
@given(pieces=PIECES, repeats=st.sampled_from([1, 1, 8, 20]))
@settings(max_examples=part_of(40))
def test_rows_of_a_subject(pieces: list[list[int]], repeats: int) -> None:
    """Up to 240 ranges, so that shelves fill and some subjects are only on some of them."""
    check_rows(pieces, repeats)


def check_rows(pieces: list[list[int]], repeats: int) -> None:
    """Compare what is found of each subject with all of its rows."""
    shelves, rows, _ = shelved(pieces * repeats)
    for subject in range(7):
        mine = [row for row in rows if row[3] == subject]
        for sequence in {0, *(row[0] for row in mine[::5]), *(row[0] + 3 for row in mine[::5])}:
            wanted = [row for row in mine if row[0] + 3 > sequence]
            assert gather(list(shelves.from_sequence(subject, sequence))) == wanted
            assert shelves.starts_by(subject, sequence) == (bool(mine) and mine[0][0] <= sequence)
        for number in range(0, len(rows) + 1, 3):
            wanted = [row for row in rows[number:] if row[3] == subject]
            assert gather(list(shelves.from_row(subject, number))) == wanted


def test_only_ranges_that_have_the_subject_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_lookup, "ASKED_A_MARK", 8)
    shelves, _, touched = shelved([[0]] * 100 + [[1]] + [[0]] * 100)
    mark_all(shelves)
    assert len({id(row_range) for row_range in touched}) == 201, "every range is read once, for the words"
    touched.clear()
    assert len(list(shelves.from_sequence(1, 0))) == 1
    assert {row_range.first_row for row_range in touched} == {100}


def test_no_lookup_marks_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_lookup, "ASKED_A_MARK", 8)
    shelves, rows, touched = shelved([[0, 1 + number % 3] for number in range(2 * SHELF_RANGES)])
    wanted = [row for row in rows if row[3] == 2]
    for lookup in range(1, 500):
        assert gather(list(shelves.from_sequence(2, 0))) == wanted
        marked = sum(row_range.times_marked for row_range in {id(one): one for one in touched}.values())
        assert marked <= 4 * lookup, "two shelves, each asked on the way back and forward"
    assert marked == 2 * SHELF_RANGES


def test_a_search_over_many_ranges_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_lookup, "ASKED_A_MARK", 1)
    shelves, rows, touched = shelved([[0]] * 1_000)
    mark_all(shelves)
    touched.clear()
    next(iter(shelves.from_sequence(0, rows[300][0])))
    assert len(touched) < 40


def test_ranges_may_be_added_between_questions() -> None:
    shelves = RangeBlocks(no_touch)
    feed = Feed()
    for number in range(130):
        first = len(feed.rows)
        shelves.add(Listed(first, feed.batch([(number % 70 * 50, 3)])))
        subject = number % 70 * 50
        wanted = [row for row in feed.rows if row[3] == subject]
        assert gather(list(shelves.from_sequence(subject, 0))) == wanted


def test_take_stops_at_the_row_and_the_limit() -> None:
    feed = Feed()
    rows = [row for subject in (0, 1, 0, 0, 0) for row in feed.batch([(subject, 1)])]
    row_range = Listed(100, rows)
    found = SubjectRows(row_range, [0, 2, 3, 4], 1)
    part = take(found, 104, 10)
    assert part is not None
    assert part.tolist() == rows[2:4]
    assert part.base is not None, "rows that lie together are a view"
    assert take(found, 102, 10) is None
    part = take(SubjectRows(row_range, [0, 2, 3, 4], 0), 200, 2)
    assert part is not None
    assert part.tolist() == [rows[0], rows[2]]


def test_a_question_costs_less_once_ranges_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject_lookup, "ASKED_A_MARK", 1)
    shelves, _, _ = shelved([[0]] * 20)
    costs = [shelves.question_us]
    while costs[-1]:
        assert len(list(shelves.from_sequence(0, 0))) == 20
        costs.append(shelves.question_us)
    assert costs[0] == 20 * subject_lookup._ASK_US
    assert costs == sorted(costs, reverse=True)

"""Intervals against a set of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from qmq.intervals import Intervals

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2), st.integers(0, 9), st.integers(0, 9))
def test_only_an_interval_that_is_the_whole_set_is_removed(pairs: list[tuple[int, int]], start: int, end: int) -> None:
    intervals = Intervals()
    for first, last in [*pairs, (start, end)]:
        intervals.add(first, last)
    before = list(intervals)
    assert intervals.remove_only(start, end) == (before == [(start, end)])
    assert list(intervals) == ([] if before == [(start, end)] else before)
    assert intervals.size == sum(last - first for first, last in intervals)


@given(PAIRS, st.integers(0, 40), st.integers(0, 40))
def test_they_are_a_set_of_numbers(pairs: list[tuple[int, int]], start: int, end: int) -> None:
    intervals, model = Intervals(), set[int]()
    for first, last in pairs:
        new = set(range(first, last)) - model
        assert intervals.add(first, last) == len(new)
        model |= new
        found = list(intervals)
        assert {number for low, high in found for number in range(low, high)} == model
        assert intervals.size == len(model)
        assert len(intervals) == len(found)
        assert all(low < high for low, high in found)
        assert all(before[1] < after[0] for before, after in pairwise(found))
    assert [number in intervals for number in range(41)] == [number in model for number in range(41)]
    missing = [number for low, high in intervals.missing(start, end) for number in range(low, high)]
    assert missing == [number for number in range(start, end) if number not in model]
    assert intervals.overlaps(start, end) == bool(model & set(range(start, end)))
    if start < end:
        assert intervals.covers(start, end) == model.issuperset(range(start, end))
    assert intervals.end_from(start) == next(number for number in range(start, 100) if number not in model)
    intervals.drop_below(start)
    model -= set(range(start))
    assert {number for low, high in intervals for number in range(low, high)} == model
    assert intervals.size == len(model)

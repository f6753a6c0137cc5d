"""Which bytes of a log are known to be bad."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmq.storage.message_log import bad_ranges
from qmq.storage.message_log.bad_ranges import UnreadableRanges


def test_a_range_matches_bytes_that_overlap_it() -> None:
    ranges = UnreadableRanges()
    assert not ranges
    assert ranges.add(100, 50)
    assert ranges
    assert ranges.first_in(0, 100) is None
    assert ranges.first_in(150, 1) is None
    for position, size in [(0, 101), (149, 1), (120, 2), (0, 1_000)]:
        assert ranges.first_in(position, size) == (100, 150)


def test_a_known_range_is_not_new() -> None:
    ranges = UnreadableRanges()
    assert ranges.add(100, 50)
    assert not ranges.add(100, 50)
    assert not ranges.add(110, 20)
    assert ranges.add(90, 20)
    assert ranges.add(90, 100)
    assert not ranges.add(90, 0)


def test_the_number_of_ranges_is_bounded_and_the_last_ones_stay() -> None:
    ranges = UnreadableRanges()
    for number in range(2 * bad_ranges.RANGES_KEPT):
        assert ranges.add(number * 100, 10)
    assert len(ranges) == bad_ranges.RANGES_KEPT
    assert ranges.first_in(0, 100 * bad_ranges.RANGES_KEPT) is None
    assert ranges.first_in(100 * bad_ranges.RANGES_KEPT, 1) is not None
    assert ranges.add(0, 10)


def test_any_ranges_answer_as_a_plain_list_does() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        ranges, plain = UnreadableRanges(), list[tuple[int, int]]()
        for _ in range(numbers.randrange(1, 12)):
            start, size = numbers.randrange(1_000), numbers.choice([1, 7, 60, 400])
            known = any(low <= start and start + size <= high for low, high in plain)
            assert ranges.add(start, size) == (not known)
            if not known:
                plain.append((start, start + size))
        for _ in range(50):
            start, size = numbers.randrange(1_200), numbers.choice([1, 30, 300])
            hits = [(low, high) for low, high in plain if low < start + size and start < high]
            assert ranges.first_in(start, size) == min(hits, default=None)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12))
def test_marks_are_counted_as_they_are_listed(marks: list[tuple[int, int]]) -> None:
    known = UnreadableRanges()
    asked = np.array([(start, start + size) for start in range(0, 60, 3) for size in (1, 5, 20)], np.int64)
    for mark in [None, *marks]:
        if mark is not None:
            known.add(*mark)
        counts = known.count_in(asked[:, 0], asked[:, 1]).tolist()
        assert counts == [len(known.within(start, end)) for start, end in asked.tolist()]

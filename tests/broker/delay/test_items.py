"""Items of the schedule: each message is in one item, and items become ranges again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qmq.broker.delay.items import DelayedRange, PositionSet, delayed_ranges_of, items_of, without

POSITION = 10_000


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_neighbours_that_are_due_together_are_one_item(times: list[int]) -> None:
    items = items_of(POSITION, np.array(times, np.uint64))
    found = [
        (number - position + offset, due)
        for due, number, position, count, _ in items.tolist()
        for offset in range(count)
    ]
    assert found == list(enumerate(times))
    assert len(items) == 1 + sum(a != b for a, b in pairwise(times))
    (delayed,) = delayed_ranges_of(items)
    assert (delayed.position, delayed.start, delayed.stop) == (POSITION, 0, len(times))
    assert delayed_ranges_of(delayed.item()) == [delayed]


def test_ranges_of_other_batches_stay_apart() -> None:
    one = items_of(POSITION, np.array([5, 5], np.uint64))
    other = items_of(POSITION + 2, np.array([5], np.uint64))
    assert delayed_ranges_of(np.concatenate([one, other])) == [
        DelayedRange(POSITION, 0, 2, 5),
        DelayedRange(POSITION + 2, 0, 1, 5),
    ]


@given(st.integers(0, 5), st.integers(1, 10), st.sets(st.integers(0, 20)))
def test_without_removes_positions_from_a_range(start: int, count: int, gone: set[int]) -> None:
    places = PositionSet()
    for number in gone:
        places.add(POSITION + number)
    left = without(DelayedRange(POSITION, start, start + count, 1), places)
    found = [ordinal for part in left for ordinal in range(part.start, part.stop)]
    assert found == [ordinal for ordinal in range(start, start + count) if ordinal not in gone]
    assert all(part.start < part.stop for part in left)

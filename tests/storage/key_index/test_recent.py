"""Filters over what has no index: they leave out no position that has a hash, and are bounded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qmq.storage.key_index.recent import MOST_PAGES, STRETCH_BYTES, STRETCH_HASHES, RecentFilters
from tests.effort import part_of

START = 1 << 30


@settings(max_examples=part_of(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2 * STRETCH_HASHES), st.integers(1, 3), st.integers(100, 10_000)), max_size=12),
    st.integers(0, 1 << 30),
)
def test_every_hash_lies_in_a_stretch(steps: list[tuple[int, int, int]], seed: int) -> None:
    """Each step has some hashes, so many in a batch, and batches of so many bytes."""
    chance, filters, end, stored = np.random.default_rng(seed), RecentFilters(START), START, list[tuple[int, int]]()
    for count, each, size in steps:
        hashes = chance.integers(1, 1 << 64, count, np.uint64)
        positions = (end + np.arange(count) // each * size).astype(np.uint64)
        end += (count // each + 1) * size
        order = chance.permutation(count)
        filters.extend(hashes[order], positions[order], end)
        stored += zip(hashes.tolist(), positions.tolist(), strict=True)
        assert filters.end == end
    for value, position in stored[:: max(1, len(stored) // 50)]:
        stretches, known = filters.stretches(value)
        assert known == end
        assert any(low <= position < high for low, high in stretches)
        assert all(after[0] > before[1] for before, after in pairwise(stretches))
        assert sum(high - low for low, high in stretches) <= max(end - START, 1)
    assert all(len(filters.stretches(value)[0]) <= 3 for value in chance.integers(1, 1 << 64, 20, np.uint64).tolist())


def test_filters_are_bounded_and_say_how_far_they_go() -> None:
    filters, end = RecentFilters(START), START
    for _ in range(MOST_PAGES + 10):
        at = end
        end += STRETCH_BYTES + 1
        filters.extend(np.array([at], np.uint64), np.array([at], np.uint64), end)
    assert filters.is_full
    stretches, known = filters.stretches(START)
    assert known == filters.end == START + MOST_PAGES * (STRETCH_BYTES + 1)
    assert stretches[0][0] == START
    filters.extend(np.array([5, 5], np.uint64), np.array([end, end + 100], np.uint64), end + 200)
    assert filters.end == known  # nothing may be covered behind a gap
    assert len(filters.stretches(at)[0]) < MOST_PAGES // 100

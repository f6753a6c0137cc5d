"""Gaps: merged, counted and packed as a set of (subject, sequence) would be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.errors import BadBytes
from qmq.storage.meta.gaps import Gaps

GAP = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)).map(lambda g: (g[0], g[1], g[1] + g[2]))


@given(batches=st.lists(st.lists(GAP, max_size=6), max_size=5), first=st.integers(0, 50), length=st.integers(0, 50))
def test_against_a_set(batches: list[list[tuple[int, int, int]]], first: int, length: int) -> None:
    gaps = Gaps()
    model: set[tuple[int, int]] = set()
    for batch in batches:
        gaps.add([g[0] for g in batch], [g[1] for g in batch], [g[2] for g in batch])
        model |= {(subject, n) for subject, start, end in batch for n in range(start, end)}
    for subject in range(5):
        wanted = sum((subject, n) in model for n in range(first, first + length))
        assert gaps.missing(subject, first, first + length) == wanted
    again = Gaps.unpack(gaps.pack())
    assert again.pack() == gaps.pack()
    sequence_ranges = sum((subject, n - 1) not in model for subject, n in model)
    assert len(again) == sequence_ranges


@given(added=st.lists(GAP, max_size=8), removed=st.lists(GAP, max_size=8))
def test_what_is_removed_is_missing_no_more(
    added: list[tuple[int, int, int]], removed: list[tuple[int, int, int]]
) -> None:
    gaps = Gaps()
    gaps.add(*_columns(added))
    gaps.remove(*_columns(removed))
    model = {(subject, n) for subject, start, end in added for n in range(start, end)}
    model -= {(subject, n) for subject, start, end in removed for n in range(start, end)}
    found = zip(gaps.subjects.tolist(), gaps.starts.tolist(), gaps.ends.tolist(), strict=True)
    assert {(subject, n) for subject, start, end in found for n in range(start, end)} == model
    assert len(gaps) == sum((subject, n - 1) not in model for subject, n in model)


def _columns(gaps: list[tuple[int, int, int]]) -> tuple[list[int], ...]:
    return [gap[0] for gap in gaps], [gap[1] for gap in gaps], [gap[2] for gap in gaps]


def test_one_gap_as_ints_and_large_numbers() -> None:
    gaps = Gaps()
    gaps.add(7, (1 << 63) + 1, (1 << 63) + 5)
    assert gaps.missing(7, 0, 1 << 64) == 4


def test_bad_sizes_are_refused() -> None:
    gaps = Gaps()
    gaps.add(1, 2, 3)
    with pytest.raises(BadBytes, match="cannot hold"):
        Gaps.unpack(gaps.pack()[:-1])
    with pytest.raises(BadBytes, match="cannot hold"):
        Gaps.unpack(b"")

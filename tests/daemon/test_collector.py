"""What a long collection leaves is not visited again; time is an argument."""

from __future__ import annotations

import gc

import pytest

from qmq.daemon.collector import LONG_S, CollectorBound


@pytest.mark.parametrize(
    ("generation", "took_s", "frozen"), [(2, 2 * LONG_S, 1), (2, LONG_S / 2, 0), (1, 2 * LONG_S, 0), (0, 2 * LONG_S, 0)]
)
def test_what_a_long_full_collection_leaves_is_frozen(generation: int, took_s: float, frozen: int) -> None:
    times, calls = iter([1.0, 1.0 + took_s]), list[None]()
    bound = CollectorBound(lambda: next(times), lambda: calls.append(None))
    bound.heard("start", {"generation": generation})
    bound.heard("stop", {"generation": generation})
    assert len(calls) == frozen


def test_state_that_grows_is_visited_no_more() -> None:
    before = gc.get_threshold()
    bound = CollectorBound(iter(range(100)).__next__)  # each collection takes a second
    bound.begin()
    try:
        state = [[[]] for _ in range(10_000)]
        gc.collect()
        assert len(gc.get_objects()) < len(state), "frozen objects are not among these"
    finally:
        bound.end()
        gc.unfreeze()
        gc.set_threshold(*before)
    assert bound.heard not in gc.callbacks

"""Retention beside consumers that fail, crash and come back: nothing is lost but what is counted."""

from __future__ import annotations

import pytest

from tests.effort import part_of
from tests.sim.retaining import ONLY_TAKEN, run
from tests.sim.runs import count_many, told

pytestmark = pytest.mark.no_cover

EACH = 12
STRIKES = (
    "killed",
    "power lost",
    "segments dropped",
    "messages carried",
    "groups moved",
    "skipped",
    "subjects forgotten",
    "crashed while a segment was leaving",
    "crashed while messages were carried",
    "dead",
    "redrive",
    "recovered",
    "of high priority",
    "of low priority",
    "behind another of the slot",
    "went back behind another",
)


#: Those that found something once.
FOUND = (41, 133, 223, 278, 308, 482, 546)


@pytest.mark.parametrize("seed", FOUND)
def test_what_once_failed(seed: int) -> None:
    assert run(seed, has_lanes=None if seed < 200 else False)["commands"] >= 600


@pytest.mark.parametrize("first", [2 * EACH, 7 * EACH][: part_of(2)])
def test_what_is_dropped_is_counted_and_all_else_is_handled_or_dead(first: int) -> None:
    counts = count_many(run, first, EACH, STRIKES)
    print(told(counts))
    assert not [name for name in STRIKES if not counts[name]]


def test_a_segment_waits_for_each_group_and_none_misses_anything() -> None:
    counts = count_many(run, ONLY_TAKEN, EACH)
    print(told(counts))
    assert counts["segments dropped"]
    assert counts["killed"]
    assert counts["power lost"]
    assert not counts["groups moved"]

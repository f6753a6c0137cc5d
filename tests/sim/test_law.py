"""Each message of a group is in one state, and counts say which, in every history of a group with tags and expiry."""

from __future__ import annotations

import pytest

from tests.sim.law import BOUNDS, LANES, run
from tests.sim.runs import SEEDS, count_seeds, told

#: Thousands of calls: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories a test: a run of all tests has the first seeds, and those of its day; `make sim` as many as wanted.
EACH = 40
RULES = (
    *(f"with {mix}" for mix in LANES),
    *(f"{name} is low" for _, name, _ in BOUNDS),
    "reliable group",
    "at_most_once group",
    "filtered",
    "expired",
    "resent",
    "kill",
    "restart",
    "set",
    "limit",
    "lose",
    "seek",
    "redrive",
    "delete",
    "withdrawn",
    "with retention",
    "segments removed",
)


@pytest.mark.parametrize("seeds", SEEDS)
def test_no_message_is_lost_and_none_is_counted_twice(seeds: str) -> None:
    counts = count_seeds(run, seeds, EACH)
    print(told(counts))
    assert counts["handed out"] >= EACH * 10
    assert not [name for name in RULES if not counts[name]]

"""What consumers are promised holds in every history: nothing lost, nobody holds what another does, attempts exact."""

from __future__ import annotations

import pytest

from tests.sim.consumption import run
from tests.sim.runs import count_many, told

#: Thousands of histories: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories a test; all tests together have the first 1,000 seeds, `make sim` as many as wanted.
EACH = 50
STRIKES = (
    "killed",
    "power lost",
    "start interrupted",
    "frame lost",
    "frame doubled",
    "answer lost",
    "disconnected",
    "clock set",
    "replaced",
    "ghosts",
    "left",
    "fenced",
    "checkpoints",
    "nack",
    "release",
    "reject",
    "dead",
    "retry_dead",
    "seek_group",
    "recovered",
)


@pytest.mark.parametrize("first", range(0, 1_000, EACH))
def test_every_message_is_handled_or_dead_and_never_with_two(first: int) -> None:
    counts = count_many(run, first, EACH)
    print(told(counts))
    assert counts["commands"] >= EACH * 1_000
    assert counts["lost"] == 0
    assert not [name for name in STRIKES if not counts[name]]

"""What consumers are promised holds in every history: nothing lost, nobody holds what another does, attempts exact."""

from __future__ import annotations

import pytest

from tests.sim.consumption import run
from tests.sim.runs import SEEDS, count_seeds, told

#: Thousands of histories: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories a test: a run of all tests has the first seeds, and those of its day; `make sim` as many as wanted.
EACH = 25
STRIKES = (
    "killed",
    "power lost",
    "start interrupted",
    "frame lost",
    "frame doubled",
    "answer lost",
    "disconnected",
    "closed by the client",
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
    "redrive",
    "seek_group",
    "resend",
    "resent",
    "recovered",
    "of normal priority",
    "of high priority",
    "of low priority",
    "with an order key",
    "behind another of the slot",
    "with another",
    "others of the slot looked at",
    "went back behind another",
    "read alone",
)


@pytest.mark.parametrize("seeds", SEEDS)
def test_every_message_is_handled_or_dead_and_never_with_two(seeds: str) -> None:
    counts = count_seeds(run, seeds, EACH)
    print(told(counts))
    assert counts["commands"] >= EACH * 1_000
    assert counts["lost"] == 0
    assert not [name for name in STRIKES if not counts[name]]

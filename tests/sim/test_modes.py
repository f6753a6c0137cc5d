"""What modes and delays promise holds in every history: once, to everybody, not early, not at all once cancelled."""

from __future__ import annotations

import pytest

from tests.effort import part_of
from tests.sim.modes import run
from tests.sim.runs import count_many, told

#: Many histories: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories a test, of the first seeds; `make sim` has as many as wanted, and longer ones.
EACH = 25
COMMANDS = 500
STRIKES = (
    "killed",
    "power lost",
    "frame lost",
    "frame doubled",
    "answer lost",
    "disconnected",
    "clock set",
    "replaced",
    "left",
    "checkpoints",
    "late",
    "cancelled",
    "cancelled too late",
    "sent to members",
    "once: got",
    "once: skipped",
    "recovered",
    "late of high priority",
    "late of low priority",
    "late with an order key",
    "behind another of the slot",
    "went back behind another",
)


@pytest.mark.parametrize("first", range(0, part_of(3 * EACH), EACH))
def test_once_to_everybody_not_early_and_not_when_cancelled(first: int) -> None:
    counts = count_many(lambda seed: run(seed, COMMANDS), first, EACH, STRIKES)
    print(told(counts))
    assert counts["commands"] >= EACH * COMMANDS
    assert counts["lost"] == 0
    assert not [name for name in STRIKES if not counts[name]]

"""What several brokers and their clients promise together holds in every history."""

from __future__ import annotations

import pytest

from tests.sim.brokers import run
from tests.sim.runs import count_many, told

#: Whole clients are at work: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories, of these seeds; `make sim` has as many as wanted, and longer ones.
FIRST, COUNT = 4, 8
FRAMES = 500
STRIKES = (
    "killed",
    "power lost",
    "away for long",
    "cut off",
    "client killed",
    "client stopped",
    "clock set",
    "frame lost",
    "frame torn",
    "answer lost",
    "frame doubled",
    "taken elsewhere",
    "came from elsewhere",
    "changed everywhere",
    "brokers missed",
    "maybe duplicate",
    "nack",
    "reject",
    "dead",
    "recovered",
)


def test_every_message_is_handled_or_dead_whichever_broker_is_there() -> None:
    counts = count_many(lambda seed: run(seed, FRAMES), FIRST, COUNT)
    print(told(counts))
    assert counts["frames"] >= COUNT * FRAMES
    assert not [name for name in STRIKES if not counts[name]]

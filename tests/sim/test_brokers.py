"""What several brokers and their clients promise together holds in every history."""

from __future__ import annotations

import pytest

from tests.sim.brokers import run
from tests.sim.runs import count_many, told

#: Whole clients are at work: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories at least, from this seed on; `make sim` has as many as wanted, and longer ones.
FIRST, COUNT = 54, 6
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
    "of normal priority",
    "of high priority",
    "of low priority",
    "with an order key",
    "delayed",
    "again: of high priority",
    "again: of low priority",
    "again: with an order key",
    "came from elsewhere: of high priority",
    "came from elsewhere: of low priority",
    "dead: of high priority",
    "dead: of low priority",
    "dead: with an order key",
    "redriven: of high priority",
    "redriven: of low priority",
    "redriven: with an order key",
    "behind another of its slot",
    "behind another in the same hands",
    "behind a dead one",
    "others of the slot looked at",
    "ordered send waited for its broker",
    "ordered send failed as its broker was away",
    "ordered nack waited for its broker",
)


def test_every_message_is_handled_or_dead_whichever_broker_is_there() -> None:
    counts = count_many(lambda seed: run(seed, FRAMES), FIRST, COUNT, STRIKES)
    print(told(counts))
    assert counts["frames"] >= COUNT * FRAMES
    assert not [name for name in STRIKES if not counts[name]]

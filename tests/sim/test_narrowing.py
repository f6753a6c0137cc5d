"""Groups that are told what to follow, beside consumers that fail, crash and come back: nothing is lost by that."""

from __future__ import annotations

import pytest

from tests.effort import part_of
from tests.sim.narrowing import run
from tests.sim.runs import count_many, told

pytestmark = pytest.mark.no_cover

EACH = 12
STRIKES = (
    "killed",
    "power lost",
    "narrowed",
    "widened",
    "dead as it was not followed",
    "redrive",
    "seek_group",
    "recovered",
    "passed as dead",
)


@pytest.mark.parametrize("first", [0, 13 * EACH][: part_of(2)])
def test_once_all_is_followed_again_all_is_handled_or_dead(first: int) -> None:
    counts = count_many(run, first, EACH, STRIKES)
    print(told(counts))
    assert not [name for name in STRIKES if not counts[name]]

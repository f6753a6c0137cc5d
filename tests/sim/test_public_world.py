"""What programs get is what the law says, whatever befalls brokers, connections and consumers, by a seed."""

from __future__ import annotations

import pytest

from tests.sim.public_people import WAYS
from tests.sim.public_world import run
from tests.sim.runs import count_many, first_of_today, told

#: Whole brokers and clients: they run twice as fast where nobody counts lines.
#: What a process that was killed was in the middle of is thrown away.
pytestmark = [pytest.mark.no_cover, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

#: So many histories a test: a run of all tests has the first seeds, and those of its day; `make sim` as many as wanted.
EACH = 20


@pytest.mark.parametrize("seeds", ["first", "of-today"])
def test_each_message_is_handled_once_or_accounted_for_whatever_fails(seeds: str) -> None:
    strikes = (
        "killed",
        "power lost",
        "answer lost",
        "frame lost",
        "frame torn",
        "frame doubled",
        "killed: kill -9",
        "refused by a full disk",
    )
    wanted = (*WAYS, *strikes)
    counts = count_many(run, 0 if seeds == "first" else first_of_today(EACH), EACH, wanted)
    print(told(counts))
    assert counts["taken"] >= EACH * 15
    assert not [name for name in wanted if not counts[name]]


def test_a_seed_repeats_a_history() -> None:
    assert run(5) == run(5)

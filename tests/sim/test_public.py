"""What programs get through the public clients is what the law says, in every history."""

from __future__ import annotations

import pytest

from tests.sim.public import run
from tests.sim.public_people import SYNC_WAYS, WAYS
from tests.sim.runs import count_many, first_of_today, told

#: Real brokers and many threads: they run twice as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

#: So many histories a test: a run of all tests has the first seeds, and those of its day; `make sim` as many as wanted.
#: Those of test_public_world.py cost less.
EACH = 8


@pytest.mark.parametrize("seeds", ["first", "of-today"])
def test_each_message_is_handled_once_or_accounted_for(seeds: str) -> None:
    wanted = (*WAYS, *SYNC_WAYS) if seeds == "first" else ()  # another day may lack one
    counts = count_many(run, 0 if seeds == "first" else first_of_today(EACH), EACH, wanted)
    print(told(counts))
    assert counts["taken"] >= EACH * 5
    assert not [way for way in wanted if not counts[way]]

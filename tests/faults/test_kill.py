"""kill -9 of a broker under load, 25 times by default: nothing acknowledged is lost, and no send makes two messages.

`make kills` has a thousand rounds of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.effort import part_of
from tests.faults.kills import MOMENTS, ROUNDS_PER_SESSION, Session, run_session, table
from tests.faults.ledger import fresh_seed
from tests.forks import SHARED

#: Who is killed says nothing of the lines that it ran, and starts in half the time where nobody counts them.
pytestmark = pytest.mark.no_cover


@pytest.mark.parametrize("number", range(part_of(3)))
async def test_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path, number: int) -> None:
    session = await run_session(tmp_path / "data", fresh_seed() + number, ROUNDS_PER_SESSION, SHARED)
    print(table([session]))
    assert session.tally.is_good, str(session.tally)
    assert session.tally.ok == session.sent
    assert_struck(session)


def assert_struck(session: Session) -> None:
    """Faults must have struck, or nothing was tested."""
    for moment in MOMENTS:
        assert session.struck[moment], f"no kill struck while: {moment}; {session.struck}"
    assert any(session.in_flight), "no kill struck anything in flight"
    assert session.segments > session.partitions * 2, "too few segments were rolled to call this a test of rolling"

"""A part of the tests of faults once more, over TLS. All of them: ``make faults TLS=1``, ``make kills TLS=1``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import over_tls
from tests.faults.consumer_kills import run
from tests.faults.kills import run_session
from tests.faults.ledger import fresh_seed
from tests.forks import SHARED

pytestmark = pytest.mark.no_cover


@pytest.fixture(autouse=True)
def by_tls(tmp_path: Path) -> Iterator[None]:
    """Serve, and connect, by TLS."""
    with over_tls(tmp_path / "tls"):
        yield


async def test_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    session = await run_session(tmp_path / "data", fresh_seed(), 5, SHARED)
    assert session.tally.is_good, str(session.tally)
    assert session.tally.ok == session.sent > 0


async def test_kills_of_broker_and_consumers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    outcome = await run(tmp_path / "data", fresh_seed(), 3, SHARED)
    assert outcome.tally.is_good, str(outcome.tally)
    assert outcome.tally.ok == 2 * outcome.sent > 0

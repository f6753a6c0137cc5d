"""kill -9 of broker and consumers under load, and consumers stopped for longer than the session timeout.

`make consumer-kills` has many rounds of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.consumer_kills import FAULTS, Books, run
from tests.faults.ledger import fresh_seed
from tests.faults.worker import REASON
from tests.forks import SHARED


@pytest.mark.no_cover
async def test_kills_of_broker_and_consumers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    outcome = await run(tmp_path / "data", fresh_seed(), 6, SHARED)
    print(outcome)
    assert outcome.tally.is_good, str(outcome.tally)
    assert outcome.tally.ok == 2 * outcome.sent
    for fault in FAULTS:
        assert outcome.struck[fault], f"nothing struck: {fault}"
    for what in ("handled", "nacked", "confirmed"):
        assert outcome.said[what], f"no consumer said: {what}"


@pytest.mark.parametrize(
    ("lines", "dead", "found"),
    [
        ([("got", 1), ("handled", 1), ("confirmed", [1])], {}, (1, 0, 0, 0)),
        ([("got", 1)], {}, (0, 1, 0, 0)),
        ([("got", 1), ("handled", 1), ("got", 1), ("handled", 1), ("confirmed", [1])], {}, (1, 0, 0, 0)),
        ([("handled", 1), ("confirmed", [1]), ("handled", 1), ("confirmed", [1])], {}, (0, 0, 1, 0)),
        ([("got", 1), ("rejecting", 1)], {1: REASON}, (1, 0, 0, 0)),
        ([("got", 1)], {1: "out of attempts"}, (1, 0, 0, 1)),
        ([("got", 1), ("handled", 1), ("got", 2)], {}, (1, 0, 0, 1)),
    ],
)
def test_the_books_find_what_is_wrong(
    lines: list[tuple[object, ...]], dead: dict[int, str], found: tuple[int, int, int, int]
) -> None:
    books = Books()
    for what, *fields in lines:
        books.hear(str(what), *fields)
    tally = books.tally({1}, dead)
    assert (tally.ok, len(tally.lost), len(tally.duplicated), len(tally.unexpected)) == found

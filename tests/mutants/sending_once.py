"""The safeguards of unique texts."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_TESTS: Final = ("tests/broker/publish/test_unique.py",)

OF_UNIQUE: Final = (
    Mutant(
        "claim no text of a message that no checkpoint claims",
        "_TextsPart.claimed",
        skip('left &= (columns["partition"] != partition) | (columns["position"] < end)'),
        _TESTS,
    ),
    Mutant(
        "free the texts of a batch that is not written",
        "UniqueArrival.refused",
        skip("self._texts.drop(self._keys, self._rows)"),
        _TESTS,
    ),
    Mutant(
        "know a batch by what it had when it was sent",
        "Intake._stage",
        never("batch.has_unique"),
        _TESTS,
    ),
    Mutant(
        "let no batch with unique texts pass for one without",
        "SubjectNumbering.know",
        instead(
            "without_unique(bytes(view[BATCH_HEADER_SIZE + RUN_SIZE : header.data_start]))",
            "bytes(view[BATCH_HEADER_SIZE + RUN_SIZE : header.data_start])",
        ),
        ("tests/broker/test_short_way.py", *_TESTS),
    ),
    Mutant(
        "keep unique texts with their broker",
        "SendWindow.give_away",
        never("batch.broker != ANY_BROKER"),
        ("tests/net/client/test_unique.py", "tests/net/client/test_brokers_order_keys.py"),
    ),
)

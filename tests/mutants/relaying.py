"""The safeguards of outbox, inbox and relay."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never

_RELAY: Final = ("tests/sql/test_relay.py",)

OF_RELAYS: Final = (
    Mutant(
        "a relay that lost its shard within its claim sends nothing",
        "shards:claim",
        instead(
            "executor.skips_locked and _take(executor, shard, owner, now_us) != (now_us, rows[-1].id, owner.name)",
            "executor.skips_locked and _take(executor, shard, owner, now_us) is None",
        ),
        _RELAY,
    ),
    Mutant(
        "rows that the broker may have forgotten are not sent again",
        "Relay._outcomes_of",
        never("row.id in taken.doubtful"),
        _RELAY,
    ),
    Mutant(
        "a claim that did not end leaves the time of its tries",
        "shards:claim",
        never("last.claimed_at_us"),
        _RELAY,
    ),
    Mutant(
        "what could not be noted is not sent again",
        "Relay._outcomes_of",
        never("row.uid in self._unnoted"),
        _RELAY,
    ),
    Mutant(
        "a row has its id as its unique text",
        "ClientSender._send_run",
        instead("[unique_of(draft.row.uid) for draft in run]", "None"),
        _RELAY,
    ),
    Mutant(
        "an outbox of Django writes within a transaction alone",
        "DjangoOutbox.send",
        never("not connection.in_atomic_block"),
        ("tests/sql/django/test_django.py",),
    ),
)

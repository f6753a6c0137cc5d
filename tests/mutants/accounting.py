"""The check that what became of a group's messages adds up: cursors, retries and counts, broken on purpose."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_ACCOUNTS: Final = ("tests/broker/test_accounts.py",)

OF_ACCOUNTS: Final = (
    Mutant(
        "pass no message without a record",
        "PullSelection._take_run",
        instead("entry[0] + stop", "entry[0] + stop + 1"),
        _ACCOUNTS,
    ),
    Mutant(
        "hold each retry that records count",
        "Retries.add_each",
        skip("self._enqueue(retry)"),
        _ACCOUNTS,
    ),
    Mutant(
        "count after a kill what was handed out",
        "Ledger._apply_pull",
        skip("self.totals.handed += pull.total"),
        _ACCOUNTS,
    ),
    Mutant(
        "begin a replayed pull at its own delivery sequence",
        "Ledger._replay_delivery",
        skip("member.in_flight.skip_to(first)", at=2),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant(
        "count what a seek drops",
        "Ledger._apply_leave",
        skip("self.totals.dropped += member.in_flight.count"),
        _ACCOUNTS,
    ),
    Mutant(
        "compare the accounts of groups at each checkpoint",
        "Subscriptions._packed",
        skip("self.accounts.look(group)"),
        _ACCOUNTS,
    ),
    Mutant(
        "keep over a start what was not accounted for",
        "Group.restore",
        instead("packed.get('unaccounted', 0)", "0"),
        _ACCOUNTS,
    ),
    Mutant(
        "compare no cursors over a loss of power",
        "GroupReplay.replay",
        never("files.generations_since or self._store.recovery.may_lack_messages"),
        _ACCOUNTS,
    ),
    Mutant(
        "compare no cursors while messages are there that the group has missed",
        "wrongly_passed",
        never("_has_missed(store, group)"),
        ("tests/broker/retention/test_retention.py", "tests/sim/test_retaining.py"),
    ),
)

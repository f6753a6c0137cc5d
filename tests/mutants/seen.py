"""Safeguards of groups that are seen and changed."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

OF_GROUPS: Final = (
    Mutant(
        "count what comes again by its size in the window",
        "qmq/broker/redelivery.py",
        "ledger.pulled_again(member, taken, size, now_us)",
        "ledger.pulled_again(member, taken, max_bytes, now_us)",
        ("tests/broker/test_cases.py",),
    ),
    Mutant(
        "refuse calls for a deleted group by its name",
        "qmq/broker/subscriptions.py",
        "        if name is not None and self.groups.get(name) is not subscription.group:\n",
        "        if False:\n",
        ("tests/broker/test_admin.py",),
    ),
    Mutant(
        "leave gaps out of what is ready",
        "qmq/storage/subjects.py",
        " - np.maximum(high - low, 0).sum())",
        ")",
        ("tests/storage/test_subjects.py",),
    ),
    Mutant(
        "name the brokers that a list lacks",
        "qmq/net/listing.py",
        "        self.lacks(missed)\n",
        "        self.lacks([])\n",
        ("tests/net/test_listing.py",),
    ),
    Mutant(
        "name a broker that goes while a list is read",
        "qmq/net/listing.py",
        "            self.lacks([*self.missed, str(link.address)])\n",
        "            pass\n",
        ("tests/net/test_listing.py",),
    ),
    Mutant(
        "do nothing to all where nobody can be asked",
        "qmq/cli/asking.py",
        "    if not can_ask():\n",
        "    if False:\n",
        ("tests/cli/test_asking.py",),
    ),
    Mutant(
        "take no ids for none of the dead letters",
        "qmq/cli/dead_letters.py",
        "    if every is bool(ids):\n",
        "    every = every or not ids\n    if every and ids:\n",
        ("tests/cli/test_asking.py",),
    ),
    Mutant(
        "keep sockets off the standard descriptors",
        "qmq/cli/streams.py",
        "            os.open(os.devnull, flags)  # the lowest number that is free: this one\n",
        "            pass\n",
        ("tests/cli/test_streams.py",),
    ),
)

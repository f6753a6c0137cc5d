"""The safeguards of what a group follows, of looks, of members of broadcasts that go, and of the longest names."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_FOLLOWS: Final = ("tests/broker/test_follows.py",)
_MODES: Final = ("tests/broker/test_modes.py",)

FOLLOWING: Final = (
    Mutant(
        "go on where a group left a prefix",
        "qmq/broker/subscriptions.py",
        "group.covering(prefix) or group.left_at(prefix)",
        "group.covering(prefix)",
        _FOLLOWS,
    ),
    Mutant(
        "keep over a start what a group follows no more",
        "qmq/broker/subscriptions.py",
        "            self._handing.unfollows(group, ended)\n",
        "            pass\n",
        _FOLLOWS,
    ),
    Mutant(
        "keep in a checkpoint what a group follows no more",
        "qmq/broker/groups.py",
        "            if has_ended:\n",
        "            if False:\n",
        _FOLLOWS,
    ),
    Mutant(
        "pass the block of a prefix that a most_once group follows again",
        "qmq/broker/groups.py",
        "            following.reserved = before.reserved  # a start passes that block even so\n",
        "            pass\n",
        _FOLLOWS,
    ),
    Mutant(
        "bury what comes back of a subject that is not followed any more",
        "qmq/broker/redelivery.py",
        "                if ended[number]:\n",
        "                if False:\n",
        _FOLLOWS,
    ),
    Mutant(
        "have whoever comes upon it bury what is nobody's",
        "qmq/broker/sharing.py",
        " or self._group.follows_no_more(name)",
        "",
        _FOLLOWS,
    ),
    Mutant(
        "widen nothing by a connection that is made anew",
        "qmq/broker/subscriptions.py",
        "if group is None or command.asks == FOLLOW or (command.asks == AGAIN and not group.ended):",
        "if group is None or command.asks != LOOK:",
        _FOLLOWS,
    ),
    Mutant(
        "widen nothing by a look",
        "qmq/broker/subscriptions.py",
        "if group is None or command.asks == FOLLOW or (command.asks == AGAIN and not group.ended):",
        "if group is None or command.asks != AGAIN or not group.ended:",
        _FOLLOWS,
    ),
    Mutant(
        "keep a member whose id was made up for a few session timeouts",
        "qmq/broker/ledger.py",
        "why == Leaving.LEFT or not self.keeps_absent or",
        "why != Leaving.LAPSED or not self.keeps_absent or",
        _MODES,
    ),
    Mutant(
        "keep members of broadcasts that were away at a start for no longer than others",
        "qmq/broker/core.py",
        "        self._broadcasts.restore(now)\n",
        "",
        _MODES,
    ),
    Mutant(
        "have room for the longest name of one group's own",
        "qmq/names.py",
        "MAX_SUBJECT_BYTES: Final = 1 + MAX_GROUP_BYTES + 1 + MAX_NAME_BYTES\n",
        "MAX_SUBJECT_BYTES: Final = MAX_GROUP_BYTES + 1 + MAX_NAME_BYTES\n",
        ("tests/broker/test_long_names.py",),
    ),
)

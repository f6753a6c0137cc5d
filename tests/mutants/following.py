"""The safeguards of what a group follows, of looks, of members of broadcasts that go, and of the longest names."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_FOLLOWS: Final = ("tests/broker/test_follows.py",)
_MODES: Final = ("tests/broker/groups/test_settings_modes.py",)

FOLLOWING: Final = (
    Mutant(
        "go on where a group left a prefix",
        "Subscriptions._follow",
        never("group.left_at(prefix)"),
        _FOLLOWS,
    ),
    Mutant(
        "begin alike with all prefixes of a group that take a subject",
        "Group.follow",
        skip("self._begin_alike(subject_filter)"),
        _FOLLOWS,
    ),
    Mutant(
        "make a group and its settings by one record",
        "DeliveryTracker.follows",
        skip("fields.append(list(settings))"),
        ("tests/broker/startup/test_replay.py",),
    ),
    Mutant(
        "compare cursors anew where a filter begins earlier",
        "Group._begin_alike",
        skip("self.compare_anew()"),
        _FOLLOWS,
    ),
    Mutant(
        "keep over a start what a group follows no more",
        "Subscriptions.set_follows",
        skip("self._tracker.unfollows(group, ended)"),
        _FOLLOWS,
    ),
    Mutant(
        "keep in a checkpoint what a group follows no more",
        "Group.restore",
        never("has_ended"),
        _FOLLOWS,
    ),
    Mutant(
        "pass the block of a prefix that an at_most_once group follows again",
        "Group.follow",
        skip("subject_filter.reserved, subject_filter.recorded = (before.reserved, before.recorded)"),
        _FOLLOWS,
    ),
    Mutant(
        "bury what comes back of a subject that is not followed any more",
        "Redelivery._not_followed",
        never("ended[number]"),
        _FOLLOWS,
    ),
    Mutant(
        "have whoever comes upon it bury what is nobody's",
        "Eligibility._takes_subject",
        never("self._group.follows_no_more(name)"),
        _FOLLOWS,
    ),
    Mutant(
        "widen nothing by a connection that is made anew",
        "Subscriptions._narrowed",
        instead(
            "group is None or command.asks == FOLLOW or (command.asks == AGAIN and (not group.ended))",
            "group is None or command.asks != LOOK",
        ),
        _FOLLOWS,
    ),
    Mutant(
        "widen nothing by a look",
        "Subscriptions._narrowed",
        instead(
            "group is None or command.asks == FOLLOW or (command.asks == AGAIN and (not group.ended))",
            "group is None or command.asks != AGAIN or (not group.ended)",
        ),
        _FOLLOWS,
    ),
    Mutant(
        "keep a member whose id was made up for a few session timeouts",
        "Ledger._apply_leave",
        instead("why == LeaveReason.LEFT", "why != LeaveReason.EXPIRED"),
        _MODES,
    ),
    Mutant(
        "keep members of broadcasts that were away at a start for no longer than others",
        "Broker.__init__",
        skip("self._broadcasts.restore(now)"),
        _MODES,
    ),
    Mutant(
        "have room for the longest name of one group's own",
        "MAX_SUBJECT_BYTES",
        instead("1 + MAX_GROUP_BYTES", "MAX_GROUP_BYTES"),
        ("tests/broker/test_long_names.py",),
    ),
)

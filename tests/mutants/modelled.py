"""Rules of a group that the model of one tells: broken on purpose, the histories against it must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_MODES: Final = "tests/sim/test_modes.py::test_once_to_everybody_not_early_and_not_when_cancelled[0]"
_MODEL: Final = ("tests/broker/test_group_model.py",)

MODELLED: Final = (
    Mutant(
        "wait as long as the attempt says that failed",
        "ResolvedSettings.delay_us",
        instead("attempt", "attempt + 1"),
        _MODEL,
    ),
    Mutant(
        "give the window back for what was handed back above the ack floor",
        "Membership.offer",
        instead("in_flight_count", "in_flight.span", at=1),
        _MODEL,
    ),
    Mutant(
        "count no release as an attempt",
        "Returning._release",
        instead("in_flight.attempt", "in_flight.attempt + 1"),
        _MODEL,
    ),
    Mutant(
        "keep attempts over an expired session",
        "Returning.expire_session",
        instead("in_flight.attempt", "1"),
        _MODEL,
    ),
    Mutant(
        "bury what is rejected",
        "Returning.failed",
        never("is_reject", at=1),
        _MODEL,
    ),
    Mutant(
        "give nothing else to who has what is out alone",
        "Membership.offer",
        never("member.quarantined"),
        _MODEL,
    ),
    Mutant(
        "hear of a consumer by its own process only",
        "Membership.joined",
        skip("self._forget_client(ledger, member)"),
        _MODEL,
    ),
    Mutant(
        "keep in the checkpoint what a seek has dropped",
        "Ledger.drop_in_flight",
        skip("self.changed = True"),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant(
        "count takeovers in a row only while something is held",
        "Member.next_takeovers",
        always("self.in_flight.count"),
        _MODEL,
    ),
    Mutant(
        "count no expire of one among several",
        "Returning.expire_session",
        instead(
            "member.quarantined and member.in_flight.count == 1 and (member.in_flight.pulls[-1].total == 1)",
            "member.quarantined",
        ),
        ("tests/broker/groups/test_group_state.py",),
    ),
    Mutant(
        "count all that is skipped before any is passed",
        "AtMostOnce.resume",
        (
            instead("sum((self._count(subject_filter, partition, row) for partition, row in enumerate(ends)))", "0"),
            instead(
                "self._pass_rows(subject_filter, partition, row)",
                "group.skipped += self._count(subject_filter, partition, row)\n"
                "self._pass_rows(subject_filter, partition, row)",
            ),
        ),
        ("tests/broker/delivery/test_at_most_once.py",),
    ),
    Mutant(
        "deliver nothing before its time",
        "DelayedMessages._take_due",
        instead("now.wall_us", "now.wall_us + 300000", at=1),
        (_MODES,),
    ),
    Mutant(
        "begin a broadcast's member at the end",
        "Subscriptions.join",
        never("command.mode == BROADCAST"),
        ("tests/broker/groups/test_settings_modes.py",),
    ),
)

"""The safeguards of resends: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import instead, never, skip

_RULES: Final = ("tests/broker/find/test_resend.py",)
_RETENTION: Final = ("tests/broker/find/test_resend_retention.py",)

OF_RESENDS: Final = (
    Mutant(
        "look up a few ids in one step",
        "of_ids",
        never("at % _IDS == 0"),
        ("tests/broker/test_admin_turns.py::test_no_turn_of_a_resend_of_many_ids_is_long",),
    ),
    Mutant(
        "resend nothing that is in flight",
        "GroupResend._settle",
        instead("self._in_flight.take_from(number, pieces)", "(pieces, 0)"),
        _RULES,
    ),
    Mutant(
        "resend nothing that is in retry",
        "GroupResend._settle",
        instead("self._retrying.take_from(number, pieces)", "(pieces, 0)"),
        _RULES,
    ),
    Mutant(
        "resend nothing that waits",
        "GroupResend._settle",
        instead("end if cursor is None else max(low, min(end, cursor))", "end"),
        _RULES,
    ),
    Mutant(
        "resend nothing that was redriven since the look",
        "GroupResend._settle",
        instead("[letter for letter in known[sequence] if dead.has(letter)]", "known[sequence]"),
        _RULES,
    ),
    Mutant(
        "resend nothing of a segment that goes",
        "GroupResend._settle",
        instead(
            "max(int(subjects.firsts[number]), self._store.offered_sequence(number))", "int(subjects.firsts[number])"
        ),
        _RETENTION,
    ),
    Mutant(
        "resend nothing that is not visible yet",
        "visible_ends",
        skip("np.minimum.at(ends, rows['subject'], rows['first_sequence'])"),
        _RULES,
    ),
    Mutant(
        "take note of retries that come during the look",
        "GroupResend._look",
        instead("(*retries.waiting(), *watch.added, *watch.passed)", "retries.waiting()"),
        _RULES,
    ),
    Mutant(
        "let dead letters that are resent be dead no more",
        "Ledger._apply_resent",
        skip("self.totals.deleted += self.dead.take_out(number, number + 1)"),
        _RULES,
    ),
    Mutant(
        "go on with a resend where it was",
        "GroupResend.__init__",
        instead("progress.upto", "(0, 0)"),
        _RULES,
    ),
    Mutant(
        "begin no resend again that has ended",
        "Resends.begin",
        instead("self._ended(run)", "None"),
        _RULES,
    ),
    Mutant(
        "wait until a checkpoint has the names of subjects",
        "Resends.wants_checkpoint",
        never("bool(self._jobs) and self._jobs[0].names > self._store.checkpoints.subjects_claimed"),
        _RULES,
    ),
    Mutant(
        "end a resend at a seek",
        "Ledger.drop_in_flight",
        skip("self.resends.stop()"),
        _RULES,
    ),
    Mutant(
        "mark what is resent",
        "InFlightRange.marked_attempt",
        never("self.messages.resent"),
        _RULES,
    ),
    Mutant(
        "mark copies of what is resent",
        "CopyRead._copies",
        never("messages.resent"),
        _RETENTION,
    ),
    Mutant(
        "remember what was taken of parts of a retry that are not loaded yet",
        "Retries._enqueue",
        skip("self._taken[retry.number] = others"),
        ("tests/broker/error_log/test_error_log.py",),
    ),
    Mutant(
        "put a retry back into the schedule as one item",
        "Retries.pass_over",
        instead("self._joined(passed)", "passed"),
        ("tests/broker/error_log/test_error_log.py",),
    ),
    Mutant(
        "see retries that are put back during a walk",
        "Retries.pass_over",
        skip("watch.passed.extend(passed)"),
        ("tests/broker/error_log/test_error_log.py",),
    ),
)

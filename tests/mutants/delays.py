"""The safeguards of the delay log's segments, of its reads, and of what is done in parts."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_SEGMENTS: Final = ("tests/broker/delay/test_segments.py",)
_TURNS: Final = "tests/broker/delay/test_due_turns.py"

OF_DELAYS: Final = (
    Mutant(
        "answer a repeated cancellation after its time",
        "DelayedMessages.cancel",
        never("self._was_cancelled(name, command.connection)"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "keep the newest cancellations in checkpoints",
        "DelayedMessages._packed_newest",
        instead("list(self._newest_cancelled)", "[]"),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "show what falls due once that is on disk",
        "Intake.append",
        instead("True", "answer is not None", at=2),
        ("tests/broker/delay/test_delay.py",),
    ),
    Mutant(
        "bound the runs of a tick",
        "DelayedMessages._deliver",
        instead("max(1, _SLICE_WORK - work)", "1 << 30"),
        (f"{_TURNS}::test_no_tick_is_long_where_a_batch_has_many_subjects[together]",),
    ),
    Mutant(
        "bound the bytes of a tick",
        "DelayedMessages._deliver",
        instead("work < _SLICE_WORK", "True"),
        (f"{_TURNS}::test_so_many_bytes_are_delivered_in_a_tick",),
    ),
    Mutant(
        "schedule again what is too much for a tick",
        "DelayedMessages._deliver",
        skip("self._push(np.concatenate([part.item() for part in left]))"),
        (f"{_TURNS}::test_no_tick_is_long_where_a_batch_has_many_subjects[together]",),
    ),
    Mutant(
        "call no late message cancelled",
        "DelayedMessages.find",
        never("self._is_late(position)"),
        ("tests/broker/find/trace/test_traces.py::test_a_message_that_is_late_is_traced_as_delayed",),
    ),
    Mutant(
        "have two checkpoints find a segment idle",
        "_CHECKPOINTS",
        instead("2", "0"),
        _SEGMENTS,
    ),
    Mutant(
        "keep what says that waiting messages are cancelled",
        "DelaySegments.remove_idle",
        never("self._cancelling.get(base, set()) & there"),
        _SEGMENTS,
    ),
    Mutant(
        "keep what was delivered to where no checkpoint has it",
        "DelaySegments.remove_idle",
        never("base in needed"),
        _SEGMENTS,
    ),
    Mutant(
        "keep the files of a segment that a checkpoint names",
        "Removals.begin_checkpoint",
        instead(
            "[base for base, checkpoints in self._left.items() if checkpoints]",
            "[base for base, checkpoints in self._left.items()]",
        ),
        ("tests/storage/message_log/test_drop_removals.py",),
    ),
    Mutant(
        "keep what waits for a read in the checkpoint",
        "DelayedMessages.packed",
        skip("late += [delayed.item().tobytes() for delayed in self._reads.cold]"),
        ("tests/broker/delay/test_reads.py",),
    ),
    Mutant(
        "read what is due beside the loop",
        "DelayReads._lacks",
        always("log is None or position == self._last[0] or position in self._found"),
        ("tests/broker/delay/test_reads.py",),
    ),
    Mutant(
        "fence who is leaving",
        "Consumers.caller",
        instead("not member.is_there", "member.closed"),
        ("tests/broker/groups/test_membership_leaving.py",),
    ),
    Mutant(
        "go on with who is leaving after a start",
        "Membership.restore",
        skip("self._leavers.resume(ledger, member)"),
        ("tests/broker/groups/test_membership_leaving.py",),
    ),
)

"""The safeguards of the delay log's segments, of its reads, and of what is done in parts."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_SEGMENTS: Final = ("tests/broker/test_delay_segments.py",)

OF_DELAYS: Final = (
    Mutant(
        "show what falls due once that is on disk",
        "qmq/broker/intake.py",
        "now, None, own, True, answer)",
        "now, None, own, answer is not None, answer)",
        ("tests/broker/test_delaying.py",),
    ),
    Mutant(
        "have two checkpoints find a segment idle",
        "qmq/broker/delay_segments.py",
        "_CHECKPOINTS: Final = 2\n",
        "_CHECKPOINTS: Final = 0\n",
        _SEGMENTS,
    ),
    Mutant(
        "keep what says that waiting messages are cancelled",
        "qmq/broker/delay_segments.py",
        " or self._cancelling.get(base, set()) & there:\n",
        ":\n",
        _SEGMENTS,
    ),
    Mutant(
        "keep what was delivered to where no checkpoint has it",
        "qmq/broker/delay_segments.py",
        " or base in needed",
        "",
        _SEGMENTS,
    ),
    Mutant(
        "keep the files of a segment that a checkpoint names",
        "qmq/storage/removals.py",
        "in self._left.items() if checkpoints]",
        "in self._left.items()]",
        ("tests/storage/test_removals.py",),
    ),
    Mutant(
        "keep what waits for a read in the checkpoint",
        "qmq/broker/delaying.py",
        "        late += [stretch.item().tobytes() for stretch in self._reading.cold]\n",
        "",
        ("tests/broker/test_delay_reading.py",),
    ),
    Mutant(
        "read what is due beside the loop",
        "qmq/broker/delay_reading.py",
        "        if log is None or position == self._last[0] or position in self._found:\n",
        "        if True:\n",
        ("tests/broker/test_delay_reading.py",),
    ),
    Mutant(
        "fence who is leaving",
        "qmq/broker/consumers.py",
        "not member.is_there or member.incarnation",
        "member.closed or member.incarnation",
        ("tests/broker/test_leaving.py",),
    ),
    Mutant(
        "go on with who is leaving after a start",
        "qmq/broker/members.py",
        "                    self._leavers.resume(ledger, member)\n",
        "                    pass\n",
        ("tests/broker/test_leaving.py",),
    ),
)

"""Rules of a group that the model of one tells: broken on purpose, the histories against it must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_MODES: Final = "tests/sim/test_modes.py::test_once_to_everybody_not_early_and_not_when_cancelled[0]"
_MODEL: Final = ("tests/broker/test_group_model.py",)

MODELLED: Final = (
    Mutant(
        "wait as long as the attempt says that failed",
        "qmq/broker/group_settings.py",
        "[min(attempt, len(self.retry_delays_us)) - 1]",
        "[min(attempt + 1, len(self.retry_delays_us)) - 1]",
        _MODEL,
    ),
    Mutant(
        "give the window back for what was handed back above the frontier",
        "qmq/broker/members.py",
        "min(most - held_count, ",
        "min(most - held.span, ",
        _MODEL,
    ),
    Mutant(
        "count no release as an attempt",
        "qmq/broker/returning.py",
        "several = [(held.messages, held.attempt, held.lapses) for held in ranges]",
        "several = [(held.messages, held.attempt + 1, held.lapses) for held in ranges]",
        _MODEL,
    ),
    Mutant(
        "keep attempts over a lapse",
        "qmq/broker/returning.py",
        "pieces += [(piece, held.attempt, lapses) for piece in split(held.messages)]",
        "pieces += [(piece, 1, lapses) for piece in split(held.messages)]",
        _MODEL,
    ),
    Mutant(
        "bury what is rejected",
        "qmq/broker/returning.py",
        "            if is_reject or attempt >= self.settings.max_attempts:\n",
        "            if attempt >= self.settings.max_attempts:\n",
        _MODEL,
    ),
    Mutant(
        "give nothing else to who has what is out alone",
        "qmq/broker/members.py",
        "        if member.alone or count <= 0",
        "        if count <= 0",
        _MODEL,
    ),
    Mutant(
        "hear of a consumer by its own process only",
        "qmq/broker/members.py",
        "        self._forget_client(ledger, member)\n        member.client = client\n",
        "        member.client = client\n",
        _MODEL,
    ),
    Mutant(
        "keep in the checkpoint what a seek has dropped",
        "qmq/broker/ledger.py",
        "        self._changed = True\n        for member in list(",
        "        for member in list(",
        ("tests/broker/test_ledger.py",),
    ),
    Mutant(
        "count takeovers in a row only while something is held",
        "qmq/broker/ledger.py",
        "if member.held.count and not member.progress else 0",
        "if not member.progress else 0",
        _MODEL,
    ),
    Mutant(
        "count no lapse of one among several",
        "qmq/broker/returning.py",
        "member.alone and member.held.count == 1 and member.held.pulls[-1].total == 1",
        "member.alone",
        ("tests/broker/test_ledger.py",),
    ),
    Mutant(
        "count all that is skipped before any is passed",
        "qmq/broker/most_once.py",
        " += sum(self._count(following, partition, row) for partition, row in enumerate(ends))\n"
        "                for partition, row in enumerate(ends):\n",
        " += 0\n"
        "                for partition, row in enumerate(ends):\n"
        "                    group.skipped += self._count(following, partition, row)\n",
        ("tests/broker/test_most_once.py",),
    ),
    Mutant(
        "deliver nothing before its time",
        "qmq/broker/delaying.py",
        "items = self._schedule.pop(now.wall_us, _SLICE_ITEMS)",
        "items = self._schedule.pop(now.wall_us + 300_000, _SLICE_ITEMS)",
        (_MODES,),
    ),
    Mutant(
        "begin a broadcast's member at the end",
        "qmq/broker/subscriptions.py",
        'command.mode == BROADCAST else "first"',
        'False else "first"',
        ("tests/broker/test_modes.py",),
    ),
)

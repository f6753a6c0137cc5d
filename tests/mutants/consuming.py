"""The safeguards of reliable consumption: with one switched off the simulation, or a smaller test, must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_SIMULATION: Final = "tests/sim/test_consumption.py::test_every_message_is_handled_or_dead_and_never_with_two[0]"

_LOST: Final = "tests/broker/test_lost_records.py"

_DURABLE: Final = ("tests/broker/test_durable.py",)

CONSUMING: Final = (
    Mutant(
        "say that a group is there when that is on disk",
        "qmq/broker/subscriptions.py",
        "        if group.name is None or self._durable.has(group.ticket):\n",
        "        if True:\n",
        _DURABLE,
    ),
    Mutant(
        "have what follows in a group on disk too before another one is told that it is there",
        "qmq/broker/subscriptions.py",
        "        group.ticket = self._durable.ticket()\n",
        "",
        _DURABLE,
    ),
    Mutant(
        "say that a group was changed when that is on disk",
        "qmq/broker/handling.py",
        "            if action in LOOKS:\n",
        "            if True:\n",
        _DURABLE,
    ),
    Mutant(
        "keep no answer back for acknowledgements that may wait",
        "qmq/broker/records.py",
        " and all(type(effect) in _REST_ON_NONE for effect in self._effects):\n",
        ":\n",
        ("tests/broker/test_records.py",),
    ),
    Mutant(
        "hand out what has just come only where nothing lies before it",
        "qmq/broker/straight.py",
        " or (exact and first != expected):\n",
        ":\n",
        ("tests/broker/test_straight.py",),
    ),
    Mutant(
        "count nothing that came after a record that the power took",
        "qmq/storage/group_files.py",
        "        if lost and found.holes:\n",
        "        if False and found.holes:\n",
        (_LOST,),
    ),
    Mutant(
        "say in the new file what of those before it does not count",
        "qmq/storage/pull_log.py",
        "        cut = base if self._cut is None else self._cut\n",
        "        cut = base\n",
        (_LOST,),
    ),
    Mutant(
        "have another generation on disk before anything is written behind it",
        "qmq/storage/pull_log.py",
        "                self._disk.fdatasync(fd)\n                self._disk.fsync_directory(self._directory)\n",
        "                pass\n",
        ("tests/storage/test_pull_log.py",),
    ),
    Mutant(
        "leave with nobody what waits to be handed out again after records are lost",
        "qmq/broker/doubled.py",
        "        taken.setdefault(subject, Intervals()).add(start, end)\n    for member, pull in pulls:\n",
        "        pass\n    for member, pull in pulls:\n",
        ("tests/broker/test_doubled.py", _LOST),
    ),
    Mutant(
        "pass blocks of most_once groups that came after a record that the power took",
        "qmq/broker/changes.py",
        "            if not record.counts and record.kind != Kind.RESERVE:\n",
        "            if not record.counts:\n",
        (_LOST,),
    ),
    Mutant(
        "read the pull log before the identity forgets that the power was lost",
        "qmq/storage/opening.py",
        "        groups = self._open_groups(identity, state.pop(GROUP_STATE, None), report)\n"
        "        identity_file = IdentityFile(self._disk, self._directory, before)\n"
        "        if identity != before or self._is_copy_behind:  # by a kill between the two, or rot\n"
        "            identity_file.change(lambda _: identity)\n",
        "        identity_file = IdentityFile(self._disk, self._directory, before)\n"
        "        if identity != before or self._is_copy_behind:  # by a kill between the two, or rot\n"
        "            identity_file.change(lambda _: identity)\n"
        "        groups = self._open_groups(identity, state.pop(GROUP_STATE, None), report)\n",
        (_LOST,),
    ),
    Mutant(
        "write records before answers leave",
        "qmq/broker/core.py",
        "        self._delivery.turn()\n        self._records.turn(now.monotonic_us)\n",
        "        self._delivery.turn()\n",
        (_SIMULATION,),
    ),
    Mutant(
        "keep acknowledgements in the pull log",
        "qmq/broker/ledger.py",
        "            self._record(_ACK, self._packed([member.number, part]))\n",
        "            pass\n",
        (_SIMULATION,),
    ),
    Mutant(
        "close who has lapsed",
        "qmq/broker/ledger.py",
        "        member.emptied()\n        member.closed = True\n",
        "        member.closed = why != Leaving.LAPSED\n",
        (_SIMULATION,),
    ),
    Mutant(
        "refuse calls of an incarnation that was taken over",
        "qmq/broker/consumers.py",
        "not member.is_there or member.incarnation != incarnation:\n",
        "not member.is_there:\n",
        (_SIMULATION,),
    ),
    Mutant(
        "hand out nothing again before its time",
        "qmq/storage/schedule.py",
        "                if in_memory[0] > now_us:\n",
        "                if in_memory[0] > now_us + 1_000_000:\n",
        (_SIMULATION,),
    ),
    Mutant(
        "count what a consumer holds in its window",
        "qmq/broker/members.py",
        "        count = min(most - held_count, ",
        "        count = min(most, ",
        (_SIMULATION,),
    ),
    Mutant(
        "count attempts",
        "qmq/broker/returning.py",
        "            yield messages, attempt + 1, lapses, Failure(",
        "            yield messages, attempt, lapses, Failure(",
        (_SIMULATION,),
    ),
    Mutant(
        "move a group behind what the pull log says that it was given",
        "qmq/broker/handing.py",
        "            self._replay_cursors(group, where, unflat(flat))\n",
        "            pass\n",
        (_SIMULATION,),
    ),
    Mutant(
        "keep what was acknowledged above the frontier in the checkpoint",
        "qmq/broker/held.py",
        "            held.acked.add(start, end)\n            held._handled.add(start, end)\n",
        "            held.acked.add(start, end)\n",
        (_SIMULATION,),
    ),
    Mutant(
        "keep what was handed back above the frontier in the checkpoint",
        "qmq/broker/held.py",
        "            held.returned.add(start, end)\n            held._handled.add(start, end)\n",
        "            held.returned.add(start, end)\n",
        (_SIMULATION,),
    ),
    Mutant(
        "hand out again what a lapsed consumer held",
        "qmq/broker/returning.py",
        "        if why == Leaving.LAPSED:\n            self.lapse(member, end, now_us)\n",
        "        if why == Leaving.LAPSED:\n            pass\n",
        (_SIMULATION,),
    ),
    Mutant(
        "count lapses of one message that is alone only",
        "qmq/broker/returning.py",
        "                lapses = held.lapses + is_single\n",
        "                lapses = held.lapses + 1\n",
        ("tests/broker/test_ledger.py",),
    ),
    Mutant(
        "give a message up after max_lapses",
        "qmq/broker/returning.py",
        "                if lapses >= self.settings.max_lapses:\n",
        "                if lapses > self.settings.max_lapses:\n",
        ("tests/broker/test_ledger.py",),
    ),
    Mutant(
        "name no subject by a number that may change",
        "qmq/broker/ranges.py",
        "        if number is not None and number >= store.subjects_claimed:\n            return False\n",
        "",
        ("tests/broker/test_consuming.py",),
    ),
)

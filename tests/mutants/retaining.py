"""The safeguards of retention: what goes, what stays, and what is carried forward."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_RETENTION: Final = ("tests/broker/test_retention.py",)
_FORWARDING: Final = ("tests/broker/test_forwarding.py",)
_TURNS: Final = ("tests/broker/test_retention_turns.py",)

OF_RETENTION: Final = (
    Mutant(
        "let nothing go that no archive has",
        "qmq/broker/retention.py",
        "self.may_go = not self._needs_archive or self.old.is_archived()",
        "self.may_go = True",
        _RETENTION,
    ),
    Mutant(
        "take a receipt only for all of a segment",
        "qmq/storage/dropping.py",
        "receipt is not None and receipt.covers(self._owner, *self.span)",
        "receipt is not None",
        _RETENTION,
    ),
    Mutant(
        "count what a group that is moved misses",
        "qmq/broker/moving.py",
        "        group.skipped += skipped\n        group.dirty = True\n        if group",
        "        group.dirty = True\n        if group",
        _RETENTION,
    ),
    Mutant(
        "record that a group was moved",
        "qmq/broker/moving.py",
        "            self._store.groups.stage(Kind.MOVED, msgpack.packb(fields))\n",
        "            pass\n",
        _RETENTION,
    ),
    Mutant(
        "move nobody back who begins behind a segment",
        "qmq/broker/moving.py",
        "        exact = [following for following in exact if self._begins_before(following)]\n",
        "",
        _RETENTION,
    ),
    Mutant(
        "wait until copies are on disk",
        "qmq/broker/forwarding.py",
        "        if any(self._intake.visible(one.partition) <= one.position for one in stored):\n            return\n",
        "",
        _FORWARDING,
    ),
    Mutant(
        "leave what has changed while it was copied",
        "qmq/broker/forwarding.py",
        "            if not self._pointing.is_there(found):\n                continue\n",
        "",
        _FORWARDING,
    ),
    Mutant(
        "look at what has come while a group was looked at",
        "qmq/broker/pointing.py",
        "        while found := list(islice(memory := self._in_memory(), MOST_FOUND)):\n",
        "        while found := list(islice(memory := iter(()), MOST_FOUND)):\n",
        _FORWARDING,
    ),
    Mutant(
        "carry nothing round and round",
        "qmq/broker/retention.py",
        "        if 2 * forwarding.carried_bytes > end - base:\n",
        "        if False:\n",
        _FORWARDING,
    ),
    Mutant(
        "count no place from what is gone",
        "qmq/broker/ranges.py",
        "    if store.segment_at(partition, messages.first) is None:\n",
        "    if False:\n",
        _RETENTION,
    ),
    Mutant(
        "leave copies that nobody names",
        "qmq/broker/unnamed.py",
        "                if header.producer_id == COPY_PRODUCER:\n",
        "                if False:\n",
        ("tests/sim/test_retaining.py",),
    ),
    Mutant(
        "give retries that wait in memory no second place",
        "qmq/broker/retries.py",
        "Watch([], {retry.number for retry in self.waiting()}, self._cleared)",
        "Watch([], set(), self._cleared)",
        ("tests/sim/test_retaining.py",),
    ),
    Mutant(
        "give no sequence again that was dropped",
        "qmq/storage/opening.py",
        "sequences.finish(raised + identity.dropped_end if claims is None else raised)",
        "sequences.finish(raised)",
        ("tests/storage/test_dropping.py",),
    ),
    Mutant(
        "move groups past a segment without waiting for the disk",
        "qmq/broker/retention.py",
        "                if missing.read.key not in leaving.reads and len(leaving.reads) < _MOST_READS:\n",
        "                if False:\n",
        _RETENTION,
    ),
    Mutant(
        "say that the sequences of what has gone are not known",
        "qmq/broker/acknowledging.py",
        "    firsts = NO_SEQUENCE if header.runs == 1 else np.full(header.runs, NO_SEQUENCE, np.uint64)\n",
        "    firsts = 0 if header.runs == 1 else np.zeros(header.runs, np.uint64)\n",
        _RETENTION,
    ),
    Mutant(
        "move so many groups in a turn",
        "qmq/broker/retention.py",
        "            left -= 1 + len(group.followings)\n",
        "",
        _TURNS,
    ),
    Mutant(
        "carry so much in a turn",
        "qmq/broker/copying.py",
        "            if self._size >= _MOST_BYTES:\n                break\n",
        "",
        _TURNS,
    ),
    Mutant(
        "look at what consumers hold once, and not for each part of it",
        "qmq/broker/pointing.py",
        "                found = list(islice(memory, MOST_FOUND))\n",
        "                found = []\n",
        _TURNS,
    ),
)

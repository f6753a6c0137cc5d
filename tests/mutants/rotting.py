"""The safeguards of files of groups that rot: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_PULL_LOG: Final = ("tests/storage/test_pull_log.py",)
_UNTOLD: Final = ("tests/broker/test_untold.py",)
_SCHEDULE: Final = ("tests/storage/test_runs.py",)
_SCRUB: Final = ("tests/storage/test_scrub_groups.py",)

ROTTING: Final = (
    Mutant(
        "check each record of the pull log",
        "qmq/storage/pull_records.py",
        "    if record_crc(head, payload, base + offset, secret) != crc:\n",
        "    if False:\n",
        _PULL_LOG,
    ),
    Mutant(
        "have a record's place in its checksum",
        "qmq/storage/pull_records.py",
        "    seed = crc32c(_SEED.pack(secret, position))\n",
        "    seed = crc32c(_SEED.pack(secret, 0))\n",
        _PULL_LOG,
    ),
    Mutant(
        "sync the names of the pull log's files at a start",
        "qmq/storage/pull_records.py",
        "    if bases:\n        try:\n            disk.fsync_directory(directory)\n",
        "    if bases:\n        try:\n            pass\n",
        _PULL_LOG,
    ),
    Mutant(
        "begin another generation behind records that are lost",
        "qmq/storage/group_files.py",
        "        is_cut = lost or bool(found.torn or found.holes)\n",
        "        is_cut = lost\n",
        _UNTOLD,
    ),
    Mutant(
        "hand out again what records that are lost may have said",
        "qmq/broker/changes.py",
        "            found = untold.missing(group) if group.mode != MOST_ONCE else []\n",
        "            found = []\n",
        _UNTOLD,
    ),
    Mutant(
        "find hand-overs again whose records are lost",
        "qmq/broker/changes.py",
        "        if files.torn or files.holes:\n",
        "        if not files:\n",
        ("tests/broker/test_unnamed.py",),
    ),
    Mutant(
        "pass all of a most_once group where a block may be lost",
        "qmq/broker/changes.py",
        "most_once.resume(self._subscriptions.groups.values(), lost=lost)",
        "most_once.resume(self._subscriptions.groups.values(), lost=False)",
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "take a torn tail for one that may hide a block",
        "qmq/storage/group_files.py",
        "        self.is_rotten: bool = bool(found.holes) or (found.torn > 0 and not lost)\n",
        "        self.is_rotten: bool = bool(found.holes)\n",
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "believe one copy of a block's record",
        "qmq/broker/most_once.py",
        "    return not all(is_told) or torn > ends.get(end, 0)\n",
        "    return True\n",
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "look at the checksum of an item",
        "qmq/storage/runs.py",
        "        bad = np.flatnonzero(~sound(items))\n",
        "        bad = np.flatnonzero(np.zeros(len(items)))\n",
        _SCHEDULE,
    ),
    Mutant(
        "read a rotten item from the other copy",
        "qmq/storage/runs.py",
        "            items[bad] = other[bad]\n",
        "            del other\n",
        _SCHEDULE,
    ),
    Mutant(
        "leave out what is rotten in both copies",
        "qmq/storage/runs.py",
        "            items[lost] = np.zeros(1, self._dtype)\n",
        "            pass\n",
        _SCHEDULE,
    ),
    Mutant(
        "scrub the items of runs",
        "qmq/storage/scrub_groups.py",
        "            bad[start : start + count] = ~self._good(data, count)\n",
        "            pass\n",
        _SCRUB,
    ),
    Mutant(
        "scrub the records of the pull log",
        "qmq/storage/scrub_groups.py",
        "            if not sound:\n                self._found",
        "            if False:\n                self._found",
        _SCRUB,
    ),
    Mutant(
        "start without a checkpoint that makes no sense",
        "qmq/broker/kept.py",
        "    except _SENSELESS as error:\n",
        "    except ZeroDivisionError as error:\n",
        ("tests/broker/test_kept.py",),
    ),
)

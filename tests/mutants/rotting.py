"""The safeguards of files of groups that rot: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_PULL_LOG: Final = ("tests/storage/pull_log/test_log.py",)
_REWIND: Final = ("tests/broker/startup/test_rewind.py",)
_SCHEDULE: Final = ("tests/storage/error_log/test_sorted_runs.py",)
_SCRUB: Final = ("tests/storage/verify/test_scrub_groups.py",)

ROTTING: Final = (
    Mutant(
        "write a torn copy of the identity before the good one",
        "IdentityFile.change",
        skip("self._first = name"),
        ("tests/storage/meta/test_identity.py",),
    ),
    Mutant(
        "see at a start which copy of the identity is bad",
        "_Opening.run",
        skip("self._bad_copy = COPY_NAMES[copies[1].identity is None]"),
        ("tests/storage/verify/test_verify.py",),
    ),
    Mutant(
        "miss nothing behind a failed sync of the pull log",
        "GroupsCheck._check_pulls",
        instead("claimed > start or (bool(claimed) and claimed == self._claims[0].position)", "bool(claimed)"),
        ("tests/storage/verify/test_verify.py",),
    ),
    Mutant(
        "check each record of the pull log",
        "record_at",
        never("record_crc(head, payload, base + offset, secret) != crc"),
        _PULL_LOG,
    ),
    Mutant(
        "have a record's place in its checksum",
        "record_crc",
        instead("position", "0"),
        _PULL_LOG,
    ),
    Mutant(
        "skip ahead of the reserves of an older copy",
        "skip_ahead:_behind",
        instead("one.reserve + skip_bytes", "one.reserve"),
        ("tests/storage/verify/test_skip_ahead.py",),
    ),
    Mutant(
        "let a start on an older copy continue at the reserves",
        "skip_ahead:_behind",
        instead("False", "True"),
        ("tests/storage/verify/test_skip_ahead.py",),
    ),
    Mutant(
        "tell that bytes of a reason are lost",
        "reason_in",
        never("any(slot in lost for slot in range(at, end))"),
        ("tests/storage/error_log/test_items.py",),
    ),
    Mutant(
        "read a rotten reason from the other file",
        "SortedRun._read_slots",
        skip("rows[bad] = other[bad]"),
        ("tests/storage/error_log/test_items.py",),
    ),
    Mutant(
        "sync the names of the pull log's files at a start",
        "rewrite_pull_log",
        skip("disk.fsync_directory(directory)"),
        _PULL_LOG,
    ),
    Mutant(
        "begin another generation behind records that are lost",
        "GroupFiles.__init__",
        never("bool(found.torn or found.holes)"),
        _REWIND,
    ),
    Mutant(
        "rewind groups to bad bytes",
        "Rewind.counts",
        always("kind not in _MOVES_ON or group not in self.groups"),
        _REWIND,
    ),
    Mutant(
        "count what was pulled since a start that rewound",
        "Rewind.finish",
        skip("self.groups.discard(group)"),
        _REWIND,
    ),
    Mutant(
        "rewind anew where more has rotten since",
        "Rewind.finish",
        always("lost_bytes == self.lost_bytes"),
        _REWIND,
    ),
    Mutant(
        "give no delivery sequence twice where records are lost",
        "GroupReplay.replay",
        skip("ledger.skip_sequences(files.generations_since * _UNSEEN)"),
        _REWIND,
    ),
    Mutant(
        "find hand-overs again whose records are lost",
        "GroupReplay.replay",
        never("files.torn or files.holes"),
        ("tests/broker/test_rotten_records.py",),
    ),
    Mutant(
        "pass all of an at_most_once group where a block may be lost",
        "GroupReplay.replay",
        never("lost"),
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "take a torn tail for one that may hide a block",
        "GroupFiles.__init__",
        never("found.torn > 0 and (not lost)"),
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "believe one copy of a block's record",
        "may_lack_reserves",
        always("not all(explained) or torn > ends.get(end, 0)"),
        ("tests/broker/test_most_once_faults.py",),
    ),
    Mutant(
        "look at the checksum of an item",
        "SortedRun._read_slots",
        instead("~sound(rows)", "np.zeros(len(rows))", at=1),
        _SCHEDULE,
    ),
    Mutant(
        "read a rotten item from the other copy",
        "SortedRun._read_slots",
        instead("rows[bad] = other[bad]", "del other"),
        _SCHEDULE,
    ),
    Mutant(
        "leave out what is rotten in both copies",
        "SortedRun._read_slots",
        skip("rows[lost] = np.zeros(1, self._form)"),
        _SCHEDULE,
    ),
    Mutant(
        "scrub the items of runs",
        "RunReader._look_at",
        skip("bad[start:start + count] = ~good_slots(data, self._slot_size, count)"),
        _SCRUB,
    ),
    Mutant(
        "scrub the records of the pull log",
        "PullReader._walked",
        never("not sound", at=2),
        _SCRUB,
    ),
    Mutant(
        "start without a checkpoint that makes no sense",
        "rejecting_bad_state",
        instead("_SENSELESS", "ZeroDivisionError"),
        ("tests/broker/startup/test_checkpoint.py",),
    ),
)

"""The safeguards of restores: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_BROKER: Final = ("tests/broker/transfer/test_restore.py",)
_RUN: Final = ("tests/restore/test_target.py", "tests/restore/test_run.py", "tests/faults/test_restore_kills.py")
_FORMS: Final = ("tests/restore/test_forms.py", "tests/restore/test_parquet.py")
_READING: Final = ("tests/restore/test_read.py",)

OF_RESTORES: Final = (
    Mutant(
        "look up what is in doubt before anything is sent again",
        "TargetBroker._once",
        instead("_found_of(begun)", "{}"),
        _RUN,
    ),
    Mutant(
        "look up from where the last progress was kept",
        "TargetBroker.__init__",
        instead("progress.since", "None"),
        _RUN,
    ),
    Mutant(
        "number on behind all that is stored of a run",
        "TargetBroker._once",
        skip("self.following = max(self.following, begun.following)"),
        _RUN,
    ),
    Mutant(
        "let one restore at a time write to its progress",
        "RestoreRun.run",
        instead("f'{self._path}.lock'", "f'{self._path}.{id(self)}'"),
        _RUN,
    ),
    Mutant(
        "stay with the form that a restore began with",
        "not_from_segments",
        instead("(progress.done, progress.by_files)", "(progress.done,)"),
        _FORMS,
    ),
    Mutant(
        "refuse to go on where a form is gone",
        "assign",
        never("_difference(progress.by_files, [listed]) or _difference(chosen, [progress.done, there])"),
        _FORMS,
    ),
    Mutant(
        "take from files only what no segment has",
        "parquet:_taken",
        instead("taken if others else None", "None"),
        _FORMS,
    ),
    Mutant(
        "keep progress by files as runs wrote them",
        "parquet:_ranges",
        instead("file.origins", "[(file.path.rpartition('/')[2], file.messages)]"),
        _FORMS,
    ),
    Mutant(
        "begin only when all brokers are known",
        "RestoreRun._find_or_begin",
        never("self._unreachable", at=1),
        _RUN,
    ),
    Mutant(
        "keep progress only behind whole batches",
        "frames_of",
        skip("frame.is_whole = not number"),
        _READING,
    ),
    Mutant(
        "look again at what was bad as a whole",
        "ArchiveReader._unreadable",
        instead(
            "RestoreStep(log, start, end, [], damage=damage, is_settled=False)",
            "RestoreStep(log, start, end, [], damage=damage)",
        ),
        _READING,
    ),
    Mutant(
        "do not look again at a batch of which some was good",
        "ArchiveReader._batch",
        never("bool(parts or found)"),
        _READING,
    ),
    Mutant(
        "restore only what fits its checksum",
        "read:_sound_parts",
        skip("kept[bad] = False"),
        _READING,
    ),
    Mutant(
        "refuse what still comes from before a run was begun again",
        "Restores.begin",
        skip("del self._runs[other]"),
        _BROKER,
    ),
    Mutant(
        "say what is stored when it is on disk",
        "Lookups._is_on_disk",
        always("start >= end or min(self._intake.on_disk(partition), self._intake.visible(partition)) >= end"),
        _BROKER,
    ),
    Mutant(
        "count what a group was not given as not stored",
        "Lookups._look_at",
        never("not lookup.ledger.restored.has(lookup.run, header.producer_sequence)"),
        _BROKER,
    ),
    Mutant(
        "name nothing for who was told that it is not there",
        "Restores._name",
        never("self._runs.get(answer.connection, (b'',))[0] != frame.run"),
        _BROKER,
    ),
    Mutant(
        "answer for a group when its record is on disk",
        "Restores._name",
        instead("self._delivery.durable.answer", "self._effects.append"),
        _BROKER,
    ),
    Mutant(
        "remember over a start what a group was given",
        "Ledger.restore",
        skip("self.restored.restore(fields['restored'])"),
        _BROKER,
    ),
    Mutant(
        "name again what a lost record named",
        "hand_out_unrecorded",
        never("not ledger.restored.has(header.producer_id, first)"),
        _BROKER,
    ),
    Mutant(
        "take the flag of restored messages from restores only",
        "_check_run",
        never("flags & ~limits.run_flags"),
        ("tests/format", *_BROKER),
    ),
    Mutant(
        "compare positions as whole numbers",
        "_by_position",
        instead("np.uint64(messages.end)", "messages.end"),
        ("tests/broker/groups/test_message_ranges.py",),
    ),
    Mutant(
        "renew the lock while a broker or the archive takes long",
        "_renewing",
        skip("lock.renew()"),
        ("tests/restore/test_run.py",),
    ),
)

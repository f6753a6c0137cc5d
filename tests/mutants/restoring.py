"""The safeguards of restores: with one switched off a test must fail."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_BROKER: Final = ("tests/broker/test_restores.py",)
_RUN: Final = ("tests/restoring/test_target.py", "tests/restoring/test_run.py", "tests/faults/test_restore_kills.py")
_FORMS: Final = ("tests/restoring/test_forms.py", "tests/restoring/test_parquet.py")
_READING: Final = ("tests/restoring/test_reading.py",)

OF_RESTORES: Final = (
    Mutant(
        "look up what is in doubt before anything is sent again",
        "qmq/restoring/target.py",
        "            self.found = _found_of(begun)\n",
        "            self.found = {}\n",
        _RUN,
    ),
    Mutant(
        "look up from where the last progress was kept",
        "qmq/restoring/target.py",
        "        self._since = progress.since\n",
        "        self._since = None\n",
        _RUN,
    ),
    Mutant(
        "number on behind all that is stored of a run",
        "qmq/restoring/target.py",
        "            self.following = max(self.following, begun.following)\n",
        "            pass\n",
        _RUN,
    ),
    Mutant(
        "let one restore at a time write to its progress",
        "qmq/restoring/run.py",
        'with ArchiveLock(self._files, self._clock, self._holder, f"{self._path}.lock") as lock:\n',
        'with ArchiveLock(self._files, self._clock, self._holder, f"{self._path}.{id(self)}") as lock:\n',
        _RUN,
    ),
    Mutant(
        "stay with the form that a restore began with",
        "qmq/restoring/forms.py",
        "for part in (progress.done, progress.by_files):",
        "for part in (progress.done,):",
        _FORMS,
    ),
    Mutant(
        "refuse to go on where a form is gone",
        "qmq/restoring/forms.py",
        "if _less(progress.by_files, [listed]) or _less(chosen, [progress.done, there]):",
        "if False:",
        _FORMS,
    ),
    Mutant(
        "take from files only what no segment has",
        "qmq/restoring/parquet.py",
        "return taken if others else None",
        "return None",
        _FORMS,
    ),
    Mutant(
        "keep progress by files as runs wrote them",
        "qmq/restoring/parquet.py",
        "for name, messages in file.origins:",
        'for name, messages in [(file.path.rpartition("/")[2], file.messages)]:',
        _FORMS,
    ),
    Mutant(
        "begin only when all brokers are known",
        "qmq/restoring/run.py",
        "        if self._away:\n",
        "        if False:\n",
        _RUN,
    ),
    Mutant(
        "keep progress only behind whole batches",
        "qmq/restoring/frames.py",
        "                frame.is_whole = not number\n",
        "                pass\n",
        _READING,
    ),
    Mutant(
        "look again at what was bad as a whole",
        "qmq/restoring/reading.py",
        "damage=damage, is_settled=False)\n",
        "damage=damage)\n",
        _READING,
    ),
    Mutant(
        "do not look again at a batch of which some was good",
        "qmq/restoring/reading.py",
        "is_settled = not lost or bool(parts or found)",
        "is_settled = not lost",
        _READING,
    ),
    Mutant(
        "restore only what fits its checksum",
        "qmq/restoring/reading.py",
        "    kept[bad] = False\n",
        "    pass\n",
        _READING,
    ),
    Mutant(
        "refuse what still comes from before a run was begun again",
        "qmq/broker/restores.py",
        "            del self._runs[other]\n",
        "            pass\n",
        _BROKER,
    ),
    Mutant(
        "say what is stored when it is on disk",
        "qmq/broker/restored_lookup.py",
        "            place >= end or min(self._intake.on_disk(partition), self._intake.visible(partition)) >= end\n",
        "            True\n",
        _BROKER,
    ),
    Mutant(
        "count what a group was not given as not stored",
        "qmq/broker/restored_lookup.py",
        "not lookup.ledger.restored.has(lookup.run, header.producer_sequence)",
        "False",
        _BROKER,
    ),
    Mutant(
        "name nothing for who was told that it is not there",
        "qmq/broker/restores.py",
        '        if self._runs.get(answer.connection, (b"",))[0] != frame.run:\n',
        "        if False:\n",
        _BROKER,
    ),
    Mutant(
        "answer for a group when its record is on disk",
        "qmq/broker/restores.py",
        "        self._delivery.durable.answer(answer)\n",
        "        self._effects.append(answer)\n",
        _BROKER,
    ),
    Mutant(
        "remember over a start what a group was given",
        "qmq/broker/ledger.py",
        '        self.restored.restore(fields["restored"])\n',
        "        pass\n",
        _BROKER,
    ),
    Mutant(
        "name again what a lost record named",
        "qmq/broker/unnamed.py",
        "            if first >= ledger.restored.end(run):",
        "            if False:",
        _BROKER,
    ),
    Mutant(
        "take the flag of restored messages from restores only",
        "qmq/format/batch.py",
        "lane or flags & ~limits.run_flags or reserved",
        "lane or reserved",
        ("tests/format", *_BROKER),
    ),
    Mutant(
        "compare positions as whole numbers",
        "qmq/broker/ranges.py",
        'np.searchsorted(rows["position"], np.uint64(messages.end), "right")',
        'np.searchsorted(rows["position"], messages.end, "right")',
        ("tests/broker/test_ranges.py",),
    ),
    Mutant(
        "renew the lock while a broker or the archive takes long",
        "qmq/restoring/run.py",
        "timeout=_HEAR_S))[0]:\n        lock.renew()\n",
        "timeout=_HEAR_S))[0]:\n        pass\n",
        ("tests/restoring/test_run.py",),
    ),
)

"""The safeguards of archives, and of those who read segments without a broker."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_ARCHIVING: Final = ("tests/history/test_archiving.py",)
_READING: Final = ("tests/spark/test_reading.py",)

OF_HISTORY: Final = (
    Mutant(
        "let the manifest come last",
        "qmq/history/archiving.py",
        "for suffix in (MESSAGES, INDEX, MANIFEST):",
        "for suffix in (MANIFEST, INDEX, MESSAGES):",
        _ARCHIVING,
    ),
    Mutant(
        "put nothing in place once another run has the archive",
        "qmq/history/archiving.py",
        "    lock.confirm()\n",
        "",
        _ARCHIVING,
    ),
    Mutant(
        "never put a beginning in the place of a whole segment, nor copy twice",
        "qmq/history/archiving.py",
        "elif path in there and there[path].end >= segment.end:",
        "elif False:",
        _ARCHIVING,
    ),
    Mutant(
        "refuse a second run",
        "qmq/history/archive_lock.py",
        "not held.is_gone() and self._clock() - renewed_us < LAPSE_US",
        "False",
        ("tests/history/test_archive_lock.py",),
    ),
    Mutant(
        "take an index for one up to the end of its segment only",
        "qmq/history/segments.py",
        " and header.covered >= end",
        "",
        ("tests/history/test_segments.py",),
    ),
    Mutant(
        "leave what a broker is writing",
        "qmq/history/data_directory.py",
        "while not sealed and positions and",
        "while False and positions and",
        ("tests/history/test_data_directory.py",),
    ),
    Mutant(
        "check the data of a batch before Spark gets it",
        "spark/qmq_spark/heads.py",
        "crc32c(window[offset + start : offset + size]) != data_crc",
        "False",
        _READING,
    ),
    Mutant(
        "tell of bytes behind a batch that are none",
        "spark/qmq_spark/reading.py",
        "            elif behind < end:\n",
        "            elif False:\n",
        _READING,
    ),
    Mutant(
        "refuse headers of messages that nobody can decode",
        "spark/qmq_spark/columns.py",
        "        odd = set(walked.odd.tolist()) | _without_text(self._window, walked)\n",
        "        odd = set(walked.odd.tolist())\n",
        ("tests/spark/test_columns.py",),
    ),
)

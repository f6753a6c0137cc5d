"""The safeguards of archives that are written as Parquet."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant

_ARCHIVING: Final = ("tests/spark/test_parquet_archiving.py",)
_FILES: Final = ("tests/spark/test_parquet_files.py",)
_MERGING: Final = ("tests/spark/test_parquet_merging.py",)
_READING: Final = ("tests/spark/test_parquet_reading.py",)

OF_PARQUET: Final = (
    Mutant(
        "make a table only if nobody else has",
        "qmq/history/file_table.py",
        "    if not files.claim(path_of(table.number), changes if changes is not None else table.pack()):\n",
        "    if files.write(path_of(table.number), changes if changes is not None else table.pack()):\n",
        ("tests/history/test_file_table.py",),
    ),
    Mutant(
        "keep the table that is being read",
        "qmq/history/file_table.py",
        "kept = {table.number, table.number - 1, ",
        "kept = {table.number, ",
        ("tests/history/test_file_table.py",),
    ),
    Mutant(
        "write nothing twice",
        "spark/qmq_spark/parquet_archiving.py",
        "start = ends.get(key, segment.base + SEGMENT_HEADER_SIZE)",
        "start = segment.base + SEGMENT_HEADER_SIZE",
        _ARCHIVING,
    ),
    Mutant(
        "list no files that another run may have removed",
        "spark/qmq_spark/parquet_archiving.py",
        "if left and table.number == before.number:",
        "if False:",
        _ARCHIVING,
    ),
    Mutant(
        "list nothing once another run has the archive",
        "spark/qmq_spark/parquet_archiving.py",
        "        self._lock.confirm()\n",
        "",
        _ARCHIVING,
    ),
    Mutant(
        "read back what was copied",
        "spark/qmq_spark/parquet_putting.py",
        "if files.checksum(draft, renew) != (size, crc):",
        "if False:",
        ("tests/spark/test_parquet_putting.py", *_ARCHIVING),
    ),
    Mutant(
        "keep files that were merged for those who read them",
        "spark/qmq_spark/parquet_archiving.py",
        "for file in (*table.files, *before.files)}",
        "for file in table.files}",
        _MERGING,
    ),
    Mutant(
        "merge no file that is bad",
        "spark/qmq_spark/parquet_merging.py",
        "            except BadBytes:\n",
        "            except ZeroDivisionError:\n",
        _MERGING,
    ),
    Mutant(
        "list what was bad",
        "spark/qmq_spark/parquet_archiving.py",
        "        self._damages.append(told)\n",
        "        pass\n",
        _ARCHIVING,
    ),
    Mutant(
        "give a name to no directory that means something else",
        "spark/qmq_spark/parquet_files.py",
        'return not subject.startswith("~") and subject != NO_SUBJECT',
        "return True",
        _FILES,
    ),
    Mutant(
        "check the pages of what is read",
        "spark/qmq_spark/parquet_reading.py",
        "page_checksum_verification=True",
        "page_checksum_verification=False",
        _READING,
    ),
    Mutant(
        "read no file that is another one than was listed",
        "spark/qmq_spark/parquet_reading.py",
        "if size != piece.file.size:",
        "if False:",
        _READING,
    ),
    Mutant(
        "read an archive from segments only where these have everything",
        "spark/qmq_spark/planning.py",
        "if not only_in_files(table, segments):",
        "if segments:",
        ("tests/spark/test_planning.py", "tests/spark/test_parts.py"),
    ),
    Mutant(
        "read no segment that is in the files too",
        "spark/qmq_spark/planning.py",
        "in_files = source.table.ends() if source.table is not None else {}",
        "in_files: dict[SegmentKey, int] = {}",
        ("tests/spark/test_planning.py", "tests/spark/test_parts.py"),
    ),
    Mutant(
        "tell of what was bad when it was archived",
        "spark/qmq_spark/parts.py",
        "Part([], first, gone)",
        "Part([], first)",
        ("tests/spark/test_parts.py",),
    ),
    Mutant(
        "say what a restore cannot bring",
        "qmq/history/file_table.py",
        "if segment.end > ends.get(segment.key, 0)]",
        "if segment.key not in ends]",
        ("tests/history/test_file_table.py",),
    ),
    Mutant(
        "keep twice what tables rest on",
        "qmq/history/file_table.py",
        "        _write_second(files, before)\n",
        "        pass\n",
        ("tests/history/test_file_table.py",),
    ),
    Mutant(
        "write all anew where a base was lost",
        "qmq/history/file_table.py",
        "replace(second.changed(table, gone), base=None)",
        "second.changed(table, gone)",
        ("tests/history/test_file_table.py",),
    ),
)

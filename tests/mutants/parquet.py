"""The safeguards of archives that are written as Parquet."""

from __future__ import annotations

from typing import Final

from tests.mutants.running import Mutant
from tests.mutants.symbols import always, instead, never, skip

_ARCHIVING: Final = ("tests/spark/parquet/test_archive.py",)
_FILES: Final = ("tests/spark/parquet/test_files.py",)
_MERGING: Final = ("tests/spark/parquet/test_merge.py",)
_READING: Final = ("tests/spark/parquet/test_read.py",)

OF_PARQUET: Final = (
    Mutant(
        "archive no clone whose segments go on where those of its original do",
        "_check_same",
        instead("crc32c(header) != listed.last_crc", "False"),
        _ARCHIVING,
    ),
    Mutant(
        "archive no clone whose batches have other sizes",
        "_check_same",
        instead("_lies_in_a_batch(source, segment, listed.last_position)", "False"),
        _ARCHIVING,
    ),
    Mutant(
        "read no two brokers of one store id",
        "BrokerFiles._connect_next",
        never("reader.started_us() != known.started_us()"),
        ("tests/archive/test_broker_logs.py",),
    ),
    Mutant(
        "make a table only if nobody else has",
        "commit",
        instead(
            "not files.claim(path_of(table.number), changes if changes is not None else table.pack())",
            "files.write(path_of(table.number), changes if changes is not None else table.pack())",
        ),
        ("tests/archive/test_file_table.py",),
    ),
    Mutant(
        "keep the table that is being read",
        "commit",
        instead(
            "{table.number, table.number - 1, before.number if before is not None else 0}",
            "{table.number, before.number if before is not None else 0}",
        ),
        ("tests/archive/test_file_table.py",),
    ),
    Mutant(
        "write nothing twice",
        "archive:_pieces",
        instead(
            "segment.base + SEGMENT_HEADER_SIZE if listed is None else listed.end", "segment.base + SEGMENT_HEADER_SIZE"
        ),
        _ARCHIVING,
    ),
    Mutant(
        "list no files that another run may have removed",
        "archive_parquet",
        never("left and table.number == before.number"),
        _ARCHIVING,
    ),
    Mutant(
        "list nothing once another run has the archive",
        "_Round._commit",
        skip("self._lock.confirm()"),
        _ARCHIVING,
    ),
    Mutant(
        "read back what was copied",
        "put",
        never("files.checksum(draft, renew) != (size, crc)"),
        ("tests/spark/parquet/test_put.py", *_ARCHIVING),
    ),
    Mutant(
        "keep files that were merged for those who read them",
        "_unlisted",
        instead("(*table.files, *before.files)", "table.files"),
        _MERGING,
    ),
    Mutant(
        "merge no file that is bad",
        "merge_small",
        instead("BadBytes", "ZeroDivisionError"),
        _MERGING,
    ),
    Mutant(
        "list what was bad",
        "_Round._note",
        skip("self._damages.append(told)"),
        _ARCHIVING,
    ),
    Mutant(
        "give a name to no directory that means something else",
        "_may_have_own",
        always("not subject.startswith('~') and subject != NO_SUBJECT"),
        _FILES,
    ),
    Mutant(
        "check the pages of what is read",
        "PieceReader._of_piece",
        never("True"),
        _READING,
    ),
    Mutant(
        "read no file that is another one than was listed",
        "PieceReader._of_piece",
        never("size != piece.file.size"),
        _READING,
    ),
    Mutant(
        "read an archive from segments only where these have everything",
        "SourceView._look_at_archive",
        instead("not only_in_files(table, segments)", "segments"),
        ("tests/spark/test_plan.py", "tests/spark/test_tasks.py"),
    ),
    Mutant(
        "read no segment that is in the files too",
        "plan",
        instead(
            "in_files = source.table.ends() if source.table is not None else {}", "in_files: dict[SegmentKey, int] = {}"
        ),
        ("tests/spark/test_plan.py", "tests/spark/test_tasks.py"),
    ),
    Mutant(
        "tell of what was bad when it was archived",
        "tasks:parts_of",
        instead("TaskPart([], first, gone)", "TaskPart([], first)"),
        ("tests/spark/test_tasks.py",),
    ),
    Mutant(
        "say what a restore cannot bring",
        "only_in_files",
        instead("segment.end > ends.get(segment.key, 0)", "segment.key not in ends"),
        ("tests/archive/test_file_table.py",),
    ),
    Mutant(
        "keep twice what tables rest on",
        "commit",
        skip("_write_second(files, before)"),
        ("tests/archive/test_file_table.py",),
    ),
    Mutant(
        "write all anew where a base was lost",
        "file_table:_read",
        instead("replace(second.changed(table, gone), base=None)", "second.changed(table, gone)"),
        ("tests/archive/test_file_table.py",),
    ),
)

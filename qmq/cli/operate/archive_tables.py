"""``qmq archive --as parquet``: write Parquet, and sum up what was done."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from qmq.archive.write import ArchiveRun
from qmq.cli.common.formatting import number
from qmq.errors import InvalidOption

if TYPE_CHECKING:
    from qmq_spark.parquet.archive import ArchivedTables


def archive_tables(run: ArchiveRun, progress: Callable[[int, int], None] | None) -> ArchivedTables:
    """Write Parquet. Raises InvalidOption without pyarrow, and as ``archive_parquet`` does."""
    try:
        from qmq_spark.parquet.archive import archive_parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise InvalidOption(
            "--as parquet needs pyarrow, which is not installed; run: pip install 'qmq[arrow]'"
        ) from None
    name = os.urandom(4).hex()
    return archive_parquet(run.source.files, run.source.segments, run.files, run.lock, name, progress)


def summary_of_tables(tables: ArchivedTables) -> str:
    """Return what was done, in one line."""
    source = number(tables.segments, "segment")
    parts = [
        f"{number(tables.messages, 'message')} of {source} in {number(tables.files, 'file')} of Parquet",
        number(tables.file_bytes, "byte"),
        f"{number(tables.kept, 'segment')} there already",
    ]
    if tables.left:
        parts.append(f"{tables.left:,} left, which a broker still writes")
    if tables.merged:
        parts.append(f"{number(tables.merged, 'small file')} of earlier runs merged into them")
    if tables.removed:
        parts.append(f"{number(tables.removed, 'file')} of earlier runs removed that no table lists")
    if tables.bad_files:
        bad = number(tables.bad_files, "file")
        parts.append(f"{bad} of earlier runs not as written: read the archive to see more")
    if tables.damages:
        parts.append(f"{number(tables.damages, 'range', 'ranges')} of bad bytes left out: see the table of files")
    return ", ".join(parts)

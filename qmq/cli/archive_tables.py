"""What ``qmq archive --as parquet`` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from qmq.errors import InvalidOption
from qmq.history.archive_run import Run

if TYPE_CHECKING:
    from qmq_spark.parquet_archiving import ArchivedTables


def archive_tables(run: Run, progress: Callable[[int, int], None] | None) -> ArchivedTables:
    """Write Parquet. Raises InvalidOption without pyarrow, and as ``archive_parquet`` does."""
    try:
        from qmq_spark.parquet_archiving import archive_parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise InvalidOption(
            "--as parquet needs pyarrow, which is not installed; run: pip install 'qmq[arrow]'"
        ) from None
    name = os.urandom(4).hex()
    return archive_parquet(run.source.files, run.source.segments, run.files, run.lock, name, progress)


def summary_of_tables(tables: ArchivedTables) -> str:
    """What became of it, in a line."""
    parts = [
        f"{tables.messages:,} messages of {tables.segments:,} segments in {tables.files:,} files of Parquet",
        f"{tables.file_bytes:,} bytes",
        f"{tables.kept:,} segments were there already",
    ]
    if tables.left:
        parts.append(f"{tables.left:,} left that a broker still writes")
    if tables.removed:
        parts.append(f"{tables.removed:,} unfinished files of earlier runs removed")
    if tables.damages:
        parts.append(f"{tables.damages:,} stretches of bad bytes left out: the table of files lists them")
    return ", ".join(parts)

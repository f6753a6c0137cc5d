"""Make archives of Parquet files in tests, and read them without Spark."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from qmq.archive.data_directory import open_data_directory
from qmq.archive.file_table import FileTable, read_table
from qmq.archive.files import Files, LocalFiles, WritableFiles
from qmq.archive.lock import ArchiveLock, LockOwner, this_process
from qmq.storage.disk.disk import Disk
from qmq_spark.parquet.archive import ArchivedTables, archive_parquet
from qmq_spark.parquet.read import FileDamage, PieceReader, plan_files
from qmq_spark.read import Wanted
from qmq_spark.schema import SCHEMA
from tests.archive.archives import NOW_US
from tests.archive.orders import SUBJECTS, Row, run_of
from tests.fake_disk import FakeDisk
from tests.storage.stores import Sender, Sent, close_cleanly, open_store

DAY_US: Final = 86_400_000_000
#: Whatever there is, also what is one group's alone.
ALL: Final = Wanted(private=True)


def write_days(directory: Path, days: int, batches: int, seed: int = 1) -> list[Sent]:
    """Write a stopped store of two partitions with so many random batches a day; the broker starts anew each day."""
    dice, sent = random.Random(seed), list[Sent]()
    for day in range(days):
        store = open_store(directory, FakeDisk(), partitions=2)
        sender = Sender(store)
        sender.pass_time(DAY_US * min(day, 1))
        for _ in range(batches):
            subjects = dice.sample(SUBJECTS, dice.choice([1, 2]))
            sender.stage(*(run_of(dice, subject) for subject in subjects), partition=dice.randrange(2))
            sender.write()
        close_cleanly(store)
        sent += sender.sent
    return sent


def archive(
    source: Path, to: Path, disk: Disk | None = None, owner: LockOwner | None = None, run: str = "run"
) -> ArchivedTables:
    """Run it once."""
    return archive_to(source, LocalFiles(to, disk), owner, run)


def archive_to(source: Path, files: WritableFiles, owner: LockOwner | None = None, run: str = "run") -> ArchivedTables:
    """Run it once, to any tree."""
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, owner if owner is not None else this_process()) as lock:
        found = open_data_directory(source)
        return archive_parquet(found.files, found.segments, files, lock, run)


def table_of(archive: Path) -> FileTable:
    """Return the table that counts."""
    return read_table(LocalFiles(archive))


def read(
    archive: Path, wanted: Wanted = ALL, schema: pa.Schema = SCHEMA, part_bytes: int = 1 << 20
) -> tuple[list[Row], list[FileDamage]]:
    """Return all rows that the table lists, by partition and position if they have these, and the damages."""
    return read_from(LocalFiles(archive), wanted, schema, part_bytes)


def read_from(
    files: Files, wanted: Wanted = ALL, schema: pa.Schema = SCHEMA, part_bytes: int = 1 << 20
) -> tuple[list[Row], list[FileDamage]]:
    """Return the same from any tree."""
    rows, damages = list[dict[str, Any]](), list[FileDamage]()
    reader = PieceReader(files, wanted, schema, damages.append)
    for part in plan_files(read_table(files), wanted, part_bytes):
        for piece in part:
            for batch in reader.record_batches(piece):
                batch.validate(full=True)
                rows += batch.to_pylist()
    if {"partition", "position"} <= set(schema.names):
        rows.sort(key=lambda row: (row["partition"], row["position"]))
    return rows, damages


def files_of(archive: Path) -> set[str]:
    """Return all files below parquet/, as the table names them."""
    return {str(path.relative_to(archive)) for path in (archive / "parquet").rglob("*") if path.is_file()}

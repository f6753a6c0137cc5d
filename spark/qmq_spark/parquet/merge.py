"""Merge small Parquet files of many runs. A directory has at most seven files of about the same size below 64 MiB.

One commit lists a merged file instead of its parts. The parts stay for their readers until a later run has finished.
The merged file names them, since a restore may have read some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from qmq.archive.file_table import FileTable, ListedFile, commit
from qmq.archive.files import WritableFiles
from qmq.archive.lock import ArchiveLock
from qmq.errors import BadBytes
from qmq_spark.parquet import files as parquet_files
from qmq_spark.parquet.files import ParquetFile
from qmq_spark.parquet.put import give_names, put
from qmq_spark.parquet.read import FileDamage, FilePiece, PieceReader
from qmq_spark.read import Wanted
from qmq_spark.schema import SCHEMA

#: This many files of about the same size are merged.
MERGED: Final = 8
#: The upper limits of the classes of sizes; larger files are not merged.
SIZES: Final = (1 << 20, 8 << 20, 64 << 20)


def merge_small(files: WritableFiles, lock: ArchiveLock, table: FileTable, run: str) -> tuple[FileTable, int]:
    """Merge files until no directory has too many; return the table, and how many of the files to be merged are
    damaged. These stay as they are, and readers report them.

    *lock* is held, *run* is a unique name of the run. Raises DirectoryInUse, StorageFull, StorageFailed.
    """
    bad = set[str]()
    while groups := groups_of(table, bad):
        made = list[ListedFile]()
        for group in groups:
            directory = group[0].path.rpartition("/")[0]
            path = f"{directory}/{run}-merged-{table.number}-{len(made)}.parquet"
            try:
                made.append(_merged(files, lock, group, path))
            except BadBytes:
                bad |= {file.path for file in group if not _is_whole(files, lock, file)} or {group[0].path}
        if made:
            lock.confirm()
            give_names(files, made)
            table = table.with_merged(made)
            table = commit(files, table)
    return table, len(bad)


def groups_of(table: FileTable, bad: set[str]) -> list[list[ListedFile]]:
    """Return the groups of files to merge: each of the same directory and about the same size."""
    alike = dict[tuple[str, int], list[ListedFile]]()
    for file in table.files:
        size = sum(file.size >= most for most in SIZES)
        if size < len(SIZES) and file.path not in bad:
            alike.setdefault((file.path.rpartition("/")[0], size), []).append(file)
    return [group[:MERGED] for group in alike.values() if len(group) >= MERGED]


def _merged(files: WritableFiles, lock: ArchiveLock, group: list[ListedFile], path: str) -> ListedFile:
    """Write one file with the messages of these, in their order. Raises BadBytes if one of them is not as listed."""
    made = ParquetFile(group[0].subject, SCHEMA)
    try:
        for messages in _tables(_batches(files, lock, group)):
            made.write(messages)
        made.finish()
        return put(files, lock, made, path, tuple(part for file in group for part in file.origins))
    finally:
        made.close()


def _batches(files: WritableFiles, lock: ArchiveLock, group: list[ListedFile]) -> Iterator[pa.RecordBatch]:
    def refuse(damage: FileDamage) -> None:
        raise BadBytes(str(damage))

    reader = PieceReader(files, Wanted(private=True), SCHEMA, refuse)
    for file in group:
        if not _is_whole(files, lock, file):
            raise BadBytes(f"{files.name}/{file.path} is not as it was written")
        yield from reader.record_batches(FilePiece(file, 0, file.size))


def _is_whole(files: WritableFiles, lock: ArchiveLock, file: ListedFile) -> bool:
    try:
        return files.checksum(file.path, lambda _: lock.renew()) == (file.size, file.crc)
    except FileNotFoundError:
        return False


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the same messages in tables with enough messages for a row group, or enough bytes."""
    held, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        if held and (rows + batch.num_rows > parquet_files.GROUP_ROWS or size > parquet_files.GATHERED_BYTES):
            yield pa.Table.from_batches(held, SCHEMA)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if held:
        yield pa.Table.from_batches(held, SCHEMA)

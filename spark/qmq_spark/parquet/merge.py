"""Small Parquet files of many runs become few. A directory has at most seven files of about the same size below 64 MiB.

A merged file is listed in the place of its parts by one commit; the parts stay, for those who are reading them, until a
later run has finished. It names them: a restore may have read some of them.
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

#: So many of about the same size become one.
MERGED: Final = 8
#: Below the first are the smallest, and so on; larger ones stay as they are.
SIZES: Final = (1 << 20, 8 << 20, 64 << 20)


def merge_small(files: WritableFiles, lock: ArchiveLock, table: FileTable, run: str) -> tuple[FileTable, int]:
    """Merge what has become many, until nothing has; gives the table then, and how many of the files that should be
    merged are bad: they stay as they are, for readers to tell of.

    *lock* is held, *run* is a name that nobody else has. Raises DirectoryInUse, StorageFull, StorageFailed.
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
    """Which files are to become one: of the same directory and about the same size."""
    alike = dict[tuple[str, int], list[ListedFile]]()
    for file in table.files:
        size = sum(file.size >= most for most in SIZES)
        if size < len(SIZES) and file.path not in bad:
            alike.setdefault((file.path.rpartition("/")[0], size), []).append(file)
    return [group[:MERGED] for group in alike.values() if len(group) >= MERGED]


def _merged(files: WritableFiles, lock: ArchiveLock, group: list[ListedFile], path: str) -> ListedFile:
    """One file with what these have, in their order. Raises BadBytes when one of them is not what was listed."""
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
            raise BadBytes(f"{files.name}/{file.path} is not what was written there")
        yield from reader.record_batches(FilePiece(file, 0, file.size))


def _is_whole(files: WritableFiles, lock: ArchiveLock, file: ListedFile) -> bool:
    try:
        return files.checksum(file.path, lambda _: lock.renew()) == (file.size, file.crc)
    except FileNotFoundError:
        return False


def _tables(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The same messages, as many at a time as make a row group, or are large."""
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

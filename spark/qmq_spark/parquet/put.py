"""Put Parquet files into an archive, verified, under unfinished names until they are listed."""

from __future__ import annotations

from qmq.archive.file_table import ListedFile
from qmq.archive.files import LocalFiles, WritableFiles
from qmq.archive.lock import ArchiveLock
from qmq.errors import StorageFailed
from qmq_spark.parquet.files import ParquetFile


def put(
    files: WritableFiles,
    lock: ArchiveLock,
    file: ParquetFile,
    path: str,
    parts: tuple[tuple[str, int], ...] = (),
) -> ListedFile:
    """Copy a complete file to the archive under its unfinished name, and read it back.

    *parts* are the files that it was merged from. Raises StorageFull, StorageFailed, DirectoryInUse.
    """
    files.make_directory(path.rpartition("/")[0])
    size, draft = file.size, unfinished(path)

    def renew(_: int) -> None:
        lock.renew()

    with LocalFiles(file.path.parent).open(file.path.name) as reading:
        crc = files.copy_in(reading, size, draft, renew)
    if files.checksum(draft, renew) != (size, crc):
        raise StorageFailed(f"{files.name}/{draft} is not as it was written; check the disk")
    return ListedFile(
        path, file.subject, file.messages, size, crc, file.first_stored_at_us, file.last_stored_at_us, parts
    )  # fmt: skip


def give_names(files: WritableFiles, made: list[ListedFile]) -> None:
    """Rename files to their final names; none of them is listed yet. Raises StorageFailed."""
    for file in made:
        files.rename(unfinished(file.path), file.path)


def unfinished(path: str) -> str:
    """Return the unfinished name of *path*."""
    directory, _, name = path.rpartition("/")
    return f"{directory}/_{name}"

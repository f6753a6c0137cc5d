"""Archiving in tests: at a time that they choose, as a process that they choose."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from qmq.history.archive_lock import ArchiveLock, Holder, this_process
from qmq.history.archiving import Archived, archive_segments
from qmq.history.data_directory import open_data_directory
from qmq.history.files import LocalFiles
from qmq.storage.disk import Disk

NOW_US: Final = 1_800_000_000_000_000
#: One that has ended.
GONE: Final = Holder(this_process().host, this_process().process, "long ago")


def archive(source: Path, to: Path, disk: Disk | None = None, holder: Holder | None = None) -> Archived:
    """One run."""
    files = LocalFiles(to, disk)
    files.make_directory("")
    with ArchiveLock(files, lambda: NOW_US, holder if holder is not None else this_process()) as lock:
        return archive_segments(open_data_directory(source, disk), files, lock, lambda: NOW_US)


def files_in(archive: Path) -> dict[str, bytes]:
    """All files of an archive."""
    return {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}

"""A run of `qmq archive`, or of the same as a job of Spark: from a data directory to wherever the archive is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from qmq.errors import InvalidOption
from qmq.history.archive_lock import ArchiveLock, this_process
from qmq.history.archiving import Archived, archive_segments
from qmq.history.data_directory import DataDirectory, is_data_directory, open_data_directory
from qmq.history.files import WritableFiles
from qmq.history.places import writable_files_at


class Run(NamedTuple):
    """What a run has: what it archives, the archive, and the hold on that."""

    source: DataDirectory
    files: WritableFiles
    lock: ArchiveLock


def archive_to(
    source: Path,
    destination: str,
    clock: Callable[[], int],
    *,
    settings: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Archived:
    """Archive the data directory *source*; *clock* gives microseconds since 1970, *settings* are Hadoop's.

    Raises InvalidOption, DirectoryInUse while another run goes on, and what ``archive_segments`` does.
    """
    with open_run(source, destination, clock, settings) as run:
        return archive_segments(run.source, run.files, run.lock, clock, progress)


@contextmanager
def open_run(
    source: Path, destination: str, clock: Callable[[], int], settings: Mapping[str, str] | None = None
) -> Iterator[Run]:
    """Take hold of an archive, to archive a data directory, until the block ends. Raises as ``archive_to`` does."""
    if not is_data_directory(source):
        raise InvalidOption(f"{source} is no data directory: it has neither store-a nor store-b")
    with writable_files_at(destination, settings) as files:
        files.make_directory("")
        with ArchiveLock(files, clock, this_process()) as lock, lock.renewed():
            yield Run(open_data_directory(source), files, lock)

"""A run of `qmq archive`: from a data directory to wherever the archive is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qmq.errors import InvalidOption
from qmq.history.archive_lock import ArchiveLock, this_process
from qmq.history.archiving import Archived, archive_segments
from qmq.history.data_directory import is_data_directory, open_data_directory
from qmq.history.places import files_at


def archive_to(
    source: Path,
    destination: str,
    clock: Callable[[], int],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Archived:
    """Archive the data directory *source*; *clock* gives microseconds since 1970.

    Raises InvalidOption, DirectoryInUse while another run goes on, and what ``archive_segments`` does.
    """
    if not is_data_directory(source):
        raise InvalidOption(f"{source} is no data directory: it has neither store-a nor store-b")
    files = files_at(destination)
    files.make_directory("")
    with ArchiveLock(files, clock, this_process()) as lock:
        return archive_segments(open_data_directory(source), files, lock, clock, progress)

"""Whether a broker runs on a data directory, and whether one is the broker of that directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qmq.storage.disk.dir_lock import holder_of
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.segment import segment_path
from qmq.storage.meta.identity import latest, read_copies


def is_live(directory: Path) -> bool:
    """Whether a broker has that data directory now. Raises StorageFailed."""
    return holder_of(Disk(), directory) is not None


def has_segments(directory: Path, places: Iterable[tuple[int, int]]) -> bool:
    """Whether a segment begins at each of these (partition, position). Raises BadBytes, StorageFailed."""
    disk = Disk()
    partitions = latest(*read_copies(disk, directory)).partitions
    return all(
        number < len(partitions) and disk.exists(segment_path(directory / partitions[number].directory, position))
        for number, position in places
    )

"""Choose the form from which each message of an archive is read: segments or Parquet.

Segments are preferred, since they have more fields. A message that only the table of files has is read from Parquet for
the whole restore, whatever is archived meanwhile: else it would be restored once from each form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from qmq.archive.file_table import FileTable
from qmq.archive.manifest import Manifest
from qmq.errors import InvalidOption
from qmq.intervals import Intervals
from qmq.restore.progress import RestoreProgress
from qmq.restore.read import Found, Reader, RestoreStep, log_of

#: Positions by log.
Ranges = dict[str, Intervals]


def assign(progress: RestoreProgress, table: FileTable, segments: Iterable[Manifest], name: str) -> None:
    """Choose the form of each message that is new in the *table* of the archive *name*.

    Raises InvalidOption if the archive has lost a form from which something has yet to be read.
    """
    listed, there = listed_positions(table), dict[str, Intervals]()
    for manifest in segments:
        there.setdefault(log_of(manifest), Intervals()).add(manifest.base, manifest.end)
    chosen = _difference(progress.in_files, [progress.by_files])
    if _difference(progress.by_files, [listed]) or _difference(chosen, [progress.done, there]):
        raise InvalidOption(
            f"{name} lacks Parquet or segments that it had when this restore began, and the restore has yet to "
            "read some of it: put that back, or give --again, and all of it comes again"
        )
    for log, ranges in _difference(listed, [progress.in_files, progress.done, there]).items():
        _add(progress.by_files, log, ranges)
    for log, ranges in listed.items():
        _add(progress.in_files, log, ranges)


def settle(progress: RestoreProgress) -> None:
    """Record by positions what came from Parquet, once all is restored; the files may then be removed."""
    for log, ranges in progress.by_files.items():
        _add(progress.done, log, ranges)
    progress.by_files = {}


def not_from_segments(progress: RestoreProgress) -> Ranges:
    """Return the positions that need not be read from segments."""
    found: Ranges = {}
    for part in (progress.done, progress.by_files):
        for log, ranges in part.items():
            _add(found, log, ranges)
    return found


def listed_positions(table: FileTable) -> Ranges:
    """Return the positions that a table lists."""
    found: Ranges = {}
    for segment in table.segments:
        log = f"{segment.store_id}-{segment.partition}"
        found.setdefault(log, Intervals()).add(segment.base, segment.end)
    return found


class CombinedReader:
    """Reads with several readers, one after the other."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    @property
    def found(self) -> Found:
        """The messages that are stored already, which are left out."""
        return self._readers[0].found

    @found.setter
    def found(self, found: Found) -> None:
        for reader in self._readers:
            reader.found = found

    def left_bytes(self) -> int:
        """Return how much is left to read: bytes of segments and rows of Parquet."""
        return sum(reader.left_bytes() for reader in self._readers)

    def steps(self) -> Iterator[RestoreStep]:
        """Yield the steps of all readers."""
        for reader in self._readers:
            yield from reader.steps()


def _difference(ranges: Mapping[str, Intervals], others: Iterable[Mapping[str, Intervals]]) -> Ranges:
    """Return the positions that are in *ranges* and in none of the others, without logs that have none."""
    found: Ranges = {}
    for log, mine in ranges.items():
        known = Intervals()
        for other in others:
            for start, end in other.get(log, ()):
                known.add(start, end)
        for start, end in mine:
            for low, high in known.missing(start, end):
                found.setdefault(log, Intervals()).add(low, high)
    return found


def _add(to: Ranges, log: str, ranges: Intervals) -> None:
    mine = to.setdefault(log, Intervals())
    for start, end in ranges:
        mine.add(start, end)

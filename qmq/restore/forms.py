"""An archive that has some messages as segments only and others as Parquet only: which are read from which form.

Segments come first: they have more. What only the table of files has is read from Parquet, and stays with it for the
whole restore, whatever is archived meanwhile: else what one form brought would come again from the other.
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
    """Decide of what is new in the *table* of the archive *name* which form it is read from.

    Raises InvalidOption when the form is gone from which something is yet to be read.
    """
    listed, there = of_table(table), dict[str, Intervals]()
    for manifest in segments:
        there.setdefault(log_of(manifest), Intervals()).add(manifest.base, manifest.end)
    chosen = _less(progress.in_files, [progress.by_files])
    if _less(progress.by_files, [listed]) or _less(chosen, [progress.done, there]):
        raise InvalidOption(
            f"{name} lacks what it had when this restore began, as Parquet or as segments, and the restore has yet to "
            "read some of it: put that back, or give --again, and all of it comes again"
        )
    for log, ranges in _less(listed, [progress.in_files, progress.done, there]).items():
        _add(progress.by_files, log, ranges)
    for log, ranges in listed.items():
        _add(progress.in_files, log, ranges)


def settle(progress: RestoreProgress) -> None:
    """All is restored: what came from Parquet counts as done by positions, whatever becomes of the files."""
    for log, ranges in progress.by_files.items():
        _add(progress.done, log, ranges)
    progress.by_files = {}


def settled_with(progress: RestoreProgress) -> Ranges:
    """What needs not be read from segments."""
    found: Ranges = {}
    for part in (progress.done, progress.by_files):
        for log, ranges in part.items():
            _add(found, log, ranges)
    return found


def of_table(table: FileTable) -> Ranges:
    """What a table lists."""
    found: Ranges = {}
    for segment in table.segments:
        log = f"{segment.store_id}-{segment.partition}"
        found.setdefault(log, Intervals()).add(segment.base, segment.end)
    return found


class SeveralReaders:
    """Reads one form, then the other."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers

    @property
    def found(self) -> Found:
        """What is stored already, to be left out."""
        return self._readers[0].found

    @found.setter
    def found(self, found: Found) -> None:
        for reader in self._readers:
            reader.found = found

    def left_bytes(self) -> int:
        """As Reader: bytes of one form, rows of the other."""
        return sum(reader.left_bytes() for reader in self._readers)

    def steps(self) -> Iterator[RestoreStep]:
        """All of both."""
        for reader in self._readers:
            yield from reader.steps()


def _less(ranges: Mapping[str, Intervals], others: Iterable[Mapping[str, Intervals]]) -> Ranges:
    """What is in *ranges* and in none of the others; no log that has nothing."""
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

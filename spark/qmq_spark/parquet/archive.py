"""Archive sealed segments as Parquet, each message once. A run may be killed at any moment and repeated.

A run works day by day, in rounds: each writes some files, renames them, and commits a table that lists them with the
segments they are from. A committed round is done for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from qmq.archive.file_table import (
    PARQUET,
    TABLES,
    FileTable,
    ListedDamage,
    ListedFile,
    ListedSegment,
    SegmentKey,
    commit,
    path_of,
    read_table,
    second_of,
)
from qmq.archive.files import Files, WritableFiles
from qmq.archive.lock import ArchiveLock
from qmq.archive.same_bytes import good_header
from qmq.archive.segments import SegmentSource
from qmq.errors import ForeignFile, StorageFailed
from qmq.format.batch import parse_header
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq_spark.parquet.files import DayFiles, ParquetFile, directory_of
from qmq_spark.parquet.merge import merge_small
from qmq_spark.parquet.put import give_names, put
from qmq_spark.read import RangeReader, SegmentDamage, SegmentRange, Wanted
from qmq_spark.schema import SCHEMA

#: A round ends after reading this many bytes of segments.
ROUND_BYTES: Final = 4 << 30
_DAY_US: Final = 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class ArchivedTables:
    """The counts of a run."""

    #: Segments of which the archive has messages that it lacked before.
    segments: int = 0
    #: Segments that were archived completely before.
    kept: int = 0
    #: Segments that a broker still writes.
    left: int = 0
    #: Bytes of segments that were read.
    read_bytes: int = 0
    messages: int = 0
    files: int = 0
    file_bytes: int = 0
    #: Ranges of bad bytes; the table lists them.
    damages: int = 0
    #: Files of earlier runs that were merged into others; and such files that could not be, because they are damaged.
    merged: int = 0
    bad_files: int = 0
    #: Files that were removed because no table lists them (any more).
    removed: int = 0


class _Piece(NamedTuple):
    """The whole batches of one day in a segment."""

    day: int
    key: SegmentKey
    segment_range: SegmentRange
    #: The position of its last batch, or of the last one before it; None where there is none.
    last: int | None

    @property
    def size(self) -> int:
        return self.segment_range.end - self.segment_range.start


def archive_parquet(
    source: Files,
    segments: list[SegmentSource],
    files: WritableFiles,
    lock: ArchiveLock,
    run: str,
    progress: Callable[[int, int], None] | None = None,
) -> ArchivedTables:
    """Write the missing messages of every sealed segment.

    *lock* is held, *run* is a unique name of the run; *progress* takes the bytes done and in all. Raises DirectoryInUse
    if another run has taken the archive, ForeignFile if it has a segment of another directory of the same store,
    BadBytes, StorageFull, StorageFailed.
    """
    done = ArchivedTables()
    table = before = read_table(files)
    pieces = _pieces(source, segments, files, table, done)
    total = sum(piece.size for piece in pieces)

    def read(more: int) -> None:
        lock.renew()
        if progress is not None:
            progress(done.read_bytes + more, total)

    for number, pieces_of in enumerate(_rounds(pieces)):
        table = _Round(source, files, lock, f"{run}-{number}", done, read).run(table, pieces_of)
    table, done.bad_files = merge_small(files, lock, table, run)
    _count_files(done, before, table)
    left = list(_unlisted(files, table, before, lock))
    if left and table.number == before.number:
        # A run that only seems to be dead cannot list these files any more, since the number of its next table is
        # taken.
        table = table.with_more((), (), ())
        table = commit(files, table)
    for path in left:
        files.remove(path)
    done.removed = len(left)
    return done


def _pieces(
    source: Files, segments: list[SegmentSource], files: Files, table: FileTable, done: ArchivedTables
) -> list[_Piece]:
    """Return what is to be read: day by day, each segment from its beginning on. Raise ForeignFile if more of a segment
    is archived than it has, or other messages.
    """
    known, found = table.by_key(), list[_Piece]()
    for segment in segments:
        key = SegmentKey(segment.store_id.hex(), segment.partition, segment.base)
        listed = known.get(key)
        if not segment.sealed:
            done.left += 1
            continue
        if listed is not None:
            _check_same(source, segment, files, listed)
        if listed is not None and listed.end == segment.end:
            done.kept += 1
        else:
            done.segments += 1
            start = segment.base + SEGMENT_HEADER_SIZE if listed is None else listed.end
            found += _days_of(source, segment, key, start)
    return sorted(found, key=lambda piece: (piece.day, piece.key, piece.segment_range.start))


def _check_same(source: Files, segment: SegmentSource, files: Files, listed: ListedSegment) -> None:
    """Raise ForeignFile if more of a segment is archived than it has, or another last batch.

    A log that has gone another way has other batches from there on, so one batch tells, unless it has rotten since.
    """
    if listed.end > segment.end:
        what = (
            f"{files.name} has messages of {source.name}/{segment.path} up to position {listed.end}, and the segment "
            f"ends at {segment.end}"
        )
    elif listed.last_position is None:
        return
    else:
        header = _header_at(source, segment, listed.last_position)
        if header is None:
            is_other = _lies_in_a_batch(source, segment, listed.last_position)
        else:
            is_other = crc32c(header) != listed.last_crc
        if not is_other:
            return
        what = (
            f"{files.name} has other messages than {source.name}/{segment.path}, at position {listed.last_position} "
            "and maybe before it"
        )
    raise ForeignFile(
        f"{what}: another directory of store {listed.store_id} was archived there, a copy of this one or its original; "
        "nothing was written. Give one of the two directories another id with qmq repair --new-id, or archive to "
        "another place"
    )


def _header_at(source: Files, segment: SegmentSource, position: int) -> bytes | None:
    """Return the header of the batch at a position; None if there is no good one."""
    reading = source.open(segment.path)
    try:
        return good_header(reading, position - segment.base, position)
    finally:
        reading.close()


def _lies_in_a_batch(source: Files, segment: SegmentSource, position: int) -> bool:
    """Return whether a batch that begins before a position reaches beyond it."""
    before = -1
    for batches in segment.pieces(source):
        earlier = batches["position"][batches["position"] < position]
        before = max(before, *earlier.astype(np.int64).tolist()[-1:])
    header = _header_at(source, segment, before) if before >= 0 else None
    return header is not None and before + parse_header(header).size > position


def _days_of(source: Files, segment: SegmentSource, key: SegmentKey, start: int) -> Iterator[_Piece]:
    """Yield the days of a segment from *start* on, cut where the day changes between two batches."""
    day: int | None = None
    last: int | None = None
    first = start
    for batches in segment.pieces(source):
        later = batches[batches["position"] >= start]
        positions, days = later["position"], (later["stored_at_us"] // _DAY_US).astype(np.int64)
        for at in np.flatnonzero(np.diff(days, prepend=days[:1] if day is None else day)).tolist():
            cut, last = int(positions[at]), int(positions[at - 1]) if at else last
            yield _Piece(int(days[at - 1]) if at else day or 0, key, SegmentRange(segment, first, cut), last)
            first = cut
        day, last = (int(days[-1]), int(positions[-1])) if len(days) else (day, last)
    yield _Piece(day or 0, key, SegmentRange(segment, first, segment.end), last)


def _rounds(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    held, size = list[_Piece](), 0
    for piece in pieces:
        held.append(piece)
        size += piece.size
        if size >= ROUND_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


class _Round:
    """Reads some pieces, and commits the files made of them, which are named *name* and a number."""

    def __init__(
        self,
        source: Files,
        files: WritableFiles,
        lock: ArchiveLock,
        name: str,
        done: ArchivedTables,
        read: Callable[[int], None],
    ) -> None:
        self._source = source
        self._files = files
        self._lock = lock
        self._name = name
        self._done = done
        self._read = read
        self._day = ""
        self._store_id = ""
        self._made: list[ListedFile] = []
        self._damages: list[ListedDamage] = []

    def run(self, table: FileTable, pieces: list[_Piece]) -> FileTable:
        """Write the files, then the table, and return it."""
        reader = RangeReader(self._source, Wanted(private=True), SCHEMA, self._note)
        segments = list[ListedSegment]()
        for day, of_day in groupby(pieces, key=lambda piece: piece.day):
            self._day = (_EPOCH + timedelta(days=day)).date().isoformat()
            day_files = DayFiles(SCHEMA, self._put)
            try:
                segments += [self._copy(reader, piece, day_files) for piece in of_day]
                day_files.finish()
            finally:
                day_files.close()
        return self._commit(table, segments)

    def _copy(self, reader: RangeReader, piece: _Piece, day_files: DayFiles) -> ListedSegment:
        self._store_id = piece.key.store_id
        messages = 0
        for batch in reader.record_batches(piece.segment_range):
            messages += batch.num_rows
            day_files.add(batch)
            self._read(batch["position"][-1].as_py() - piece.segment_range.start)
        self._done.read_bytes += piece.size
        self._read(0)
        header = None if piece.last is None else _header_at(self._source, piece.segment_range.segment, piece.last)
        last = (None, None) if header is None else (piece.last, crc32c(header))
        return ListedSegment(*piece.key, piece.segment_range.end, messages, *last)

    def _note(self, damage: SegmentDamage) -> None:
        told = ListedDamage(
            self._store_id, damage.partition, damage.start, damage.end, damage.messages, damage.reason
        )  # fmt: skip
        self._damages.append(told)

    def _put(self, file: ParquetFile) -> None:
        directory = f"{PARQUET}/{directory_of(self._day, file.subject)}"
        path = f"{directory}/{self._name}-{len(self._made)}.parquet"
        self._made.append(put(self._files, self._lock, file, path))

    def _commit(self, table: FileTable, segments: list[ListedSegment]) -> FileTable:
        messages = sum(segment.messages for segment in segments)
        if messages != sum(file.messages for file in self._made):
            raise StorageFailed(f"{messages} messages were read, but another number was written to {self._files.name}")
        self._lock.confirm()
        give_names(self._files, self._made)
        table = table.with_more(self._made, segments, self._damages)
        table = commit(self._files, table)
        self._done.messages += messages
        self._done.damages += len(self._damages)
        return table


def _count_files(done: ArchivedTables, before: FileTable, table: FileTable) -> None:
    known, listed = {file.path for file in before.files}, {file.path for file in table.files}
    new = [file for file in table.files if file.path not in known]
    done.files, done.file_bytes = len(new), sum(file.size for file in new)
    done.merged = len(known - listed)


def _unlisted(files: Files, table: FileTable, before: FileTable, lock: ArchiveLock) -> Iterator[str]:
    """Yield the files of killed runs, and parts that earlier runs merged. The parts that this run merged stay for their
    readers. This run has finished, and no other one runs.
    """
    listed = {file.path for file in (*table.files, *before.files)}
    for day in files.names(PARQUET):
        for subject in files.names(f"{PARQUET}/{day}"):
            directory = f"{PARQUET}/{day}/{subject}"
            yield from (path for name in files.names(directory) if (path := f"{directory}/{name}") not in listed)
    base = table.base.number if table.base is not None else 0
    tables = {second_of(base), *(path_of(number) for number in (table.number, table.number - 1, base))}
    yield from (path for name in files.names(TABLES) if (path := f"{TABLES}/{name}") not in tables)
    yield from (name for name in files.names("") if name.startswith("_") and name not in lock.names)

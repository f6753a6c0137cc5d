"""Read the Parquet files of an archive for a restore, as its table lists them. Positions are rows of a file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from qmq.archive.file_table import FileTable, ListedFile, read_table
from qmq.archive.files import Files, Reading
from qmq.errors import BadBytes, InvalidOption, StorageError
from qmq.format.batch import COLUMN_BYTES, parse_header
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.copies.restored import Part
from qmq.format.layout import HAS_ORIGIN_ID, MAX_KEY_BYTES, MAX_KEYS
from qmq.format.pieces import stored_runs
from qmq.format.private import is_private
from qmq.format.run import Run
from qmq.format.source import Source, packed
from qmq.intervals import Intervals
from qmq.restore.forms import listed_positions
from qmq.restore.parquet_apart import ParquetApart, checksum_of
from qmq.restore.read import ArchiveDamage, Found, RestoreStep, new_parts
from qmq.restore.selection import RestoreSelection

#: How many rows are decoded at a time.
_ROWS: Final = 4_096
_COLUMNS: Final = (
    "subject", "message_id", "keys", "tags", "properties", "created_at", "stored_at", "body", "partition", "position",
    "lane", "order_key", "source", "sender", "producer", "app",
)  # fmt: skip
_LANE: Final = _COLUMNS.index("lane")
_ORDER_KEY: Final = _COLUMNS.index("order_key")
_SOURCE: Final = _COLUMNS.index("source")
_NO_PRODUCER: Final = bytes(16)

Row = tuple[Any, ...]


class _RowRange(NamedTuple):
    """Rows [start, end) of a file. They come from the file *path* that was merged into it and begins at its row
    *first*.
    """

    path: str
    first: int
    start: int
    end: int


class ParquetReader:
    """Reads messages from Parquet: those at the positions *by_files*, by log; None: all. As ArchiveReader."""

    def __init__(
        self,
        files: Files,
        selection: RestoreSelection,
        done: dict[str, Intervals],
        by_files: Mapping[str, Intervals] | None = None,
    ) -> None:
        """Raises InvalidOption, BadBytes, ForeignFile, StorageFailed."""
        self._files = files
        self._selection = selection
        #: The messages that are stored already, which are left out.
        self.found: Found = {}
        table = read_table(files)
        by_files = listed_positions(table) if by_files is None else by_files
        self._lost = [
            lost
            for lost in table.damages
            if by_files.get(f"{lost.store_id}-{lost.partition}", Intervals()).overlaps(lost.start, lost.end)
        ]
        #: The positions whose messages are read, by partition; None: all.
        self._taken = _taken(table, by_files, files.name)
        self._left = [(file, row_ranges) for file in table.files if (row_ranges := list(_ranges(file, done)))]

    def left_bytes(self) -> int:
        """Return how many rows are left to read."""
        return sum(one.end - one.start for _, row_ranges in self._left for one in row_ranges)

    def steps(self) -> Iterator[RestoreStep]:
        """Yield the steps of all rows that are left, each row in one of them."""
        for lost in self._lost:
            log = f"{lost.store_id}-{lost.partition}"
            damage = ArchiveDamage(f"{self._files.name}, log {log}", lost.start, lost.end, lost.messages, lost.reason)
            yield RestoreStep(log, lost.start, lost.start, [], damage=damage, is_settled=False)
        for file, row_ranges in self._left:
            yield from self._of_file(file, row_ranges)

    def _of_file(self, file: ListedFile, row_ranges: list[_RowRange]) -> Iterator[RestoreStep]:
        wanted = self._selection
        outside = file.last_stored_at_us < wanted.since_us or file.first_stored_at_us >= wanted.until_us
        if outside or (file.subject is not None and not wanted.takes(file.subject)):
            for one in row_ranges:
                yield RestoreStep(one.path, one.start - one.first, one.end - one.first, [])
            return
        done, end = row_ranges[0].start, row_ranges[-1].end
        try:
            reading = self._files.open(file.path)
            try:
                for at, rows in _rows_of(reading, file, done, end):
                    for one in row_ranges:
                        low, high = max(at, one.start), min(at + len(rows), one.end)
                        if low < high:
                            yield from self._steps_of(one.path, low - one.first, rows[low - at : high - at])
                    done = at + len(rows)
            finally:
                reading.close()
        except (BadBytes, StorageError, pa.ArrowException, OSError, KeyError, ValueError) as error:
            # The footer of a file has no checksum, and may name other columns.
            lost = sum(max(0, one.end - max(one.start, done)) for one in row_ranges)
            damage = ArchiveDamage(f"{self._files.name}/{file.path}", done, end, lost, str(error))
            yield RestoreStep(file.path, done, end, [], damage=damage, is_settled=False)

    def _steps_of(self, path: str, first: int, rows: list[Row]) -> Iterator[RestoreStep]:
        """Yield a step for each range of rows with the same creation time and source."""
        for (created_at_us, *source), together in groupby(rows, key=lambda row: (int(row[5]), *row[_SOURCE:])):
            several = list(together)
            kept = [row for row in several if self._is_wanted(row)]
            private = sum(is_private(row[0]) and self._is_taken(row) for row in several)
            runs = _runs_of(kept, created_at_us, packed(Source(*source))) if kept else []
            parts = list[Part]()
            for run in runs:
                parts += [(self._selection.subject_for(run.subject), one) for one in new_parts(run, self.found)]
            found = len(kept) - sum(run.count for _, run in parts)
            yield RestoreStep(path, first, first + len(several), parts, created_at_us, found, private)
            first += len(several)

    def _is_wanted(self, row: Row) -> bool:
        wanted = self._selection
        return wanted.takes(row[0]) and wanted.since_us <= row[6] < wanted.until_us and self._is_taken(row)

    def _is_taken(self, row: Row) -> bool:
        """Return whether the message is to be read from Parquet, not from a segment."""
        return self._taken is None or (row[8] in self._taken and row[9] in self._taken[row[8]])


def _ranges(file: ListedFile, done: Mapping[str, Intervals]) -> Iterator[_RowRange]:
    """Yield the rows of a file that are left. Progress names the files that runs wrote, whatever they are merged
    into.
    """
    directory, first = file.path.rpartition("/")[0], 0
    for name, messages in file.origins:
        path = f"{directory}/{name}"
        for start, end in done.get(path, Intervals()).missing(0, messages):
            yield _RowRange(path, first, first + start, first + end)
        first += messages


def _taken(table: FileTable, by_files: Mapping[str, Intervals], name: str) -> dict[int, Intervals] | None:
    """Return the positions of *by_files* by partition; None if the table has no others.

    Rows do not say which store they come from: raises InvalidOption if positions do not tell it either.
    """
    taken, others = dict[int, Intervals](), dict[int, Intervals]()
    for log, ranges in listed_positions(table).items():
        mine, partition = by_files.get(log, Intervals()), int(log.rpartition("-")[2])
        for start, end in ranges:
            left = mine.missing(start, end)
            for low, high in left:
                others.setdefault(partition, Intervals()).add(low, high)
        for start, end in mine:
            taken.setdefault(partition, Intervals()).add(start, end)
    for partition, ranges in others.items():
        if any(ranges.overlaps(start, end) for start, end in taken.get(partition, ())):
            raise InvalidOption(
                f"{name} has messages of several stores as Parquet, at the same positions, and some of them as "
                "segments: archive all of them --as both, and restore that"
            )
    return taken if others else None


def _rows_of(reading: Reading, file: ListedFile, start: int, end: int) -> Iterator[tuple[int, list[Row]]]:
    """Yield rows [start, end) of a file in pieces, each with the number of its first. Raises BadBytes,
    ArrowException.
    """
    size = reading.size()
    if size != file.size:
        raise BadBytes(f"it has {size:,} bytes instead of {file.size:,}")
    if checksum_of(reading, size) != file.crc:
        with ParquetApart(reading, size) as apart:
            yield from _rows_apart(apart, file, start, end)
        raise BadBytes("it does not fit its checksum, though its pages do")
    opened = pq.ParquetFile(_SeekableReading(reading, size), pre_buffer=False, page_checksum_verification=True)
    if opened.metadata.num_rows != file.messages:
        raise BadBytes(f"it has {opened.metadata.num_rows:,} messages instead of {file.messages:,}")
    first = 0
    for number in range(opened.num_row_groups):
        count = opened.metadata.row_group(number).num_rows
        if first < end and start < first + count:
            at = first
            for batch in opened.iter_batches(_ROWS, [number], list(_COLUMNS), use_threads=False):
                low, high = max(start - at, 0), min(end - at, batch.num_rows)
                if low < high:
                    yield at + low, _decoded(batch.slice(low, high - low))
                at += batch.num_rows
            if at < first + count:
                raise BadBytes(f"its pages end before message {at + 1:,} of {file.messages:,}")
        first += count


def _rows_apart(apart: ParquetApart, file: ListedFile, start: int, end: int) -> Iterator[tuple[int, list[Row]]]:
    """Yield rows as ``_rows_of``, of a file that does not fit its checksum, up to its bad bytes. Raises BadBytes."""
    groups = apart.groups()
    if sum(group.rows for group in groups) != file.messages:
        raise BadBytes(f"it has {sum(group.rows for group in groups):,} messages instead of {file.messages:,}")
    first = 0
    for number, group in enumerate(groups):
        if first < end and start < first + group.rows:
            at = first
            for batch in apart.batches(number, _COLUMNS):
                low, high = max(start - at, 0), min(end - at, batch.num_rows)
                if low < high:
                    yield at + low, _decoded(batch.slice(low, high - low))
                at += batch.num_rows
            if at < first + group.rows:
                raise BadBytes(f"its pages end before message {at + 1:,} of {file.messages:,}")
        first += group.rows


def _decoded(batch: pa.RecordBatch) -> list[Row]:
    columns = []
    for name in _COLUMNS:
        column = batch.column(name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        columns.append(column.to_pylist())
    return list(zip(*columns, strict=True))


def _runs_of(rows: list[Row], created_at_us: int, source: bytes) -> list[Run]:
    """Return the messages of the rows, which came from *source*, as runs, one for each subject and lane, under their
    ids.
    """
    by_lane = dict[tuple[str, int], list[Row]]()
    for row in rows:
        by_lane.setdefault((row[0], row[_LANE]), []).append(row)
    contents = [
        RunContent(
            subject,
            [row[7] for row in some],
            [make_header(_keys_of(row), row[3], dict(row[4] or ()), order_key=_order_key_of(row)) for row in some],
            lane,
        )
        for (subject, lane), some in by_lane.items()
    ]
    parts = build_batch(
        contents, created_at_us=created_at_us, producer_id=_NO_PRODUCER, producer_sequence=0, source=source
    )
    view = memoryview(b"".join(parts))
    runs = stored_runs(view, parse_header(view))
    return [
        _with_ids(run, b"".join(bytes.fromhex(row[1]) for row in some))
        for run, some in zip(runs, by_lane.values(), strict=True)
    ]


def _with_ids(run: Run, ids: bytes) -> Run:
    """Return the messages of *run* as copies under these ids; their checksums are not computed again."""
    columns = COLUMN_BYTES[run.flags] * run.count
    data = b"".join((run.data[:columns], ids, run.data[columns:]))
    header = run.origin._replace(flags=run.flags | HAS_ORIGIN_ID)
    return Run(header, run.subject, run.count, run.lane, 0, 0, 0, memoryview(data), 0, len(data), run.table)


def _keys_of(row: Row) -> list[str]:
    """Return the keys of a message; without those that no QMQ client sends, which other clients may have sent."""
    return [key for key in row[2] or () if 0 < len(key.encode()) <= MAX_KEY_BYTES][:MAX_KEYS]


def _order_key_of(row: Row) -> str | None:
    """Return the order key of a message; None for one that no QMQ client sends. The message stays in its lane."""
    order_key: str | None = row[_ORDER_KEY]
    return order_key if order_key is not None and 0 < len(order_key.encode()) <= MAX_KEY_BYTES else None


class _SeekableReading(io.RawIOBase):
    """A file in the form that Arrow reads."""

    def __init__(self, reading: Reading, size: int) -> None:
        super().__init__()
        self._reading = reading
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._reading.read(self._at, min(len(buffer), self._size - self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

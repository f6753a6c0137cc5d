"""Reading an archive of Parquet for a restore: what its table lists, file by file; positions are rows of a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from qmq.errors import BadBytes, StorageError
from qmq.format.batch import COLUMN_BYTES, parse_header
from qmq.format.build import RunContent, build_batch, make_header
from qmq.format.layout import HAS_ORIGIN_ID
from qmq.format.pieces import stored_runs
from qmq.format.private import is_private
from qmq.format.restored import Part
from qmq.format.run import Run
from qmq.history.file_table import ListedFile, read_table
from qmq.history.files import Files, Reading
from qmq.intervals import Intervals
from qmq.restoring.reading import Damage, Found, Step, new_parts
from qmq.restoring.selection import Selection

#: Rows that are decoded at once.
_ROWS: Final = 4_096
_COLUMNS: Final = ("subject", "message_id", "key", "tags", "properties", "created_at", "stored_at", "body")
_NO_PRODUCER: Final = bytes(16)

Row = tuple[Any, ...]


class ParquetReader:
    """As ArchiveReader, for an archive that has Parquet only."""

    def __init__(self, files: Files, selection: Selection, done: dict[str, Intervals]) -> None:
        """Raises BadBytes, ForeignFile, StorageFailed."""
        self._files = files
        self._selection = selection
        #: What is stored already, to be left out.
        self.found: Found = {}
        table = read_table(files)
        self._lost = table.damages
        self._left = [
            (file, start, end)
            for file in table.files
            for start, end in done.get(file.path, Intervals()).missing(0, file.messages)
        ]

    def left_bytes(self) -> int:
        """How many rows are to be looked at."""
        return sum(end - start for _, start, end in self._left)

    def steps(self) -> Iterator[Step]:
        """All that is to be looked at, step by step; each row of each file is in one of them."""
        for lost in self._lost:
            log = f"{lost.store_id}-{lost.partition}"
            damage = Damage(f"{self._files.name}, log {log}", lost.start, lost.end, lost.messages, lost.reason)
            yield Step(log, lost.start, lost.start, [], damage=damage, is_settled=False)
        for file, start, end in self._left:
            yield from self._stretch(file, start, end)

    def _stretch(self, file: ListedFile, start: int, end: int) -> Iterator[Step]:
        wanted, done = self._selection, start
        outside = file.last_stored_at_us < wanted.since_us or file.first_stored_at_us >= wanted.until_us
        if outside or (file.subject is not None and not wanted.takes(file.subject)):
            yield Step(file.path, start, end, [])
            return
        try:
            reading = self._files.open(file.path)
            try:
                for first, rows in _rows_of(reading, file, start, end):
                    for step in self._steps_of(file, first, rows):
                        yield step
                        done = step.end
            finally:
                reading.close()
        except (FileNotFoundError, BadBytes, StorageError, pa.ArrowException, OSError) as error:
            damage = Damage(f"{self._files.name}/{file.path}", done, end, end - done, str(error))
            yield Step(file.path, done, end, [], damage=damage, is_settled=False)

    def _steps_of(self, file: ListedFile, first: int, rows: list[Row]) -> Iterator[Step]:
        """A step for each stretch of rows that were made at one time."""
        for created_at_us, together in groupby(rows, key=lambda row: int(row[5])):
            several = list(together)
            kept = [row for row in several if self._is_wanted(row)]
            private = sum(is_private(row[0]) for row in several)
            runs = _runs_of(kept, created_at_us) if kept else []
            parts = list[Part]()
            for run in runs:
                parts += [(self._selection.subject_for(run.subject), one) for one in new_parts(run, self.found)]
            found = len(kept) - sum(run.count for _, run in parts)
            yield Step(file.path, first, first + len(several), parts, created_at_us, found, private)
            first += len(several)

    def _is_wanted(self, row: Row) -> bool:
        return self._selection.takes(row[0]) and self._selection.since_us <= row[6] < self._selection.until_us


def _rows_of(reading: Reading, file: ListedFile, start: int, end: int) -> Iterator[tuple[int, list[Row]]]:
    """Rows [start, end) of a file, some at a time, with the number of the first. Raises BadBytes, ArrowException."""
    size = reading.size()
    if size != file.size:
        raise BadBytes(f"it has {size:,} bytes instead of {file.size:,}")
    opened = pq.ParquetFile(_Seekable(reading, size), pre_buffer=False, page_checksum_verification=True)
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
        first += count


def _decoded(batch: pa.RecordBatch) -> list[Row]:
    columns = []
    for name in _COLUMNS:
        column = batch.column(name)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        columns.append(column.to_pylist())
    return list(zip(*columns, strict=True))


def _runs_of(rows: list[Row], created_at_us: int) -> list[Run]:
    """These messages by subject, under their ids."""
    by_subject = dict[str, list[Row]]()
    for row in rows:
        by_subject.setdefault(row[0], []).append(row)
    contents = [
        RunContent(
            subject,
            [row[7] for row in some],
            [make_header(row[2], row[3], dict(row[4] or ())) for row in some],
        )
        for subject, some in by_subject.items()
    ]
    parts = build_batch(contents, created_at_us=created_at_us, producer_id=_NO_PRODUCER, producer_sequence=0)
    view = memoryview(b"".join(parts))
    runs = stored_runs(view, parse_header(view))
    return [
        _with_ids(run, b"".join(bytes.fromhex(row[1]) for row in some))
        for run, some in zip(runs, by_subject.values(), strict=True)
    ]


def _with_ids(run: Run, ids: bytes) -> Run:
    """The same messages as copies under those ids; their checksums are not made anew."""
    columns = COLUMN_BYTES[run.flags] * run.count
    data = b"".join((run.data[:columns], ids, run.data[columns:]))
    header = run.origin._replace(flags=run.flags | HAS_ORIGIN_ID)
    return Run(header, run.subject, run.count, 0, 0, 0, 0, memoryview(data), 0, len(data))


class _Seekable(io.RawIOBase):
    """A file as Arrow reads one."""

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

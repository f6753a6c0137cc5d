"""Read the Parquet files that the table of an archive lists, as ``RangeReader`` reads segments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from qmq.archive.file_table import FileTable, ListedFile
from qmq.archive.files import Files, Reading
from qmq.errors import BadBytes
from qmq.restore.parquet_apart import ParquetApart, checksum_of
from qmq_spark.read import ROWS, Wanted

if TYPE_CHECKING:
    import pyarrow.parquet as pq

#: Whoever reads this column reads nearly all of a file, so its checksum costs no more than that again. Who does not
#: may read a hundredth of it; then the checksums of pages have to do.
_BODY: Final = "body"


class FileDamage(NamedTuple):
    """Bad bytes of a file, or of a segment when it was archived; with positions if they are known."""

    file: str
    partition: int | None
    start: int | None
    end: int | None
    #: None if it is unknown.
    messages: int | None
    reason: str

    def __str__(self) -> str:
        count = "an unknown number of" if self.messages is None else f"{self.messages:,}"
        where = "" if self.start is None else f": partition {self.partition}, positions {self.start} to {self.end}"
        return f"{self.file}{where}: {self.reason}; {count} messages are missing"


class FilePiece(NamedTuple):
    """The part of a file that one task reads: the row groups that begin at its bytes [start, end)."""

    file: ListedFile
    start: int
    end: int


def plan_files(table: FileTable, wanted: Wanted, part_bytes: int) -> list[list[FilePiece]]:
    """Return the parts of an archive's files, each of about *part_bytes*, without those that have no wanted message."""
    parts: list[list[FilePiece]] = [[]]
    room = part_bytes
    for file in table.files:
        if not _may_have(file, wanted):
            continue
        count = -(-file.size // part_bytes)
        edges = [file.size * number // count for number in range(count + 1)]
        for start, end in itertools.pairwise(edges):
            if parts[-1] and end - start > room:
                parts.append([])
                room = part_bytes
            parts[-1].append(FilePiece(file, start, end))
            room -= end - start
    return [part for part in parts if part]


def missing(table: FileTable, wanted: Wanted, name: str) -> list[FileDamage]:
    """Return the damages of segments from when they were archived, whose messages no file has."""
    return [
        FileDamage(name, damage.partition, damage.start, damage.end, damage.messages, damage.reason)
        for damage in table.damages
        if wanted.partitions is None or damage.partition in wanted.partitions
    ]


def _may_have(file: ListedFile, wanted: Wanted) -> bool:
    if file.subject is not None and not wanted.takes(file.subject):
        return False
    return file.first_stored_at_us < wanted.stored_until and file.last_stored_at_us >= wanted.stored_from


class PieceReader:
    """Reads pieces of the files of one tree. ``report`` takes each damage."""

    def __init__(self, files: Files, wanted: Wanted, schema: pa.Schema, report: Callable[[FileDamage], None]) -> None:
        self._files = files
        self._wanted = wanted
        self._schema = schema
        self._report = report

    def record_batches(self, piece: FilePiece) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a piece. Raises StorageFailed; BadBytes if its file is gone."""
        try:
            reading = self._files.open(piece.file.path)
        except FileNotFoundError as error:
            raise BadBytes(f"{piece.file.path} in {self._files.name} is gone; the archive has lost it") from error
        try:
            yield from self._of_piece(reading, piece)
        except (KeyError, ValueError) as error:  # the footer has no checksum, and may name other columns
            self._damage(piece, str(error))
        finally:
            reading.close()

    def _of_piece(self, reading: Reading, piece: FilePiece) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq  # imported late: most processes read no such file

        size = reading.size()
        if size != piece.file.size:
            self._damage(piece, f"it has {size:,} bytes instead of {piece.file.size:,}")
            return
        if _BODY in self._schema.names and checksum_of(reading, size) != piece.file.crc:
            with ParquetApart(reading, size) as apart:
                yield from self._of_bad_file(apart, piece)
            return
        try:
            file = pq.ParquetFile(
                pa.PythonFile(_Seekable(reading, size), "r"), pre_buffer=False, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            self._damage(piece, str(error))
            return
        if file.metadata.num_rows != piece.file.messages:
            self._damage(piece, f"it has {file.metadata.num_rows:,} messages instead of {piece.file.messages:,}")
            return
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            if piece.start <= _start_of(group) < piece.end and self._may_have(group):
                yield from self._of_group(file, number, piece)

    def _of_bad_file(self, apart: ParquetApart, piece: FilePiece) -> Iterator[pa.RecordBatch]:
        """Yield what can be read of a file that does not fit its checksum."""
        try:
            groups = apart.groups()
        except BadBytes as error:
            self._damage(piece, str(error))
            return
        if sum(group.rows for group in groups) != piece.file.messages:
            rows = sum(group.rows for group in groups)
            self._damage(piece, f"it has {rows:,} messages instead of {piece.file.messages:,}")
            return
        filtered = self._filtered(piece)
        names = [*self._schema.names, *(name for name in filtered if name not in self._schema.names)]
        for number, group in enumerate(groups):
            if not piece.start <= group.start < piece.end:
                continue
            read = 0
            try:
                for batch in apart.batches(number, names):
                    read += batch.num_rows
                    yield self._converted(batch, filtered)
                why = "its pages end before all messages have come"
            except BadBytes as error:
                why = str(error)
            if read < group.rows:
                self._report(FileDamage(self._name(piece), None, None, None, group.rows - read, why))

    def _of_group(self, file: pq.ParquetFile, number: int, piece: FilePiece) -> Iterator[pa.RecordBatch]:
        filtered = self._filtered(piece)
        names = [*self._schema.names, *(name for name in filtered if name not in self._schema.names)]
        rows, read = file.metadata.row_group(number).num_rows, 0
        batches = file.iter_batches(ROWS, [number], names, use_threads=False)
        while read < rows:
            try:
                batch = next(batches, None)
                why = "its pages end before all messages have come"
            except (pa.ArrowException, OSError) as error:
                batch, why = None, str(error)
            if batch is None:
                self._report(FileDamage(self._name(piece), None, None, None, rows - read, why))
                return
            read += batch.num_rows
            yield self._converted(batch, filtered)

    def _converted(self, batch: pa.RecordBatch, filtered: list[str]) -> pa.RecordBatch:
        kept = self._kept(batch, filtered)
        columns = [kept.column(field.name).cast(field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _filtered(self, piece: FilePiece) -> list[str]:
        """Return the columns that decide which messages are wanted, without those that the whole file satisfies."""
        wanted = self._wanted
        found = [] if piece.file.subject is not None else ["subject"]
        found += ["partition"] if wanted.partitions is not None else []
        for name, (first, until) in _limits(wanted).items():
            if first > 0 or until < 1 << 63:
                found.append(name)
        return found

    def _kept(self, batch: pa.RecordBatch, filtered: list[str]) -> pa.RecordBatch:
        import pyarrow.compute as pc

        wanted, limits = self._wanted, _limits(self._wanted)
        mask = None
        for name in filtered:
            column = batch.column(name)
            if name == "subject":
                names = [one for one in column.unique().to_pylist() if wanted.takes(one)]
                such = pc.is_in(column, pa.array(names, pa.string()))
            elif name == "partition":
                such = pc.is_in(column, pa.array(sorted(wanted.partitions or ()), column.type))
            else:
                first, until = limits[name]
                stamps = column.cast(pa.int64())
                such = pc.and_(pc.greater_equal(stamps, first), pc.less_equal(stamps, until - 1))
            mask = such if mask is None else pc.and_(mask, such)
        return batch if mask is None else batch.filter(mask)

    def _may_have(self, group: Any) -> bool:
        """Return whether a row group may have wanted messages, by its statistics."""
        limits = _limits(self._wanted)
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema in limits and column.statistics is not None:
                first, until = limits[column.path_in_schema]
                if column.statistics.max_raw < first or column.statistics.min_raw >= until:
                    return False
            if (
                column.path_in_schema == "subject"
                and column.statistics is not None
                and self._wanted.subjects is not None
            ):
                low, high = column.statistics.min, column.statistics.max
                if not any(low <= subject <= high for subject in self._wanted.subjects):
                    return False
        return True

    def _damage(self, piece: FilePiece, reason: str) -> None:
        """Report a file that cannot be read; only the task that reads its beginning does so."""
        if piece.start == 0:
            self._report(FileDamage(self._name(piece), None, None, None, piece.file.messages, reason))

    def _name(self, piece: FilePiece) -> str:
        return f"{self._files.name}/{piece.file.path}"


def _limits(wanted: Wanted) -> dict[str, tuple[int, int]]:
    """Return for each time column the wanted range: from (included) and until (excluded)."""
    return {
        "stored_at": (wanted.stored_from, wanted.stored_until),
        "created_at": (wanted.created_from, wanted.created_until),
    }


def _start_of(group: Any) -> int:
    """Return the beginning of a row group in its file."""
    column = group.column(0)
    starts = (column.dictionary_page_offset, column.data_page_offset)
    return min(int(start) for start in starts if start is not None)


class _Seekable:
    """A file in the form that Arrow reads."""

    closed = False

    def __init__(self, reading: Reading, size: int) -> None:
        self._reading = reading
        self._size = size
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        size = self._size - self._at if size < 0 else min(size, self._size - self._at)
        data = self._reading.read(self._at, size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

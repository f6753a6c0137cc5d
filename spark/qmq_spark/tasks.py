"""The tasks of a read: each reads its part of a source, and reports damages as the query asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from qmq.errors import BadBytes, StorageError
from qmq_spark.options import COLUMNS, ReadOptions
from qmq_spark.parquet.read import FileDamage, FilePiece, PieceReader, missing, plan_files
from qmq_spark.plan import SourceSnapshot, open_files, plan
from qmq_spark.read import RangeReader, SegmentDamage, SegmentRange, Wanted, unreadable

_LOG: Final = logging.getLogger("qmq_spark")


class TaskPart(InputPartition):
    """The part that one task reads."""

    def __init__(
        self, segment_ranges: list[SegmentRange], pieces: Sequence[FilePiece] = (), missing: Sequence[FileDamage] = ()
    ) -> None:
        super().__init__(None)
        self.segment_ranges = segment_ranges
        #: The pieces of an archive's Parquet files; and the damages from when these were written.
        self.pieces = pieces
        self.missing = missing


def parts_of(source: SourceSnapshot, wanted: Wanted, part_bytes: int) -> list[InputPartition]:
    """Return the parts of a source, each of about *part_bytes*; at least one."""
    of_segments = [TaskPart(segment_ranges) for segment_ranges in plan(source, wanted, part_bytes)]
    if source.table is None:
        return [*of_segments] or [TaskPart([])]
    first, *others = plan_files(source.table, wanted, part_bytes) or [[]]
    gone = missing(source.table, wanted, source.files.name)
    return [TaskPart([], first, gone), *(TaskPart([], pieces) for pieces in others), *of_segments]


def read_part(
    options: ReadOptions, schema: StructType, wanted: Wanted, part: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a part, or with view=damages its damages. Raises BadBytes, StorageError."""
    assert isinstance(part, TaskPart)
    return (_damages if options.damages else _messages)(options, schema, wanted, part)


def _messages(options: ReadOptions, schema: StructType, wanted: Wanted, part: TaskPart) -> Iterator[pa.RecordBatch]:
    skipped: list[SegmentDamage | FileDamage] = []

    def report(damage: SegmentDamage | FileDamage) -> None:
        if not options.skip:
            raise BadBytes(f"{damage}. To read all others, give the option corrupt=skip; view=damages lists them all")
        skipped.append(damage)

    yield from _read(options, to_arrow_schema(schema, timezone="UTC"), wanted, part, report)
    if skipped:
        _LOG.warning("ranges of bad bytes skipped: %d, the first: %s", len(skipped), skipped[0])


def _damages(options: ReadOptions, schema: StructType, wanted: Wanted, part: TaskPart) -> Iterator[pa.RecordBatch]:
    found: list[SegmentDamage | FileDamage] = []
    for _ in _read(options, to_arrow_schema(COLUMNS, timezone="UTC"), wanted, part, found.append):
        pass
    own = to_arrow_schema(schema, timezone="UTC")
    rows = [{name: getattr(damage, name) for name in own.names} for damage in found]
    yield pa.RecordBatch.from_pylist(rows, schema=own)


def _read(
    options: ReadOptions,
    schema: pa.Schema,
    wanted: Wanted,
    part: TaskPart,
    report: Callable[[SegmentDamage | FileDamage], None],
) -> Iterator[pa.RecordBatch]:
    for damage in part.missing:
        report(damage)
    if not part.segment_ranges and not part.pieces:
        return
    files = open_files(options.place, options.tls)
    try:
        reader = RangeReader(files, wanted, schema, report)
        for segment_range in part.segment_ranges:
            try:
                yield from reader.record_batches(segment_range)
            except BadBytes:
                raise
            except StorageError as error:
                report(unreadable(segment_range, files, error))
        of_files = PieceReader(files, wanted, schema, report)
        for piece in part.pieces:
            try:
                yield from of_files.record_batches(piece)
            except BadBytes:
                raise
            except StorageError as error:
                report(FileDamage(f"{files.name}/{piece.file.path}", None, None, None, None, str(error)))
    finally:
        files.close()

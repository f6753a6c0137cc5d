"""What tasks do: read their part of a source, and tell of what is bad as the query wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from qmq.errors import BadBytes, StorageError
from qmq_spark.options import COLUMNS, ReadOptions
from qmq_spark.planning import open_files
from qmq_spark.reading import Damage, Stretch, StretchReader, Wanted, unreadable

_LOG: Final = logging.getLogger("qmq_spark")


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, stretches: list[Stretch]) -> None:
        super().__init__(None)
        self.stretches = stretches


def read_part(
    options: ReadOptions, schema: StructType, wanted: Wanted, part: InputPartition
) -> Iterator[pa.RecordBatch]:
    """The messages of a part, or with view=damages what is bad of them. Raises BadBytes, StorageError."""
    assert isinstance(part, Part)
    return (_damages if options.damages else _messages)(options, schema, wanted, part)


def _messages(options: ReadOptions, schema: StructType, wanted: Wanted, part: Part) -> Iterator[pa.RecordBatch]:
    skipped: list[Damage] = []

    def tell(damage: Damage) -> None:
        if not options.skip:
            raise BadBytes(f"{damage}. To read the others, give the option corrupt=skip; view=damages lists them")
        skipped.append(damage)

    yield from _read(options, to_arrow_schema(schema, timezone="UTC"), wanted, part, tell)
    if skipped:
        _LOG.warning("%d stretches of bad bytes were skipped, the first: %s", len(skipped), skipped[0])


def _damages(options: ReadOptions, schema: StructType, wanted: Wanted, part: Part) -> Iterator[pa.RecordBatch]:
    found: list[Damage] = []
    for _ in _read(options, to_arrow_schema(COLUMNS, timezone="UTC"), wanted, part, found.append):
        pass
    own = to_arrow_schema(schema, timezone="UTC")
    rows = [{name: getattr(damage, name) for name in own.names} for damage in found]
    yield pa.RecordBatch.from_pylist(rows, schema=own)


def _read(
    options: ReadOptions, schema: pa.Schema, wanted: Wanted, part: Part, tell: Callable[[Damage], None]
) -> Iterator[pa.RecordBatch]:
    if not part.stretches:
        return
    files = open_files(options.place)
    try:
        reader = StretchReader(files, wanted, schema, tell)
        for stretch in part.stretches:
            try:
                yield from reader.record_batches(stretch)
            except BadBytes:
                raise
            except StorageError as error:
                tell(unreadable(stretch, files, error))
    finally:
        files.close()

"""The Spark data source: ``spark.read.format("qmq").load(SOURCE)``, ``spark.readStream``, ``df.write``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from qmq_spark.filters import narrowed
from qmq_spark.options import ReadOptions, read_options
from qmq_spark.parts import parts_of, read_part
from qmq_spark.planning import SourceView
from qmq_spark.streaming import QmqStreamReader
from qmq_spark.writing import QmqWriter, write_options

if TYPE_CHECKING:
    import pyarrow as pa


class QmqDataSource(DataSource):
    """Messages of a data directory, an archive or live brokers; and rows that become messages."""

    @classmethod
    def name(cls) -> str:
        return "qmq"

    def schema(self) -> StructType:
        return read_options(self.options).schema

    def reader(self, schema: StructType) -> QmqReader:
        options = read_options(self.options)
        options.check(schema)
        return QmqReader(options, schema)

    def streamReader(self, schema: StructType) -> QmqStreamReader:  # noqa: N802 (Spark's name)
        options = read_options(self.options)
        options.check(schema)
        return QmqStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> QmqWriter:
        return QmqWriter(write_options(self.options, schema, overwrite=overwrite))


class QmqReader(DataSourceReader):
    """Reads messages, or with view=damages what is bad of them."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = options.wanted

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 (Spark's name)
        if not self._options.damages:
            self._wanted = narrowed(self._wanted, filters)
        yield from filters

    def partitions(self) -> list[InputPartition]:
        with SourceView(self._options.place) as view:
            return parts_of(view.look(), self._wanted, self._options.part_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._options, self._schema, self._wanted, partition)

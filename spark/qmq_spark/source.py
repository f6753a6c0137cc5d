"""The Spark data source: ``spark.read.format("qmq").load(SOURCE)``, ``spark.readStream``, ``df.write``.

For each query Spark starts a Python process that only makes a source of its options. So numpy and Arrow, which cost
half a second of processor time, are imported only by readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from qmq.errors import InvalidOption
from qmq_spark.options import ReadOptions, read_options

if TYPE_CHECKING:
    import pyarrow as pa

    from qmq_spark.stream import QmqStreamReader
    from qmq_spark.write import QmqWriter


class QmqDataSource(DataSource):
    """Messages of a data directory, an archive or running brokers; and a target for rows that become messages."""

    @classmethod
    def name(cls) -> str:
        return "qmq"

    def schema(self) -> StructType:
        return read_options(self.options).schema

    def reader(self, schema: StructType) -> QmqReader:
        options = read_options(self.options)
        options.check(schema)
        if options.starts_new:
            raise InvalidOption("start=new is for streams; give a query the option since instead, or neither")
        return (FilteringReader if options.pushdown else QmqReader)(options, schema)

    def streamReader(self, schema: StructType) -> QmqStreamReader:  # noqa: N802 (Spark's name)
        from qmq_spark.stream import QmqStreamReader

        options = read_options(self.options)
        options.check(schema)
        return QmqStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> QmqWriter:
        from qmq_spark.write import QmqWriter, write_options

        return QmqWriter(write_options(self.options, schema, overwrite=overwrite))


class QmqReader(DataSourceReader):
    """Reads messages, or with view=damages the bad bytes."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = options.wanted

    def partitions(self) -> list[InputPartition]:
        from qmq_spark.plan import SourceView
        from qmq_spark.tasks import parts_of

        with SourceView(self._options.place, tls=self._options.tls) as view:
            return parts_of(view.look(), self._wanted, self._options.part_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from qmq_spark.tasks import read_part

        return read_part(self._options, self._schema, self._wanted, partition)


class FilteringReader(QmqReader):
    """Reads less where filters of the query say so.

    Spark 4.3 keeps what it planned with the filters of one query, and reads that again for later queries of the same
    DataFrame or view that have none: these lack rows. So only who asks for it gets this reader.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 (Spark's name)
        from qmq_spark.filters import narrowed

        if not self._options.damages:
            self._wanted = narrowed(self._wanted, filters)
        yield from filters

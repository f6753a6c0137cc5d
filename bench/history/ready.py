"""A source with prepared batches: it measures Spark alone, without reading, checking and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from qmq_spark.options import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

#: How many prepared batches a task has.
_READY: Final = 4


class ReadySource(DataSource):
    """As many ``rows`` and tasks as format qmq has for the same place; each task repeats the first batch of its
    part.
    """

    @classmethod
    def name(cls) -> str:
        return "ready"

    def schema(self) -> StructType:
        return COLUMNS

    def reader(self, schema: StructType) -> _Reader:
        return _Reader(self.options["path"], int(self.options["rows"]), schema)


class _Reader(DataSourceReader):
    def __init__(self, place: str, rows: int, schema: StructType) -> None:
        from qmq_spark.options import read_options

        self._options = read_options({"path": place})
        self._rows = rows
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from qmq_spark.plan import SourceView
        from qmq_spark.tasks import parts_of

        with SourceView(self._options.place) as view:
            parts = parts_of(view.look(), self._options.wanted, self._options.part_bytes)
        each, rest = divmod(self._rows, len(parts))
        return [_Repeated(part, each + (number < rest)) for number, part in enumerate(parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from itertools import cycle, islice

        from qmq_spark.tasks import read_part

        assert isinstance(partition, _Repeated)
        left = partition.rows
        for batch in cycle(
            islice(read_part(self._options, self._schema, self._options.wanted, partition.part), _READY)
        ):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return


class _Repeated(InputPartition):
    def __init__(self, part: InputPartition, rows: int) -> None:
        super().__init__(None)
        self.part = part
        self.rows = rows

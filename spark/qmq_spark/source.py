"""The Spark data source: ``spark.read.format("qmq").load(SOURCE)``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from qmq.errors import BadBytes, InvalidOption, StorageError
from qmq_spark.filters import narrowed
from qmq_spark.planning import open_files, open_source, plan
from qmq_spark.reading import Damage, Stretch, StretchReader, Wanted, unreadable

if TYPE_CHECKING:
    import pyarrow as pa

_LOG: Final = logging.getLogger("qmq_spark")

#: The columns, in this order.
COLUMNS: Final = StructType(
    [
        StructField("subject", StringType()),
        StructField("lane", IntegerType()),
        StructField("partition", IntegerType()),
        StructField("position", LongType()),
        StructField("sequence", LongType()),
        StructField("message_id", StringType()),
        StructField("key", StringType()),
        StructField("tags", ArrayType(StringType())),
        StructField("properties", MapType(StringType(), StringType())),
        StructField("created_at", TimestampType()),
        StructField("stored_at", TimestampType()),
        StructField("body", BinaryType()),
    ]
)
#: Those of the view of damages.
DAMAGE_COLUMNS: Final = StructType(
    [
        StructField("file", StringType()),
        StructField("partition", IntegerType()),
        StructField("start", LongType()),
        StructField("end", LongType()),
        StructField("messages", LongType()),
        StructField("reason", StringType()),
    ]
)
#: What a task reads, about.
PART_BYTES: Final = 32 << 20

#: Every option, with its default and what it may be (None: a number of bytes).
_OPTIONS: Final[dict[str, tuple[str, tuple[str, ...] | None]]] = {
    "body": ("true", ("true", "false")),
    "private": ("false", ("true", "false")),
    "corrupt": ("fail", ("fail", "skip")),
    "view": ("messages", ("messages", "damages")),
    "part_bytes": (str(PART_BYTES), None),
}


class Part(InputPartition):
    """What one task reads."""

    def __init__(self, stretches: list[Stretch]) -> None:
        super().__init__(None)
        self.stretches = stretches


class QmqDataSource(DataSource):
    """Messages of a data directory or an archive. Options: body, private, corrupt, view, part_bytes."""

    @classmethod
    def name(cls) -> str:
        return "qmq"

    def schema(self) -> StructType:
        options = read_options(self.options)
        return StructType([field for field in columns_of(options) if field.name != "body" or options["body"] == "true"])

    def reader(self, schema: StructType) -> QmqReader:
        options = read_options(self.options)
        known = {field.name: field.dataType for field in columns_of(options)}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                there = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
                raise InvalidOption(
                    f"there is no column {field.name} {field.dataType.simpleString()}; there are {there}"
                )
        return QmqReader(options, schema)


def columns_of(options: dict[str, str]) -> StructType:
    """All columns that a read with these options may have."""
    return DAMAGE_COLUMNS if options["view"] == "damages" else COLUMNS


def read_options(given: Any) -> dict[str, str]:
    """All options of a read, checked. Raises InvalidOption."""
    found = {name.lower(): value for name, value in given.items()}
    place = found.pop("path", "")
    if not place:
        raise InvalidOption('no source is given; name it: spark.read.format("qmq").load("/path")')
    options = {"path": place}
    for name, (default, allowed) in _OPTIONS.items():
        value = options[name] = str(found.pop(name, default)).lower()
        if allowed is not None and value not in allowed:
            raise InvalidOption(f"option {name} is {value!r}; give one of {', '.join(allowed)}")
        if allowed is None and not (value.isdecimal() and int(value) > 0):
            raise InvalidOption(f"option {name} is {value!r}; give a number of bytes")
    if found:
        raise InvalidOption(f"there is no option {', '.join(sorted(found))}; there are {', '.join(_OPTIONS)}")
    return options


class QmqReader(DataSourceReader):
    """Reads messages, or with view=damages what is bad of them."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = Wanted(private=options["private"] == "true")

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 (Spark's name)
        if self._options["view"] == "messages":
            self._wanted = narrowed(self._wanted, filters)
        yield from filters

    def partitions(self) -> list[InputPartition]:
        source = open_source(self._options["path"])
        parts = plan(source, self._wanted, int(self._options["part_bytes"]))
        return [Part(stretches) for stretches in parts] or [Part([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Part)
        if self._options["view"] == "damages":
            return self._damages(partition)
        return self._messages(partition)

    def _messages(self, part: Part) -> Iterator[pa.RecordBatch]:
        skipped: list[Damage] = []

        def tell(damage: Damage) -> None:
            if self._options["corrupt"] == "fail":
                raise BadBytes(f"{damage}. To read the others, give the option corrupt=skip; view=damages lists them")
            skipped.append(damage)

        yield from self._read(part, tell, to_arrow_schema(self._schema, timezone="UTC"))
        if skipped:
            _LOG.warning("%d stretches of bad bytes were skipped, the first: %s", len(skipped), skipped[0])

    def _damages(self, part: Part) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        found: list[Damage] = []
        all_of_it = to_arrow_schema(COLUMNS, timezone="UTC")
        for _ in self._read(part, found.append, all_of_it):
            pass
        schema = to_arrow_schema(self._schema, timezone="UTC")
        rows = [{name: getattr(damage, name) for name in schema.names} for damage in found]
        yield pa.RecordBatch.from_pylist(rows, schema=schema)

    def _read(self, part: Part, tell: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        files = open_files(self._options["path"])
        reader = StretchReader(files, self._wanted, schema, tell)
        for stretch in part.stretches:
            try:
                yield from reader.record_batches(stretch)
            except BadBytes:
                raise
            except StorageError as error:
                tell(unreadable(stretch, files, error))

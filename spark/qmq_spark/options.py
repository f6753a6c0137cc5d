"""Columns and options of a read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

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

from qmq.errors import InvalidOption

if TYPE_CHECKING:
    from qmq.archive.broker_logs import TlsPaths
    from qmq_spark.read import Wanted

#: The columns in their order. Spark need not check columns that are never null message by message.
COLUMNS: Final = StructType(
    [
        StructField("subject", StringType(), False),
        StructField("lane", IntegerType(), False),
        StructField("priority", StringType(), False),
        StructField("partition", IntegerType(), False),
        StructField("position", LongType(), False),
        StructField("sequence", LongType(), False),
        StructField("message_id", StringType(), False),
        StructField("key", StringType()),
        StructField("keys", ArrayType(StringType(), False), False),
        StructField("order_key", StringType()),
        StructField("tags", ArrayType(StringType(), False), False),
        StructField("properties", MapType(StringType(), StringType(), False), False),
        StructField("created_at", TimestampType(), False),
        StructField("stored_at", TimestampType(), False),
        StructField("source", StringType()),
        StructField("sender", StringType()),
        StructField("producer", StringType()),
        StructField("app", StringType()),
        StructField("body", BinaryType(), False),
    ]
)
#: The columns of view=damages.
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
#: About how many bytes a task reads: each task costs Spark 0.1 s of processor time.
PART_BYTES: Final = 128 << 20

_CHOICES: Final = {
    "body": ("true", "false"),
    "private": ("false", "true"),
    "corrupt": ("fail", "skip"),
    "view": ("messages", "damages"),
    "pushdown": ("false", "true"),
}
#: Where a stream may start, besides a time.
_ENDS: Final = ("first", "new")
#: The options of TLS: paths that exist wherever Spark's tasks run.
TLS_NAMES: Final = ("tls_ca", "tls_cert", "tls_key")
_NAMES: Final = (*_CHOICES, "columns", "prefix", "since", "start", "part_bytes", "max_trigger_bytes", *TLS_NAMES)


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, in bytes; ``max_trigger_bytes`` None: no limit.

    ``starts_new``: a stream skips all messages that are there when it begins. ``chosen`` columns; none: all.
    """

    place: str
    body: bool = True
    private: bool = False
    skip: bool = False
    damages: bool = False
    prefix: str = ""
    since_us: int = 0
    part_bytes: int = PART_BYTES
    max_trigger_bytes: int | None = None
    starts_new: bool = False
    chosen: tuple[str, ...] = ()
    #: The values of TLS_NAMES; None where an option is not given.
    tls: TlsPaths = (None, None, None)
    #: Filters of the query lessen what is read.
    pushdown: bool = False

    @property
    def columns(self) -> StructType:
        """Return all columns that the read can have."""
        return DAMAGE_COLUMNS if self.damages else COLUMNS

    @property
    def schema(self) -> StructType:
        """Return the columns of a read for which no schema is given."""
        if self.chosen:
            return StructType([self.columns[name] for name in self.chosen])
        return StructType([field for field in self.columns.fields if self.body or field.name != "body"])

    @property
    def wanted(self) -> Wanted:
        """Return which messages are to be read."""
        from qmq_spark.read import Wanted  # imported late, see source.py

        return Wanted((self.prefix,) if self.prefix else (), private=self.private, stored_from=self.since_us)

    def check(self, schema: StructType) -> None:
        """Raise InvalidOption for an unknown column."""
        known = {field.name: field.dataType.simpleString() for field in self.columns.fields}
        for field in schema.fields:
            kind = field.dataType.simpleString()  # a name without whether it may be null
            if known.get(field.name) != kind:
                there = ", ".join(f"{name} {kind}" for name, kind in known.items())
                raise InvalidOption(f"there is no column {field.name} {kind}; there are {there}")


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Return the options of a read, checked. Raises InvalidOption."""
    found = {name.lower(): str(value) for name, value in given.items()}
    place = found.pop("path", "")
    if not place:
        raise InvalidOption('no source is given; name it: spark.read.format("qmq").load("/path")')
    unknown = sorted(found.keys() - set(_NAMES))
    if unknown:
        raise InvalidOption(f"there is no option {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    chosen = {name: _choice(name, found.get(name, allowed[0]), allowed) for name, allowed in _CHOICES.items()}
    limit, start = found.get("max_trigger_bytes"), found.get("start", "first")
    times = [_time("since", found["since"])] if "since" in found else []
    times += [_time("start", start)] if start not in _ENDS else []
    options = ReadOptions(
        place,
        chosen["body"] == "true",
        chosen["private"] == "true",
        chosen["corrupt"] == "skip",
        chosen["view"] == "damages",
        found.get("prefix", ""),
        max(times, default=0),
        _bytes("part_bytes", found.get("part_bytes", str(PART_BYTES))),
        None if limit is None else _bytes("max_trigger_bytes", limit),
        start == "new",
        tuple(name.strip() for name in found["columns"].split(",")) if "columns" in found else (),
        tls_options(found, place),
        chosen["pushdown"] == "true",
    )
    _check_chosen(options)
    return options


def tls_options(found: Mapping[str, str], place: str) -> TlsPaths:
    """Return the options of TLS among those found. Raises InvalidOption if *place* is not reached by TLS."""
    given = [name for name in TLS_NAMES if name in found]
    if given and "qmqs://" not in place:
        raise InvalidOption(f"option {given[0]} is given, but {place} does not begin with qmqs://: no TLS is used")
    return found.get("tls_ca"), found.get("tls_cert"), found.get("tls_key")


def _check_chosen(options: ReadOptions) -> None:
    known = [name for name in options.columns.names if options.body or name != "body"]
    for name in options.chosen:
        if name not in known:
            raise InvalidOption(f"option columns names {name!r}; there are {', '.join(known)}")
        if options.chosen.count(name) > 1:
            raise InvalidOption(f"option columns names {name!r} twice")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise InvalidOption(f"option {name} is {value!r}; give one of {', '.join(allowed)}")
    return value.lower()


def _bytes(name: str, value: str) -> int:
    if not (value.isdecimal() and int(value) > 0):
        raise InvalidOption(f"option {name} is {value!r}; give a number of bytes")
    return int(value)


def _time(name: str, value: str) -> int:
    from qmq_spark.filters import microseconds  # imported late, see source.py

    try:
        return max(0, microseconds(datetime.fromisoformat(value).astimezone(UTC)))
    except ValueError:
        raise InvalidOption(f"option {name} is {value!r}; give a time such as 2025-12-01T00:00:00Z") from None

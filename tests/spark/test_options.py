"""Options of a read, and those that are refused."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from qmq.errors import InvalidOption
from qmq_spark.options import COLUMNS, DAMAGE_COLUMNS, PART_BYTES, ReadOptions, read_options
from qmq_spark.read import Wanted


def test_defaults() -> None:
    options = read_options({"path": "/data"})
    assert options == ReadOptions("/data")
    assert (options.part_bytes, options.max_trigger_bytes) == (PART_BYTES, None)
    assert options.schema == options.columns == COLUMNS
    assert options.wanted == Wanted()


def test_each_option() -> None:
    given = {
        "path": "/data", "body": "False", "private": "true", "corrupt": "skip", "prefix": "hotel.",
        "SINCE": "2025-12-01T00:00:00Z", "part_bytes": "5", "max_trigger_bytes": "6",
    }  # fmt: skip
    options = read_options(given)
    december = int(datetime(2025, 12, 1, tzinfo=UTC).timestamp() * 1_000_000)
    assert options == ReadOptions("/data", False, True, True, False, "hotel.", december, 5, 6)
    assert options.schema.names == [name for name in COLUMNS.names if name != "body"]
    assert options.wanted == Wanted(("hotel.",), private=True, stored_from=december)
    assert read_options({"path": "/data", "view": "damages"}).schema == DAMAGE_COLUMNS


def test_where_a_stream_starts() -> None:
    assert read_options({"path": "/data", "start": "first"}) == read_options({"path": "/data"})
    assert read_options({"path": "/data", "start": "new"}).starts_new
    since = read_options({"path": "/data", "since": "2025-12-01T00:00:00Z"})
    assert read_options({"path": "/data", "start": "2025-12-01T00:00:00Z"}) == since
    assert read_options({"path": "/data", "start": "2025-11-01T00:00:00Z", "since": "2025-12-01T00:00:00Z"}) == since


def test_chosen_columns_come_in_their_order() -> None:
    chosen = read_options({"path": "/data", "columns": "stored_at, subject"}).schema
    assert chosen == StructType([COLUMNS["stored_at"], COLUMNS["subject"]])
    assert read_options({"path": "/data", "view": "damages", "columns": "file"}).schema.names == ["file"]
    assert read_options({"path": "/data", "body": "false", "columns": "key"}).schema.names == ["key"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no source is given"),
        ({"path": "/data", "colour": "red"}, "no option colour"),
        ({"path": "/data", "corrupt": "ignore"}, "one of fail, skip"),
        ({"path": "/data", "part_bytes": "0"}, "number of bytes"),
        ({"path": "/data", "max_trigger_bytes": "1 MB"}, "number of bytes"),
        ({"path": "/data", "since": "yesterday"}, "give a time"),
        ({"path": "/data", "since": "last"}, "give a time"),
        ({"path": "/data", "start": "middle"}, "give a time"),
        ({"path": "/data", "columns": "subject,price"}, "names 'price'; there are subject, lane"),
        ({"path": "/data", "columns": ""}, "names ''"),
        ({"path": "/data", "columns": "key,key"}, "names 'key' twice"),
        ({"path": "/data", "columns": "body", "body": "false"}, "names 'body'; there are"),
        ({"path": "/data", "columns": "body", "view": "damages"}, "names 'body'; there are file"),
    ],
)
def test_what_cannot_be(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        read_options(given)


def test_columns_that_there_are_not() -> None:
    with pytest.raises(InvalidOption, match="no column price string"):
        read_options({"path": "/data"}).check(StructType([StructField("price", StringType())]))

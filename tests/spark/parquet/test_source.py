"""An archive of Parquet in a real session: the same rows as from its segments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from qmq_spark.options import COLUMNS
from tests.archive.orders import Row, rows_in
from tests.spark.parquet.archives import archive, table_of, write_days
from tests.spark.test_source import load, rows_of
from tests.storage.stores import damage


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of ``data`` and its ``archive``."""
    path = tmp_path_factory.mktemp("parquet")
    write_days(path / "data", 2, 20)
    archive(path / "data", path / "archive")
    return path


def test_gives_the_same(spark: SparkSession, directory: Path) -> None:
    rows = rows_in(directory / "data")
    frame = load(spark, directory / "archive", part_bytes=10_000)
    assert frame.schema == COLUMNS
    assert frame.rdd.getNumPartitions() > 2
    assert rows_of(frame) == rows
    counts = load(spark, directory / "archive", body="false").groupBy("subject").count().collect()
    assert {row["subject"]: row["count"] for row in counts} == Counter(row["subject"] for row in rows)
    middle = rows[len(rows) // 2]["stored_at"]
    chosen = load(spark, directory / "archive").where("subject like 'hotel.%'")
    assert rows_of(chosen.where(f"stored_at >= timestamp'{middle}'")) == [
        row for row in rows if row["subject"][:6] == "hotel." and row["stored_at"] >= middle
    ]


def test_everybody_else_reads_it_too(spark: SparkSession, directory: Path) -> None:
    rows = rows_in(directory / "data")
    frame = spark.read.parquet(str(directory / "archive" / "parquet"))
    assert set(frame.columns) == {*COLUMNS.names, "date", "only_subject"}
    assert rows_of(frame.select(*COLUMNS.names)) == rows
    days = frame.groupBy("date").count().collect()
    assert {str(row["date"]): row["count"] for row in days} == Counter(_day(row) for row in rows)


def _day(row: Row) -> str:
    return str(row["stored_at"].date())


def test_bad_bytes_fail_the_query_or_are_skipped_and_listed(spark: SparkSession, tmp_path: Path) -> None:
    source, to = tmp_path / "data", tmp_path / "archive"
    sent = write_days(source, 2, 10)
    damage(source, sent[3], len(sent[3].data) - 1)
    archive(source, to)
    lost = table_of(to).files[-1]
    (to / lost.path).write_bytes(b"PAR1")
    with pytest.raises(PySparkException, match="corrupt=skip"):
        load(spark, to).collect()
    told = load(spark, to, view="damages").orderBy("partition").collect()
    assert [row["partition"] for row in told] == [None, sent[3].partition]
    assert [row["messages"] for row in told] == [lost.messages, sum(count for _, _, count in sent[3].runs)]
    rest = table_of(to).messages - lost.messages
    assert load(spark, to, corrupt="skip").count() == rest > 0

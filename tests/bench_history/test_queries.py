"""The measured queries return what was written."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from bench.history.orders import Amount, total, write_orders
from bench.history.queries import QUERIES, READY
from bench.history.ready import ReadySource


def test_queries_give_what_was_written(spark: SparkSession, tmp_path: Path) -> None:
    contents = write_orders(tmp_path, Amount(10_000, subjects=20))
    messages, size, _ = total(contents)
    counts = sorted([subject, tally.messages] for subject, tally in contents.items())
    expected = {
        "count by subject": counts,
        "count by subject, all columns but the body": counts,
        "sum of lengths, bodies alone": [[messages, size]],
        "sum of lengths, all columns": [[messages, size]],
        "noop write, all columns": [],
        READY: [],
        "Parquet by Spark": [[messages]],
        "check": sorted([subject, *tally] for subject, tally in contents.items()),
    }
    spark.dataSource.register(ReadySource)
    spark.conf.set("bench.rows", "10000")
    assert {name: sorted(query(spark, str(tmp_path))) for name, query in QUERIES.items()} == expected


def test_batches_that_are_ready_are_as_many_as_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    write_orders(tmp_path, Amount(10_000, subjects=20))
    spark.dataSource.register(ReadySource)
    ready = spark.read.format("ready").option("rows", 25_001).load(str(tmp_path))
    assert ready.selectExpr("count(*)", "sum(length(body))", "count(distinct position)").collect() == [
        (25_001, 25_001 * Amount().body_bytes, 10_000)
    ]

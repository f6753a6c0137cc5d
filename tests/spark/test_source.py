"""The data source in a real session: rows, schema, filters, options, bad bytes, a directory whose broker runs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

import qmq_spark
from qmq_spark.options import COLUMNS
from tests.archive.archives import archive
from tests.archive.orders import Row, rows_in, write_orders
from tests.archive.test_keys import write as write_keys
from tests.storage.stores import Sender, Sent, close_cleanly, damage, open_store


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orders") / "data"
    write_orders(path, 120)
    return path


def load(spark: SparkSession, place: Path | str, **options: Any) -> DataFrame:
    return spark.read.format("qmq").options(**options).load(str(place))


def rows_of(frame: DataFrame) -> list[Row]:
    """Return the rows in the order of the store, as ``rows_in`` returns them."""
    table = frame.orderBy("partition", "position").toArrow()
    return [dict(row) for row in table.to_pylist()]


def test_gives_what_a_client_would(spark: SparkSession, directory: Path) -> None:
    frame = load(spark, directory, part_bytes=20_000)
    assert frame.schema == COLUMNS
    assert frame.rdd.getNumPartitions() > 2
    assert rows_of(frame) == rows_in(directory)
    assert rows_of(load(spark, f"file://{directory}")) == rows_in(directory)


def test_workers_run_the_python_that_asks(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, unless another Python is configured."""
    context = spark.sparkContext
    assert context.pythonExec == sys.executable
    monkeypatch.setattr(context, "pythonExec", "another")
    monkeypatch.setenv("PYSPARK_PYTHON", "another")
    qmq_spark.register(spark)
    assert context.pythonExec == "another"
    monkeypatch.delenv("PYSPARK_PYTHON")
    qmq_spark.register(spark)
    assert context.pythonExec == sys.executable


def test_an_archive_gives_the_same(spark: SparkSession, directory: Path, tmp_path: Path) -> None:
    archive(directory, tmp_path)
    assert rows_of(load(spark, tmp_path)) == rows_in(directory)


def test_chosen_columns_and_filters(spark: SparkSession, directory: Path) -> None:
    rows = rows_in(directory)
    counts = load(spark, directory, body="false").groupBy("subject").count().collect()
    assert {row["subject"]: row["count"] for row in counts} == Counter(row["subject"] for row in rows)
    assert "body" not in load(spark, directory, body="false").columns
    narrow = spark.read.format("qmq").schema("position long, subject string").load(str(directory))
    assert sorted(tuple(row) for row in narrow.collect()) == sorted((row["position"], row["subject"]) for row in rows)
    assert [field.name for field in load(spark, directory).schema if field.nullable] == [
        "key", "order_key", "source", "sender", "producer", "app",
    ]  # fmt: skip
    loose = spark.read.format("qmq").schema("tags array<string>, properties map<string,string>").load(str(directory))
    assert all(field.nullable for field in loose.schema)
    assert loose.where("tags is null or properties is null").count() == 0
    middle = rows[len(rows) // 2]["stored_at"]
    for pushdown in ("false", "true"):
        frame = load(spark, directory, pushdown=pushdown)
        chosen = frame.where("subject like 'hotel.%'").where(f"stored_at >= timestamp'{middle}'")
        assert rows_of(chosen) == [row for row in rows if row["subject"][:6] == "hotel." and row["stored_at"] >= middle]


def test_a_filter_of_one_query_leaves_nothing_out_of_the_next(spark: SparkSession, directory: Path) -> None:
    frame, rows = load(spark, directory), rows_in(directory)
    subject = rows[0]["subject"]
    assert frame.filter(frame.subject == subject).count() == sum(row["subject"] == subject for row in rows)
    assert frame.count() == len(rows)


def test_a_filter_on_key_reads_only_what_key_indexes_name(spark: SparkSession, tmp_path: Path) -> None:
    write_keys(tmp_path, with_indexes=True)
    every, chosen = (load(spark, tmp_path, part_bytes=1, pushdown="true") for _ in range(2))
    chosen = chosen.filter(chosen.key == "order-3")
    expected = [row for row in rows_of(every) if row["key"] == "order-3"]
    assert expected
    assert rows_of(chosen) == expected
    assert chosen.rdd.getNumPartitions() < every.rdd.getNumPartitions() / 2


def test_bad_batches_fail_the_query_or_are_skipped_and_listed(spark: SparkSession, tmp_path: Path) -> None:
    sent = write_orders(tmp_path, 60)
    rows, bad = rows_in(tmp_path), sent[20]
    damage(tmp_path, bad, len(bad.data) - 1)
    with pytest.raises(PySparkException, match=f"from position {bad.position} .* corrupt=skip"):
        load(spark, tmp_path).collect()
    messages = _messages_of(bad)
    kept = [row for row in rows if row["position"] not in messages or row["partition"] != bad.partition]
    assert rows_of(load(spark, tmp_path, corrupt="skip")) == kept
    (told,) = load(spark, tmp_path, view="damages").collect()
    assert (told["partition"], told["start"], told["messages"]) == (bad.partition, bad.position, len(messages))
    assert told["end"] == bad.position + len(bad.data)
    assert told["file"].endswith(".messages")


def _messages_of(sent: Sent) -> range:
    return range(sent.position, sent.position + sum(count for _, _, count in sent.runs))


def test_reads_beside_a_broker(spark: SparkSession, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    sender = Sender(store)
    for number in range(3):
        sender.send("a", b"%d" % number)
    frame = load(spark, tmp_path).select("body").orderBy("position")
    assert [bytes(row["body"]) for row in frame.collect()] == [b"0", b"1", b"2"]
    sender.send("a", b"3")
    again = load(spark, tmp_path).select("body").orderBy("position")
    assert [bytes(row["body"]) for row in again.collect()] == [b"0", b"1", b"2", b"3"]
    close_cleanly(store)


def test_what_cannot_be_is_said(spark: SparkSession, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match="give one of fail, skip"):
        load(spark, directory, corrupt="ignore")
    with pytest.raises(AnalysisException, match="there is no option colour"):
        load(spark, directory, colour="red")
    with pytest.raises(PySparkException, match="neither a data directory nor an archive"):
        load(spark, tmp_path).collect()
    with pytest.raises(PySparkException, match="there is no column price string"):
        spark.read.format("qmq").schema("price string").load(str(directory)).collect()

"""Rows become messages, and brokers are read over the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

import qmq
from qmq.errors import InvalidOption
from qmq_spark.write import QmqWriter, WriteOptions, chunks_of, rows_of, write_options
from tests.broker_process import BrokerProcess, broker_process
from tests.spark.reads import read

ROWS = "subject string, key string, tags array<string>, properties map<string,string>, body binary"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("writing") / "data", partitions=2) as started:
        yield started


TYPES = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "array<string>": ArrayType(StringType()),
    "array<int>": ArrayType(IntegerType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def schema_of(text: str) -> StructType:
    """Return the schema as Spark parses it, which needs a session."""
    columns = [column.split(" ") for column in text.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in columns])


def test_rows_go_and_come_back_over_the_wire(spark: SparkSession, broker: BrokerProcess) -> None:
    sent = [
        ("hotel.order", f"k{number}", ["vip"], {"price": str(number)}, b"%d" % number) if number % 3
        else ("flight.order", None, None, None, b"%d" % number)
        for number in range(3_000)
    ]  # fmt: skip
    frame = spark.createDataFrame(sent, ROWS).repartition(3)
    frame.write.format("qmq").mode("append").save(broker.url)
    back = spark.read.format("qmq").option("part_bytes", 20_000).load(broker.url)
    assert back.rdd.getNumPartitions() > 2
    table = back.toArrow()
    got = sorted(
        (row["subject"], row["key"], row["tags"], dict(row["properties"]), row["body"]) for row in table.to_pylist()
    )
    assert got == sorted((name, key, tags or [], properties or {}, body) for name, key, tags, properties, body in sent)
    local = read(broker.path)[0]
    places = sorted((row["partition"], row["position"], row["message_id"]) for row in table.to_pylist())
    assert places == sorted((row["partition"], row["position"], row["message_id"]) for row in local)
    counted = spark.read.format("qmq").load(broker.url).where("subject = 'hotel.order'").groupBy("subject").count()
    assert [tuple(row) for row in counted.collect()] == [("hotel.order", 2_000)]


def test_what_cannot_be_sent_fails_the_write(spark: SparkSession, broker: BrokerProcess) -> None:
    frame = spark.createDataFrame([("a..b", b"")], "subject string, body binary")
    with pytest.raises(PySparkException, match=r"a\.\.b"):
        frame.write.format("qmq").mode("append").save(broker.url)
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("qmq").mode("overwrite").save(broker.url)


def rows(first: int, count: int) -> pa.RecordBatch:
    """Return rows with text bodies."""
    return pa.RecordBatch.from_pydict({"body": [f"{number}" for number in range(first, first + count)]})


def test_a_broker_that_restarts_gets_each_row_once(tmp_path: Path) -> None:
    with broker_process(tmp_path / "data") as broker:

        def batches() -> Iterator[pa.RecordBatch]:
            for number in range(6):
                yield rows(number * 1_500, 1_500)
                if number % 2:
                    broker.kill()
                    broker.start()

        QmqWriter(WriteOptions(broker.url, "a", "flush", 60.0)).write(batches())
        with qmq.connect_sync(broker.url) as client, client.subscribe("a", start="first") as consumer:
            got: list[bytes] = []
            while len(got) < 9_000:
                pulled = consumer.pull_batch(max_count=10_000, timeout=30)
                assert len(pulled)
                got += pulled.bodies
            assert consumer.pull(timeout=0) == []
        assert sorted(map(int, got)) == list(range(9_000))


def bodies_in(url: str, subject: str) -> list[int]:
    """Return all stored bodies of a subject, as numbers."""
    with qmq.connect_sync(url) as client, client.subscribe(subject, start="first") as consumer:
        found: list[bytes] = []
        while len(pulled := consumer.pull_batch(max_count=10_000, timeout=0.5)):
            found += pulled.bodies
    return sorted(map(int, found))


class Ended(Exception):
    """The end of a task."""


CHUNK = len(next(chunks_of(rows_of(iter([rows(0, 10_000)]), "repeated.0"))))


@pytest.mark.parametrize("sent", [1, CHUNK, CHUNK + 1, 20_000])
def test_a_repeated_task_stores_nothing_twice(broker: BrokerProcess, sent: int) -> None:
    subject = f"repeated.{sent % 2}"
    writer = QmqWriter(WriteOptions(broker.url, subject, "append", 60.0))

    def ending() -> Iterator[pa.RecordBatch]:
        yield rows(0, sent)
        raise Ended

    before = bodies_in(broker.url, subject)
    with pytest.raises(Ended):
        writer.write(ending())
    *whole, _ = chunks_of(rows_of(iter([rows(0, sent)]), subject))
    assert bodies_in(broker.url, subject) == sorted([*before, *range(sum(map(len, whole)))])
    for _ in range(2):
        writer.write(iter([rows(0, 10_000), rows(10_000, 20_000)]))
        assert bodies_in(broker.url, subject) == sorted([*before, *range(30_000)]), "another write is another one"


def test_a_repeated_task_with_other_rows_is_refused(broker: BrokerProcess) -> None:
    for number, others in enumerate(([rows(1, 20_000)], [rows(0, 10_000)], [rows(0, 8_192), rows(9_000, 8_192)])):
        writer = QmqWriter(WriteOptions(broker.url, f"others.{number}", "append", 60.0))
        writer.write(iter([rows(0, 20_000)]))
        with pytest.raises(InvalidOption, match="has other rows, or the same ones in another order"):
            writer.write(iter(others))
        assert bodies_in(broker.url, f"others.{number}") == list(range(20_000))


def test_the_option_producer_names_a_write(broker: BrokerProcess) -> None:
    for name, count in (("import-7", 1), ("", 2)):
        subject = f"named.{count}"
        given = {"path": broker.url, "subject": subject, "producer": name}
        for _ in range(2):
            QmqWriter(write_options(given, schema_of("body string"), overwrite=False)).write(iter([rows(0, 10)]))
        assert bodies_in(broker.url, subject) == sorted([*range(10)] * count)


def test_chunks_go_by_rows_alone(broker: BrokerProcess) -> None:
    large = pa.RecordBatch.from_pydict({"body": [b"%d" % number + bytes(90_000) for number in range(30)]})
    writer = QmqWriter(WriteOptions(broker.url, "chunks", "append", 60.0))

    def ending() -> Iterator[pa.RecordBatch]:
        yield large.slice(0, 17)
        raise Ended

    with pytest.raises(Ended):
        writer.write(ending())
    writer.write(large.slice(first, 3) for first in range(0, 30, 3))
    with qmq.connect_sync(broker.url) as client:
        assert [info.messages for info in client.subjects("chunks")] == [30]


def test_more_than_a_client_queues(broker: BrokerProcess) -> None:
    large = pa.RecordBatch.from_pydict({"body": [bytes(200_000)] * 500, "subject": ["large"] * 500})
    QmqWriter(WriteOptions(broker.url, None, "append", 60.0)).write(iter([large]))
    with qmq.connect_sync(broker.url) as client:
        assert [info.messages for info in client.subjects("large")] == [500]


def test_a_row_without_a_subject_or_a_body_is_refused(broker: BrokerProcess) -> None:
    for row, lacking in ({"subject": None, "body": "b"}, "subject"), ({"subject": "a", "body": None}, "body"):
        batch = pa.RecordBatch.from_pylist([row])
        with pytest.raises(InvalidOption, match=f"a row has no {lacking}"):
            QmqWriter(WriteOptions(broker.url, None, "append", 60.0)).write(iter([batch]))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"priority": "urgent"}, "priority must be 'low', 'normal' or 'high', or 0, 1 or 2, not 'urgent'"),
        ({"priority": ""}, "or 0, 1 or 2, not ''"),
        ({"priority": "3"}, "or 0, 1 or 2, not '3'"),
        ({"order_key": ""}, "an order key has 1 to 1,024 bytes as UTF-8, not 0 as ''"),
        ({"order_key": "k" * 1_025}, "not 1,025 as 'kkk"),
        ({"order_key": "k", "priority": "lowest"}, "priority must be"),
    ],
)
def test_a_row_with_a_wrong_lane_fails_the_write(broker: BrokerProcess, columns: dict[str, str], said: str) -> None:
    batch = pa.RecordBatch.from_pylist([{"subject": "lanes", "body": "b", **columns}])
    with pytest.raises(InvalidOption, match=said):
        QmqWriter(WriteOptions(broker.url, None, "append", 60.0)).write(iter([batch]))


@pytest.mark.parametrize(
    ("given", "columns", "said"),
    [
        ({}, "subject string, body binary", "nothing is no URL of a broker"),
        ({"path": "/data"}, "subject string, body binary", "/data is no URL of a broker"),
        ({"path": "qmq://h", "colour": "red"}, "subject string, body binary", "no option colour"),
        ({"path": "qmq://h", "durability": "none"}, "subject string, body binary", "flush, append"),
        ({"path": "qmq://h", "send_timeout": "soon"}, "subject string, body binary", "give seconds"),
        ({"path": "qmq://h"}, "subject string", "no column body"),
        ({"path": "qmq://h"}, "body binary", "column subject, or the option"),
        ({"path": "qmq://h", "subject": "a"}, "subject string, body binary", "column subject, or the option"),
        ({"path": "qmq://h"}, "subject string, body binary, price int", "price int is no column"),
        ({"path": "qmq://h"}, "subject string, body int", "body int is no column"),
        ({"path": "qmq://h"}, "subject string, body binary, priority int", "priority int is no column"),
        ({"path": "qmq://h"}, "subject string, body binary, order_key binary", "order_key binary is no column"),
        ({"path": "qmq://h"}, "subject string, body binary, lane int", "lane int is no column"),
        ({"path": "qmq://h"}, "subject string, body binary, tags array<int>", "tags array<int> is no column"),
        ({"path": "qmq://h"}, "subject string, body binary, properties map<string,int>", "is no column"),
    ],
)
def test_what_cannot_be(given: dict[str, str], columns: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        write_options(given, schema_of(columns), overwrite=False)


def test_each_option() -> None:
    given: dict[str, Any] = {"path": "qmq://h", "subject": "a", "durability": "append", "send_timeout": "5"}
    options = write_options(given, schema_of("body string, key string"), overwrite=False)
    assert options == WriteOptions("qmq://h", "a", "append", 5.0)
    assert write_options({"path": "qmq://h"}, schema_of(ROWS), overwrite=False).subject is None

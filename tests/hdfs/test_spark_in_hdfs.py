"""Spark reads an archive in HDFS: its tasks fetch their parts by themselves; a stream takes what is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from qmq.archive.hdfs_write import WritableHdfsFiles
from qmq_spark.options import read_options
from qmq_spark.stream import QmqStreamReader
from tests.archive.orders import rows_in, write_orders
from tests.hdfs.trees import archive


def test_reads_an_archive_in_hdfs(spark: SparkSession, tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_orders(tmp_path, 60)
    archive(tmp_path, tree)
    frame = spark.read.format("qmq").option("part_bytes", 20_000).load(tree.name)
    assert frame.rdd.getNumPartitions() > 1
    found: list[dict[str, Any]] = frame.orderBy("partition", "position").toArrow().to_pylist()
    assert found == rows_in(tmp_path)


def test_a_stream_reads_an_archive_in_hdfs(tree: WritableHdfsFiles, tmp_path: Path) -> None:
    write_orders(tmp_path, 30)
    archive(tmp_path, tree)
    options = read_options({"path": tree.name})
    reader = QmqStreamReader(options, options.schema)
    end = reader.latestOffset({}, ReadAllAvailable())
    rows = [row for part in reader.partitions({}, end) for batch in reader.read(part) for row in batch.to_pylist()]
    assert sorted(rows, key=lambda row: (row["partition"], row["position"])) == rows_in(tmp_path)
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.stop()

"""Archiving as a job of Spark, to HDFS; and Spark reading that archive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from qmq_spark import archive_job
from tests.archive.orders import rows_in, write_orders
from tests.hdfs.cluster import Cluster
from tests.spark.session import environment_of, settings_of


def test_archives_to_hdfs_by_spark_submit(spark: SparkSession, hdfs: Cluster, tmp_path: Path) -> None:
    """Settings in spark.hadoop.* count, and executors read what the job wrote."""
    write_orders(tmp_path / "data", 30)
    place = f"{hdfs.address}/{tmp_path.name}"
    settings = {**settings_of(tmp_path, 1), **{f"spark.hadoop.{name}": value for name, value in hdfs.settings.items()}}
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    submit = [str(Path(sys.prefix, "bin", "spark-submit")), *options, str(archive_job.__file__)]
    done = subprocess.run(
        [*submit, str(tmp_path / "data"), "--to", place],
        env={**environment_of(), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if " INFO " not in line)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["receipts"] == said["copied"] > 0
    assert said["destination"] == place
    frame = spark.read.format("qmq").option("part_bytes", 20_000).load(place)
    assert frame.rdd.getNumPartitions() > 1
    table = frame.orderBy("partition", "position").toArrow()
    assert [dict(row) for row in table.to_pylist()] == rows_in(tmp_path / "data")


def test_archives_in_both_forms(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_orders(tmp_path / "data", 10)
    arguments = [str(tmp_path / "data"), "--to", str(tmp_path / "archive"), "--as", "both"]
    assert archive_job.main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["messages"] == said["parquet"]["messages"] == len(rows_in(tmp_path / "data"))


def test_what_cannot_be_is_one_line(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert archive_job.main([str(tmp_path), "--to", str(tmp_path / "archive")]) == 2
    assert "is no data directory" in capsys.readouterr().err
    write_orders(tmp_path / "data", 2)
    (tmp_path / "archive").mkdir()
    held = {"host": "elsewhere", "process": 7, "started": "now", "renewed_at_us": 1 << 62}
    (tmp_path / "archive" / "_lock").write_text(json.dumps(held))
    assert archive_job.main([str(tmp_path / "data"), "--to", str(tmp_path / "archive")]) == 1
    assert "process 7 on elsewhere" in capsys.readouterr().err

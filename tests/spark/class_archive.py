"""Keeps what Java makes of the classes of Spark, so that the sessions of tests start in half the processor time.

``python -m tests.spark.class_archive`` runs what tests run, and writes the archive to .venv. `make env-spark` calls it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Java says nothing of an archive that does not fit it, and does without.
_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off"
ARCHIVE: Final = Path(sys.prefix, "spark.jsa")


def java_options() -> str:
    """Return the options of Java to use the archive, if there is one."""
    return f"{_QUIET} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else ""


def main() -> None:
    """Make the archive."""
    from tests.archive.orders import write_orders
    from tests.spark import session

    draft = ARCHIVE.with_suffix(".tmp")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_orders(directory / "data", 30)
        with session.running(directory, f"{_QUIET} -XX:ArchiveClassesAtExit={draft}") as spark:
            _work(spark, directory)
            gateway = spark.sparkContext._gateway
        assert gateway is not None
        gateway.shutdown()
        java = gateway.proc
        java.stdin.close()
        java.wait()  # it writes the archive as its last
    draft.replace(ARCHIVE)


def _work(spark: SparkSession, directory: Path) -> None:
    """Read, write and stream, as tests do."""
    frame = spark.read.format("qmq").option("part_bytes", 20_000).load(str(directory / "data"))
    frame.orderBy("partition", "position").toArrow()
    frame.filter("subject like 'hotel.%'").groupBy("subject").count().collect()
    frame.drop("properties").write.parquet(str(directory / "parquet"))
    spark.read.parquet(str(directory / "parquet")).selectExpr("count(*)", "sum(length(body))").collect()
    stream = spark.readStream.format("qmq").load(str(directory / "data")).writeStream.format("parquet")
    query = stream.option("checkpointLocation", str(directory / "checkpoint")).trigger(availableNow=True)
    assert query.start(str(directory / "rows")).awaitTermination(240)


if __name__ == "__main__":
    main()

"""Run `qmq archive` as a job of Spark: ``spark-submit .../qmq_spark/archive_job.py SOURCE --to DEST``.

The driver copies, so it must see the data directory. The settings ``--conf spark.hadoop.*`` count for HDFS.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qmq.archive.write import archive_segments, open_run
from qmq.errors import QmqError, UsageError
from qmq_spark.parquet.archive import archive_parquet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMS: Final = ("segments", "parquet", "both")
_HADOOP: Final = "spark.hadoop."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job, and print its counts as one JSON object. Return the exit code, as that of ``qmq archive``."""
    from pyspark.sql import SparkSession

    parser = argparse.ArgumentParser(prog="archive_job.py", description="Archive a data directory of QMQ.")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the data directory, which the driver must see")
    parser.add_argument("--to", required=True, metavar="DEST", help="the archive: a path, file:// or hdfs:// URL")
    parser.add_argument(
        "--as",
        dest="form",
        choices=FORMS,
        default="segments",
        help="copy segments (default), write Parquet, or both",
    )
    options = parser.parse_args(arguments)
    session = SparkSession.builder.appName("qmq archive").getOrCreate()
    try:
        said = archive(session, options.source, options.to, options.form)
    except QmqError as error:
        print(f"qmq: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(json.dumps({"destination": options.to, **said}))
    tables = said.get("parquet", {})
    return 1 if tables.get("damages") or tables.get("bad_files") else 0


def archive(session: SparkSession, source: Path, destination: str, form: str = "segments") -> dict[str, Any]:
    """Archive with the settings of a session, and return the counts, as ``qmq archive --json`` prints them.

    Raises InvalidOption, DirectoryInUse, BadBytes, StorageFull, StorageFailed.
    """
    settings = session.sparkContext.getConf().getAll()
    hadoop = {name.removeprefix(_HADOOP): value for name, value in settings if name.startswith(_HADOOP)}
    said: dict[str, Any] = {}
    with open_run(source, destination, _now_us, hadoop) as run:
        if form != "parquet":
            said |= asdict(archive_segments(run.source, run.files, run.lock, _now_us))
        if form != "segments":
            name = os.urandom(4).hex()
            said["parquet"] = asdict(archive_parquet(run.source.files, run.source.segments, run.files, run.lock, name))
    return said


def _now_us() -> int:
    return time.time_ns() // 1_000


if __name__ == "__main__":
    sys.exit(main())

"""Run the Spark part in a process of its own: a session, and queries one after another.

``python -m bench.history.queries`` with a Job as JSON; it prints one line of JSON for each query, and one about memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import qmq_spark
from bench.history.ready import ReadySource
from bench.history.watching import Memory, cpu_s

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The settings of a session, besides where it runs.
_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class Job(NamedTuple):
    """The places to read, each with its queries by name, and the number of messages; a directory to write to; the
    session's cores and memory.
    """

    queries: list[tuple[str, str]]
    messages: int
    scratch: str
    cores: int = 2
    memory: str = "1g"
    settings: dict[str, str] = {}  # noqa: RUF012 (a tuple's default, never changed)


def _read(session: SparkSession, place: str, **options: str) -> DataFrame:
    return session.read.format("qmq").options(**options).load(place)


def _subjects(frame: DataFrame) -> list[list[Any]]:
    return [list(row) for row in frame.groupBy("subject").count().collect()]


def _count_subjects(session: SparkSession, place: str) -> list[list[Any]]:
    return _subjects(session.read.format("qmq").schema("subject string").load(place))


def _count_subjects_of_all_but_bodies(session: SparkSession, place: str) -> list[list[Any]]:
    return _subjects(_read(session, place, body="false"))


def _sum_lengths(session: SparkSession, place: str) -> list[list[Any]]:
    frame = _read(session, place).selectExpr("count(*)", "sum(length(body))")
    return [list(row) for row in frame.collect()]


def _sum_lengths_of_bodies_alone(session: SparkSession, place: str) -> list[list[Any]]:
    frame = session.read.format("qmq").schema("body binary").load(place).selectExpr("count(*)", "sum(length(body))")
    return [list(row) for row in frame.collect()]


def _write_nowhere(session: SparkSession, place: str) -> list[list[Any]]:
    _read(session, place).write.format("noop").mode("overwrite").save()
    return []


def _write_ready_nowhere(session: SparkSession, place: str) -> list[list[Any]]:
    ready = session.read.format("ready").option("rows", session.conf.get("bench.rows")).load(place)
    ready.write.format("noop").mode("overwrite").save()
    return []


def _check(session: SparkSession, place: str) -> list[list[Any]]:
    frame = session.read.format("qmq").schema("subject string, body binary").load(place)
    frame.createOrReplaceTempView("checked")
    found = session.sql(
        "SELECT subject, count(*), sum(length(body)), CAST(sum(crc32(body)) AS LONG) FROM checked GROUP BY subject"
    )
    return [list(row) for row in found.collect()]


def _write_parquet(session: SparkSession, place: str) -> list[list[Any]]:
    with tempfile.TemporaryDirectory(dir=session.conf.get("spark.local.dir")) as directory:
        frame = _read(session, place)
        frame.write.mode("overwrite").option("compression", "zstd").parquet(directory)
        return [[session.read.parquet(directory).count()]]


#: The cost of Spark itself: see ``ready``.
READY: Final = "noop write, all columns, batches ready before"
QUERIES: Final[dict[str, Callable[..., list[list[Any]]]]] = {
    "count by subject": _count_subjects,
    "count by subject, all columns but the body": _count_subjects_of_all_but_bodies,
    "sum of lengths, bodies alone": _sum_lengths_of_bodies_alone,
    "sum of lengths, all columns": _sum_lengths,
    "noop write, all columns": _write_nowhere,
    READY: _write_ready_nowhere,
    "Parquet by Spark": _write_parquet,
    "check": _check,
}


def main() -> None:
    """Do the job in the arguments."""
    from pyspark.sql import SparkSession

    job = Job(**json.loads(sys.argv[1]))
    began = time.perf_counter()
    builder = SparkSession.builder.master(f"local[{job.cores}]").config("spark.driver.memory", job.memory)
    own = {"spark.local.dir": job.scratch, "spark.sql.warehouse.dir": str(Path(job.scratch, "warehouse"))}
    for name, value in {**_SETTINGS, **own, **job.settings}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    qmq_spark.register(session)
    session.dataSource.register(ReadySource)
    session.conf.set("bench.rows", str(job.messages))
    _say({"query": "session", "seconds": time.perf_counter() - began, "cpu_s": cpu_s(), "rows": []})
    memory = Memory()
    with memory.watched():
        for query, place in job.queries:
            cpu, began = cpu_s(), time.perf_counter()
            rows = QUERIES[query](session, place)
            seconds = time.perf_counter() - began
            _say({"query": query, "seconds": seconds, "cpu_s": cpu_s() - cpu, "rows": rows})
    _say({"memory": memory.most})
    session.stop()


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

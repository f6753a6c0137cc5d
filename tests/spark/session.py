"""The one Spark session of a test run: it takes seconds to start, so tests that need it come first, in one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark import class_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
#: Where Python finds this tree's packages.
PATHS = (ROOT, ROOT / "spark")


def settings_of(directory: Path, cores: int = 2, java_options: str | None = None) -> dict[str, str]:
    """Return the settings of a session; its files go to *directory*."""
    archive = class_archive.java_options() if java_options is None else java_options
    return {
        "spark.master": f"local[{cores}]",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        # What tests run is not run often: compiled by the first compiler alone it takes little more than half the time.
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {archive}",
        "spark.local.dir": str(directory),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


def environment_of() -> dict[str, str]:
    """Return the environment of Spark's processes: they find this tree, and do not count covered lines."""
    there = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
    known = [there["PYTHONPATH"]] if there.get("PYTHONPATH") else []
    paths = os.pathsep.join([*map(str, PATHS), *known])
    return {**there, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": paths}


@contextmanager
def running(directory: Path, java_options: str | None = None) -> Iterator[SparkSession]:
    """Yield a session on two cores, with the data source registered; *java_options* instead of its class archive."""
    from pyspark.sql import SparkSession

    import qmq_spark

    builder = SparkSession.builder
    for name, value in settings_of(directory, java_options=java_options).items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:  # the JVM keeps what it was started with
        environment = environment_of()
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        patch.delenv("PYSPARK_PYTHON", raising=False)  # as with who follows the documents
        for name in ("SPARK_LOCAL_IP", "PYTHONPATH"):
            patch.setenv(name, environment[name])
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    qmq_spark.register(session)
    try:
        yield session
    finally:
        session.stop()

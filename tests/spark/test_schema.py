"""The Arrow columns equal those that Spark gets, and need no Spark."""

from __future__ import annotations

import subprocess
import sys

from pyspark.sql.pandas.types import to_arrow_schema

from qmq_spark.options import COLUMNS
from qmq_spark.schema import SCHEMA


def test_columns_are_those_of_the_data_source() -> None:
    assert to_arrow_schema(COLUMNS, timezone="UTC").equals(SCHEMA)


def test_archiving_needs_no_spark() -> None:
    code = "import qmq_spark.parquet.archive, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pyarrow" in done.stdout.split()
    assert "pyspark" not in done.stdout.split()

"""Read without Spark: the parts of a source, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from qmq_spark.options import COLUMNS
from qmq_spark.plan import open_source, plan
from qmq_spark.read import RangeReader, SegmentDamage, Wanted

SCHEMA = to_arrow_schema(COLUMNS, timezone="UTC")


def schema_of(*names: str) -> pa.Schema:
    """Return the schema of the columns of these names."""
    return pa.schema([SCHEMA.field(name) for name in names])


def read(
    place: Path, wanted: Wanted | None = None, schema: pa.Schema = SCHEMA, part_bytes: int = 1 << 20
) -> tuple[list[dict[str, Any]], list[SegmentDamage]]:
    """Return all rows of a source, in order, and the damages."""
    wanted = wanted if wanted is not None else Wanted()
    source, damages, rows = open_source(str(place)), list[SegmentDamage](), list[dict[str, Any]]()
    reader = RangeReader(source.files, wanted, schema, damages.append)
    for part in plan(source, wanted, part_bytes):
        for part_range in part:
            for batch in reader.record_batches(part_range):
                batch.validate(full=True)
                rows += batch.to_pylist()
    return rows, damages

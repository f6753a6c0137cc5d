"""The filters of a query that save reading, and that they never save too much."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from qmq_spark.filters import narrowed
from qmq_spark.read import Wanted

NOON = datetime(2025, 12, 1, 12, tzinfo=UTC)
NOON_US = 1_764_590_400_000_000
STORED = ("stored_at",)


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        ([EqualTo(("subject",), "a")], {"subjects": frozenset("a")}),
        ([In(("subject",), ("a", "b")), EqualTo(("subject",), "b")], {"subjects": frozenset("b")}),
        ([StringStartsWith(("subject",), "hotel.")], {"prefixes": ("hotel.",)}),
        ([EqualTo(("partition",), 1)], {"partitions": frozenset([1])}),
        ([GreaterThan(STORED, NOON)], {"stored_from": NOON_US + 1}),
        ([GreaterThanOrEqual(STORED, NOON.replace(tzinfo=None))], {"stored_from": NOON_US}),
        ([LessThan(STORED, NOON)], {"stored_until": NOON_US}),
        ([LessThanOrEqual(("created_at",), NOON)], {"created_until": NOON_US + 1}),
        ([EqualTo(STORED, NOON)], {"stored_from": NOON_US, "stored_until": NOON_US + 1}),
        ([LessThan(STORED, datetime(1960, 1, 1, tzinfo=UTC))], {"stored_until": 0}),
        ([EqualTo(("key",), "order-1"), In(("key",), ("order-1", "b"))], {"keys": frozenset(["order-1"])}),
        ([In(("key",), ("a", None))], {}),
        ([IsNotNull(("subject",)), Not(EqualTo(("subject",), "a")), EqualTo(("tags",), "a")], {}),
        ([EqualTo(("properties", "subject"), "a")], {}),
    ],
)
def test_what_filters_spare(conditions: list[Filter], wanted: dict[str, Any]) -> None:
    assert narrowed(Wanted(), conditions) == Wanted(**wanted)

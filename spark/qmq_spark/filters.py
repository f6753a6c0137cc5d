"""Use filters of a query on subject, key, times and partition to read less. Spark applies all filters again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from qmq_spark.read import Wanted

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_TIMES: Final = ("stored", "created")


def narrowed(wanted: Wanted, filters: Iterable[Filter]) -> Wanted:
    """Return what is still to be read if all *filters* hold; filters on other things are ignored."""
    for condition in filters:
        wanted = _narrowed(wanted, condition)
    return wanted


def _narrowed(wanted: Wanted, condition: Any) -> Wanted:
    attribute: tuple[str, ...] = getattr(condition, "attribute", ())
    value: Any = getattr(condition, "value", None)
    if len(attribute) != 1:
        return wanted
    name = attribute[0]
    if name == "subject" and isinstance(condition, StringStartsWith):
        return replace(wanted, prefixes=(*wanted.prefixes, value))
    if name in ("subject", "partition", "key") and isinstance(condition, EqualTo | In):
        values = frozenset(value if isinstance(condition, In) else [value])
        if name == "key" and not all(isinstance(one, str) for one in values):
            return wanted  # a null is no key
        known: frozenset[Any] | None = getattr(wanted, f"{name}s")
        changed: dict[str, Any] = {f"{name}s": values if known is None else values & known}
        return replace(wanted, **changed)
    for time in _TIMES:
        if name == f"{time}_at" and isinstance(value, datetime):
            return _in_time(wanted, condition, time, microseconds(value))
    return wanted


def _in_time(wanted: Wanted, condition: Any, time: str, us: int) -> Wanted:
    first, until = getattr(wanted, f"{time}_from"), getattr(wanted, f"{time}_until")
    if isinstance(condition, GreaterThan | GreaterThanOrEqual | EqualTo):
        first = max(first, us + isinstance(condition, GreaterThan))
    if isinstance(condition, LessThan | LessThanOrEqual | EqualTo):
        until = min(until, us + (not isinstance(condition, LessThan)))
    return replace(wanted, **{f"{time}_from": max(first, 0), f"{time}_until": max(until, 0)})


def microseconds(time: datetime) -> int:
    """Return microseconds since 1970. Spark gives times with a zone; a time without one is in UTC."""
    return ((time if time.tzinfo is not None else time.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND

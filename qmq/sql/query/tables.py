"""The tables of queries: their columns, and how DuckDB reads one a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from qmq.sql.query.filters import RowFilter
from qmq_spark.schema import SCHEMA as STORED

_TIME: Final = pa.timestamp("us", "UTC")
_TEXTS: Final = pa.list_(pa.string())

#: The columns of each table. Those of messages are the ones that archives and Spark have, but for the number of the
#: lane, which priority and order key say.
SCHEMAS: Final = {
    "messages": pa.schema([field for field in STORED if field.name != "lane"]),
    "subjects": pa.schema(
        {
            "subject": pa.string(),
            "messages": pa.int64(),
            "first_sequence": pa.int64(),
            "next_sequence": pa.int64(),
            "delayed": pa.int64(),
            "high": pa.int64(),
            "low": pa.int64(),
            "ordered": pa.int64(),
            "broker": pa.string(),
        }
    ),
    "groups": pa.schema(
        {
            "group_name": pa.string(),
            "mode": pa.string(),
            "follows": _TEXTS,
            "consumers": pa.int64(),
            "ready": pa.int64(),
            "ready_exact": pa.bool_(),
            "oldest": _TIME,
            "in_flight": pa.int64(),
            "in_retry": pa.int64(),
            "dead": pa.int64(),
            "skipped": pa.int64(),
            "filtered": pa.int64(),
            "delayed": pa.int64(),
            "broker": pa.string(),
        }
    ),
    "consumers": pa.schema(
        {
            "group_name": pa.string(),
            "consumer": pa.string(),
            "program": pa.string(),
            "online": pa.bool_(),
            "in_flight": pa.int64(),
            "in_flight_since": _TIME,
            "last_pull": _TIME,
            "silent_s": pa.float64(),
            "stalled_s": pa.float64(),
            "order_slots": pa.int64(),
            "broker": pa.string(),
        }
    ),
    "dead_letters": pa.schema(
        {
            "group_name": pa.string(),
            "message_id": pa.string(),
            "subject": pa.string(),
            "sequence": pa.int64(),
            "attempts": pa.int64(),
            "session_expiries": pa.int64(),
            "reason": pa.string(),
            "died_at": _TIME,
            "broker": pa.string(),
        }
    ),
}


class Scan(NamedTuple):
    """One read of a table for a query: the columns that it needs, and the filter of its rows."""

    #: Those of the result, and those that the filter needs.
    schema: pa.Schema
    filter: RowFilter


#: Yields at least the rows of a scan, with its columns.
Reader = Callable[[Scan], Iterator[pa.RecordBatch]]


class Table(ds.Dataset):  # type: ignore[misc]  # pyarrow ships no types
    """A table that DuckDB scans: it takes datasets of Arrow, and calls ``scanner`` with the columns and the filter."""

    def __init__(self, name: str, read: Reader, failures: list[BaseException]) -> None:
        """*failures* takes the error that ends a scan, of which DuckDB tells its text alone."""
        self._schema = SCHEMAS[name]
        self._read = read
        self._failures = failures

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._schema

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_options: Any
    ) -> ScannedRows:
        """Return the rows that pass a filter, with these columns."""
        chosen = list(self._schema.names if columns is None else columns)
        row_filter = RowFilter(filter, self._schema)
        names = [name for name in self._schema.names if name in chosen or name in row_filter.columns]
        scan = Scan(pa.schema([self._schema.field(name) for name in names]), row_filter)
        return ScannedRows(pa.schema([self._schema.field(name) for name in chosen]), self._rows(scan, chosen))

    def _rows(self, scan: Scan, columns: list[str]) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._read(scan):
                yield from scan.filter.applied(batch, columns)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failures.append(error)
            raise


class ScannedRows:
    """The rows of a scan, as DuckDB takes them."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self._schema = schema
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        """Return them as a stream."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches)


def batches_of(rows: Iterable[dict[str, Any]], schema: pa.Schema, size: int = 4_096) -> Iterator[pa.RecordBatch]:
    """Yield rows in batches, with the columns of *schema*."""
    held = list[dict[str, Any]]()
    for row in rows:
        held.append(row)
        if len(held) == size:
            yield pa.RecordBatch.from_pylist(held, schema)
            held = []
    if held:
        yield pa.RecordBatch.from_pylist(held, schema)

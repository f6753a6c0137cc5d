"""Messages as they lie in logs and archives: read as Spark reads them, by run and without a loop over messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from typing import Final

import pyarrow as pa

from qmq.sql.query.filters import Limits, microseconds
from qmq.sql.query.tables import Scan
from qmq_spark.parquet.read import FileDamage, PieceReader, missing, plan_files
from qmq_spark.plan import SourceSnapshot, SourceView, open_files, plan
from qmq_spark.read import RangeReader, SegmentDamage, Wanted

Damage = SegmentDamage | FileDamage

#: Bytes that are planned together.
_PART_BYTES: Final = 128 << 20
_END_US: Final = 1 << 63


class StoredMessages:
    """The messages of a data directory, an archive, or the logs of running brokers, at one moment."""

    def __init__(self, location: str, report: Callable[[Damage], None]) -> None:
        """*report* takes each place that cannot be read."""
        self._location = location
        self._report = report

    def open(self) -> None:
        """Look what is there. Raises InvalidOption if it is nothing of QMQ, Forbidden, StorageError, ConnectionLost."""
        _ = self._snapshot

    @cached_property
    def _snapshot(self) -> SourceSnapshot:
        with SourceView(self._location) as view:
            return view.look()

    def read(self, scan: Scan) -> Iterator[pa.RecordBatch]:
        """Yield at least the messages of a scan. Raises StorageError, ConnectionLost."""
        wanted = wanted_of(scan)
        if wanted is None:
            return
        with closing(open_files(self._location)) as files:  # of its own: connections are for one thread
            source = self._snapshot._replace(files=files)
            if source.table is not None:
                for damage in missing(source.table, wanted, files.name):
                    self._report(damage)
                pieces = PieceReader(files, wanted, scan.schema, self._report)
                for part in plan_files(source.table, wanted, _PART_BYTES):
                    for piece in part:
                        yield from pieces.record_batches(piece)
            ranges = RangeReader(files, wanted, scan.schema, self._report)
            for segment_ranges in plan(source, wanted, _PART_BYTES):
                for segment_range in segment_ranges:
                    yield from ranges.record_batches(segment_range)


def wanted_of(scan: Scan) -> Wanted | None:
    """Return what a scan has to read; None: nothing."""
    subject, key, partition = (scan.filter.of(name) for name in ("subject", "key", "partition"))
    message_id = scan.filter.of("message_id")
    (stored_from, stored_until), (created_from, created_until) = (
        times_us(scan.filter.of(name)) for name in ("stored_at", "created_at")
    )
    if stored_from >= stored_until or created_from >= created_until:
        return None
    return Wanted(
        prefixes=(subject.prefix,) if subject.prefix else (),
        subjects=subject.values,
        stored_from=stored_from,
        stored_until=stored_until,
        created_from=created_from,
        created_until=created_until,
        partitions=partition.values,
        keys=texts_of(key),
        ids=texts_of(message_id),
    )


def times_us(limits: Limits) -> tuple[int, int]:
    """Return the range of a column of times: from (included) and until (excluded), in microseconds since 1970."""
    first, until = 0, _END_US
    if limits.values is not None:
        times = [microseconds(value) for value in limits.values if value is not None]
        first, until = (min(times), max(times) + 1) if times else (0, 0)
    if limits.low is not None:
        first = max(first, microseconds(limits.low))
    if limits.high is not None:
        until = min(until, microseconds(limits.high) + (not limits.below_high))
    return max(first, 0), max(until, 0)


def texts_of(limits: Limits) -> frozenset[str] | None:
    """Return the only texts that a column may have; None if it may have others, or none at all."""
    if limits.values is None or None in limits.values:
        return None
    return limits.values

"""Streams: micro-batches between offsets, which say what was read (``qmq_spark.offsets``).

A partition that the offset does not name is read from its first stored message. The messages between two offsets never
change, so a repeated micro-batch gives the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from qmq.errors import BadBytes
from qmq.intervals import Intervals
from qmq_spark.offsets import Offset, Read, before, between, everything, limited, name_of, offset_of, read_of
from qmq_spark.options import ReadOptions
from qmq_spark.plan import PartitionKey, SourceSnapshot, SourceView, plan
from qmq_spark.tasks import TaskPart, read_part

if TYPE_CHECKING:
    import pyarrow as pa

_LOG: Final = logging.getLogger("qmq_spark")


class QmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads messages as they arrive."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._view = SourceView(options.place, only_segments=True, tls=options.tls)
        #: The end of a stream that only reads what is there when it starts.
        self._target: Read | None = None
        #: The end at which this stream begins, until a micro-batch has been planned.
        self._last: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Return where the stream begins. Spark asks again when it repeats the first micro-batch.

        So it only skips what *since* excludes anyway. A stream that begins at the end has an empty first micro-batch,
        so that there is nothing to repeat: Spark saves where it ended.
        """
        if self._options.starts_new:
            self._last = offset_of({key: _whole(ranges) for key, ranges in everything(self._view.look()).items()})
            return self._last
        return offset_of(before(self._view.look(), self._options.since_us)) if self._options.since_us else {}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        self._target = everything(self._view.look())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        most = self._options.max_trigger_bytes
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        last, self._last = self._last, None
        if last == start:
            return start
        source, read = self._view.look(), read_of(start)
        self._check_there(source, {key: _end_of(ranges) for key, ranges in read.items()})
        most_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        return offset_of(limited(source, read, most_bytes, self._target))

    def reportLatestOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        return offset_of(everything(self._view.look()))

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        source, read = self._view.look(), read_of(start)
        spans = between(read, read_of(end))
        self._check_there(source, {key: _end_of(read.get(key)) for key, wanted in spans.items() if wanted})
        return [TaskPart(part) for part in plan(source, self._options.wanted, self._options.part_bytes, spans)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._options, self._schema, self._options.wanted, partition)

    def stop(self) -> None:
        self._view.close()

    def _check_there(self, source: SourceSnapshot, ends: dict[PartitionKey, int]) -> None:
        """Raise BadBytes if the next messages have been removed; with corrupt=skip, log that and skip them."""
        firsts: dict[PartitionKey, int] = {}
        for segment in source.segments:
            firsts.setdefault(segment.partition_key, segment.base)
        for key, position in ends.items():
            first = firsts.get(key)
            if not position or (first is not None and first <= position):
                continue
            what = f"continues at position {first}" if first is not None else "has no messages of that store"
            read = f"the stream has read partition {name_of(key)} up to position {position}"
            gone = f"{read}, and {self._options.place} {what}"
            if not self._options.skip:
                raise BadBytes(f"{gone}: messages were removed, or it is another source. corrupt=skip continues there")
            _LOG.warning("%s: the stream continues there", gone)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for tasks, which need the options but not what was found."""
        options = self._options
        return {**self.__dict__, "_view": SourceView(options.place, only_segments=True, tls=options.tls)}


def _end_of(ranges: Intervals | None) -> int:
    """Return the position up to which ranges were read; 0: nothing."""
    return max((end for _, end in ranges), default=0) if ranges is not None else 0


def _whole(ranges: Intervals) -> Intervals:
    """Return one range from 0 to the end of these."""
    made = Intervals()
    made.add(0, _end_of(ranges))
    return made

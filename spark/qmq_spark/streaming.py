"""Streams: micro-batches between offsets. An offset says how far each partition of each store was read.

    {"<store id, hex>-<partition>": position behind the last batch, ...}

A partition that is not named is read from its first message kept. What lies between two offsets never changes, so a
micro-batch that is run again gives the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from qmq.errors import BadBytes
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.history.segments import SegmentSource
from qmq_spark.options import ReadOptions
from qmq_spark.parts import Part, read_part
from qmq_spark.planning import Source, SourceView, Whose, plan

if TYPE_CHECKING:
    import pyarrow as pa

_LOG: Final = logging.getLogger("qmq_spark")

Offset = dict[str, int]


class QmqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads messages as they come."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._view = SourceView(options.place, only_segments=True)
        #: Where a run over what is there now ends.
        self._target: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Spark asks again when it repeats the first micro-batch. So this passes over nothing but what *since* leaves
        out in any case.
        """
        if not self._options.since_us:
            return {}
        source = self._view.look()
        first: Offset = {}
        for segment in source.segments:
            stamps = segment.batches(source.files)
            at = int(np.searchsorted(stamps["stored_at_us"], np.uint64(self._options.since_us)))
            if at < len(stamps):
                first.setdefault(_name(segment.whose), int(stamps["position"][at]))
        return first

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        self._target = ends_of(self._view.look())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        most = self._options.max_trigger_bytes
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        source = self._view.look()
        self._check_there(source, start)
        ends = ends_of(source)
        if self._target is not None:
            ends = {name: min(end, self._target[name]) for name, end in ends.items() if name in self._target}
        if isinstance(limit, ReadMaxBytes):
            ends = limited(source, start, ends, limit.max_bytes)
        return {**start, **{name: end for name, end in ends.items() if end > start.get(name, 0)}}

    def reportLatestOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        return ends_of(self._view.look())

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        source = self._view.look()
        self._check_there(source, {name: start.get(name, 0) for name in end if end[name] > start.get(name, 0)})
        spans = {_whose(name): (start.get(name, 0), upto) for name, upto in end.items()}
        return [Part(part) for part in plan(source, self._options.wanted, self._options.part_bytes, spans)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(self._options, self._schema, self._options.wanted, partition)

    def stop(self) -> None:
        self._view.close()

    def _check_there(self, source: Source, start: Offset) -> None:
        """Raise BadBytes when what comes next is not kept any more; with corrupt=skip that is said and passed over."""
        firsts: Offset = {}
        for segment in source.segments:
            firsts.setdefault(_name(segment.whose), segment.base)
        for name, position in start.items():
            first = firsts.get(name)
            if not position or (first is not None and first <= position):
                continue
            what = f"goes on at position {first}" if first is not None else "has nothing of that store"
            gone = f"the stream has read partition {name} up to position {position}, and {self._options.place} {what}"
            if not self._options.skip:
                raise BadBytes(f"{gone}: messages were removed, or it is another source. corrupt=skip goes on there")
            _LOG.warning("%s: it goes on there", gone)

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get what they need to read: not what was found."""
        return {**self.__dict__, "_view": SourceView(self._options.place, only_segments=True)}


def _name(whose: Whose) -> str:
    store_id, partition = whose
    return f"{store_id.hex()}-{partition}"


def _whose(name: str) -> Whose:
    store_id, _, partition = name.partition("-")
    return bytes.fromhex(store_id), int(partition)


def ends_of(source: Source) -> Offset:
    """Behind the last batch of each partition."""
    ends: Offset = {}
    for segment in source.segments:
        name = _name(segment.whose)
        ends[name] = max(ends.get(name, 0), segment.end)
    return ends


def limited(source: Source, start: Offset, ends: Offset, most_bytes: int) -> Offset:
    """How far *most_bytes* go from *start*, at most to *ends*: whole batches, one at least where there is any."""
    segments: dict[str, list[SegmentSource]] = {}
    for segment in source.segments:
        segments.setdefault(_name(segment.whose), []).append(segment)
    behind = {name: end for name, end in ends.items() if end > start.get(name, 0)}
    reached: Offset = {}
    left = most_bytes
    for at, name in enumerate(sorted(behind, key=lambda name: behind[name] - start.get(name, 0))):
        share = max(0, left) // (len(behind) - at)
        reached[name], taken = _reach(source, segments[name], start.get(name, 0), behind[name], share)
        left -= taken
    return reached


def _reach(source: Source, segments: list[SegmentSource], start: int, end: int, most_bytes: int) -> tuple[int, int]:
    """Where a batch begins that is about *most_bytes* behind *start*, or *end*; and how many bytes that are."""
    position, taken = start, 0
    for segment in segments:
        first, stop = max(position, segment.base + SEGMENT_HEADER_SIZE), min(segment.end, end)
        if first >= stop:
            continue
        if taken + stop - first <= most_bytes:
            taken += stop - first
            position = stop
            continue
        starts = segment.batches(source.files)["position"].astype(np.int64)
        edges = np.append(starts[(starts > first) & (starts < stop)], stop)
        at = int(np.searchsorted(edges, first + most_bytes - taken, "right"))
        if at:
            return int(edges[at - 1]), taken + int(edges[at - 1]) - first
        return (position, taken) if taken else (int(edges[0]), int(edges[0]) - first)
    return end, taken

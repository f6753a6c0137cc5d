"""Offsets of streams: the ranges of positions that were read of each partition of each store.

    {"<store id, hex>-<partition>": [start, end, start, end, ...], ...}

Data directories and brokers only grow at the end: then there is one range, from 0 on. An archive may also get
segments before existing ones, from a later run: positions between two ranges have not been read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import numpy as np

from qmq.archive.segments import SegmentSource
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.intervals import Intervals
from qmq_spark.plan import PartitionKey, SourceSnapshot, Spans

_LOG: Final = logging.getLogger("qmq_spark")

#: The most ranges of a partition. Beyond that the lowest gap counts as read, so that an offset stays small.
MOST_RANGES: Final = 1_000

Offset = dict[str, list[int]]
#: The same in memory.
Read = dict[PartitionKey, Intervals]


def name_of(key: PartitionKey) -> str:
    """Return the name of a partition of a store in offsets."""
    store_id, partition = key
    return f"{store_id.hex()}-{partition}"


def read_of(offset: Mapping[str, list[int]]) -> Read:
    """Return the ranges that an offset says were read."""
    found: Read = {}
    for name, numbers in offset.items():
        store_id, _, partition = name.partition("-")
        ranges = found[bytes.fromhex(store_id), int(partition)] = Intervals()
        for start, end in zip(numbers[::2], numbers[1::2], strict=True):
            ranges.add(start, end)
    return found


def offset_of(read: Read) -> Offset:
    """Return the offset of the ranges that were read, with at most so many gaps a partition."""
    found: Offset = {}
    for key, ranges in read.items():
        if len(ranges) > MOST_RANGES:
            (first, _), *others = ranges
            behind = others[len(ranges) - MOST_RANGES - 1][1]
            _LOG.warning(
                "partition %s has more than %d gaps: messages that are archived later below position %d are not read",
                name_of(key), MOST_RANGES, behind,
            )  # fmt: skip
            ranges.add(first, behind)
        found[name_of(key)] = [number for both in ranges for number in both]
    return found


def everything(source: SourceSnapshot) -> Read:
    """Return all ranges of a source."""
    found: Read = {}
    for segment in source.segments:
        _add(found, source, segment, segment.end)
    return found


def before(source: SourceSnapshot, since_us: int) -> Read:
    """Return the ranges that were stored before a time, as far as the indexes tell."""
    found: Read = {}
    for segment in source.segments:
        batches, is_whole = segment.outline(source.files)
        at = int(np.searchsorted(batches["stored_at_us"], np.uint64(since_us)))
        at -= not is_whole and at > 0  # messages between the two may be later
        if at:
            end = int(batches["position"][at]) if at < len(batches) else segment.end
            found.setdefault(segment.partition_key, Intervals()).add(0, end)
    return found


def between(start: Read, end: Read) -> Spans:
    """Return the ranges that *end* has and *start* lacks."""
    none = Intervals()
    return {
        key: [span for low, high in ranges for span in start.get(key, none).missing(low, high)]
        for key, ranges in end.items()
    }


def limited(source: SourceSnapshot, read: Read, most_bytes: int | None, within: Read | None = None) -> Read:
    """Return the ranges after a read of *most_bytes* more (None: all), only *within* these ranges. It reads whole
    batches, at least one if there is any.
    """
    left = _unread(source, read, within)
    sizes = {key: sum(high - low for _, low, high in ranges) for key, ranges in left.items()}
    reached: Read = {key: _copy(ranges) for key, ranges in read.items()}
    for at, key in enumerate(sorted(sizes, key=lambda key: sizes[key])):
        share = sizes[key] if most_bytes is None else max(0, most_bytes) // (len(sizes) - at)
        taken = _take(source, left[key], share, reached)
        most_bytes = None if most_bytes is None else most_bytes - taken
    return reached


def _unread(
    source: SourceSnapshot, read: Read, within: Read | None
) -> dict[PartitionKey, list[tuple[SegmentSource, int, int]]]:
    """Return the unread ranges of segments, ascending, for each partition that has any."""
    none, found = Intervals(), dict[PartitionKey, list[tuple[SegmentSource, int, int]]]()
    for segment in source.segments:
        known = read.get(segment.partition_key, none)
        spans = known.missing(segment.base, segment.end)
        if within is not None:
            outside = within.get(segment.partition_key, none).missing(segment.base, segment.end)
            spans = [part for low, high in spans for part in _without(low, high, outside)]
        if spans:
            found.setdefault(segment.partition_key, []).extend((segment, low, high) for low, high in spans)
    return found


def _without(low: int, high: int, outside: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left = Intervals()
    for start, end in outside:
        left.add(start, end)
    return left.missing(low, high)


def _take(source: SourceSnapshot, ranges: list[tuple[SegmentSource, int, int]], most_bytes: int, reached: Read) -> int:
    """Add to *reached* the first of these ranges, up to about *most_bytes*; return how many bytes that is."""
    taken = 0
    for segment, low, high in ranges:
        first = max(low, segment.base + SEGMENT_HEADER_SIZE)
        if taken + high - first <= most_bytes:
            taken += max(0, high - first)
            _add(reached, source, segment, high, low)
            continue
        starts = segment.outline(source.files)[0]["position"].astype(np.int64)
        edges = np.append(starts[(starts > first) & (starts < high)], high)
        at = int(np.searchsorted(edges, first + most_bytes - taken, "right"))
        if at or not taken:
            end = int(edges[max(at - 1, 0)])
            taken += end - first
            _add(reached, source, segment, end, low)
        break
    return taken


def _add(read: Read, source: SourceSnapshot, segment: SegmentSource, end: int, start: int | None = None) -> None:
    """Record that a segment was read from *start* (None: its beginning) to *end*."""
    first = segment.base if start is None else start
    read.setdefault(segment.partition_key, Intervals()).add(first if source.may_fill else 0, end)


def _copy(ranges: Intervals) -> Intervals:
    made = Intervals()
    for start, end in ranges:
        made.add(start, end)
    return made

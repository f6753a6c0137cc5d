"""Offsets of streams: what was read of each partition of each store, as ranges of positions.

    {"<store id, hex>-<partition>": [start, end, start, end, ...], ...}

A data directory and a broker add at the end only: of these that is one range, from 0 on. An archive may also get
segments that lie before others, from a run that comes later: what lies between two ranges has not been read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import numpy as np

from qmq.archive.segments import SegmentSource
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.intervals import Intervals
from qmq_spark.plan import HistorySource, Spans, Whose

_LOG: Final = logging.getLogger("qmq_spark")

#: Of a partition. Beyond that the gap that lies lowest counts as read, so that an offset stays small.
MOST_RANGES: Final = 1_000

Offset = dict[str, list[int]]
#: The same, to work with.
Read = dict[Whose, Intervals]


def name_of(whose: Whose) -> str:
    """How offsets name a partition of a store."""
    store_id, partition = whose
    return f"{store_id.hex()}-{partition}"


def read_of(offset: Mapping[str, list[int]]) -> Read:
    """What an offset says was read."""
    found: Read = {}
    for name, numbers in offset.items():
        store_id, _, partition = name.partition("-")
        ranges = found[bytes.fromhex(store_id), int(partition)] = Intervals()
        for start, end in zip(numbers[::2], numbers[1::2], strict=True):
            ranges.add(start, end)
    return found


def offset_of(read: Read) -> Offset:
    """The offset that says that this was read; less of gaps than there may be of a partition."""
    found: Offset = {}
    for whose, ranges in read.items():
        if len(ranges) > MOST_RANGES:
            (first, _), *others = ranges
            behind = others[len(ranges) - MOST_RANGES - 1][1]
            _LOG.warning(
                "partition %s has more than %d gaps: what may come yet below position %d is not read",
                name_of(whose), MOST_RANGES, behind,
            )  # fmt: skip
            ranges.add(first, behind)
        found[name_of(whose)] = [number for both in ranges for number in both]
    return found


def everything(source: HistorySource) -> Read:
    """All that is there."""
    found: Read = {}
    for segment in source.segments:
        _add(found, source, segment, segment.end)
    return found


def before(source: HistorySource, since_us: int) -> Read:
    """All that was stored before a time, as far as what is there tells."""
    found: Read = {}
    for segment in source.segments:
        batches, is_whole = segment.outline(source.files)
        at = int(np.searchsorted(batches["stored_at_us"], np.uint64(since_us)))
        at -= not is_whole and at > 0  # what lies between the two may be later
        if at:
            end = int(batches["position"][at]) if at < len(batches) else segment.end
            found.setdefault(segment.whose, Intervals()).add(0, end)
    return found


def between(start: Read, end: Read) -> Spans:
    """What *end* has, and *start* has not."""
    none = Intervals()
    return {
        whose: [span for low, high in ranges for span in start.get(whose, none).missing(low, high)]
        for whose, ranges in end.items()
    }


def limited(source: HistorySource, read: Read, most_bytes: int | None, within: Read | None = None) -> Read:
    """What is read when *most_bytes* more are, None: all there is; nothing that is not *within*. Whole batches, one at
    least where there is any.
    """
    left = _unread(source, read, within)
    sizes = {whose: sum(high - low for _, low, high in sequence_ranges) for whose, sequence_ranges in left.items()}
    reached: Read = {whose: _copy(ranges) for whose, ranges in read.items()}
    for at, whose in enumerate(sorted(sizes, key=lambda whose: sizes[whose])):
        share = sizes[whose] if most_bytes is None else max(0, most_bytes) // (len(sizes) - at)
        taken = _take(source, left[whose], share, reached)
        most_bytes = None if most_bytes is None else most_bytes - taken
    return reached


def _unread(
    source: HistorySource, read: Read, within: Read | None
) -> dict[Whose, list[tuple[SegmentSource, int, int]]]:
    """Of each partition that has any, what was not read of its segments, ascending."""
    none, found = Intervals(), dict[Whose, list[tuple[SegmentSource, int, int]]]()
    for segment in source.segments:
        known = read.get(segment.whose, none)
        spans = known.missing(segment.base, segment.end)
        if within is not None:
            outside = within.get(segment.whose, none).missing(segment.base, segment.end)
            spans = [part for low, high in spans for part in _without(low, high, outside)]
        if spans:
            found.setdefault(segment.whose, []).extend((segment, low, high) for low, high in spans)
    return found


def _without(low: int, high: int, outside: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left = Intervals()
    for start, end in outside:
        left.add(start, end)
    return left.missing(low, high)


def _take(
    source: HistorySource, sequence_ranges: list[tuple[SegmentSource, int, int]], most_bytes: int, reached: Read
) -> int:
    """Add to *reached* about so many bytes of the first of these ranges; gives how many they are."""
    taken = 0
    for segment, low, high in sequence_ranges:
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


def _add(read: Read, source: HistorySource, segment: SegmentSource, end: int, start: int | None = None) -> None:
    """Count a segment as read from *start*, else from its first byte, to *end*."""
    first = segment.base if start is None else start
    read.setdefault(segment.whose, Intervals()).add(first if source.may_fill else 0, end)


def _copy(ranges: Intervals) -> Intervals:
    made = Intervals()
    for start, end in ranges:
        made.add(start, end)
    return made

"""What tasks read: the stretches of a source, cut by bytes into parts of about the same size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from qmq.errors import InvalidOption
from qmq.format.layout import SEGMENT_HEADER_SIZE
from qmq.history.archive import archived_segments, is_archive
from qmq.history.data_directory import check_is_there, is_data_directory, open_data_directory
from qmq.history.files import Files, LocalFiles, local_path
from qmq.history.segments import SegmentSource
from qmq_spark.reading import Stretch, Wanted


class Source(NamedTuple):
    """A source at one moment. What is in it does not change; what comes later is not read."""

    files: Files
    segments: list[SegmentSource]


def open_files(place: str) -> Files:
    """The tree that *place* names. Raises InvalidOption for a scheme that is not known."""
    path = local_path(place)
    if path is None:
        raise InvalidOption(f"{place}: give a path of this machine, or a file:// URL")
    return LocalFiles(path)


def open_source(place: str) -> Source:
    """Look at a data directory or an archive. Raises InvalidOption, BadBytes, StorageFailed."""
    path = local_path(place)
    if path is not None:
        check_is_there(path)
        if is_data_directory(path):
            found = open_data_directory(path)
            return Source(found.files, found.segments)
    files = open_files(place)
    if is_archive(files):
        return Source(files, archived_segments(files))
    raise InvalidOption(f"{place} is neither a data directory nor an archive; name the directory itself")


def plan(source: Source, wanted: Wanted, part_bytes: int) -> list[list[Stretch]]:
    """The parts of a source: each of about *part_bytes*, in order of their partitions and positions."""
    parts: list[list[Stretch]] = [[]]
    room = part_bytes
    for segment in source.segments:
        if wanted.partitions is not None and segment.partition not in wanted.partitions:
            continue
        for stretch in _stretches(source.files, segment, wanted, part_bytes):
            size = stretch.end - stretch.start
            if parts[-1] and size > room:
                parts.append([])
                room = part_bytes
            parts[-1].append(stretch)
            room -= size
    return [part for part in parts if part]


def _stretches(files: Files, segment: SegmentSource, wanted: Wanted, part_bytes: int) -> Iterator[Stretch]:
    """A segment cut where batches begin, into pieces of about the same size; less what is of another time."""
    batches = segment.batches(files)
    start, end = segment.base + SEGMENT_HEADER_SIZE, segment.end
    limits = np.array([wanted.stored_from, wanted.stored_until], np.uint64)
    low, high = np.searchsorted(batches["stored_at_us"], limits).tolist()
    positions = batches["position"].astype(np.int64)
    if low:
        start = int(positions[low]) if low < len(positions) else end
    if high < len(positions):
        end = int(positions[high])
    if start >= end:
        return
    if low >= high:  # none of them, but bad bytes
        yield Stretch(_trimmed(segment, start, end), start, end)
        return
    pieces = -(-(end - start) // part_bytes)
    aims = np.linspace(start, end, pieces + 1)[1:-1].astype(np.int64)
    cuts = np.unique(positions[low:high][np.searchsorted(positions[low:high], aims, "right") - 1]).tolist()
    edges = [start, *(cut for cut in cuts if start < cut < end), end]
    for first, last in pairwise(edges):
        yield Stretch(_trimmed(segment, first, last), first, last)


def _trimmed(segment: SegmentSource, start: int, end: int) -> SegmentSource:
    """What a task has to know of a segment: of batches that were looked for, its own ones."""
    if segment.found is None:
        return segment
    low, high = np.searchsorted(segment.found["position"], np.array([start, end], np.uint64)).tolist()
    return segment._replace(found=segment.found[low:high])

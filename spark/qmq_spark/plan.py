"""Plan what tasks read: the ranges of a source, cut into parts of about the same size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from qmq.archive.archive import archived_segments, is_archive
from qmq.archive.broker_logs import NO_TLS, SCHEMES, BrokerFiles, TlsPaths
from qmq.archive.data_directory import check_is_there, is_data_directory, open_data_directory
from qmq.archive.file_table import FileTable, SegmentKey, only_in_files, read_table
from qmq.archive.files import Files, local_path
from qmq.archive.keys import looked_up
from qmq.archive.locations import files_at
from qmq.archive.segments import SegmentSource
from qmq.errors import InvalidOption
from qmq.format.hashing import hash_bytes, key_hash
from qmq.format.ids import MessageId
from qmq.format.layout import MESSAGE_ID, SEGMENT_HEADER_SIZE
from qmq_spark.read import SegmentRange, Wanted

#: A partition of a store: store id and number.
PartitionKey = tuple[bytes, int]
#: Ranges of positions [start, end), ascending, by partition.
Spans = Mapping[PartitionKey, Sequence[tuple[int, int]]]


class SourceSnapshot(NamedTuple):
    """A source at one moment. It does not change; messages that are added later are not read."""

    files: Files
    segments: list[SegmentSource]
    #: The Parquet files of an archive that lacks some segments. Then all of them are read, and of segments only the
    #: messages that no file has.
    table: FileTable | None = None
    #: Whether segments may be added before existing ones.
    may_fill: bool = False


class SourceView:
    """A source that is read repeatedly; segments that were found before are not read again. Close it.

    With *only_segments* an archive that lacks some segments is refused.
    """

    def __init__(self, location: str, *, only_segments: bool = False, tls: TlsPaths = NO_TLS) -> None:
        self._place = location
        self._tls = tls
        self._only_segments = only_segments
        self._files: Files | None = None
        self._known: list[SegmentSource] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections to the tree."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def look(self) -> SourceSnapshot:
        """Return the current contents. Raises InvalidOption, BadBytes, StorageError."""
        if self._files is None:
            self._files = open_files(self._place, self._tls)
        source = self._look(self._files)
        self._known = source.segments
        return source

    def _look(self, files: Files) -> SourceSnapshot:
        if isinstance(files, BrokerFiles):
            return SourceSnapshot(files, files.segments())
        path = local_path(self._place)
        if path is not None:
            check_is_there(path)
            if is_data_directory(path):
                return SourceSnapshot(files, open_data_directory(path, known=self._known).segments)
        if is_archive(files):
            return self._look_at_archive(files)
        raise InvalidOption(f"{self._place} is neither a data directory nor an archive; name the directory itself")

    def _look_at_archive(self, files: Files) -> SourceSnapshot:
        table = read_table(files)  # before the segments: these then have all that a run adds meanwhile
        segments = archived_segments(files, self._known)
        if not only_in_files(table, segments):
            return SourceSnapshot(files, segments, may_fill=True)
        if self._only_segments:
            raise InvalidOption(
                f"{self._place} has messages only as Parquet, and a stream reads segments: archive these too, where "
                "they are still kept (qmq archive --as segments); or stream from the data directory or its broker, "
                "and read earlier messages by a query"
            )
        return SourceSnapshot(files, segments, table)


def open_files(location: str, tls: TlsPaths = NO_TLS) -> Files:
    """Return the tree that *location* names. Raises InvalidOption for an unknown scheme."""
    if location.startswith(SCHEMES):
        return BrokerFiles(location, *tls)
    return files_at(location)


def open_source(location: str) -> SourceSnapshot:
    """Return the contents of a source once. Raises InvalidOption, BadBytes, StorageError."""
    return SourceView(location).look()


def plan(
    source: SourceSnapshot, wanted: Wanted, part_bytes: int, spans: Spans | None = None
) -> list[list[SegmentRange]]:
    """Return the parts of a source, each of about *part_bytes*, in order of partitions and positions; with *spans*,
    only these positions.
    """
    parts: list[list[SegmentRange]] = [[]]
    room = part_bytes
    in_files = source.table.ends() if source.table is not None else {}
    for segment in source.segments:
        if wanted.partitions is not None and segment.partition not in wanted.partitions:
            continue
        first = in_files.get(SegmentKey(segment.store_id.hex(), segment.partition, segment.base), segment.base)
        own = [(first, segment.end)] if spans is None else spans.get(segment.partition_key, ())
        if spans is None and (wanted.keys is not None or wanted.ids is not None):
            own = _spans_with(source.files, segment, wanted, first)
        for span in own:
            for segment_range in _ranges(source.files, segment, wanted, part_bytes, span):
                size = segment_range.end - segment_range.start
                if parts[-1] and size > room:
                    parts.append([])
                    room = part_bytes
                parts[-1].append(segment_range)
                room -= size
    return [part for part in parts if part]


def _spans_with(files: Files, segment: SegmentSource, wanted: Wanted, first: int) -> list[tuple[int, int]]:
    """Return the positions from *first* on of a segment's batches that may have one of the wanted ids, or else one of
    the wanted keys, as spans between batches that its outline has; all of it where there is no good key index. Raises
    BadBytes, StorageFailed.
    """
    hashes, found = list[int](), set[int]()
    if wanted.ids is not None:
        for name in _parsed(wanted.ids):
            hashes.append(hash_bytes(MESSAGE_ID.pack(*name)))  # a copy has the id as its origin id
            if (name.store_id, name.partition) == segment.partition_key and segment.base <= name.position < segment.end:
                found.add(name.position)
    else:
        hashes = [key_hash(key) for key in wanted.keys or ()]
    for value in hashes:
        positions = None if isinstance(files, BrokerFiles) else looked_up(files, segment, value, False)
        if positions is None:
            return [(first, segment.end)]
        found.update(positions)
    if not found:
        return []
    edges = np.append(segment.outline(files)[0]["position"].astype(np.int64), segment.end)
    starts = np.unique(np.searchsorted(edges, np.array(sorted(found), np.int64), "right") - 1).tolist()
    spans = [(max(first, int(edges[at])) if at >= 0 else first, int(edges[at + 1])) for at in starts]
    return [span for span in spans if span[0] < span[1]]


def _parsed(ids: frozenset[str]) -> Iterator[MessageId]:
    for text in ids:
        with suppress(InvalidOption):  # no message has it
            yield MessageId.parse(text)


def _ranges(
    files: Files, segment: SegmentSource, wanted: Wanted, part_bytes: int, span: tuple[int, int]
) -> Iterator[SegmentRange]:
    """Yield the parts of a segment, cut between batches into pieces of about the same size, without other times."""
    start, end = max(segment.base + SEGMENT_HEADER_SIZE, span[0]), min(segment.end, span[1])
    if start >= end:
        return
    batches, is_whole = segment.outline(files)
    positions = batches["position"].astype(np.int64)
    first, behind = np.searchsorted(positions, [start, end]).tolist()
    limits = np.array([wanted.stored_from, wanted.stored_until], np.uint64)
    low, high = np.searchsorted(batches["stored_at_us"], limits).tolist()
    low -= not is_whole and low > 0  # batches between the two may be of that time
    if low > first:
        start = int(positions[low]) if low < len(positions) else end
    if high < behind:
        end = int(positions[high])
    low, high = max(low, first), min(high, behind)
    if start >= end:
        return
    if low >= high:  # no batch is in it, but bad bytes
        yield SegmentRange(_trimmed(segment, start, end), start, end)
        return
    pieces = -(-(end - start) // part_bytes)
    aims = np.linspace(start, end, pieces + 1)[1:-1].astype(np.int64)
    cuts = np.unique(positions[low:high][np.searchsorted(positions[low:high], aims, "right") - 1]).tolist()
    edges = [start, *(cut for cut in cuts if start < cut < end), end]
    for begin, stop in pairwise(edges):
        yield SegmentRange(_trimmed(segment, begin, stop), begin, stop)


def _trimmed(segment: SegmentSource, start: int, end: int) -> SegmentSource:
    """Return the segment as a task needs it: with only its own part of the batches that were found by reading."""
    if segment.found is None:
        return segment
    low, high = np.searchsorted(segment.found["position"], np.array([start, end], np.uint64)).tolist()
    return segment._replace(found=segment.found[low:high])

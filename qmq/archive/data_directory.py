"""Find the segments of a data directory without locking or changing it.

A broker may be using it: then reading ends after the last complete batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qmq.archive.files import Files, LocalFiles
from qmq.archive.segments import INDEX, MESSAGES, SegmentSource, index_pieces
from qmq.errors import BadBytes, StorageFailed
from qmq.format.batch import Header
from qmq.format.layout import INDEX_DTYPE
from qmq.storage.disk.dir_lock import holder_of
from qmq.storage.disk.disk import Disk
from qmq.storage.message_log.archive_receipt import ArchiveReceipt, read_receipt, write_receipt
from qmq.storage.message_log.reader import Scanner
from qmq.storage.message_log.segment import ForeignSegment, Segment, SegmentOwner, list_bases, segment_path
from qmq.storage.meta.checkpoint import PartitionClaim, list_checkpoints, read_checkpoint
from qmq.storage.meta.identity import COPY_NAMES, Identity, latest, read_copies


def is_live(directory: Path) -> bool:
    """Return whether a broker is using the data directory. Raises StorageFailed."""
    return holder_of(Disk(), directory) is not None


def has_segments(directory: Path, positions: Iterable[tuple[int, int]]) -> bool:
    """Return whether a segment begins at each of these (partition, position). Raises BadBytes, StorageFailed."""
    disk = Disk()
    partitions = latest(*read_copies(disk, directory)).partitions
    return all(
        number < len(partitions) and disk.exists(segment_path(directory / partitions[number].directory, position))
        for number, position in positions
    )


class DataDirectory(NamedTuple):
    """The contents of a data directory at one moment."""

    files: LocalFiles
    store_id: bytes
    segments: list[SegmentSource]
    #: The broker that is using it, whose current segments grow; None if there is none.
    holder: str | None
    directory: Path
    disk: Disk

    def has(self, segment: SegmentSource) -> bool:
        """Return whether a segment still exists: retention may have dropped it."""
        return self.disk.exists(self.directory / segment.path)

    def receipt(self, segment: SegmentSource) -> ArchiveReceipt | None:
        """Return the receipt beside a segment if it covers all of it. Raises ForeignFile, StorageFailed."""
        try:
            receipt = read_receipt(self.disk, self._directory_of(segment), segment.base)
        except BadBytes:
            return None
        owner = SegmentOwner(segment.store_id, segment.partition)
        return receipt if receipt is not None and receipt.covers(owner, segment.base, segment.end) else None

    def write_receipt(self, segment: SegmentSource, receipt: ArchiveReceipt) -> None:
        """Write a receipt beside a segment, unless the segment was removed meanwhile. Raises StorageFull or
        StorageFailed.
        """
        if self.has(segment):
            write_receipt(self.disk, self._directory_of(segment), receipt)

    def _directory_of(self, segment: SegmentSource) -> Path:
        return (self.directory / segment.path).parent


def is_data_directory(directory: Path) -> bool:
    """Return whether *directory* has an identity file of a data directory."""
    return any((directory / name).exists() for name in COPY_NAMES)


def open_data_directory(
    directory: Path, disk: Disk | None = None, known: Iterable[SegmentSource] = ()
) -> DataDirectory:
    """Read a data directory; the *known* segments of an earlier call are not read again.

    Raises BadBytes if both identity files are damaged, ForeignFile, StorageFailed.
    """
    disk = disk if disk is not None else Disk()
    holder = holder_of(disk, directory)  # before the segments: a broker that starts meanwhile only adds to them
    identity = latest(*read_copies(disk, directory))
    files = LocalFiles(directory, disk)
    known, segments = list(known), list[SegmentSource]()
    for number, claim in enumerate(_claims(disk, directory, identity)):
        own = {segment.base: segment for segment in known if segment.partition_key == (identity.store_id, number)}
        partition = _Partition(disk, directory, files, identity, number, own)
        segments += partition.segments(claim, is_live=holder is not None)
    return DataDirectory(files, identity.store_id, segments, holder, directory, disk)


def _claims(disk: Disk, directory: Path, identity: Identity) -> list[PartitionClaim | None]:
    """Return what the last good checkpoint says of each partition, which tells what was removed."""
    none: list[PartitionClaim | None] = [None] * len(identity.partitions)
    for number in list_checkpoints(disk, directory):
        claims = read_checkpoint(disk, directory, number).claims
        if claims is not None:
            return [*claims.partitions, *none][: len(none)]
    return none


class _Partition:
    def __init__(
        self,
        disk: Disk,
        directory: Path,
        files: Files,
        identity: Identity,
        number: int,
        known: dict[int, SegmentSource],
    ) -> None:
        self._disk = disk
        self._known = known
        self._files = files
        self._identity = identity
        self._owner = SegmentOwner(identity.store_id, number)
        self._name = identity.partitions[number].directory
        self._directory = directory / self._name

    def segments(self, claim: PartitionClaim | None, *, is_live: bool) -> list[SegmentSource]:
        """Return the readable segments, ascending."""
        starts = [(base, end) for base, end in self._starts() if claim is None or not claim.is_removed(base)]
        found = []
        for (base, _), behind in zip(starts, [*starts[1:], None], strict=False):
            sealed = behind is not None or not is_live
            end = min(behind) if behind is not None else None
            segment = self._indexed(base, end) if end is not None else None
            segment = segment or self._scanned(base, end, sealed=sealed)
            found.append(segment)
        return found

    def _starts(self) -> list[tuple[int, int]]:
        """Return (base, previous_end) of each segment, without foreign ones."""
        starts = []
        for base in list_bases(self._disk, self._directory):
            segment = Segment.open(self._disk, self._directory, base, 0, writable=False)
            try:
                end = segment.previous_end(self._owner)
            except ForeignSegment:
                continue
            finally:
                segment.close()
            starts.append((base, base if end is None else end))
        return starts

    def _indexed(self, base: int, end: int) -> SegmentSource | None:
        """Return a sealed segment by its index if that is good."""
        path, known = f"{self._name}/{base:016x}", self._known.get(base)
        if known is not None and known.index_path is not None and known.end == end:
            return known
        try:
            for _ in index_pieces(self._files, path + INDEX, *self._owner, base, end):
                """Read to its end."""
        except BadBytes:
            return None
        return SegmentSource(*self._owner, base, end, path + MESSAGES, path + INDEX, None)

    def _scanned(self, base: int, end: int | None, *, sealed: bool) -> SegmentSource:
        """Return a segment whose batches are found by reading it, by the rules by which a broker finds them when it
        starts.
        """
        known, found, start = self._known.get(base), None, base
        if known is not None and known.found is not None and (end is None or known.end <= end):
            found, start = known.found, known.end  # bytes that were found before do not change
            if start == end:
                return known._replace(sealed=sealed)
        positions, stamps = array("Q"), array("Q")

        def feed(header: Header, _: memoryview) -> None:
            positions.append(header.position)
            stamps.append(header.stored_at_us)

        scanner = Scanner(self._disk, self._identity.secret, self._identity.store_id, feed)
        segment = Segment.open(self._disk, self._directory, base, 0, writable=False)
        try:
            stop = base + segment.size() if end is None else end
            # Batches with good headers and bad data count too: their readers report the damage.
            seen = scanner.scan(segment, start, stop, vouched=True)
        finally:
            segment.close()
        last = seen.end
        rotten = {hole.start: hole.end for hole in seen.rotten}
        while not sealed and positions and positions[-1] in rotten:  # a broker is still writing the last batch
            last = positions.pop()
            stamps.pop()
        index = np.empty(len(positions), INDEX_DTYPE)
        index["position"], index["stored_at_us"] = positions, stamps
        if found is not None:
            index = np.concatenate((found, index))
        return SegmentSource(
            *self._owner, base, last if end is None else end, f"{self._name}/{base:016x}{MESSAGES}", None, index, sealed
        )


def check_is_there(directory: Path) -> None:
    """Raise StorageFailed unless *directory* is a directory."""
    if not directory.is_dir():
        raise StorageFailed(f"{directory} is no directory; name a data directory or an archive")

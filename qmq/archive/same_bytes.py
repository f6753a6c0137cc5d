"""Compare a segment with its copy in an archive, as far as both go.

Segments of two directories with one store id have the same names, and may have other batches: those of a clone, or of
an older copy that serves again. Then the copy in the archive is not one of this segment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from qmq.archive.data_directory import DataDirectory
from qmq.archive.files import COPY_BYTES, Files, Progress, Reading
from qmq.archive.manifest import Manifest
from qmq.archive.segments import INDEX, MESSAGES, SegmentSource, index_pieces
from qmq.errors import ForeignFile, StorageFailed
from qmq.format.batch import header_crc_of, parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC


class CommonBytes(NamedTuple):
    """The bytes that a segment and its copy have in common: how many, and the crc32c of those of the copy."""

    size: int
    crc: int


def check_same(
    source: DataDirectory, segment: SegmentSource, archive: Files, path: str, manifest: Manifest, progress: Progress
) -> CommonBytes:
    """Compare a segment with its copy at *path* up to the end of the shorter one.

    Raises ForeignFile if one has a batch that the other has not, or another one in its place; bytes that are bad in one
    of them do not count. Raises BadBytes for a copy that is damaged, FileNotFoundError, StorageFailed.
    """
    reading = source.files.open(segment.path)
    try:
        size = min(segment.end - segment.base, reading.size(), manifest.messages_bytes)
        crc = _crc_of(reading, size, progress)
        copied = archive.open(path + MESSAGES)
        try:
            copied_crc = manifest.messages_crc
            if size < manifest.messages_bytes:
                copied_crc = _crc_of(copied, size, progress)
            if copied_crc != crc:
                _check_batches(source, segment, reading, archive, path, copied, manifest, segment.base + size)
        finally:
            copied.close()
    finally:
        reading.close()
    return CommonBytes(size, copied_crc)


def _crc_of(reading: Reading, size: int, progress: Progress) -> int:
    crc = done = 0
    while done < size:
        piece = reading.read(done, min(COPY_BYTES, size - done))
        if not piece:
            raise StorageFailed(f"a segment ends at {done} of {size} bytes; run qmq verify")
        crc = crc32c(piece, crc)
        done += len(piece)
        progress(len(piece))
    return crc


def _check_batches(
    source: DataDirectory, segment: SegmentSource, reading: Reading, archive: Files, path: str, copied: Reading,
    manifest: Manifest, end: int,
) -> None:  # fmt: skip
    """Compare the batches by their headers, which have the checksums of all else, and the mark."""
    own = [piece["position"] for piece in segment.pieces(source.files, until=end)]
    others = [
        piece["position"][piece["position"] < end]
        for piece in index_pieces(
            archive, path + INDEX, segment.store_id, segment.partition, segment.base, manifest.end
        )
    ]
    positions, archived = np.concatenate(own), np.concatenate(others)
    for position in positions.tolist():
        offset = position - segment.base
        header = good_header(reading, offset, position)
        if header is None:  # rotten since
            continue
        other = good_header(copied, offset, position)
        if other != header and (other is not None or position not in archived):
            raise ForeignFile(
                f"{archive.name}/{path + MESSAGES} has other messages than {source.files.name}/{segment.path} from "
                f"position {position} on: another directory of store {segment.store_id.hex()} was archived there, a "
                "copy of this one or its original; nothing was written. Give one of the two directories another id "
                "with qmq repair --new-id, or archive to another place"
            )


def good_header(reading: Reading, offset: int, position: int) -> bytes | None:
    """Return the header of the batch at a position; None if it is bad."""
    data = reading.read(offset, BATCH_HEADER_SIZE)
    if len(data) < BATCH_HEADER_SIZE:
        return None
    header = parse_header(data)
    if header.magic != BATCH_MAGIC or header.position != position or header.data_start > header.size:
        return None
    front = reading.read(offset, header.data_start)
    if len(front) < header.data_start or header_crc_of(memoryview(front), header.data_start) != header.header_crc:
        return None
    return data

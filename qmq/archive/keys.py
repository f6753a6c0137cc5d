"""Key indexes of segments that are read without a broker: look-ups, and making those that an archive lacks.

``<base>.keys`` lies beside a segment in a data directory and in an archive. A segment without a good one is read from
end to end, so a look-up misses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from qmq.archive.files import Files, Reading
from qmq.archive.segments import MESSAGES, Index, SegmentSource
from qmq.errors import BadBytes
from qmq.storage.consumer_log.header import DerivedHeader
from qmq.storage.disk.disk import Disk
from qmq.storage.key_index.build import KeyIndexBuilder
from qmq.storage.key_index.hashes import FoundHashes, hashes_in
from qmq.storage.key_index.key_file import SUFFIX as KEYS
from qmq.storage.key_index.key_file import KeyFile, owner_of
from qmq.storage.key_index.walk import WalkStep

__all__ = ["KEYS", "batches_with", "key_file_of", "looked_up", "make_keys"]

#: Bytes read at once; more only for a larger batch.
_READ_BYTES: Final = 4 << 20


def owner_header(segment: SegmentSource) -> DerivedHeader:
    """Return the header that the key index of a segment has, but for count and body_crc."""
    return owner_of(segment.partition, segment.store_id, segment.base, segment.end)


def keys_path_of(segment: SegmentSource) -> str:
    """Return the path of the key index beside a segment."""
    return segment.path.removesuffix(MESSAGES) + KEYS


def key_file_of(files: Files, segment: SegmentSource) -> KeyFile | None:
    """Open the key index of a segment; None where there is none, or not the one of the segment as it is. Raises
    StorageFailed.
    """
    path = keys_path_of(segment)
    try:
        reading = files.open(path)
    except FileNotFoundError:
        return None
    try:
        return KeyFile(reading, Path(files.name, path), owner_header(segment))
    except BadBytes:
        reading.close()
        return None
    except BaseException:
        reading.close()
        raise


def batches_with(files: Files, segment: SegmentSource, value: int, *, newest: bool = False) -> Iterator[list[int]]:
    """Yield the positions of the batches of a segment that have a hash, oldest or *newest* first, in pieces; also empty
    ones, so that a caller may stop in between.

    *value* is ``hashing.key_hash`` of a key, or ``hashes.hash_of_id`` of an origin id; a batch may have another key
    with the same hash. Raises StorageFailed, and BadBytes where the index of batches is bad.
    """
    found = looked_up(files, segment, value, newest)
    if found is not None:
        yield found
        return
    positions: list[int] = []
    with closing(files.open(segment.path)) as reading:
        walk = IndexWalk(reading, segment, files)
        while not walk.is_done:
            step = walk.step()
            some = np.unique(step.positions[step.hashes == np.uint64(value)]).tolist()
            positions += some
            yield [] if newest else some
    if newest:
        yield positions[::-1]


def looked_up(files: Files, segment: SegmentSource, value: int, newest: bool) -> list[int] | None:
    """Return the positions by the key index; None where it is missing or rotten."""
    file = key_file_of(files, segment)
    if file is None:
        return None
    with closing(file):
        try:
            if not file.may_have(value):
                return []
            size = segment.end - segment.base
            return [segment.base + offset for offset in file.offsets(value, 0, size, newest=newest)]
        except BadBytes:
            return None


class IndexWalk:
    """Reads a segment for its hashes, batch after batch as its index says, since an archive knows no marks."""

    def __init__(self, reading: Reading, segment: SegmentSource, files: Files) -> None:
        self.path = Path(files.name, segment.path)
        self._reading = reading
        self._segment = segment
        self._pieces = segment.pieces(files)
        self._piece: Index = next(self._pieces)
        self._end = segment.base + min(segment.end - segment.base, reading.size())
        self.is_done = False
        self._settle()

    def _settle(self) -> None:
        """Have the next batches at hand, if there are any."""
        while not len(self._piece):
            piece = next(self._pieces, None)
            if piece is None:
                self.is_done = True
                return
            self._piece = piece

    def step(self) -> WalkStep:
        """Read up to 4 MiB of batches, or one that is larger. Raises as ``SegmentSource.pieces``."""
        positions = self._piece["position"]
        first = int(positions[0])
        count = max(1, int(positions.searchsorted(np.uint64(first + _READ_BYTES))))
        self._piece, rest = self._piece[count:], positions[count:]
        end = int(rest[0]) if len(rest) else self._next_position()
        data = memoryview(self._reading.read(first - self._segment.base, end - first))
        found, start, left = list[FoundHashes](), first, positions[:count]
        while len(left):
            found.append(hashes_in(data[start - first :], start))
            # Where bad bytes were met, the next batch behind them.
            left = left[int(left.searchsorted(np.uint64(start + found[-1].size), "right")) :]
            start = int(left[0]) if len(left) else end
        self._settle()
        return WalkStep(
            np.concatenate([one.hashes for one in found]),
            np.concatenate([one.positions for one in found]),
            len(data),
            0,
        )

    def _next_position(self) -> int:
        """Return where the batches end that were at hand."""
        self._settle()
        return self._end if self.is_done else int(self._piece["position"][0])

    def close(self) -> None:
        """Do nothing: who opened the file closes it."""


def make_keys(files: Files, segment: SegmentSource, directory: Path) -> Path:
    """Make the key index of a segment in a local directory; return its path. Raises StorageFull, StorageFailed,
    BadBytes.
    """
    with closing(files.open(segment.path)) as reading:
        builder = KeyIndexBuilder(Disk(), directory, owner_header(segment), IndexWalk(reading, segment, files))
        with closing(builder):
            while builder.step():
                pass
        return builder.path

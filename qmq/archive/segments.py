"""Segments as they are read without a broker: of a data directory, of a running broker, or of an archive.

Reading needs little of storage: identity, names and headers of segments, indexes, and what checkpoints say was removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.archive.files import Files
from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, INDEX_DTYPE, INDEX_ENTRY_SIZE, INDEX_MAGIC
from qmq.storage.consumer_log.header import parse_derived

#: The index entries of batches, INDEX_DTYPE[n], ascending.
Index = npt.NDArray[Any]

MESSAGES: Final = ".messages"
INDEX: Final = ".index"
#: The most batches of an index in memory at once: 2 MiB.
PIECE_BATCHES: Final = 1 << 17
_BEHIND_ALL: Final = 1 << 63


class SegmentSource(NamedTuple):
    """A segment that can be read. Its paths are relative to the tree that it was found in."""

    store_id: bytes
    partition: int
    #: The position of the first byte of the file.
    base: int
    #: The position after the last batch.
    end: int
    path: str
    #: The index with the beginnings of its batches; None if they were found by reading, or the tree provides them.
    index_path: str | None
    #: The batches that were found by reading.
    found: Index | None
    #: False while it may still grow.
    sealed: bool = True

    @property
    def partition_key(self) -> tuple[bytes, int]:
        """Return store id and partition."""
        return self.store_id, self.partition

    def batches(self, files: Files, start: int = 0, until: int = _BEHIND_ALL) -> Index:
        """Return its batches that begin at positions [start, until). Raises BadBytes if the index does not belong to
        the segment, StorageFailed.
        """
        return np.concatenate(list(self.pieces(files, start, until)))

    def outline(self, files: Files) -> tuple[Index, bool]:
        """Return all its batches and True; of very many, only the first and some of the others, and False. Raises as
        ``batches``.
        """
        kept, step = np.empty(0, INDEX_DTYPE), 1
        for piece in self.pieces(files):
            kept = np.concatenate((kept, piece[::step]))
            while len(kept) > PIECE_BATCHES:
                kept, step = kept[::2], 2 * step
        return kept, step == 1

    def pieces(self, files: Files, start: int = 0, until: int = _BEHIND_ALL) -> Iterator[Index]:
        """Yield its batches as ``batches``, in pieces, since a large segment has a large index. Raises as ``batches``,
        maybe after the first pieces; then those were not good either.
        """
        if self.found is not None:
            found = iter((self.found,))
        elif self.index_path is not None:
            found = index_pieces(files, self.index_path, self.store_id, self.partition, self.base, self.end)
        else:
            assert isinstance(files, ProvidesIndex)
            found = files.pieces(self, start, until)
        for piece in found:
            yield within(piece, start, until)


@runtime_checkable
class ProvidesIndex(Protocol):
    """A tree that knows where batches begin without index files."""

    def pieces(self, segment: SegmentSource, start: int, until: int) -> Iterator[Index]:
        """Yield the batches of a segment that begin at positions [start, until), in at least one piece. Raises
        BadBytes.
        """


def index_pieces(files: Files, path: str, store_id: bytes, partition: int, base: int, end: int) -> Iterator[Index]:
    """Yield the batches of a segment up to *end*, by its sealed index, in at least one piece.

    The index may have more: in an archive it is written before the manifest. Raises BadBytes if it is damaged or of
    another segment; StorageFailed.
    """
    try:
        file = files.open(path)
    except FileNotFoundError as error:
        raise BadBytes(f"{path} in {files.name} is missing") from error
    try:
        data = file.read(0, DERIVED_HEADER_SIZE + PIECE_BATCHES * INDEX_ENTRY_SIZE)
        header = parse_derived(data, INDEX_MAGIC, Path(files.name, path))
        ours = (header.store_id, header.partition, header.base) == (store_id, partition, base) and header.covered >= end
        whole = DERIVED_HEADER_SIZE + header.rows * INDEX_ENTRY_SIZE
        is_good = header.sealed and ours and file.size() == whole
        body, done, crc = memoryview(data)[DERIVED_HEADER_SIZE:], len(data), 0
        while is_good:
            crc = crc32c(body, crc)
            if len(body) % INDEX_ENTRY_SIZE or (done == whole and crc != header.body_crc):
                break
            records = np.frombuffer(body, INDEX_DTYPE)
            yield records[records["position"] < end]
            if done == whole:
                return
            body = memoryview(file.read(done, min(whole - done, PIECE_BATCHES * INDEX_ENTRY_SIZE)))
            done += len(body)
            is_good = len(body) > 0
        raise BadBytes(f"{path} in {files.name} is not the index of the segment beside it")
    finally:
        file.close()


def followed(pieces: Iterable[Index], end: int) -> Iterator[tuple[Index, int]]:
    """Yield each piece that has batches, with the position after its last batch, which is *end* for the last piece."""
    held: Index | None = None
    for piece in pieces:
        if len(piece):
            if held is not None:
                yield held, int(piece["position"][0])
            held = piece
    if held is not None:
        yield held, end


def within(batches: Index, start: int, until: int) -> Index:
    """Return the batches that begin at positions [start, until)."""
    positions = batches["position"]
    return batches[(positions >= np.uint64(start)) & (positions < np.uint64(until))]

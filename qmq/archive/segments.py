"""What there is to read: the segments of a data directory, a live broker's too, or of an archive.

A reader of history needs of storage what says where segments lie and whose they are, and no more: identity, names and
headers of segments, indexes, what checkpoints say was removed.
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

#: Batches of a segment: INDEX_DTYPE[n], ascending.
Index = npt.NDArray[Any]

MESSAGES: Final = ".messages"
INDEX: Final = ".index"
#: So many batches of an index are in memory at once: 2 MiB.
PIECE_BATCHES: Final = 1 << 17
_BEHIND_ALL: Final = 1 << 63


class SegmentSource(NamedTuple):
    """A segment that can be read. Positions; paths are in the tree that it was found in."""

    store_id: bytes
    partition: int
    #: Of the file's first byte.
    base: int
    #: Behind the last batch.
    end: int
    path: str
    #: Where its batches begin; None where they had to be looked for, or the tree is asked.
    index_path: str | None
    #: Those that were looked for.
    found: Index | None
    #: Whether it can still grow.
    sealed: bool = True

    @property
    def whose(self) -> tuple[bytes, int]:
        """Store id and partition."""
        return self.store_id, self.partition

    def batches(self, files: Files, start: int = 0, until: int = _BEHIND_ALL) -> Index:
        """Those of its batches that begin at positions [start, until). Raises BadBytes when the index is not that of
        this segment, StorageFailed.
        """
        return np.concatenate(list(self.pieces(files, start, until)))

    def outline(self, files: Files) -> tuple[Index, bool]:
        """Its batches and True; of very many only the first and every so many behind it, and False. Raises as
        ``batches``.
        """
        kept, step = np.empty(0, INDEX_DTYPE), 1
        for piece in self.pieces(files):
            kept = np.concatenate((kept, piece[::step]))
            while len(kept) > PIECE_BATCHES:
                kept, step = kept[::2], 2 * step
        return kept, step == 1

    def pieces(self, files: Files, start: int = 0, until: int = _BEHIND_ALL) -> Iterator[Index]:
        """The same, some at a time: in a large segment an index is large, too. Raises as ``batches``, maybe behind
        others: then none was good.
        """
        if self.found is not None:
            found = iter((self.found,))
        elif self.index_path is not None:
            found = index_pieces(files, self.index_path, self.store_id, self.partition, self.base, self.end)
        else:
            assert isinstance(files, Telling)
            found = files.pieces(self, start, until)
        for piece in found:
            yield within(piece, start, until)


@runtime_checkable
class Telling(Protocol):
    """A tree without indexes, which tells where batches begin."""

    def pieces(self, segment: SegmentSource, start: int, until: int) -> Iterator[Index]:
        """Of a segment those that begin at positions [start, until), in one piece at least. Raises BadBytes."""


def index_pieces(files: Files, path: str, store_id: bytes, partition: int, base: int, end: int) -> Iterator[Index]:
    """The batches of a segment up to *end*, by its sealed index, which may go on: in an archive it comes before what
    tells of it. One piece at least. Raises BadBytes when it is not whole, or another one's; StorageFailed.
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
    """Each piece with the position behind its last batch, *end* the last one; none is empty."""
    held: Index | None = None
    for piece in pieces:
        if len(piece):
            if held is not None:
                yield held, int(piece["position"][0])
            held = piece
    if held is not None:
        yield held, end


def within(batches: Index, start: int, until: int) -> Index:
    """Those that begin at positions [start, until)."""
    positions = batches["position"]
    return batches[(positions >= np.uint64(start)) & (positions < np.uint64(until))]

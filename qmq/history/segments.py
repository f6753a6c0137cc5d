"""What there is to read: the segments of a data directory, a live broker's too, or of an archive.

A reader of history needs of storage what says where segments lie and whose they are, and no more: identity, names and
headers of segments, indexes, what checkpoints say was removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from qmq.errors import BadBytes
from qmq.format.layout import DERIVED_HEADER_SIZE, INDEX_DTYPE, INDEX_ENTRY_SIZE, INDEX_MAGIC
from qmq.history.files import Files
from qmq.storage.derived import parse_derived

#: Batches of a segment: INDEX_DTYPE[n], ascending.
Index = npt.NDArray[Any]

MESSAGES: Final = ".messages"
INDEX: Final = ".index"


class SegmentSource(NamedTuple):
    """A segment that can be read. Positions; paths are in the tree that it was found in."""

    store_id: bytes
    partition: int
    #: Of the file's first byte.
    base: int
    #: Behind the last batch.
    end: int
    path: str
    #: Where its batches begin; None where they had to be looked for.
    index_path: str | None
    #: Those that were looked for.
    found: Index | None
    #: Whether it can still grow.
    sealed: bool = True

    @property
    def whose(self) -> tuple[bytes, int]:
        """Store id and partition."""
        return self.store_id, self.partition

    def batches(self, files: Files) -> Index:
        """Its batches. Raises BadBytes when the index is not that of this segment, StorageFailed."""
        if self.found is not None:
            return self.found
        assert self.index_path is not None
        return read_index(files, self.index_path, self.store_id, self.partition, self.base, self.end)


def read_index(files: Files, path: str, store_id: bytes, partition: int, base: int, end: int) -> Index:
    """The batches of a segment up to *end*, by its sealed index, which may go on: in an archive it comes before what
    tells of it. Raises BadBytes when it is not whole, or another one's; StorageFailed.
    """
    try:
        data = files.read_whole(path)
    except FileNotFoundError as error:
        raise BadBytes(f"{path} in {files.name} is missing") from error
    header = parse_derived(data, INDEX_MAGIC, Path(files.name, path))
    body = memoryview(data)[DERIVED_HEADER_SIZE:]
    ours = (header.store_id, header.partition, header.base) == (store_id, partition, base) and header.covered >= end
    if not header.sealed or not ours or len(body) != header.rows * INDEX_ENTRY_SIZE or crc32c(body) != header.body_crc:
        raise BadBytes(f"{path} in {files.name} is not the index of the segment beside it")
    records = np.frombuffer(body, INDEX_DTYPE)
    return records[records["position"] < end]

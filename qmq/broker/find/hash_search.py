"""The batches that may have a key, or a copy of a message, by the hash: threads look into key indexes and the log."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from qmq.broker.find.rows import RowChunk, chunk_of_batches, first_position
from qmq.net.protocol.selection import Boundary
from qmq.storage.store import KeySearch, Partition, Store

#: A thread looks for at most so many batches for one answer, and takes so many steps of about a megabyte.
BATCHES: Final = 32
STEPS: Final = 16


class HashSearch:
    """[thread] The search of one partition for one answer. Call ``step`` until it returns False."""

    def __init__(self, part: Partition, search: KeySearch) -> None:
        self.partition = part.number
        self._search = search
        self._steps = 0
        #: The positions of batches that have the hash, in the order of the search.
        self.positions: list[int] = []
        #: All batches before this position are searched, of a search for the newest all from it on; None: all are.
        self.searched_to: int | None = None
        #: Steps that met bytes which the disk cannot read.
        self.unreadable = 0

    def step(self) -> bool:
        """Search a little further; return whether more is to be searched for the answer. Raises StorageFailed."""
        found = self._search.step()
        self.positions += found.positions
        self.searched_to = None if found.is_last else found.searched_to
        self.unreadable += found.unread_bytes > 0
        self._steps += 1
        if not found.is_last and len(self.positions) < BATCHES and self._steps < STEPS:
            return True
        self._search.close()
        return False

    def close(self) -> None:
        """Close the file of a search that has failed."""
        self._search.close()


def hash_searches(store: Store, value: int, lower: Boundary, upper: Boundary, newest: bool) -> list[HashSearch]:
    """Return the searches of all partitions for batches between two boundaries. Raises StorageError, NotInMemory."""
    found = []
    for part in store.partitions:
        start, end = first_position(part, lower), first_position(part, upper, is_end=True)
        if start < end:
            found.append(HashSearch(part, part.key_index.search(value, start, end, newest=newest)))
    return found


class Candidates(NamedTuple):
    """The rows of the batches that searches have found, and the places that these could not read."""

    chunk: RowChunk
    unreadable: int


def candidates_of(
    store: Store, searches: list[HashSearch], lower: Boundary, upper: Boundary, newest: bool
) -> Candidates:
    """Return the rows of the batches that *searches* have found, as far as all partitions are searched. Raises
    StorageError, NotInMemory.
    """
    edges = [
        edge
        for search in searches
        if search.searched_to is not None
        and (edge := _edge_of(store.partitions[search.partition], search.searched_to)) is not None
    ]
    after: Boundary | None = None
    if edges:
        after = Boundary(max(edges) if newest else min(edges), 0)
        lower, upper = (max(lower, after), upper) if newest else (lower, min(upper, after))
    positions = {search.partition: np.unique(np.array(search.positions, np.int64)) for search in searches}
    chunk = chunk_of_batches(store, positions, lower, upper)._replace(after=after)
    return Candidates(chunk, sum(search.unreadable for search in searches))


def _edge_of(part: Partition, position: int) -> int | None:
    """Return when the first readable batch at or behind a position was stored; None where there is none."""
    log = part.consumer_log
    row = log.row_at_position(position)
    return log.read_entry(row)[2] if row < log.visible_row else None

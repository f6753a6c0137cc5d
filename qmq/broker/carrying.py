"""The buffers that carry what was selected: whole batches as they lie, single runs as pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.commands import Buffer
from qmq.errors import QmqError, StorageFailed
from qmq.format.batch import EntryRow
from qmq.format.pieces import StoredBatch
from qmq.storage.store import KnownBad, Store

Rows = npt.NDArray[np.void]


class Some(NamedTuple):
    """Messages [start, stop) of one run."""

    partition: int
    entry: EntryRow
    start: int
    stop: int


class Many(NamedTuple):
    """Whole runs, in row order."""

    partition: int
    rows: Rows


class Carrier:
    """Makes the buffers of one answer. What can't be read any more is left out and named in ``damaged``, but for what
    was known to be bad.
    """

    def __init__(self, store: Store, damaged: list[QmqError]) -> None:
        self._store = store
        self._damaged = damaged
        self._buffers: list[Buffer] = []
        #: The system refused to read something; that may pass.
        self.failed: StorageFailed | None = None

    def carry(self, parts: list[Some | Many]) -> list[Buffer]:
        """The buffers, in order."""
        for part in parts:
            try:
                if isinstance(part, Some):
                    self._add_some(part)
                else:
                    self._add_many(part)
            except QmqError as error:
                self._note(error)
        return self._buffers

    def _add_some(self, part: Some) -> None:
        entry = part.entry
        if entry[7] == 1 and part.start == 0 and part.stop == entry[4]:
            self._buffers.append(self._store.view(part.partition, entry[1], entry[10]))
            return
        pieces, _ = self._batch(part.partition, entry).piece(entry[5], part.start, part.stop)
        self._buffers.extend(pieces)

    def _add_many(self, part: Many) -> None:
        """Batches that are wanted whole go as they lie, neighbours as one slice; of the others each run is a piece."""
        rows = part.rows
        positions = rows["position"].astype(np.int64)
        edges = np.flatnonzero(positions[1:] != positions[:-1]) + 1
        firsts = np.concatenate(([0], edges))
        chosen = np.diff(np.concatenate((firsts, [len(rows)])))
        starts, sizes = positions[firsts], rows["batch_size"][firsts].astype(np.int64)
        whole = chosen == rows["runs"][firsts]
        joined = (starts[1:] == starts[:-1] + sizes[:-1]) & whole[1:] & whole[:-1]
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1)).tolist()
        for head, tail in zip(heads, [*heads[1:], len(firsts)], strict=True):
            first = int(firsts[head])
            try:
                if whole[head]:
                    start = int(starts[head])
                    size = int(starts[tail - 1] + sizes[tail - 1]) - start
                    self._buffers.append(self._store.view(part.partition, start, size))
                else:
                    self._add_pieces(part.partition, rows[first : first + int(chosen[head])])
            except QmqError as error:
                if tail - head == 1:
                    self._note(error)
                    continue
                self._add_each(part.partition, zip(starts[head:tail], sizes[head:tail], strict=True))

    def _add_each(self, partition: int, batches: Iterable[tuple[int, int]]) -> None:
        """Whole batches one by one, of which some cannot be read."""
        for position, size in batches:
            try:
                self._buffers.append(self._store.view(partition, int(position), int(size)))
            except QmqError as error:
                self._note(error)

    def _add_pieces(self, partition: int, rows: Rows) -> None:
        batch = self._batch(partition, rows[0].item())
        for run in rows["run"].tolist():
            self._buffers.extend(batch.piece(run, 0, None)[0])

    def _batch(self, partition: int, entry: EntryRow) -> StoredBatch:
        return StoredBatch(self._store.view(partition, entry[1], entry[10]))

    def _note(self, error: QmqError) -> None:
        if isinstance(error, StorageFailed):
            self.failed = error
        if not isinstance(error, KnownBad):
            self._damaged.append(error)

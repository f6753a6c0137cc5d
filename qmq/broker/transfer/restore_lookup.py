"""Look up which messages of a restore's run are stored from a position on, in slices between other work.

A row of the consumer log says whether its run was restored, so only batches with such runs are read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from qmq.broker.groups.group_state import Ledger
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered, Asker, Effect, ReadWanted, Refused, first_number
from qmq.broker.publish.publish import Intake
from qmq.errors import BadBatch, InvalidOption, QmqError, StorageError
from qmq.format.batch import parse_header
from qmq.format.copies.restored import id_ranges_of, ids_of
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, RUN_REPLAYED
from qmq.format.pieces import stored_runs
from qmq.intervals import Intervals
from qmq.storage.store import ColdRead, NotInMemory, Store

#: The number of the one read that is under way.
READ_NUMBER: Final = first_number(Asker.RESTORE)
#: The most rows of one turn, about 10 ns each, and batches, about 30 us each; a large batch counts as several.
_ROWS: Final = 65_536
_BATCHES: Final = 256
_BYTES_A_BATCH: Final = 256 << 10


@dataclass(slots=True)
class Lookup:
    """One lookup under way. Positions go by partition; ``row`` is the next row of ``partition``."""

    command: Administer
    run: bytes
    ledger: Ledger | None
    since: list[int]
    ends: list[int]
    partition: int = 0
    row: int | None = None
    #: The position of the last batch that was read.
    last: int = -1
    found: dict[tuple[bytes, int], Intervals] = field(default_factory=dict)
    #: The next producer sequence of the run.
    following: int = 0


class Lookups:
    """The lookups of all restores, done one after another. The answers go to *effects*."""

    def __init__(self, store: Store, intake: Intake, effects: list[Effect]) -> None:
        self._store = store
        self._intake = intake
        self._effects = effects
        self._waiting: deque[Lookup] = deque()
        self._read: ColdRead | None = None
        self._last_key: object = None

    def begin(self, command: Administer, run: bytes, ledger: Ledger | None, since: list[int] | None) -> None:
        """Look up the messages of *run* from positions *since* on; None: there are none.

        Raises InvalidOption when messages behind these positions may have been removed, SyncFailed.
        """
        store = self._store
        ends = [part.message_log.end for part in store.partitions]
        starts = ends if since is None else (since + [0] * len(ends))[: len(ends)]
        for partition, start in enumerate((since or [])[: len(ends)]):
            if not _first_position(store, partition) <= start <= ends[partition]:
                raise InvalidOption(
                    f"the broker's log of partition {partition} has no position {start} any more: messages have been "
                    "removed since, or its directory was made anew; so it is unknown what is stored of this restore: "
                    "begin it anew"
                )
        for partition, end in enumerate(ends):
            broken = store.partitions[partition].broken()
            if broken is not None:
                raise broken
            if starts[partition] < end:
                self._intake.want_on_disk(partition)
        lookup = Lookup(command, run, ledger, starts, ends)
        if ledger is not None:
            lookup.following = ledger.restored.end(run)
        self._waiting.append(lookup)

    def disconnected(self, connection: int) -> None:
        """Forget the lookups of a connection that is gone."""
        self._waiting = deque(lookup for lookup in self._waiting if lookup.command.connection != connection)

    @property
    def any(self) -> bool:
        """Whether a lookup is under way."""
        return bool(self._waiting)

    @property
    def can_go_on(self) -> bool:
        """Whether the first lookup waits for neither a sync nor a read."""
        return bool(self._waiting) and self._read is None and self._is_on_disk(self._waiting[0])

    def _is_on_disk(self, lookup: Lookup) -> bool:
        return all(
            start >= end or min(self._intake.on_disk(partition), self._intake.visible(partition)) >= end
            for partition, (start, end) in enumerate(zip(lookup.since, lookup.ends, strict=True))
        )

    def turn(self) -> None:
        """Go on with the first lookup."""
        if not self.can_go_on:
            return
        lookup = self._waiting[0]
        command = lookup.command
        try:
            if not self._look(lookup):
                return
            answer: Effect = Administered(command.connection, command.request, _fields(lookup))
        except QmqError as error:
            answer = Refused(command.connection, command.request, error)
        self._waiting.popleft()
        self._effects.append(answer)

    def _look(self, lookup: Lookup) -> bool:
        """Do some of a lookup; return True when it is complete. Raises StorageError."""
        left = _BATCHES
        while lookup.partition < len(lookup.ends):
            if lookup.since[lookup.partition] >= lookup.ends[lookup.partition]:
                lookup.partition, lookup.row = lookup.partition + 1, None
                continue
            broken = self._store.partitions[lookup.partition].broken()
            if broken is not None:
                raise broken
            try:
                left = self._look_at_rows(lookup, left)
            except NotInMemory as missing:
                self._want(missing.read)
                return False
            if not left or self._read is not None:
                return False
        return True

    def _look_at_rows(self, lookup: Lookup, left: int) -> int:
        """Read some rows and at most *left* batches; return how many more batches may be read. Raises NotInMemory."""
        store, partition = self._store, lookup.partition
        part = store.partitions[partition]
        if lookup.row is None:
            lookup.row = part.consumer_log.row_at_position(lookup.since[partition])
        rows = part.consumer_log.rows(lookup.row, _ROWS)
        rows = rows[: int(np.searchsorted(rows["position"], np.uint64(lookup.ends[partition])))]
        if not len(rows):
            lookup.partition, lookup.row = partition + 1, None
            return left
        first = lookup.row
        for at in np.flatnonzero(rows["flags"] & RUN_REPLAYED).tolist():
            lookup.row = first + at
            position, size = int(rows["position"][at]), int(rows["batch_size"][at])
            if position == lookup.last:
                continue
            if not left or not self._look_at(lookup, position, size):
                return left
            lookup.last = position
            left = max(0, left - 1 - size // _BYTES_A_BATCH)
        lookup.row = first + len(rows)
        return left

    def _look_at(self, lookup: Lookup, position: int, size: int) -> bool:
        """Look at one batch; return False when it must be read first. A batch with bad bytes counts as not stored."""
        store, partition = self._store, lookup.partition
        part = store.partitions[partition]
        if not part.page_cache.has(position, size):
            sizes = np.array([size], np.int64)
            read = part.page_cache.read(np.array([position], np.int64), sizes, onward=True)
            if self._want(read):
                return False
        try:
            header = parse_header(part.message_log.view(position, BATCH_HEADER_SIZE))
            if header.magic != BATCH_MAGIC or header.producer_id != lookup.run:
                return True
            runs = stored_runs(part.message_log.view(position, size), header)
        except (StorageError, BadBatch):
            return True
        lookup.following = max(lookup.following, header.producer_sequence + header.messages)
        if lookup.ledger is not None and not lookup.ledger.restored.has(lookup.run, header.producer_sequence):
            return True
        for run in runs:
            for store_id, number, start, stop in id_ranges_of(ids_of(run)):
                lookup.found.setdefault((store_id, number), Intervals()).add(start, stop)
        return True

    # --- reads --------------------------------------------------------------------------------------------------------

    def _want(self, read: ColdRead) -> bool:
        """Begin a read; return False when it was the last one: its bytes leave memory as fast as they are read."""
        if read.key == self._last_key:
            self._last_key = None
            return False
        self._read, self._last_key = read, read.key
        self._effects.append(ReadWanted(READ_NUMBER, read))
        return True

    def read_done(self, error: QmqError | None) -> None:
        """Take the read, or refuse the first lookup when it failed."""
        read, self._read = self._read, None
        assert read is not None
        if error is None:
            self._store.finish_read(read)
        elif self._waiting:
            command = self._waiting.popleft().command
            self._effects.append(Refused(command.connection, command.request, error))


def _first_position(store: Store, partition: int) -> int:
    """Return the position where the first segment of a partition begins."""
    return store.partitions[partition].message_log.spans()[0].base


def _fields(lookup: Lookup) -> dict[str, Any]:
    found = [
        [store_id, number, [one for pair in intervals for one in pair]]
        for (store_id, number), intervals in lookup.found.items()
    ]
    return {"ends": lookup.ends, "found": found, "next": lookup.following}

"""Reads of the message log by clients: lists of segments, lists of batches, and bytes as they lie.

Bytes are read in a thread, a few reads of a partition at a time. Further requests wait, which takes little memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from qmq.broker.ports.commands import Fetched, ListBatches, ListSegments, ReadDone, ReadLog
from qmq.broker.ports.effects import (
    Asker,
    BatchList,
    Effect,
    FetchWanted,
    LogBytes,
    ReadWanted,
    Refused,
    SegmentList,
    first_number,
)
from qmq.errors import InvalidOption, Overloaded, QmqError
from qmq.storage.store import Fetch, NotInMemory, Store

#: Bytes of one answer.
MAX_BYTES: Final = 1 << 20
#: Waiting requests of one connection, for lists of batches and for bytes.
MAX_WAITING: Final = 64
#: Reads of a partition that run at once.
RUNNING: Final = 4
#: Segments of one answer; rows that one list of batches is made from.
SEGMENTS_AT_ONCE: Final = 1_000
ROWS_AT_ONCE: Final = 16_384


class LogReads:
    """Answers the reads of the log, to *effects*."""

    def __init__(self, store: Store, effects: list[Effect], visible: Callable[[int], int]) -> None:
        """*visible* returns the position before which a partition may be read."""
        self._store = store
        self._effects = effects
        self._visible = visible
        self._last_number = first_number(Asker.HISTORY)
        self._by_connection: Counter[int] = Counter()
        self._listing: dict[int, ListBatches] = {}  # requests whose rows are being read
        self._waiting: list[deque[ReadLog]] = [deque() for _ in range(len(store.partitions))]
        self._running: dict[int, tuple[ReadLog, Fetch]] = {}
        self._busy = [0] * len(store.partitions)

    def list_segments(self, asked: ListSegments) -> None:
        """Answer with a list of segments. Raises InvalidOption."""
        self._check(asked.partition)
        visible = self._visible(asked.partition)
        part = self._store.partitions[asked.partition]
        spans = part.segments_from(asked.position, SEGMENTS_AT_ONCE)
        current = part.segments_from(part.message_log.end, 1)[0].base
        rows = [(base, min(end, visible), base != current and end <= visible) for base, end in spans if base < visible]
        more = bool(spans) and spans[-1].base != current
        self._effects.append(SegmentList(asked.connection, asked.request, len(self._store.partitions), rows, more))

    def list_batches(self, asked: ListBatches) -> None:
        """Answer with the positions of batches. Raises InvalidOption, Overloaded, StorageError."""
        self._check(asked.partition)
        try:
            records = self._store.partitions[asked.partition].batches_from(asked.start, ROWS_AT_ONCE)
        except NotInMemory as missing:
            self._count(asked.connection)
            self._last_number += 1
            self._listing[self._last_number] = asked
            self._effects.append(ReadWanted(self._last_number, missing.read))
            return
        within = records[records["position"] < asked.end]
        after = int(within["position"][-1]) + 1 if len(within) and len(within) == len(records) else None
        self._effects.append(BatchList(asked.connection, asked.request, within.tobytes(), after))

    def read_done(self, done: ReadDone) -> None:
        """Answer a list whose rows were read, or refuse it where that has failed."""
        asked = self._listing.pop(done.number)
        if self._forget(asked.connection):
            try:
                if done.error is not None:
                    raise done.error
                self.list_batches(asked)
            except QmqError as error:
                self._effects.append(Refused(asked.connection, asked.request, error))

    def read(self, asked: ReadLog) -> None:
        """Have bytes read. Raises InvalidOption, Overloaded."""
        self._check(asked.partition)
        self._count(asked.connection)
        self._waiting[asked.partition].append(asked)
        self._begin_reads(asked.partition)

    def fetched(self, fetched: Fetched) -> None:
        """Answer with the bytes that were read, or refuse where that has failed."""
        asked, fetch = self._running.pop(fetched.number)
        self._busy[asked.partition] -= 1
        if self._forget(asked.connection):
            if fetched.error is not None:
                self._effects.append(Refused(asked.connection, asked.request, fetched.error))
            else:
                self._effects.append(LogBytes(asked.connection, asked.request, fetch.data))
        self._begin_reads(asked.partition)

    def disconnected(self, connection: int) -> None:
        """Forget the requests of a closed connection."""
        if not self._by_connection.pop(connection, 0):
            return
        for partition, waiting in enumerate(self._waiting):
            self._waiting[partition] = deque(asked for asked in waiting if asked.connection != connection)

    def _begin_reads(self, partition: int) -> None:
        waiting = self._waiting[partition]
        while waiting and self._busy[partition] < RUNNING:
            asked = waiting.popleft()
            size = min(asked.size, MAX_BYTES)
            fetch = self._store.partitions[partition].fetch(asked.position, size, self._visible(partition))
            if fetch is None:
                self._forget(asked.connection)
                self._effects.append(LogBytes(asked.connection, asked.request, b""))
                continue
            self._last_number += 1
            self._running[self._last_number] = asked, fetch
            self._busy[partition] += 1
            self._effects.append(FetchWanted(self._last_number, fetch))

    def _check(self, partition: int) -> None:
        if partition >= len(self._store.partitions):
            raise InvalidOption(f"there is no partition {partition}; there are {len(self._store.partitions)}")

    def _count(self, connection: int) -> None:
        if self._by_connection[connection] >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} reads of the log wait for this connection; send more when some are done")
        self._by_connection[connection] += 1

    def _forget(self, connection: int) -> bool:
        """Count one request less of a connection; return False when the connection is closed."""
        if connection not in self._by_connection:
            return False
        self._by_connection[connection] -= 1
        if not self._by_connection[connection]:
            del self._by_connection[connection]
        return True

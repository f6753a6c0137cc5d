"""Batches of the delay log that are due and not in memory: a thread reads them, and the loop goes on."""

from __future__ import annotations

from typing import Final

import numpy as np

from qmq.broker.commands import ReadDone
from qmq.broker.delay_items import Stretch
from qmq.broker.effects import Effect, ReadWanted
from qmq.errors import BadBatch, QmqError, StorageError
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE
from qmq.storage.store import Read, Store

#: The number of the one read that is under way: 0 is taken, and others count up or down from there.
READ_NUMBER: Final = 1 << 62
#: So many stretches may wait for reads; what is due beyond that stays in the schedule.
MOST_COLD: Final = 1_024
#: Read at first of a batch whose size is not known.
_FIRST_BYTES: Final = 16 << 10


class DelayReading:
    """Reads batches of the delay log; of messages that are due, in a thread."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._last = -1, memoryview(b"")  # a position, and the batch there
        self._read: Read | None = None
        self._last_key: object = None
        #: What is due, and out of the schedule, but not in memory.
        self.cold: list[Stretch] = []

    def batch(self, position: int) -> memoryview:
        """The batch at *position*, read at once where it is not in memory. Raises BadBytes, StorageFailed, BadBatch.

        One whose messages fall due one by one is read once for many of them.
        """
        if position == self._last[0]:
            return self._last[1]
        log = self._store.delay_log
        if log is None:
            raise BadBatch("there is no delay log; was its directory taken away?")
        header = parse_header(log.peek(0, position, BATCH_HEADER_SIZE))
        if header.position != position:
            raise BadBatch(f"no batch begins at position {position} of the delay log; run qmq verify")
        batch = log.peek(0, position, header.size)
        self._last = position, batch
        return batch

    @property
    def is_full(self) -> bool:
        """Nothing more is to be asked for before reads are done."""
        return len(self.cold) >= MOST_COLD

    def ready(self, stretches: list[Stretch]) -> list[Stretch]:
        """Those of *stretches*, and of what has been waiting for a read, that can be delivered without waiting; the
        others are read first.
        """
        if self._read is None:
            stretches, self.cold = self.cold + stretches, []
        ready, missing = list[Stretch](), dict[int, int]()
        for stretch in stretches:
            size = self._missing(stretch.position)
            if size is None:
                ready.append(stretch)
            else:
                missing[stretch.position] = size
                self.cold.append(stretch)
        if missing and self._read is None and not self._begin(missing):
            ready, self.cold = ready + self.cold, []  # it leaves memory as fast as it is read
        return ready

    def _missing(self, position: int) -> int | None:
        """How much of the batch at *position* is to be read; None when ``batch`` would not wait for the disk."""
        log = self._store.delay_log
        if log is None or position == self._last[0]:
            return None
        span = log.segment_at(0, position)
        if span is None:
            return None  # it was removed, as all of it is cancelled
        log.may_wait(False)
        try:
            if not log.is_at_hand(0, position, BATCH_HEADER_SIZE):
                return min(_FIRST_BYTES, span.end - position)
            size = parse_header(log.view(0, position, BATCH_HEADER_SIZE)).size
            size = min(size, span.end - position)  # what lies about that is found out later
            return None if log.is_at_hand(0, position, size) else size
        except StorageError:
            return None  # whoever reads it is told
        finally:
            log.may_wait(True)

    def _begin(self, missing: dict[int, int]) -> bool:
        """Have some of it read; False when that is what was read last."""
        log = self._store.delay_log
        assert log is not None
        positions = np.array(sorted(missing), np.int64)
        sizes = np.array([missing[position] for position in positions.tolist()], np.int64)
        read = log.read_of(0, positions, sizes, onward=False)
        if read.key == self._last_key:
            self._last_key = None
            return False
        self._read, self._last_key = read, read.key
        self._effects.append(ReadWanted(READ_NUMBER, read))
        return True

    def done(self, done: ReadDone) -> list[QmqError]:
        """The read is done; what it came upon."""
        read, self._read = self._read, None
        log = self._store.delay_log
        assert read is not None
        assert log is not None
        if done.error is not None:
            self._last_key = None
            return [done.error]
        return list(log.finish_read(read))

    @property
    def is_reading(self) -> bool:
        """A read is under way."""
        return self._read is not None

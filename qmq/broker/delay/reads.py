"""Read batches of the delay log that are due and not in memory, in a thread, while the loop goes on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from qmq.broker.delay.items import DelayedRange
from qmq.broker.ports.commands import Administer, ReadDone
from qmq.broker.ports.effects import Asker, Effect, ReadWanted, first_number
from qmq.errors import BadBatch, QmqError, StorageError
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE
from qmq.storage.store import ColdRead, NotInMemory, Store

#: The number of the one read of due batches that is under way.
READ_NUMBER: Final = first_number(Asker.DUE)
#: After so many reads for one command, the loop itself reads what the command needs.
_MOST_TRIES: Final = 4
#: The size and position in a batch's header.
_SIZE_AND_POSITION: Final = struct.Struct("<8xI12xQ")
#: At most so many ranges wait for reads; further due messages stay in the schedule.
MOST_COLD: Final = 1_024
#: The first read of a batch whose size is not known.
_FIRST_BYTES: Final = 16 << 10


class _Lookup(NamedTuple):
    """A read that a command waits for; *tries* counts the reads made for the command."""

    command: Administer
    read: ColdRead
    tries: int


class DelayReads:
    """Reads batches of the delay log: for due messages in a thread, for commands in a thread or at once."""

    def __init__(self, store: Store, effects: list[Effect]) -> None:
        self._store = store
        self._effects = effects
        self._last = -1, memoryview(b"")  # a position and its batch
        self._found: dict[int, memoryview] = {}  # batches that are ready
        self._read: ColdRead | None = None
        self._last_key: object = None
        #: Ranges that are due and out of the schedule, but not in memory.
        self.cold: list[DelayedRange] = []
        self._lookups: dict[int, _Lookup] = {}
        self._last_lookup = first_number(Asker.CANCEL)
        self._is_looking_up = False

    def batch(self, position: int) -> memoryview:
        """Return the batch at *position*; read it at once when it is not in memory. The last batch is remembered, for
        batches whose messages fall due one by one.

        Raises BadBytes, StorageFailed, BadBatch, and within ``looking_up`` NotInMemory.
        """
        if position == self._last[0]:
            return self._last[1]
        if (found := self._found.get(position)) is not None:
            return found
        log = self._store.delay_log
        if log is None:
            raise BadBatch("there is no delay log; was its directory taken away?")
        part = log.partitions[0]
        if self._is_looking_up and (size := self._missing(position)) is not None:
            raise NotInMemory(part.page_cache.read(np.array([position]), np.array([size]), onward=False))
        header = parse_header(part.page_cache.peek(position, BATCH_HEADER_SIZE))
        if header.position != position:
            raise BadBatch(f"no batch begins at position {position} of the delay log; run qmq verify")
        batch = part.page_cache.peek(position, header.size)
        self._last = position, batch
        return batch

    # --- for commands -------------------------------------------------------------------------------------------------

    @contextmanager
    def looking_up(self, tries: int) -> Iterator[None]:
        """Within this context, bytes that are not in memory raise NotInMemory, until *tries* reads are too many."""
        log = self._store.delay_log
        if log is None or tries >= _MOST_TRIES:
            yield
            return
        log.may_wait(False)
        self._is_looking_up = True
        try:
            yield
        finally:
            self._is_looking_up = False
            log.may_wait(True)

    def begin_lookup(self, command: Administer, missing: NotInMemory, tries: int) -> None:
        """Begin the read that a command needs."""
        self._last_lookup += 1
        self._lookups[self._last_lookup] = _Lookup(command, missing.read, tries)
        self._effects.append(ReadWanted(self._last_lookup, missing.read))

    def lookup_done(self, done: ReadDone) -> tuple[Administer, int]:
        """Return the command whose read is done, and how many reads were made for it."""
        command, read, tries = self._lookups.pop(done.number)
        if self._store.delay_log is not None:
            self._store.delay_log.finish_read(read)
        return command, tries

    # --- for due messages ---------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether no more ranges may be passed to ``ready`` until reads are done."""
        return len(self.cold) >= MOST_COLD

    def ready(self, delayed_ranges: list[DelayedRange]) -> list[DelayedRange]:
        """Return the ranges, of *delayed_ranges* and of those that waited for a read, that need no read; begin to read
        the others.
        """
        if self._read is None:
            delayed_ranges, self.cold = self.cold + delayed_ranges, []
        ready, missing = list[DelayedRange](), dict[int, int]()
        with self._refusing():
            for delayed in delayed_ranges:
                size = self._lacks(delayed.position)
                if size is None:
                    ready.append(delayed)
                else:
                    missing[delayed.position] = size
                    self.cold.append(delayed)
        if missing and self._read is None and not self._begin(missing):
            ready, self.cold = ready + self.cold, []  # the batches leave memory as fast as they are read
        return ready

    def clear_ready(self) -> None:
        """Forget the batches that were ready: they are delivered."""
        self._found.clear()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Within this context, the delay log raises instead of reading what is not in memory."""
        log = self._store.delay_log
        if log is not None:
            log.may_wait(False)
        try:
            yield
        finally:
            if log is not None:
                log.may_wait(True)

    def _missing(self, position: int) -> int | None:
        """As ``_lacks``, but do not remember the batch as ready."""
        with self._refusing():
            size = self._lacks(position)
        self._found.pop(position, None)
        return size

    def _lacks(self, position: int) -> int | None:
        """Return how many bytes of the batch at *position* must be read; None when ``batch`` would not wait for the
        disk.
        """
        log = self._store.delay_log
        if log is None or position == self._last[0] or position in self._found:
            return None
        part = log.partitions[0]
        span = part.message_log.segment_at(position)
        if span is None:
            return None  # the segment was removed: all its messages are cancelled
        try:
            if not part.page_cache.has(position, BATCH_HEADER_SIZE):
                return min(_FIRST_BYTES, span.end - position)
            said: int
            place: int
            said, place = _SIZE_AND_POSITION.unpack_from(part.message_log.view(position, BATCH_HEADER_SIZE))
            size = min(said, span.end - position)  # a wrong size is found when the batch is parsed
            if not part.page_cache.has(position, size):
                return size
            if (place, said) == (position, size):
                self._found[position] = part.message_log.view(position, size)
        except StorageError:
            pass  # ``batch`` raises it again
        return None

    def _begin(self, missing: dict[int, int]) -> bool:
        """Begin to read the batches at these positions; return False when they are those of the last read."""
        log = self._store.delay_log
        assert log is not None
        positions = np.array(sorted(missing), np.int64)
        sizes = np.array([missing[position] for position in positions.tolist()], np.int64)
        read = log.partitions[0].page_cache.read(positions, sizes, onward=False)
        if read.key == self._last_key:
            self._last_key = None
            return False
        self._read, self._last_key = read, read.key
        self._effects.append(ReadWanted(READ_NUMBER, read))
        return True

    def done(self, done: ReadDone) -> list[QmqError]:
        """Return the errors of the read that is done."""
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
        """Whether a read is under way."""
        return self._read is not None

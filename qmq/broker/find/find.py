"""Searches of clients: a bounded step in each turn, each answered by itself, while others send and pull."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.delivery.encode import PIECE_BYTES, AnswerEncoder, answer_bytes, parts_of_rows
from qmq.broker.find.get import GetMessages
from qmq.broker.find.hash_search import HashSearch, candidates_of, hash_searches
from qmq.broker.find.rows import RowChunk, boundary_at, read_chunk, read_subject, rows_between
from qmq.broker.find.subjects import SubjectFilters
from qmq.broker.groups.message_ranges import Rows, RunPart, WholeRuns
from qmq.broker.ports.commands import Find, Get, ReadDone
from qmq.broker.ports.effects import Asker, Buffer, Effect, FoundMessages, ReadWanted, Refused, failed, first_number
from qmq.broker.ports.rights import Rights
from qmq.errors import BadBatch, BadBytes, Overloaded, QmqError
from qmq.format.batch import EntryRow
from qmq.format.layout import ENTRY_HAS_ORIGIN_ID
from qmq.format.pieces import StoredBatch
from qmq.net.protocol.matches import MessageMatcher
from qmq.net.protocol.selection import Boundary, Selection
from qmq.storage.store import ColdRead, KnownBad, NotInMemory, Partition, Store

#: Rows of one step, about 10 ns each; and batches that are looked into, about 20 us each, a large one as several.
ROWS: Final = 16_384
BATCHES: Final = 32
_BYTES_A_BATCH: Final = 64 << 10
#: Runs of one answer that is not sparse.
_RUNS: Final = 1_024
#: Bytes that a search backward reads together.
_READ_BYTES: Final = 2 << 20
#: Requests of one connection that may wait.
MAX_WAITING: Final = 16
#: After this many reads for one step the next one is made while everybody waits: its bytes leave memory too fast.
_MOST_READS: Final = 8


class _OpenRequest:
    """A request, the reads that were made for it, and the searches of threads for its answer."""

    __slots__ = ("command", "reads", "running", "searches", "upto_us")

    def __init__(self, command: Get | Find) -> None:
        self.command = command
        self.reads: set[object] = set()
        self.searches: list[HashSearch] | None = None
        #: Searches that are not done.
        self.running = 0
        #: The search covers what was stored before this time.
        self.upto_us: int | None = None


class _Taken(NamedTuple):
    """The messages of one step, in the order of the store, and the boundary at which the search goes on if they are not
    all of the chunk.
    """

    parts: list[RunPart | WholeRuns]
    after: Boundary | None
    unreadable: int = 0
    #: Rows of the chunk that were looked at, where whole runs are taken.
    looked: int = 0


class Finds:
    """Answers GET at once, and FIND one step in a turn, to *effects*. Places that were not known to be bad are added to
    ``damaged``.
    """

    def __init__(self, store: Store, effects: list[Effect], getting: GetMessages, rights: Mapping[int, Rights]) -> None:
        """*rights* are those of the connections that have a token: what they may not browse is passed over."""
        self._rights = rights
        self._store = store
        self._effects = effects
        self._getting = getting
        self._subjects = SubjectFilters(store)
        self._by_connection: Counter[int] = Counter()
        self._waiting: deque[_OpenRequest] = deque()
        self._reading: dict[int, tuple[_OpenRequest, ColdRead | HashSearch]] = {}
        self._last_number = first_number(Asker.FIND)
        self.damaged: list[QmqError] = []

    # --- in ----------------------------------------------------------------------------------------------------------

    def get(self, command: Get) -> None:
        """Answer with a message. Raises UnknownMessage, StorageError, Overloaded."""
        self._count(command.connection)
        self._step(_OpenRequest(command))

    def find(self, command: Find) -> None:
        """Have a turn answer with the next messages of a search. Raises Overloaded."""
        self._count(command.connection)
        self._waiting.append(_OpenRequest(command))

    def read_done(self, done: ReadDone) -> None:
        """Go on with the request that waits for a read, or refuse it where the read has failed."""
        asked, read = self._reading.pop(done.number)
        if isinstance(read, HashSearch):
            asked.running -= 1
            if done.error is not None:
                read.close()
        elif done.error is None:
            self.damaged += self._store_of(asked.command).finish_read(read)
        if done.error is not None:
            self._refuse(asked.command, done.error)
            asked.running = -1  # the answers of its other searches count no more
        elif asked.running == 0:
            self._waiting.appendleft(asked)

    def disconnected(self, connection: int) -> None:
        """Forget the requests of a closed connection."""
        if self._by_connection.pop(connection, 0):
            self._waiting = deque(asked for asked in self._waiting if asked.command.connection != connection)

    def turn(self) -> None:
        """Do one step of the request that has waited for longest."""
        if self._waiting:
            asked = self._waiting.popleft()
            if asked.command.connection in self._by_connection:
                self._step(asked)

    @property
    def is_unfinished(self) -> bool:
        """Whether a request waits for a turn."""
        return bool(self._waiting)

    def _store_of(self, command: Get | Find) -> Store:
        """Return the store that a request reads."""
        return self._getting.store_of(command) if isinstance(command, Get) else self._store

    def _count(self, connection: int) -> None:
        if self._by_connection[connection] >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} searches of this connection wait; send more when some are answered")
        self._by_connection[connection] += 1

    # --- one step ----------------------------------------------------------------------------------------------------

    def _step(self, asked: _OpenRequest) -> None:
        try:
            with _reading(self._store_of(asked.command), may_wait=len(asked.reads) >= _MOST_READS):
                answer = self._answer(asked)
        except NotInMemory as missing:
            read = missing.read
            if read.key in asked.reads:
                asked.reads.update(range(_MOST_READS))  # it was read, and has left memory again
                self._waiting.append(asked)
                return
            asked.reads.add(read.key)
            self._begin(asked, read)
        except QmqError as error:
            self._refuse(asked.command, error)
        except Exception as error:
            if self._forget(asked.command.connection):
                self._effects.append(failed(asked.command.connection, asked.command.request, error))
        else:
            if answer is not None:
                self._forget(asked.command.connection)
                self._effects.append(answer)

    def _begin(self, asked: _OpenRequest, read: ColdRead | HashSearch) -> None:
        """Have a thread read for a request."""
        self._last_number += 1
        self._reading[self._last_number] = asked, read
        self._effects.append(ReadWanted(self._last_number, read))

    def _refuse(self, command: Get | Find, error: QmqError) -> None:
        if self._forget(command.connection):
            self._effects.append(Refused(command.connection, command.request, error))

    def _forget(self, connection: int) -> bool:
        """Count one request less of a connection; return False when the connection is closed."""
        if connection not in self._by_connection:
            return False
        self._by_connection[connection] -= 1
        if not self._by_connection[connection]:
            del self._by_connection[connection]
        return True

    def _answer(self, asked: _OpenRequest) -> Effect | None:
        """Return the answer to a request, None where threads search for it first. Raises QmqError, NotInMemory."""
        command, store = asked.command, self._store
        if isinstance(command, Get):
            return self._getting.message(command)
        selection, newest = command.selection, command.newest
        if asked.upto_us is None:  # the same after reads, which take time
            asked.upto_us = store.last_stored_at_us + 1 if command.upto_us is None else command.upto_us
        upto_us = asked.upto_us
        lower = Boundary(selection.since_us, 0)
        upper = Boundary(min(selection.until_us, upto_us), 0)
        if command.after is not None:
            lower, upper = (lower, min(upper, command.after)) if newest else (max(lower, command.after), upper)
        matcher, unreadable = MessageMatcher(selection), 0
        if not selection.is_sparse:
            chunk = self._chunk(selection, lower, upper, newest)
        else:
            if asked.searches is None:
                asked.searches = hash_searches(store, matcher.value, lower, upper, newest)
                asked.running = len(asked.searches)
                for search in asked.searches:
                    self._begin(asked, search)
                if asked.searches:
                    return None
            chunk, unreadable = candidates_of(store, asked.searches, lower, upper, newest)
        wanted = self._subjects.taken(chunk.rows["subject"], selection, self._rights.get(command.connection))
        if selection.original is not None:
            wanted &= (chunk.rows["flags"] & ENTRY_HAS_ORIGIN_ID) != 0
        if selection.is_sparse:
            taken = self._sparse(command, chunk, wanted, matcher)
        else:
            taken = self._dense(command, chunk, wanted)
        after = chunk.after if taken.after is None else taken.after
        looked, left = taken.looked, chunk.total - taken.looked
        if selection.is_sparse:
            looked, left = _progress(store, lower, upper, after, newest)
        buffers, lost = self._encoded(taken.parts)
        unreadable += taken.unreadable + lost
        return FoundMessages(command.connection, command.request, buffers, after, upto_us, looked, left, unreadable)

    def _chunk(self, selection: Selection, lower: Boundary, upper: Boundary, newest: bool) -> RowChunk:
        """Return the rows of one step: where one subject is selected, only its own. Raises StorageError,
        NotInMemory.
        """
        store, prefix = self._store, selection.prefix
        if prefix and not prefix.endswith(".") and not store.subjects.damaged:  # else it may be of a lost name
            found = read_subject(store, store.subjects.numbers_of(prefix), lower, upper, newest, ROWS)
            if found is not None:
                return found
        return read_chunk(store, lower, upper, newest, ROWS)

    def _dense(self, command: Find, chunk: RowChunk, wanted: npt.NDArray[np.bool_]) -> _Taken:
        """Take whole runs, and of the outermost ones parts, as many as the answer may have. Raises StorageError,
        NotInMemory.
        """
        newest = command.newest
        chosen = np.flatnonzero(wanted)
        if not len(chosen):
            return _Taken([], None, looked=len(chunk.rows))
        if newest:
            chosen = chosen[::-1]
        chosen = chosen[:_RUNS]
        starts, stops = chunk.starts[chosen], chunk.stops[chosen]
        counts = np.cumsum(stops - starts)
        fits = int(np.searchsorted(np.cumsum(answer_bytes(chunk.rows[chosen])), command.max_bytes, side="right"))
        enough = int(np.searchsorted(counts, command.max_count)) + 1
        few = min(max(fits, 1), enough, len(chosen))
        chosen, starts, stops = chosen[:few], starts[:few], stops[:few]
        over = max(0, int(counts[few - 1]) - command.max_count)
        if newest:
            starts[-1] += over
            chosen, starts, stops = chosen[::-1], starts[::-1], stops[::-1]
        else:
            stops[-1] -= over
        partitions, rows = chunk.partitions[chosen], chunk.rows[chosen]
        self._require(partitions, rows, newest)
        rest = wanted[: chosen[0]] if newest else wanted[chosen[-1] + 1 :]
        if not over and not rest.any():
            return _Taken(_parts(partitions, rows, starts, stops), None, looked=len(chunk.rows))
        at = 0 if newest else -1
        index = int(starts[0] if newest else stops[-1])
        after = boundary_at(self._store.partitions[int(partitions[at])], int(chunk.numbers[chosen[at]]), index)
        looked = len(chunk.rows) - int(chosen[0]) if newest else int(chosen[-1]) + 1
        return _Taken(_parts(partitions, rows, starts, stops), after, looked=looked)

    def _sparse(self, command: Find, chunk: RowChunk, wanted: npt.NDArray[np.bool_], matcher: MessageMatcher) -> _Taken:
        """Look into batches for single messages, up to the bounds of a step. Raises StorageFailed, NotInMemory."""
        newest = command.newest
        chosen = np.flatnonzero(wanted)
        if newest:
            chosen = chosen[::-1]
        parts: list[RunPart | WholeRuns] = []
        count, size, left, unreadable = command.max_count, command.max_bytes, BATCHES, 0
        last: tuple[int, int] = (-1, -1)
        batch: StoredBatch | None = None
        for done, at in enumerate(chosen.tolist()):
            part = self._store.partitions[int(chunk.partitions[at])]
            entry: EntryRow = chunk.rows[at].item()
            start, stop = int(chunk.starts[at]), int(chunk.stops[at])
            key = part.number, entry[1]
            if key != last:
                is_there = part.page_cache.has(entry[1], entry[10])
                if not is_there and not done:
                    self._require(chunk.partitions[chosen], chunk.rows[chosen], newest)
                if not is_there or left <= 0 or size <= 0:
                    after = boundary_at(part, int(chunk.numbers[at]), stop if newest else start)
                    return _Taken(parts[::-1] if newest else parts, after, unreadable)
                left -= 1 + entry[10] // _BYTES_A_BATCH
                last, batch = key, self._batch(part, entry)
                unreadable += batch is None
            if batch is None:
                continue
            found = [index for index in matcher.matches(batch.run(entry[5])) if start <= index < stop]
            if newest:
                found.reverse()
            for index in found[:count]:
                parts.append(RunPart(part.number, entry, index, index + 1))
                size -= int(batch.lengths(entry[5])[index]) + PIECE_BYTES
            count -= len(found[:count])
            if not count:
                taken = parts[-1]
                assert isinstance(taken, RunPart)
                after = boundary_at(part, int(chunk.numbers[at]), taken.start if newest else taken.stop)
                return _Taken(parts[::-1] if newest else parts, after, unreadable)
        return _Taken(parts[::-1] if newest else parts, None, unreadable)

    def _batch(self, part: Partition, entry: EntryRow) -> StoredBatch | None:
        """Return the batch of a row, None where it cannot be read. Raises StorageFailed."""
        try:
            return StoredBatch(part.message_log.view(entry[1], entry[10]))
        except KnownBad:
            return None
        except (BadBatch, BadBytes) as error:
            self.damaged.append(error)
            return None

    def _require(self, partitions: npt.NDArray[np.int64], rows: Rows, newest: bool) -> None:
        """Raise NotInMemory where a batch of these rows, of the first ones that are read together, is not in memory."""
        for number in np.unique(partitions).tolist():
            part = self._store.partitions[number]
            mine = rows[partitions == number]
            order = np.argsort(mine["position"], kind="stable")
            positions, sizes = mine["position"][order].astype(np.int64), mine["batch_size"][order].astype(np.int64)
            if newest:  # those nearest to the end
                near = int(np.searchsorted(positions, int(positions[-1]) - _READ_BYTES))
                positions, sizes = positions[near:], sizes[near:]
            there = part.page_cache.count(positions, sizes)
            if there < len(positions):
                raise NotInMemory(part.page_cache.read(positions[there:], sizes[there:], onward=not newest))

    def _encoded(self, parts: list[RunPart | WholeRuns]) -> tuple[list[Buffer], int]:
        """Return the buffers of messages, and how many places could not be read. Raises StorageFailed."""
        damaged: list[QmqError] = []
        encoder = AnswerEncoder(self._store, damaged)
        buffers = encoder.encode(parts)
        if encoder.failed is not None:
            raise encoder.failed
        self.damaged += damaged
        return buffers, max(len(damaged), int(encoder.left_out))


@contextmanager
def _reading(store: Store, *, may_wait: bool) -> Iterator[None]:
    """Within it, bytes that are not in memory raise NotInMemory, or are read at once if everybody *may_wait*."""
    before = store.partitions[0].message_log.residence.may_wait  # the delay log's may wait, the broker's may not
    store.may_wait(may_wait)
    try:
        yield
    finally:
        store.may_wait(before)


def _progress(store: Store, lower: Boundary, upper: Boundary, after: Boundary | None, newest: bool) -> tuple[int, int]:
    """Return how many rows of a search were looked at, and how many are left. Raises StorageError, NotInMemory."""
    total = rows_between(store, lower, upper)
    if after is None:
        return total, 0
    left = rows_between(store, lower, after) if newest else rows_between(store, after, upper)
    return total - left, left


def _parts(
    partitions: npt.NDArray[np.int64], rows: Rows, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> list[RunPart | WholeRuns]:
    """Return the messages [start, stop) of each row, whole runs together."""
    is_cut = (starts > 0) | (stops < rows["count"])
    parts: list[RunPart | WholeRuns] = []
    done = 0
    for at in [*np.flatnonzero(is_cut).tolist(), len(rows)]:
        if done < at:
            parts += parts_of_rows(partitions[done:at], rows[done:at], None)
        if at < len(rows):
            parts.append(RunPart(int(partitions[at]), rows[at].item(), int(starts[at]), int(stops[at])))
        done = at + 1
    return parts

"""What comes out of the broker's state machine. ``connection`` and ``request`` are those of the command it answers."""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.errors import QmqError
from qmq.net.protocol.types import ConsumerState, ReportOutcome
from qmq.storage.store import Fetch

Buffer = bytes | memoryview


class Sent(NamedTuple):
    """A batch is acknowledged. ``first_sequences`` is one int for a batch of one run, else u64[runs]."""

    connection: int
    request: int
    position: int
    stored_at_us: int
    partition: int
    first_sequences: int | npt.NDArray[np.uint64]


class Subscribed(NamedTuple):
    """``start_us`` is told to who follows alone from a time on: all that was stored since is theirs. A consumer of a
    group is told its place, the tags that the group takes, and which settings it has that are not as asked for.
    """

    connection: int
    request: int
    subscription: int
    start_us: int | None = None
    consumer_state: ConsumerState | None = None
    tags: tuple[str, ...] = ()
    differing: tuple[tuple[str, Any], ...] = ()


class PulledMessages(NamedTuple):
    """A pull's answer: buffers of batches and pieces, ``size`` bytes in all; empty when none came.

    ``left_us`` is told to who follows alone over several partitions: nothing stored before it is still to come. To a
    consumer of a group ``ranges`` say which delivery sequences these messages have, in order: (first, count, attempt),
    and ``tags`` by whose bits the group's messages are chosen.
    """

    connection: int
    request: int
    buffers: list[Buffer]
    size: int
    messages: int
    left_us: int | None = None
    ranges: tuple[tuple[int, int, int], ...] = ()
    tags: tuple[str, ...] = ()


class Unsubscribed(NamedTuple):
    connection: int
    request: int


class Acked(NamedTuple):
    """What could be is handled; so many had to be refused: they were handed back before, or never pulled. One that
    ``joins`` may be told as a part of the messages that follow to that connection.
    """

    connection: int
    request: int
    refused: int
    joins: bool = False


class HandedBack(NamedTuple):
    """They are, but for those of these numbers, of which some was not in flight (any more)."""

    connection: int
    request: int
    refused: tuple[int, ...] = ()


class HandedOver(NamedTuple):
    """It is stored here, and waits to be handed out again, or is a dead letter."""

    connection: int
    request: int


class Restored(NamedTuple):
    """They are stored, on disk, and seen by whom they are for. ``ends``: where each partition's log ends."""

    connection: int
    request: int
    ends: tuple[int, ...]


class HeartbeatSeen(NamedTuple):
    connection: int
    request: int


class Administered(NamedTuple):
    """What came of it."""

    connection: int
    request: int
    fields: dict[str, Any]


class LastSequenceIs(NamedTuple):
    connection: int
    request: int
    sequence: int | None


class Claimed(NamedTuple):
    connection: int
    request: int


class SubjectList(NamedTuple):
    """Rows (name, first sequence, next sequence, messages, delayed); ``after`` is what to ask for next, or None."""

    connection: int
    request: int
    rows: list[tuple[str, int, int, int, int]]
    after: int | None


class SegmentList(NamedTuple):
    """Segments, ascending: base, end, whether it can grow no more. How many partitions there are; if more follow."""

    connection: int
    request: int
    partitions: int
    rows: list[tuple[int, int, bool]]
    more: bool


class BatchList(NamedTuple):
    """Where batches begin, records of an index; ``after`` is the position to go on from, None where that was all."""

    connection: int
    request: int
    records: bytes
    after: int | None


class LogBytes(NamedTuple):
    """Bytes as they lie; fewer than asked for where the segment ends, none behind the end of what can be read."""

    connection: int
    request: int
    data: Buffer


class Refused(NamedTuple):
    connection: int
    request: int
    error: QmqError


class SyncWanted(NamedTuple):
    """Run ``store.sync(partition)`` in a thread, then hand in Synced(partition, position) or SyncBroken."""

    partition: int
    position: int


_BLOCK_BITS: Final = 48


class Asker(enum.IntEnum):
    """Who asks for reads; the number of its block."""

    PULL_LOG = 0  # syncs of it
    PULLS = 1  # and commands that wait for what is to be looked up
    REPORTS = 2
    HISTORY = 3  # lists of batches
    DUE = 4  # what is due to be delivered
    CANCEL = 5  # what is to be cancelled
    RESTORE = 6  # what may have been restored before
    RETENTION = 7  # a look at a segment
    FORWARDING = 8  # what is to be copied out of one


def first_number(asker: Asker) -> int:
    """The first number of its block; the others count up from there."""
    return asker << _BLOCK_BITS


def asker_of(number: int) -> Asker:
    """Whose block that number is of."""
    return Asker(number >> _BLOCK_BITS)


class ReadWork(Protocol):
    """Bytes on disk that are to be brought into memory."""

    partition: int

    def step(self) -> bool:
        """[thread] Read a piece; True while more is left. Raises StorageError when nothing can be read."""


class ReadWanted(NamedTuple):
    """Run ``read.step`` in a thread of its partition until nothing is left, then hand in ReadDone(number, error)."""

    number: int
    read: ReadWork


class FetchWanted(NamedTuple):
    """Run ``fetch.run`` in a thread for such reads of its partition, then hand in Fetched(number, error)."""

    number: int
    fetch: Fetch


class Reported(NamedTuple):
    """The answer to a report of damaged messages: what the broker found there."""

    connection: int
    request: int
    found: ReportOutcome


class CheckWanted(NamedTuple):
    """Have the batch of that size read in a thread: ``store.reader(partition, position).read_batch(position, size,
    first, messages)``; then hand in Checked.
    """

    number: int
    partition: int
    position: int
    size: int
    first: int
    messages: int


Effect = (
    Sent
    | Subscribed
    | PulledMessages
    | Unsubscribed
    | Acked
    | HandedBack
    | HandedOver
    | Restored
    | HeartbeatSeen
    | Administered
    | LastSequenceIs
    | Claimed
    | SubjectList
    | Reported
    | SegmentList
    | BatchList
    | LogBytes
    | Refused
    | SyncWanted
    | ReadWanted
    | CheckWanted
    | FetchWanted
)

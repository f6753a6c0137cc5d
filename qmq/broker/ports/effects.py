"""Effects: the output of the broker's state machine. ``connection`` and ``request`` are those of the command that an
effect answers.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from qmq.errors import InternalError, QmqError
from qmq.net.protocol.selection import Boundary
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


class SentDuplicates(NamedTuple):
    """As Sent, for a batch of which some or all messages repeat unique texts, and were left out.

    ``first_sequences`` are those of the runs as they were sent, NO_SEQUENCE for one of which nothing is stored.
    ``duplicates`` has an ordinal u32 and a UNIQUE_ROW for each message that was left out.
    """

    connection: int
    request: int
    position: int
    stored_at_us: int
    partition: int
    first_sequences: npt.NDArray[np.uint64]
    duplicates: bytes


class Subscribed(NamedTuple):
    """A subscription began.

    A solo consumer that starts at a time gets ``start_us``: it gets all that was stored since then. A consumer of a
    group gets its state, the group's tags, the settings in which the group differs from those that it asked for, and
    how often and after which delays the group tries a message (``max_attempts`` 0: there are no attempts to count).
    """

    connection: int
    request: int
    subscription: int
    start_us: int | None = None
    consumer_state: ConsumerState | None = None
    tags: tuple[str, ...] = ()
    differing: tuple[tuple[str, Any], ...] = ()
    max_attempts: int = 0
    retry_delays_us: tuple[int, ...] = ()


class PulledMessages(NamedTuple):
    """The answer to a pull: buffers of batches and pieces, ``size`` bytes in all; empty when no messages came.

    A solo consumer of several partitions gets ``left_us``: no message stored before that is still to come. A consumer
    of a group gets ``ranges``, the delivery sequences of these messages in order, as (first, count, attempt), and the
    group's ``tags``, by whose bits the broker chose the messages.
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
    """A subscription ended."""

    connection: int
    request: int


class Acked(NamedTuple):
    """Acks are written. ``refused`` messages were handed back before, or never pulled. One that ``joins`` may be sent
    as a part of the messages that follow to that connection.
    """

    connection: int
    request: int
    refused: int
    joins: bool = False


class HandedBack(NamedTuple):
    """The ranges are handed back, except those with the numbers *refused*, of which some message was not in flight."""

    connection: int
    request: int
    refused: tuple[int, ...] = ()


class HandedOver(NamedTuple):
    """The message is stored here, and is a retry or a dead letter."""

    connection: int
    request: int


class Restored(NamedTuple):
    """The messages are stored, on disk, and visible to their readers. ``ends``: where each partition's log ends."""

    connection: int
    request: int
    ends: tuple[int, ...]


class HeartbeatSeen(NamedTuple):
    """The answer to a heartbeat."""

    connection: int
    request: int


class Administered(NamedTuple):
    """The result of an Administer command."""

    connection: int
    request: int
    fields: dict[str, Any]


class LastSequenceIs(NamedTuple):
    """The last producer sequence that is stored of a producer; None where the broker remembers none."""

    connection: int
    request: int
    sequence: int | None


class Claimed(NamedTuple):
    """The answer to a Claim."""

    connection: int
    request: int


#: A row of a SubjectList.
SubjectRow = tuple[str, int, int, int, int, int, int, int]


class SubjectList(NamedTuple):
    """Rows (name, first sequence, next sequence, messages, delayed messages, and of the messages those of high and of
    low priority and with an order key); ``after`` is the number to go on from, or None at the end.
    """

    connection: int
    request: int
    rows: list[SubjectRow]
    after: int | None


class SegmentList(NamedTuple):
    """Segments, ascending, as (base, end, whether it is complete); the count of partitions; whether more follow."""

    connection: int
    request: int
    partitions: int
    rows: list[tuple[int, int, bool]]
    more: bool


class BatchList(NamedTuple):
    """Positions of batches, as records of an index; ``after`` is the position to go on from, None at the end."""

    connection: int
    request: int
    records: bytes
    after: int | None


class LogBytes(NamedTuple):
    """Bytes as they lie; fewer than asked for where the segment ends, none behind the end of the readable log."""

    connection: int
    request: int
    data: Buffer


class GotMessage(NamedTuple):
    """The message that was asked for, alone in a piece or as its whole batch."""

    connection: int
    request: int
    buffers: list[Buffer]


class FoundMessages(NamedTuple):
    """Some of the messages that are looked for, as batches and pieces in the order of the store.

    The search goes on at ``after``; it is done where that is None. ``looked`` runs of messages were looked at for this
    answer, about ``left`` are left; ``unreadable`` places could not be read, so messages may be missing. The search
    covers what was stored before ``upto_us``.
    """

    connection: int
    request: int
    buffers: list[Buffer]
    after: Boundary | None
    upto_us: int
    looked: int = 0
    left: int = 0
    unreadable: int = 0


class Traced(NamedTuple):
    """The answer to a trace of a message: the facts about it, and a row for each group with its state and events; or to
    one of a consumer: no facts, and a row for each event. With *is_partial* the pull log does not reach back far
    enough, or not all of it was read.
    """

    connection: int
    request: int
    message: dict[str, Any]
    rows: list[dict[str, Any]] | list[list[Any]]
    is_partial: bool


class Refused(NamedTuple):
    """The command failed, or is not allowed."""

    connection: int
    request: int
    error: QmqError


def failed(connection: int, request: int, cause: Exception) -> Refused:
    """Return the answer to a request at which the broker failed by a bug; the server logs *cause*."""
    error = InternalError("the broker failed to handle this; its log has the details")
    error.__cause__ = cause
    return Refused(connection, request, error)


class SyncWanted(NamedTuple):
    """Run ``store.sync(partition)`` in a thread, then hand in Synced(partition, position) or SyncBroken."""

    partition: int
    position: int


_BLOCK_BITS: Final = 48


class Asker(enum.IntEnum):
    """The parts of the broker that ask for reads. Each has a block of numbers, by which ReadDone finds it again."""

    PULL_LOG = 0  # syncs of the pull log
    PULLS = 1  # and commands that wait for a read
    REPORTS = 2
    HISTORY = 3  # lists of batches for readers of the log
    DUE = 4  # delayed messages that are due
    CANCEL = 5  # delayed messages to cancel
    RESTORE = 6  # messages that may have been restored before
    RETENTION = 7  # a segment that may be dropped
    FORWARDING = 8  # messages to carry forward out of one
    FIND = 9  # messages that clients look for
    RESEND = 10  # rows of messages that are handed out again
    TRACE = 11  # a message to trace, and the pull log


def first_number(asker: Asker) -> int:
    """Return the first number of a part's block; its other numbers count up from there."""
    return asker << _BLOCK_BITS


def asker_of(number: int) -> Asker:
    """Return the part whose block has that number."""
    return Asker(number >> _BLOCK_BITS)


class ReadWork(Protocol):
    """A read that brings bytes of a file into memory, or looks through files."""

    #: Whose thread takes it; -1: it is slow and of no partition, and has a thread of its own.
    partition: int

    def step(self) -> bool:
        """[thread] Read a piece; return True while more is left. Raise StorageError when nothing can be read."""


class ReadWanted(NamedTuple):
    """Run ``read.step`` in a thread of its partition until it returns False, then hand in ReadDone(number, error)."""

    number: int
    read: ReadWork


class FetchWanted(NamedTuple):
    """Run ``fetch.run`` in the thread for such reads of its partition, then hand in Fetched(number, error)."""

    number: int
    fetch: Fetch


class Reported(NamedTuple):
    """The answer to a report of damaged messages: what the broker found there."""

    connection: int
    request: int
    found: ReportOutcome


class CheckWanted(NamedTuple):
    """Read the batch of that size in a thread: ``store.reader(partition, position).read_batch(position, size, first,
    messages)``; then hand in Checked.
    """

    number: int
    partition: int
    position: int
    size: int
    first: int
    messages: int


class CheckpointWanted(NamedTuple):
    """Take a checkpoint now: a request waits for one."""


class InfoWanted(NamedTuple):
    """Add to *fields* what only the process knows (settings, disks, connections); then hand in InfoFound."""

    connection: int
    request: int
    fields: dict[str, Any]


class StatsWanted(NamedTuple):
    """Add to *fields* what only the process knows (durations, disks, memory); then hand in InfoFound."""

    connection: int
    request: int
    fields: dict[str, Any]


Effect = (
    Sent
    | SentDuplicates
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
    | GotMessage
    | FoundMessages
    | Traced
    | Refused
    | SyncWanted
    | ReadWanted
    | CheckWanted
    | FetchWanted
    | CheckpointWanted
    | InfoWanted
    | StatsWanted
)

"""Commands: the input of the broker's state machine. ``connection`` is an opaque int from the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.broker.ports.rights import Rights
from qmq.errors import QmqError
from qmq.net.protocol.selection import Boundary, Selection
from qmq.net.protocol.types import KnownConsumer
from qmq.storage.store import PartitionDamage

#: The short way makes nothing due before this time is over, so no timer has to be looked at for its sake.
QUIET_US: Final = 20_000


class Now(NamedTuple):
    """The time as an argument: the monotonic clock for waits, the wall clock for stamps. Both in microseconds."""

    monotonic_us: int
    wall_us: int


# --- from clients ----------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A batch to store. The view is writable: the broker stamps it in place, and it must stay until the next ``turn``.

    A *copy* (a handover or a restore) has message ids of its own; the part that took it recognises repeats, not the
    producer window. *numbers* are the numbers of the subjects of its runs where these belong to one group alone.
    """

    connection: int
    request: int
    batch: memoryview
    flush: bool
    copy: bool = False
    numbers: int | npt.NDArray[np.int64] | None = None


class Subscribe(NamedTuple):
    """Join a group, or (group None) read as a solo consumer. ``start`` None means the default of the kind.

    ``start`` is "first", "new", ("time", microseconds) or ("sequence", number). ``nonce`` is a random number that the
    client keeps over reconnects, ``client`` a random number of its process. ``settings`` are those of a new group. The
    broker forgets a ``transient`` consumer once it has left. ``mode`` is one of MODES, ``asks`` one of ASKS.
    ``session`` counts the subscriptions of the client; 0 is one that is not counted.
    """

    connection: int
    request: int
    group: str | None
    prefixes: tuple[str, ...]
    consumer: str
    start: str | tuple[str, int] | None
    nonce: bytes = b""
    client: bytes = b""
    transient: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    mode: str = "reliable"
    known: KnownConsumer | None = None
    asks: str = "follow"
    session: int = 0


class Pull(NamedTuple):
    """Ask for messages. The answer comes with min_count messages, or when timeout_ms is over; max_count and max_bytes
    bound it.

    A consumer of a group has seen its pulls up to delivery sequence ``expected`` (None: no check). With ``checks`` the
    broker verifies the header of each batch before it sends messages of it.
    """

    connection: int
    request: int
    subscription: int
    max_count: int
    min_count: int
    max_bytes: int
    timeout_ms: int
    expected: int | None = None
    checks: bool = False


class Withdraw(NamedTuple):
    """Answer that waiting pull now, with the messages that are there, or none."""

    connection: int
    pull_request: int


class Unsubscribe(NamedTuple):
    """End a subscription: a consumer of a group leaves."""

    connection: int
    request: int
    subscription: int


class Ack(NamedTuple):
    """Ack these delivery sequences: start, end, start, end, ... With *may_wait* the answer may come some milliseconds
    later, with the answer to a pull of the same connection.
    """

    connection: int
    request: int
    subscription: int
    intervals: tuple[int, ...]
    may_wait: bool = False


class DispositionRange(NamedTuple):
    """Hand back the delivery sequences [start, end): nack, release or reject. ``delay_us`` None means the delay of the
    group.
    """

    start: int
    end: int
    disposition: int
    delay_us: int | None
    reason: str


class HandBack(NamedTuple):
    """Hand back several ranges, each by itself."""

    connection: int
    request: int
    subscription: int
    backs: Sequence[DispositionRange]


class HandOver(NamedTuple):
    """Hand over a message of another broker: its consumer there nacked or rejected attempt ``attempt``.

    The batch has this message alone, under a subject that belongs to the group. ``delay_us`` None means the delay of
    the group.
    """

    connection: int
    request: int
    batch: memoryview
    group: str
    attempt: int
    disposition: int
    delay_us: int | None
    reason: str


class Restore(NamedTuple):
    """Store batches of messages from an archive, one behind the other; their run began on this connection."""

    connection: int
    request: int
    batches: memoryview


class Heartbeat(NamedTuple):
    """The process of a client is alive. Its loop has not turned for ``stalled_us``."""

    connection: int
    request: int
    client: bytes
    stalled_us: int


class Administer(NamedTuple):
    """Show groups or change them; ``fields`` are the arguments of the action."""

    connection: int
    request: int
    action: str
    fields: dict[str, Any]


class LastSequence(NamedTuple):
    """Ask for the last producer sequence that is stored of a producer."""

    connection: int
    request: int
    producer_id: bytes


class Claim(NamedTuple):
    """Announce that the client sends under a producer's name on this connection from now on."""

    connection: int
    request: int
    producer_id: bytes
    client: bytes


class ListSubjects(NamedTuple):
    """List the subjects that a prefix matches, by number, from number ``after`` on."""

    connection: int
    request: int
    prefix: str
    after: int
    limit: int


class Report(NamedTuple):
    """Report that a client could not verify or decode ``messages`` messages (0: all) of a batch, from ordinal ``first``
    on.
    """

    connection: int
    request: int
    partition: int
    position: int
    first: int
    messages: int
    reason: str


class ListSegments(NamedTuple):
    """List the segments of a partition, from the first that ends behind ``position``."""

    connection: int
    request: int
    partition: int
    position: int


class ListBatches(NamedTuple):
    """List the positions in [start, end) of a partition at which batches begin."""

    connection: int
    request: int
    partition: int
    start: int
    end: int


class ReadLog(NamedTuple):
    """Read bytes of a partition as they lie, at most ``size`` from ``position`` on."""

    connection: int
    request: int
    partition: int
    position: int
    size: int


class Get(NamedTuple):
    """Read the message with that id, 16 bytes."""

    connection: int
    request: int
    message_id: bytes


class Find(NamedTuple):
    """Find messages of a selection that were stored before ``upto_us`` (None: until now), in the order in which they
    were stored, or with ``newest`` in the opposite order; go on at ``after``, where an answer before ended.

    One answer has at most ``max_count`` messages and about ``max_bytes``, and comes after a bounded amount of work.
    """

    connection: int
    request: int
    selection: Selection
    newest: bool = False
    after: Boundary | None = None
    upto_us: int | None = None
    max_count: int = 1_000
    max_bytes: int = 256 << 10


class TraceMessage(NamedTuple):
    """Say what has become of the message with that id, 16 bytes, in each group. ``places`` are (partition, position) of
    its copies in this store.
    """

    connection: int
    request: int
    message_id: bytes
    places: tuple[tuple[int, int], ...] = ()


class TraceConsumer(NamedTuple):
    """Say what the consumers did that are meant by *name*, their id or the name of their program, from *since_us* on:
    the last *limit* events.
    """

    connection: int
    request: int
    name: str
    since_us: int = 0
    limit: int = 1_000


class Unanswered(NamedTuple):
    """The batches of a client whose answers were lost with an earlier connection, and which it may send again: of a
    producer, with sequences below ``end``; it wrote the first of them ``age_us`` ago.
    """

    producer_id: bytes
    end: int
    age_us: int


class Connected(NamedTuple):
    """A client has connected. *source* is stamped into its batches: its address, and the name of its token, as
    ``format.source.stamp_of`` packs them. *rights* are those of its token; with None it may do everything. *program* is
    the name that its program gave.

    Given again for an open connection, it changes the rights.
    """

    connection: int
    source: bytes
    rights: Rights | None = None
    program: str = ""
    unanswered: Unanswered | None = None


class Moved(NamedTuple):
    """Bytes of answers or requests move on the connection, so its client lives."""

    connection: int


class Disconnected(NamedTuple):
    """The connection is closed: its pulls and subscriptions end. *for_good*: its token has ended, so what its consumers
    have in flight is handed out again at once. *by_client*: the client or its system closed it, so the process may have
    ended; else the broker did, or the network lost it. *has_read_all*: its client's system has taken all answers.
    """

    connection: int
    for_good: bool = False
    by_client: bool = False
    has_read_all: bool = False


# --- from the daemon --------------------------------------------------------------------------------------------------


class Synced(NamedTuple):
    """The fdatasync that SyncWanted asked for is done up to ``position``."""

    partition: int
    position: int


class SyncBroken(NamedTuple):
    """The fdatasync failed: the broker acknowledges no more sends to that partition."""

    partition: int
    error: QmqError


class ReadDone(NamedTuple):
    """The read that ReadWanted asked for is done; *error* says why it failed."""

    number: int
    error: QmqError | None


class Checked(NamedTuple):
    """The batch that CheckWanted asked for was read: its bytes and the damage in them; or *error* says why not."""

    number: int
    batch: memoryview
    damage: PartitionDamage | None
    error: QmqError | None


class Fetched(NamedTuple):
    """The bytes that FetchWanted asked for were read; *error* says why not."""

    number: int
    error: QmqError | None


class InfoFound(NamedTuple):
    """The answer to a request that InfoWanted is about; *failure*: why there is none."""

    connection: int
    request: int
    fields: dict[str, Any]
    failure: Exception | None = None


Command = (
    Send
    | Subscribe
    | Pull
    | Withdraw
    | Unsubscribe
    | Ack
    | HandBack
    | HandOver
    | Restore
    | Heartbeat
    | Administer
    | LastSequence
    | Claim
    | ListSubjects
    | Report
    | ListSegments
    | ListBatches
    | ReadLog
    | Get
    | Find
    | TraceMessage
    | TraceConsumer
    | Connected
    | Moved
    | Disconnected
    | Synced
    | SyncBroken
    | ReadDone
    | Checked
    | Fetched
    | InfoFound
)

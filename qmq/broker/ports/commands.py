"""What goes into the broker's state machine. ``connection`` is an opaque int from the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qmq.errors import QmqError
from qmq.net.protocol.types import KnownConsumer
from qmq.storage.store import PartitionDamage


class Now(NamedTuple):
    """Time as an argument: the monotonic clock for waits, the wall clock for stamps. Both microseconds."""

    monotonic_us: int
    wall_us: int


# --- from clients ----------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """One batch; the view is writable, is stamped in place, and must stay until the next ``turn``.

    One that is a *copy* (handed over, restored) has ids of its own, and is told from others by who took it, not by its
    producer. *numbers* are those of its runs' subjects, where these are one group's own.
    """

    connection: int
    request: int
    batch: memoryview
    flush: bool
    copy: bool = False
    numbers: int | npt.NDArray[np.int64] | None = None


class Subscribe(NamedTuple):
    """Take part in a group, or (group None) follow alone. ``start`` is None for the default of the kind.

    ``start`` is "first", "last", ("time", microseconds) or ("sequence", number). ``nonce`` is a random number that the
    client keeps over reconnects, ``client`` one of its process, ``settings`` those of a new group. A ``transient``
    consumer is forgotten once it has left. ``mode`` is one of MODES, ``asks`` of ASKS.
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


class Pull(NamedTuple):
    """Ask for messages: answered with min_count or more, or when timeout_ms is over; max_count, max_bytes bound it.

    A consumer of a group knows its pulls up to delivery sequence ``expected`` (None: whatever comes next). ``checks``:
    the header of each batch is checked before messages of it are sent.
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
    """Answer that waiting pull now, with what is there (maybe nothing)."""

    connection: int
    pull_request: int


class Unsubscribe(NamedTuple):
    connection: int
    request: int
    subscription: int


class Ack(NamedTuple):
    """These delivery sequences are handled: start, end, start, end, ... With *may_wait* nobody waits for the answer: it
    may come some milliseconds later, with the answer to a pull of that connection.
    """

    connection: int
    request: int
    subscription: int
    intervals: tuple[int, ...]
    may_wait: bool = False


class DispositionRange(NamedTuple):
    """The delivery sequences [start, end) come back: nacked, released or rejected. ``delay_us`` None: the group's."""

    start: int
    end: int
    disposition: int
    delay_us: int | None
    reason: str


class HandBack(NamedTuple):
    """These come back, each by itself."""

    connection: int
    request: int
    subscription: int
    backs: Sequence[DispositionRange]


class HandOver(NamedTuple):
    """A message of another broker, a batch of its own under a subject of the group alone, comes back: its consumer was
    given it for the ``attempt``-th time and has nacked or rejected it. ``delay_us`` None: the group's.
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
    """Batches of messages from an archive, one behind the other; their run was begun on this connection."""

    connection: int
    request: int
    batches: memoryview


class Heartbeat(NamedTuple):
    """A client's process lives; its loop has not turned for so long."""

    connection: int
    request: int
    client: bytes
    stalled_us: int


class Administer(NamedTuple):
    """Look at groups or change them; ``fields`` are what the action needs."""

    connection: int
    request: int
    action: str
    fields: dict[str, Any]


class LastSequence(NamedTuple):
    """The last producer sequence stored of a producer."""

    connection: int
    request: int
    producer_id: bytes


class Claim(NamedTuple):
    """That client sends under a producer's name on this connection from now on."""

    connection: int
    request: int
    producer_id: bytes
    client: bytes


class ListSubjects(NamedTuple):
    """Subjects that a prefix matches, by number, from number ``after`` on."""

    connection: int
    request: int
    prefix: str
    after: int
    limit: int


class Report(NamedTuple):
    """A client could not verify or decode so many messages (0: all) of the batch there, from ordinal ``first`` on."""

    connection: int
    request: int
    partition: int
    position: int
    first: int
    messages: int
    reason: str


class ListSegments(NamedTuple):
    """The segments of a partition, from the first that ends behind ``position``."""

    connection: int
    request: int
    partition: int
    position: int


class ListBatches(NamedTuple):
    """Where batches begin at positions [start, end) of a partition."""

    connection: int
    request: int
    partition: int
    start: int
    end: int


class ReadLog(NamedTuple):
    """Bytes of a partition as they lie, at most ``size`` from ``position`` on."""

    connection: int
    request: int
    partition: int
    position: int
    size: int


class Disconnected(NamedTuple):
    """The connection is gone: its pulls and subscriptions with it."""

    connection: int


# --- from the wiring -------------------------------------------------------------------------------------------------


class Synced(NamedTuple):
    """The fdatasync that SyncWanted asked for is done up to ``position``."""

    partition: int
    position: int


class SyncBroken(NamedTuple):
    """It failed: nothing more is acknowledged from that partition."""

    partition: int
    error: QmqError


class ReadDone(NamedTuple):
    """The read that ReadWanted asked for is done; *error* says why nothing could be read."""

    number: int
    error: QmqError | None


class Checked(NamedTuple):
    """The batch that CheckWanted asked for was read: its bytes, and what is bad in them; or *error*: it was not."""

    number: int
    batch: memoryview
    damage: PartitionDamage | None
    error: QmqError | None


class Fetched(NamedTuple):
    """The bytes that FetchWanted asked for were read; or *error*: they were not."""

    number: int
    error: QmqError | None


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
    | Disconnected
    | Synced
    | SyncBroken
    | ReadDone
    | Checked
    | Fetched
)

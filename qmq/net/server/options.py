"""The options of a server, the interface of the broker that it serves, and the server's own errors."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from qmq.broker.ports.commands import Command, Now, Pull
from qmq.broker.ports.effects import Acked, Effect, PulledMessages, Sent, SyncWanted
from qmq.errors import BrokerStopping, InternalError
from qmq.net.protocol import frames

_NOT_ANNOUNCED: Final = (
    "max_waiting_pulls", "max_connections", "max_inflight_bytes", "max_buffered_bytes", "first_frame_timeout_ms",
    "max_handshakes",
)  # fmt: skip


#: The answer to a sender, the messages for pulls that waited, and the answers to acks that go with them.
Answers = tuple[Sent | None, list[PulledMessages], list[Acked]]


class ShortRules(Protocol):
    """The short way for single messages as the server sees it: qmq.broker.short_way.ShortWay."""

    def send(
        self, connection: int, request: int, batch: memoryview, size: int, flush: bool, now: Now
    ) -> Answers | None: ...
    def ack(
        self, connection: int, request: int, number: int, start: int, end: int, pull: Pull | None, now: Now
    ) -> tuple[int, Answers | None]: ...
    def pull(self, pull: Pull, now: Now) -> tuple[int, Answers | None]: ...

    def take_syncs(self) -> list[SyncWanted]: ...
    def next_deadline_us(self, now_us: int) -> int | None: ...

    is_unfinished: bool
    is_sync_wanted: bool


class BrokerRules(Protocol):
    """The broker as the server sees it: qmq.broker.broker.Broker."""

    @property
    def short_way(self) -> ShortRules | None: ...
    def handle(self, command: Command, now: Now) -> None: ...
    def turn(self, now: Now) -> None: ...
    def tick(self, now: Now) -> int | None: ...
    def take_effects(self) -> list[Effect]: ...
    def take_syncs(self) -> list[SyncWanted]: ...


class ClientInfo(NamedTuple):
    """A connected client, by what it said of itself, and the number of its requests without an answer."""

    name: str
    app: str
    client: str
    address: str
    since_us: int
    open_requests: int


class ServerOptions(NamedTuple):
    """Values that the server announces in WELCOME, and its own limits."""

    store_id: bytes
    version: str
    max_frame_bytes: int
    #: The largest batch of the store: the largest max_frame_bytes that it ever had.
    max_batch_bytes: int
    max_message_bytes: int
    producer_window: int
    producer_ttl_ms: int
    unique_for_ms: int
    max_pull_count: int
    max_pull_bytes: int
    session_timeout_ms: int
    max_waiting_pulls: int
    max_connections: int
    max_inflight_bytes: int
    max_buffered_bytes: int
    first_frame_timeout_ms: int
    max_handshakes: int = 1_000

    def welcome(self) -> bytes:
        """Return the meta of WELCOME."""
        fields = {"protocol": frames.PROTOCOL_VERSION, **self._asdict()}
        for own in _NOT_ANNOUNCED:
            del fields[own]
        return frames.pack_meta(fields)


def internal_error() -> InternalError:
    """Return the error that clients get for a bug of the broker."""
    return InternalError("the broker failed to handle this; its log has the details")


def stopping() -> BrokerStopping:
    """Return the error that clients get when the broker stops."""
    return BrokerStopping("the broker is shutting down; connect again in a moment, or to another broker")

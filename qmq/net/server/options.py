"""What a server is given: its bounds, and the rules that it serves; and the errors that are its own."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from qmq.broker.ports.commands import Command, Now
from qmq.broker.ports.effects import Effect, SyncWanted
from qmq.errors import BrokerStopping, InternalError
from qmq.net.protocol import frames

_NOT_ANNOUNCED: Final = (
    "max_waiting_pulls", "max_connections", "max_inflight_bytes", "max_buffered_bytes", "first_frame_timeout_ms",
)  # fmt: skip


class BrokerRules(Protocol):
    """The broker as the server sees it: qmq.broker.broker.Broker."""

    def handle(self, command: Command, now: Now) -> None: ...
    def turn(self, now: Now) -> None: ...
    def tick(self, now: Now) -> int | None: ...
    def take_effects(self) -> list[Effect]: ...
    def take_syncs(self) -> list[SyncWanted]: ...


class ServerOptions(NamedTuple):
    """What the server announces of its store, and its own bounds."""

    store_id: bytes
    version: str
    max_frame_bytes: int
    #: How large a batch of the store may be: as large as max_frame_bytes ever was.
    max_batch_bytes: int
    max_message_bytes: int
    producer_window: int
    producer_ttl_ms: int
    max_pull_count: int
    max_pull_bytes: int
    session_timeout_ms: int
    max_waiting_pulls: int
    max_connections: int
    max_inflight_bytes: int
    max_buffered_bytes: int
    first_frame_timeout_ms: int

    def welcome(self) -> bytes:
        """The meta of WELCOME."""
        fields = {"protocol": frames.PROTOCOL_VERSION, **self._asdict()}
        for own in _NOT_ANNOUNCED:
            del fields[own]
        return frames.pack_meta(fields)


def internal_error() -> InternalError:
    """What a client is told then."""
    return InternalError("the broker failed to handle this; its log has the details")


def stopping() -> BrokerStopping:
    """What clients are told at the end."""
    return BrokerStopping("the broker is shutting down; connect again in a moment, or to another broker")

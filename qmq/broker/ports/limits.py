"""The limits of a broker."""

from __future__ import annotations

from typing import NamedTuple


class BrokerLimits(NamedTuple):
    """The limits that the rules enforce; docs/OPERATIONS.md explains each. The defaults are those of ``qmq serve``, but
    that nothing is dropped by age.
    """

    max_message_bytes: int = 4 << 20
    max_groups: int = 10_000
    max_producers: int = 100_000
    producer_window: int = 64
    producer_ttl_ms: int = 3_600_000
    unique_for_ms: int = 3_600_000
    max_unique_texts: int = 1_000_000
    max_unique_bytes: int = 256 << 20
    max_waiting_pulls: int = 1_000
    max_pull_count: int = 1_000_000
    max_pull_bytes: int = 16 << 20
    max_consumers_per_connection: int = 1_000
    max_prefixes: int = 1_000
    session_timeout_ms: int = 30_000
    reconnect_timeout_ms: int = 5_000
    broadcast_ttl_ms: int = 7 * 86_400_000
    retention_ms: int = 0
    retention_max_ms: int = 0
    retention_bytes: int = 0
    retention_needs_archive: bool = False

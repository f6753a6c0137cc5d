"""Statistics and snapshots for tests that need no broker."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from qmq.net.client.admin.statistics import BrokerStats, GroupStats, GroupTotals, SubjectStats

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """The time *seconds* after START."""
    return START + timedelta(seconds=seconds)


def group_stats(name: str, **values: Any) -> GroupStats:
    """A group without messages, but for *values*."""
    nothing = {field.name: 0 for field in fields(GroupStats)}
    known = {
        "name": name, "at": START, "mode": "reliable", "follows": ["shop."], "ready_exact": True,
        "oldest_unacked": None, "in_flight_since": None, "in_retry_oldest": None, "held_since": None, "held": None,
        "last_pull": None, "retry_due": None,
    }  # fmt: skip
    return GroupStats(**{**nothing, **known, **values})


def broker_stats(seconds: float = 0, *groups: GroupStats, **values: Any) -> BrokerStats:
    """The statistics of a broker *seconds* after START, with no counts but those of *values*."""
    nothing = {field.name: 0 for field in fields(BrokerStats)}
    known = {
        "version": "0.1.0", "python": "3.11.7", "store_id": "00" * 8, "at": at(seconds), "started_at": START,
        "uptime": seconds, "file_bytes": {}, "archive": None,
        "refused": {}, "disks": [], "durations": {}, "subjects": [], "ended": GroupTotals(*[0] * 9),
        "groups": list(groups), "broker": "127.0.0.1:20881", "group_count": len(groups),
    }  # fmt: skip
    return BrokerStats(**{**nothing, **known, **values})


def received(stats: BrokerStats, count: int) -> BrokerStats:
    """The same statistics after *count* messages to subjects below ``shop.``."""
    return replace(stats, subjects=[SubjectStats("shop", 1, count, count)])

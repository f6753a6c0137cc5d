"""The result of ``client.admin.info``: one broker with its settings, disks, connections and problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from qmq.net.client.producer.receipts import utc_from_us


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """The disk of one directory of a broker. Its sizes are None if the disk did not answer the broker.

    Sends are refused when less than ``reserved_bytes`` would stay free.
    """

    directory: str
    total_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """A client that is connected to a broker: its ``name`` and ``app`` as given to ``qmq.connect``, the software
    (``client``), and its address. ``open_requests`` counts its requests without an answer, waiting pulls among them.
    """

    name: str
    app: str
    client: str
    address: str
    since: datetime
    open_requests: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something at a broker that a person should act on: ``message`` says what is wrong, and what to do.

    ``level`` is "error" when messages or service suffer now, else "warning". ``code`` is a stable word for programs.
    """

    code: str
    level: Literal["error", "warning"]
    message: str


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A running broker.

    ``uptime`` and ``checkpoint_age`` are seconds; everything older than the latter is part of a checkpoint.
    ``checkpoint_error`` says why the last checkpoint failed. ``settings`` has every setting in effect by key, and
    ``changed_settings`` the keys of those that differ from their defaults. ``log_bytes`` is the size of the message
    log, ``consumers`` the count of those that are online. ``connections`` has at most 1,000 of ``connection_count``.
    """

    version: str
    store_id: str
    started_at: datetime
    uptime: float
    subjects: int
    groups: int
    consumers: int
    log_bytes: int
    disks: list[DiskInfo]
    checkpoint_age: float
    checkpoint_error: str | None
    settings: dict[str, Any]
    changed_settings: list[str]
    connections: list[ConnectionInfo]
    connection_count: int
    problems: list[Problem]
    broker: str = ""


def broker_info_of(fields: Mapping[str, Any]) -> BrokerInfo:
    """Return the broker of an answer to the action info."""
    return BrokerInfo(
        version=fields["version"],
        store_id=fields["store_id"].hex(),
        started_at=utc_from_us(fields["started_us"]),
        uptime=fields["uptime_us"] / 1e6,
        subjects=fields["subjects"],
        groups=fields["groups"],
        consumers=fields["consumers"],
        log_bytes=fields["log_bytes"],
        disks=[
            DiskInfo(row["directory"], row["total_bytes"], row["free_bytes"], row["reserved_bytes"])
            for row in fields["disks"]
        ],
        checkpoint_age=fields["checkpoint_age_us"] / 1e6,
        checkpoint_error=fields["checkpoint_error"],
        settings=fields["settings"],
        changed_settings=fields["changed_settings"],
        connections=[
            ConnectionInfo(
                row["name"], row["app"], row["client"], row["address"], utc_from_us(row["since_us"]),
                row["open_requests"],
            )
            for row in fields["connections"]
        ],
        connection_count=fields["connection_count"],
        problems=[Problem(row["code"], row["level"], row["message"]) for row in fields["problems"]],
    )  # fmt: skip

"""Write stores with messages of every shape, and return their contents message by message."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from qmq.format.batch import parse_header
from qmq.format.build import MessageHeader, RunContent, make_header
from qmq.format.lanes import priority_of
from qmq.format.layout import LANE_HIGH, LANE_LOW, LANE_NORMAL
from qmq.format.pieces import stored_runs
from qmq.storage.store import Store
from tests.storage.stores import Sender, Sent, close_cleanly, open_store

SUBJECTS: Final = ("hotel.order.created", "hotel.order.paid", "flight.order.created", "a")
#: Priority, or order key, of messages with a header.
LANES: Final = {"hotel.order.paid": (LANE_HIGH, None), "flight.order.created": (LANE_LOW, None), "a": (0, "größe")}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Row = dict[str, Any]


def header_of(dice: random.Random, lane: int = LANE_NORMAL, order_key: str | None = None) -> MessageHeader:
    """Return a header with key, tags and properties, none of them or all."""
    key = dice.choice([None, "o", "order-4421", "größe", ["order-4421", "größe"], "k" * (1 + dice.randrange(299))])
    tags = [dice.choice(["vip", "new", "grün"]) for _ in range(dice.choice([0, 0, 1, 20]))]
    names = {f"p{dice.randrange(99)}": "v" * dice.choice([0, 5, 40, 300]) for _ in range(dice.choice([0, 0, 2, 17]))}
    return make_header(key, tags, names, 0, 0, lane, order_key)


def run_of(dice: random.Random, subject: str) -> RunContent:
    """Return a run of messages of a subject. Some have a priority, and some an order key."""
    count = dice.choice([1, 1, 3, 40])
    bodies = [dice.randbytes(dice.choice([0, 1, 20, 60])) for _ in range(count)]
    if dice.random() >= 0.5:
        return RunContent(subject, bodies, None)
    lane, order_key = LANES.get(subject, (LANE_NORMAL, None))
    headers = [header_of(dice, lane, order_key) for _ in bodies]
    return RunContent(subject, bodies, headers, headers[0].lane)


def write_orders(directory: Path, batches: int, seed: int = 1, **options: Any) -> list[Sent]:
    """Write a stopped store of two partitions with so many random batches, whose last segment is not sealed."""
    dice = random.Random(seed)
    store = open_store(directory, partitions=2, **options)
    sender = Sender(store)
    for _ in range(batches):
        subjects = dice.sample(SUBJECTS, dice.choice([1, 1, 2, 4]))
        sender.stage(*(run_of(dice, subject) for subject in subjects), partition=dice.randrange(2))
        sender.write()
    close_cleanly(store)
    return sender.sent


def time_of(us: int) -> datetime:
    """Return the time that many microseconds after 1970."""
    return _EPOCH + timedelta(microseconds=us)


def rows_in(directory: Path) -> list[Row]:
    """Return all messages of a store by partition and position, decoded as a client does it, one by one."""
    store = open_store(directory, partitions=2)
    try:
        found = [row for partition, header in store.headers_since([]) for row in _rows(store, partition, header)]
    finally:
        close_cleanly(store)
    return sorted(found, key=lambda row: (row["partition"], row["position"]))


def _rows(store: Store, partition: int, header: Any) -> list[Row]:
    view = store.partitions[partition].message_log.view(header.position, header.size)
    return [
        {
            "subject": run.subject,
            "lane": run.lane,
            "priority": priority_of(run.lane),
            "partition": partition,
            "position": header.position + run.ordinal + index,
            "sequence": run.first_sequence + index,
            "message_id": str(run.id(index)),
            "key": run.header(index).get("k", [None])[0],
            "keys": run.header(index).get("k", []),
            "order_key": run.header(index).get("o", [None])[0],
            "tags": run.header(index).get("t", []),
            "properties": list(run.header(index).get("p", {}).items()),
            "created_at": time_of(header.created_at_us),
            "stored_at": time_of(header.stored_at_us),
            **dict(zip(("source", "sender", "producer", "app"), run.source(index), strict=True)),
            "body": run.body(index),
        }
        for run in stored_runs(view, parse_header(view))
        for index in range(run.count)
    ]

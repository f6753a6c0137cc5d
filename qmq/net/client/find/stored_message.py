"""Stored messages, as they are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from qmq.format.hashing import hash_bytes
from qmq.format.ids import MessageId
from qmq.format.lanes import PRIORITIES, lane_of_key_hash, priority_of
from qmq.format.layout import DELAY_END_US, HAS_DELIVER_AT, HAS_EXPIRE_AT, RUN_REPLAYED
from qmq.format.private import is_private, origin_subject
from qmq.format.run import Run
from qmq.net.client.options import json_of
from qmq.net.client.producer.receipts import utc_from_us


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as a broker has it stored, found by ``Client.get`` or ``Client.find``. Finding it changes nothing.

        message = await client.get("7f0000015191000300000100000000ff")
        print(message.subject, message.key, message.stored_at, message.json())

    ``sequence`` is None while the message is delayed, and for a copy that only one group has. ``broker`` is the address
    of the broker that has it, or the place of its files.
    """

    id: str
    subject: str
    sequence: int | None
    body: bytes = field(repr=False)
    #: The keys that it was sent with.
    keys: tuple[str, ...] = ()
    #: "low", "normal" or "high".
    priority: str = "normal"
    order_key: str | None = None
    tags: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    #: When its sender made its batch: microseconds since 1970, by the sender's clock.
    created_at_us: int = 0
    #: When the broker stored it: microseconds since 1970.
    stored_at_us: int = 0
    #: When it is delivered, or was meant to be; None unless it is delayed: microseconds since 1970.
    deliver_at_us: int | None = None
    #: When it expires, or has expired; None for never: microseconds since 1970.
    expires_at_us: int | None = None
    #: Whether it was restored from an archive, under its original id.
    replayed: bool = False
    #: The address that it was sent from, as host:port, which the broker has seen; None if it is unknown.
    source: str | None = None
    #: The name of the token that its sender had; None without one.
    sender: str | None = None
    #: The id of the producer that sent it, 32 hex digits.
    producer: str | None = None
    #: The program that sent it, by its own account.
    app: str | None = None
    #: The bytes of header (keys, tags, properties) and body.
    size: int = 0
    broker: str = ""
    #: Where it lies in the log of its broker: the partition, and its position there.
    partition: int = 0
    position: int = 0

    @property
    def key(self) -> str | None:
        """The first key that it was sent with, or None."""
        return self.keys[0] if self.keys else None

    @property
    def created_at(self) -> datetime:
        """When its sender made its batch: UTC, by the sender's clock."""
        return utc_from_us(self.created_at_us)

    @property
    def stored_at(self) -> datetime:
        """When the broker stored it, UTC."""
        return utc_from_us(self.stored_at_us)

    @property
    def deliver_at(self) -> datetime | None:
        """When it is delivered, UTC; None unless it is delayed."""
        return None if self.deliver_at_us is None else utc_from_us(self.deliver_at_us)

    @property
    def expires_at(self) -> datetime | None:
        """When it expires, or has expired, UTC; None for never."""
        return None if self.expires_at_us is None else utc_from_us(self.expires_at_us)

    def json(self) -> Any:
        """Return the value that the body has as JSON. Raises ValueError if the body is no JSON.

        order = message.json()
        """
        try:
            return json_of(self.body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body of message {self.id} is no JSON: {error}") from error


def stored_message(run: Run, index: int, broker: str, delayed: MessageId | None = None) -> StoredMessage:
    """Return a message of a verified run. *delayed* is the id of a delayed message, which its batch does not say.

    Raises BadBatch where its header cannot be decoded.
    """
    header = run.header(index)
    due_us = None if delayed is None else _time_of(run, index, HAS_DELIVER_AT, run.stored_at_us)
    source = run.source(index)
    has_sequence = delayed is None and not is_private(run.subject)
    return StoredMessage(
        id=str(delayed or run.id(index)),
        subject=origin_subject(run.subject),
        sequence=run.first_sequence + index if has_sequence else None,
        body=run.body(index),
        keys=tuple(header.get("k", ())),
        priority=priority_of(run.lane),
        order_key=next(iter(header.get("o", ())), None),
        tags=tuple(header.get("t", ())),
        properties=dict(header.get("p", ())),
        created_at_us=run.created_us(index),
        stored_at_us=run.stored_at_us,
        deliver_at_us=due_us,
        expires_at_us=_time_of(run, index, HAS_EXPIRE_AT, due_us or run.stored_at_us),
        replayed=bool(run.run_flags & RUN_REPLAYED),
        source=source.address,
        sender=source.sender,
        producer=source.producer,
        app=source.app,
        size=int(run.lengths()[index]),
        broker=broker,
        partition=run.origin.partition,
        position=run.origin.position + run.ordinal + index,
    )


def lane_of_stored(message: StoredMessage) -> int:
    """Return the lane of a stored message: that of its order key, or of its priority."""
    if message.order_key is not None:
        return lane_of_key_hash(hash_bytes(message.order_key.encode()), PRIORITIES[message.priority])
    return PRIORITIES[message.priority]


def _time_of(run: Run, index: int, flag: int, from_us: int) -> int | None:
    """Return the time in a column of times, of which short ones count from *from_us*; None where there is none."""
    column = run.column(flag)
    if column is None or not column[index]:
        return None
    time_us = int(column[index])
    return time_us if time_us >= DELAY_END_US else from_us + time_us

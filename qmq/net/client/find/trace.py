"""A trace: what has become of one message in each group, at all brokers that have it or a copy of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgpack
from crc32c import crc32c

from qmq.errors import BrokersMissed, ProtocolError, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import MESSAGE_ID
from qmq.net.client.admin.listing import Listing
from qmq.net.client.admin.results import time_of
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers
from qmq.net.client.find.get import get
from qmq.net.client.find.requests import ask, find_page
from qmq.net.client.find.stored_message import StoredMessage
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.selection import Boundary, Selection

#: The most copies of a message at one broker that a trace looks at, and messages of one answer to the search for them.
_MOST_COPIES: Final = 1_000
_COPIES_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that happened to a message in a group, as the pull log has it.

    ``kind``: ``handed_out``, ``acked``, ``nacked``, ``released``, ``rejected``, ``session_expired`` (its consumer fell
    silent, or another program took over from it), ``left`` (its consumer left), ``redriven``, ``deleted`` (its dead
    letter), ``sought`` (the group was set to another place, which drops what is in flight), ``resent``, ``restored`` or
    ``handed_over`` (another broker's consumer handed it back here). ``consumer`` is None where it is not known any
    more; ``reason`` is that of a nack, reject or handover, or says to which place the group was set.
    """

    kind: str
    time: datetime
    consumer: str | None = None
    attempt: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupTrace:
    """The state of a message in one group of one broker, and what happened to it there, the oldest event first.

    =================  ================================================================================================
    ``delayed``        it is delivered at ``due_at``
    ``waiting``        no consumer had it yet; the next pull may bring it
    ``in_flight``      ``consumer`` has had it since ``since``, in attempt ``attempts``
    ``retrying``       it is handed out again at ``due_at``, after ``attempts`` failed attempts; ``reason`` of the last
    ``acked``          it is done: acked by ``consumer`` at ``since``, while the pull log still says so
    ``dead``           it is a dead letter since ``since``, for ``reason``
    ``deleted``        its dead letter, or its retry, was deleted
    ``cancelled``      it was delayed, and is never delivered
    ``filtered``       it has none of the group's tags
    ``expired``        its time is over: the next pull makes it a dead letter, or passes it in an at-most-once group
    ``before_start``   the group began behind it
    ``not_subscribed`` the group does not follow its subject
    ``dropped``        retention has dropped it
    ``handed_out``     an at-most-once group has passed it; such groups keep no more of a message
    =================  ================================================================================================
    """

    group: str
    state: str
    consumer: str | None = None
    since: datetime | None = None
    attempts: int = 0
    due_at: datetime | None = None
    reason: str = ""
    events: tuple[TraceEvent, ...] = ()
    broker: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of a message: the message (None once no broker keeps it), and a row for each group of each broker that
    has it.

        for group in (await client.trace(receipt.id)).groups:
            print(group.group, group.state, group.consumer)

    ``is_partial``: events from before the oldest records that the pull log keeps are missing, or some were too many to
    read. ``missed`` are brokers that did not answer.
    """

    id: str
    message: StoredMessage | None = field(repr=False)
    groups: tuple[GroupTrace, ...]
    is_partial: bool = False
    missed: tuple[str, ...] = ()


async def trace(brokers: Brokers, listing: Listing, message_id: str) -> Trace:
    """Return the trace of a message. See ``Client.trace``."""
    name = MessageId.parse(message_id)
    timeout = brokers.options.admin_timeout
    message, unknown = None, None
    try:
        message = await get(brokers, listing, message_id)
    except UnknownMessage as error:
        unknown = error
    links = await listing.begin()
    since_us = message.stored_at_us if message is not None else 0
    answers = await asyncio.gather(*(_at(link, timeout, name, since_us) for link in links), return_exceptions=True)
    groups, missed, is_partial, is_known = list[GroupTrace](), list(listing.missed), False, False
    for link, answer in zip(links, answers, strict=True):
        if isinstance(answer, TimeoutError):
            missed.append(str(link.address))
        elif isinstance(answer, UnknownMessage):
            unknown = answer
        elif isinstance(answer, BaseException):
            raise answer
        elif answer is not None:
            is_known = True
            is_partial |= bool(answer["partial"])
            groups += [_group_trace(row, str(link.address)) for row in answer["groups"]]
    if not is_known and missed:
        raise BrokersMissed(f"{listing.no_answer(sorted(missed))}, which may have message {name}; call it again")
    if not is_known:
        raise unknown or UnknownMessage(f"no broker here has message {name}: it is of store {name.store_id.hex()}")
    return Trace(str(name), message, tuple(groups), is_partial, tuple(sorted(set(missed))))


async def _at(link: Link, timeout: float, name: MessageId, since_us: int) -> dict[str, Any] | None:
    """Return the answer of one broker; None where it is another store's message, of which it has no copy.

    Raises UnknownMessage, StorageError, TimeoutError.
    """
    places = await _copies(link, timeout, name, since_us)
    if link.store_id != name.store_id and not places:
        return None
    fields = {"id": MESSAGE_ID.pack(*name), "places": [number for place in places for number in place]}
    answer = await ask(link, timeout, FrameKind.TRACE, fields)
    if crc32c(answer.payload) != answer.meta.get("crc"):
        raise ProtocolError(f"TRACED of the broker at {link.address} does not fit its checksum")
    found: dict[str, Any] = msgpack.unpackb(answer.payload, strict_map_key=False)
    return found


async def _copies(link: Link, timeout: float, name: MessageId, since_us: int) -> list[tuple[int, int]]:
    """Return partition and position of each copy of a message at a broker. Raises StorageError, TimeoutError."""
    selection = Selection(since_us=since_us, original=MESSAGE_ID.pack(*name))
    after: Boundary | None = None
    upto_us: int | None = None
    found = list[tuple[int, int]]()
    while len(found) < _MOST_COPIES:
        page = await find_page(link, timeout, selection, False, after, upto_us, _COPIES_AT_ONCE)
        for run in page.runs:
            found += [(run.partition, run.position + run.ordinal + index) for index in range(run.count)]
        if page.after is None:
            break
        after, upto_us = page.after, page.upto_us
    return found[:_MOST_COPIES]


def _group_trace(row: Mapping[str, Any], broker: str) -> GroupTrace:
    events = tuple(
        TraceEvent(kind, utc_from_us(time_us), consumer, attempt, reason)
        for kind, time_us, consumer, attempt, reason in row["events"]
    )
    return GroupTrace(
        row["group"], row["state"], row["consumer"], time_of(row["since_us"]), row["attempts"], time_of(row["due_us"]),
        row["reason"], events, broker,
    )  # fmt: skip

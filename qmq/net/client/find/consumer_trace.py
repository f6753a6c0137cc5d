"""The trace of a consumer: what it was given and what it did with it, at all brokers, as the pull logs have it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgpack
from crc32c import crc32c

from qmq.errors import BrokersMissed, InvalidOption, ProtocolError
from qmq.net.client.admin.listing import Listing
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers
from qmq.net.client.find.finder import microseconds_since_1970
from qmq.net.client.find.requests import ask
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol.frames import FrameKind

#: The most events of one broker in an answer.
MOST_EVENTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ConsumerEvent:
    """One thing that a consumer of a group did, with ``count`` messages of a subject from ``sequence`` on.

    ``kind``: ``joined`` (``reason``: the name of its program), ``handed_out`` (it was given them), ``acked``,
    ``nacked``, ``released``, ``rejected``, ``left`` or ``session_expired``. ``message_id`` is that of the first
    message. ``subject``, ``sequence`` and ``message_id`` are None for messages that are not kept any more, or were
    handed out before the time that was asked for.
    """

    time: datetime
    kind: str
    group: str
    consumer: str
    subject: str | None = None
    sequence: int | None = None
    count: int = 0
    attempt: int = 0
    reason: str = ""
    message_id: str | None = None
    broker: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerTrace:
    """The events of the consumers of a name, the oldest first.

        for event in (await client.trace_consumer("worker-7")).events:
            print(event.time, event.kind, event.subject, event.count)

    ``is_partial``: earlier events are missing, since the pull logs do not reach back to the time that was asked for, or
    there are more than the limit. ``missed`` are brokers that did not answer.
    """

    name: str
    events: tuple[ConsumerEvent, ...]
    is_partial: bool = False
    missed: tuple[str, ...] = ()


async def trace_consumer(
    brokers: Brokers, listing: Listing, name: str, since: datetime | None, limit: int
) -> ConsumerTrace:
    """Return what the consumers of a name did. See ``Client.trace_consumer``."""
    if not isinstance(name, str) or not name:
        raise InvalidOption(f"trace_consumer takes the id of a consumer or the name of a program, not {name!r:.80}")
    if type(limit) is not int or not 1 <= limit <= MOST_EVENTS:
        raise InvalidOption(f"limit must be a whole number from 1 to {MOST_EVENTS:,}, not {limit!r:.80}")
    since_us = 0 if since is None else max(microseconds_since_1970("since", since), 0)
    timeout = brokers.options.admin_timeout
    links = await listing.begin()
    answers = await asyncio.gather(
        *(_at(link, timeout, name, since_us, limit) for link in links), return_exceptions=True
    )
    events, missed, is_partial, has_answer = list[ConsumerEvent](), list(listing.missed), False, False
    for link, answer in zip(links, answers, strict=True):
        if isinstance(answer, TimeoutError):
            missed.append(str(link.address))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            has_answer = True
            is_partial |= bool(answer["partial"])
            events += [_event(row, str(link.address)) for row in answer["groups"]]
    if not has_answer:
        raise BrokersMissed(f"{listing.no_answer(sorted(missed))}; call it again")
    events.sort(key=lambda event: event.time)
    return ConsumerTrace(name, tuple(events), is_partial, tuple(sorted(set(missed))))


async def _at(link: Link, timeout: float, name: str, since_us: int, limit: int) -> dict[str, Any]:
    fields = {"consumer": name, "since_us": since_us, "limit": limit}
    answer = await ask(link, timeout, FrameKind.TRACE, fields)
    if crc32c(answer.payload) != answer.meta.get("crc"):
        raise ProtocolError(f"TRACED of the broker at {link.address} does not fit its checksum")
    found: dict[str, Any] = msgpack.unpackb(answer.payload, strict_map_key=False)
    return found


def _event(row: Sequence[Any], broker: str) -> ConsumerEvent:
    kind, time_us, group, consumer, subject, sequence, count, attempt, reason, message_id = row
    return ConsumerEvent(
        utc_from_us(time_us), kind, group, consumer, subject, sequence, count, attempt, reason, message_id, broker
    )

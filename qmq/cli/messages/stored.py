"""Read stored messages of a subject without a group, which changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgpack

from qmq import connect
from qmq.errors import UnknownGroup
from qmq.net.client.address import parse_url
from qmq.net.client.blocking import answering_within
from qmq.net.protocol.frames import FrameKind, pack_meta

if TYPE_CHECKING:
    from qmq import GroupInfo, Message, SubjectInfo

#: How long to wait, in seconds, for messages that are stored.
_TIMEOUT_S: Final = 5.0


class WaitingSpan(NamedTuple):
    """Messages of a lane of a subject at one broker that no consumer of a group had yet."""

    broker: str
    subject: str
    start: int
    end: int
    lane: int


def waiting_spans(server: str, group: str, timeout: float, most: int) -> list[WaitingSpan]:
    """Return the subjects with messages that no consumer of a group had yet, at most *most* at each broker. Raises
    UnknownGroup, ConnectionLost.
    """
    found, unknown = list[WaitingSpan](), list[UnknownGroup]()
    addresses = parse_url(server)
    for address in addresses:
        try:
            with answering_within(timeout, address) as connection:
                after: int | None = 0
                while after is not None and len(found) < most:
                    fields = {"action": "waiting", "group": group, "after": after}
                    page = msgpack.unpackb(connection.ask(FrameKind.ADMINISTER, meta=pack_meta(fields)).payload)
                    found += [WaitingSpan(str(address), **row) for row in page["rows"] if row["subject"][:1] != "~"]
                    after = page["after"]
        except UnknownGroup as error:
            unknown.append(error)
    if len(unknown) == len(addresses):
        raise unknown[0]
    return found


class SubjectEnds(NamedTuple):
    """A subject at one broker, when its first and its last message were stored, and the groups that follow it."""

    info: SubjectInfo
    first_stored_at: datetime | None
    last_stored_at: datetime | None
    groups: list[str]


async def ends_of(info: SubjectInfo, groups: Sequence[GroupInfo]) -> SubjectEnds:
    """Read the first and the last message of a subject; *groups* are all groups."""
    following = {
        group.name for group in groups if group.broker == info.broker and is_followed(info.name, group.follows)
    }
    first = last = None
    if info.messages:
        first, last = [
            next((message.stored_at for message in await stored_messages(info.broker, info.name, sequence, 1)), None)
            for sequence in (info.first_sequence, info.next_sequence - 1)
        ]
    return SubjectEnds(info, first, last, sorted(following))


def is_followed(subject: str, follows: Sequence[str]) -> bool:
    """Return whether one of these prefixes and subjects takes a subject."""
    return any(subject.startswith(name) if name.endswith(".") or not name else subject == name for name in follows)


async def stored_messages(url: str, subject: str, sequence: int, count: int) -> list[Message]:
    """Return up to *count* messages of a subject at one broker, with sequences from *sequence* on."""
    found: list[Message] = []
    async with connect(url) as client, client.subscribe(subject, start=sequence) as consumer:
        while len(found) < count and (not found or found[-1].sequence < sequence + count - 1):
            page = await consumer.pull(count - len(found), timeout=_TIMEOUT_S)
            if not page:
                break
            found += page
    return found

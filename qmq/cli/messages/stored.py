"""Read stored messages of a subject without a group, which changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from qmq import connect
from qmq.errors import Forbidden, UnknownGroup
from qmq.net.client.address import parse_url
from qmq.net.client.blocking import answering_within
from qmq.net.protocol.frames import FrameKind, pack_meta

if TYPE_CHECKING:
    from qmq import Client, GroupInfo, SubjectInfo


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
    """Read the first and the last message of a subject, whatever their lanes; their times are None without the right to
    browse it. *groups* are all groups.
    """
    following = {
        group.name for group in groups if group.broker == info.broker and is_followed(info.name, group.follows)
    }
    first = last = None
    if info.messages:
        async with connect(info.broker) as client:
            with suppress(Forbidden):
                first, last = [await _stored_at(client, info.name, newest=newest) for newest in (False, True)]
    return SubjectEnds(info, first, last, sorted(following))


async def _stored_at(client: Client, subject: str, *, newest: bool) -> datetime | None:
    """Return when the first or the last message of a subject was stored; None without one."""
    async for message in client.find(subject, newest=newest, limit=1):
        return message.stored_at
    return None


def is_followed(subject: str, follows: Sequence[str]) -> bool:
    """Return whether one of these prefixes and subjects takes a subject."""
    return any(subject.startswith(name) if name.endswith(".") or not name else subject == name for name in follows)

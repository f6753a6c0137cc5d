"""The results of ``client.admin`` and ``client.subjects``, and how they are made from the rows of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from qmq.net.client.group_settings import shown_settings
from qmq.net.client.producer.receipts import utc_from_us


@dataclass(frozen=True, slots=True)
class SubjectInfo:
    """A subject. ``messages`` are stored: ``high`` and ``low`` ones with this priority, ``ordered`` with an order key.

    All others have the normal priority, and sequences from ``first_sequence`` up to, not including, ``next_sequence``.
    Each priority and each slot of order keys has sequences of its own; where no message was ever sent with the normal
    priority, the two are those of the messages that were the first.
    """

    name: str
    first_sequence: int
    next_sequence: int
    messages: int
    #: The count of delayed messages.
    delayed: int
    broker: str = ""
    high: int = 0
    low: int = 0
    ordered: int = 0


@dataclass(frozen=True, slots=True)
class BlockedSlot:
    """A slot of order keys whose ``waiting`` messages come behind an earlier one of it.

    ``reason`` is "in_flight": ``consumer`` has that one since ``since``, in attempt ``attempts``; or "retrying": it is
    to be delivered again at ``due``, after ``attempts`` failed attempts, the last of which failed at ``since`` for
    ``failure``. ``subject``, ``message_id`` and ``order_key`` are those of the message that the others come behind;
    these have subjects such as ``waiting_subjects``, a few of them.

    ``consumer`` and ``since`` of messages in flight are always there. The rest is filled in where a single group is
    asked for, ``admin.groups("desk")``, and None or 0 where the broker would have to search long for it.
    """

    subject: str
    slot: int
    waiting: int
    reason: str
    consumer: str | None
    since: datetime | None
    due: datetime | None = None
    attempts: int = 0
    failure: str = ""
    message_id: str | None = None
    order_key: str | None = None
    waiting_subjects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group: the prefixes and subjects that it follows, its count of online consumers, and counts of its messages.

    ``ready``: not handed out yet (a lower bound unless ``ready_exact``); ``oldest`` is the time at which the oldest of
    these was stored. ``in_flight``: handed to consumers, without a disposition. ``in_retry``: waiting to be handed out
    again. ``skipped``: lost to the group, as they were dropped before it took them, or may have been handed out before
    a crash. ``filtered``: passed over, as they have none of its tags. ``delayed``: to be delivered later. ``blocked``:
    the slots of order keys that hold messages up, the longest first, at most 20.
    """

    name: str
    mode: str
    follows: list[str]
    consumers: int
    ready: int
    oldest: datetime | None
    in_flight: int
    in_retry: int
    dead: int
    skipped: int
    settings: dict[str, Any]
    broker: str = ""
    delayed: int = 0
    ready_exact: bool = True
    filtered: int = 0
    blocked: tuple[BlockedSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer of a group, and its count of messages in flight, the oldest of them since ``in_flight_since``.

    ``last_pull``: the time at which it last got messages, if the broker remembers. ``silent``: seconds since its last
    sign of life. ``stalled``: seconds for which its event loop had not turned then. ``order_slots``: the slots of order
    keys that it has messages of in flight. ``program``: the ``name`` of its client, else the ``app``.
    """

    name: str
    epoch: int
    online: bool
    in_flight: int
    in_flight_since: datetime | None
    last_pull: datetime | None
    silent: float
    stalled: float
    broker: str = ""
    order_slots: int = 0
    program: str = ""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter of a group, and the reason. ``id`` is None if the message can no longer be read."""

    number: int
    id: str | None
    subject: str | None
    sequence: int | None
    attempts: int
    session_expiries: int
    reason: str
    died_at: datetime
    broker: str = ""


@dataclass(frozen=True, slots=True)
class SealedLog:
    """A partition of a broker's message log, of which all before position ``end`` is in sealed segments."""

    partition: int
    end: int
    broker: str = ""


@dataclass(frozen=True, slots=True)
class TokenRights:
    """The rights of a client at a broker: prefixes of the subjects that it may send to, receive and look at, and of the
    groups that it may join ("" is all of them). ``admin``: it may do everything. ``name`` is that of its token, or ""
    where the broker asks for none.
    """

    name: str
    admin: bool
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    browse: tuple[str, ...] = ()
    broker: str = ""


class ResendCount(int):
    """The count of messages that a resend hands out again, once for each group that gets them: an int.

    ``groups`` get them. ``redriven`` of them were dead letters. Other messages are left alone: ``waiting`` ones were
    not handed out yet, ``in_flight`` and ``retrying`` ones come again anyway if they fail; ``gone`` ones were dropped.

        count = await client.admin.resend(prefix="shop.order.", since=yesterday, group="billing")
        print(f"{count} resent; {count.waiting} come anyway")
    """

    groups: int
    redriven: int
    waiting: int
    in_flight: int
    retrying: int
    gone: int

    def __new__(
        cls, messages: int = 0, *, groups: int = 0, redriven: int = 0, waiting: int = 0, in_flight: int = 0,
        retrying: int = 0, gone: int = 0,
    ) -> ResendCount:  # fmt: skip
        """Make the count of so many *messages*."""
        made = super().__new__(cls, messages)
        made.groups, made.redriven, made.waiting = groups, redriven, waiting
        made.in_flight, made.retrying, made.gone = in_flight, retrying, gone
        return made


def group_info_of(row: Mapping[str, Any]) -> GroupInfo:
    """Return the group of a row of the action groups."""
    return GroupInfo(
        row["group"], row["mode"], row["follows"], row["consumers"], row["ready"], time_of(row["oldest_us"]),
        row["in_flight"], row["in_retry"], row["dead"], row.get("skipped", 0), shown_settings(row["settings"]),
        delayed=row["delayed"], ready_exact=row["ready_exact"], filtered=row["filtered"],
        blocked=tuple(map(_blocked_of, row.get("blocked", ()))),
    )  # fmt: skip


def _blocked_of(row: Mapping[str, Any]) -> BlockedSlot:
    return BlockedSlot(
        row["subject"], row["slot"], row["waiting"], row["reason"], row["consumer"], time_of(row["since_us"]),
        time_of(row["due_us"]), row["attempts"], row["failure"], row["message_id"], row["order_key"],
        tuple(row.get("waiting_subjects", ())),
    )  # fmt: skip


def consumer_info_of(row: Mapping[str, Any]) -> ConsumerInfo:
    """Return the consumer of a row of the action consumers."""
    return ConsumerInfo(
        row["consumer"], row["epoch"], row["online"], row["in_flight"], time_of(row["in_flight_since_us"]),
        time_of(row["pulled_us"]), row["silent_us"] / 1e6, row["stalled_us"] / 1e6,
        order_slots=row.get("order_slots", 0), program=row.get("program", ""),
    )  # fmt: skip


def dead_letter_of(row: Mapping[str, Any]) -> DeadLetter:
    """Return the dead letter of a row of the action dead_letters."""
    return DeadLetter(
        row["number"], row["id"], row["subject"], row["sequence"], row["attempts"], row["session_expiries"],
        row["reason"], utc_from_us(row["died_at_us"]),
    )  # fmt: skip


def token_rights_of(fields: Mapping[str, Any]) -> TokenRights:
    """Return the rights of an answer to the action rights."""
    produce, consume, group, browse = (tuple(fields[kind]) for kind in ("produce", "consume", "group", "browse"))
    return TokenRights(fields["name"], fields["admin"], produce, consume, group, browse)


def time_of(time_us: int | None) -> datetime | None:
    """Return a time of the wire as a datetime in UTC."""
    return None if time_us is None else utc_from_us(time_us)

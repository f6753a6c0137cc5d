"""Resends: the request that a client repeats until each broker has ended, and the counts of all brokers."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from qmq.errors import UnknownMessage, UsageError
from qmq.format.ids import MessageId
from qmq.names import check_group_or_member, check_prefix
from qmq.net.client.admin.results import ResendCount

#: Ids of one request.
IDS_AT_ONCE: Final = 1_000
_RUN_BYTES: Final = 16

#: Takes how many messages were looked at, and how many there are to look at, each counted once for each group.
OnProgress = Callable[[int, int], None]


class Resend:
    """What a call of ``Admin.resend`` asks for. Raises UsageError, InvalidName."""

    def __init__(
        self, ids: Iterable[str] | None, prefix: str | None, since: datetime | None, until: datetime | None,
        group: str | None, all_groups: bool, dry_run: bool,
    ) -> None:  # fmt: skip
        if (group is None) is not all_groups:
            raise UsageError(
                "give either the group that gets the messages, or all_groups=True for all that follow their subjects"
            )
        if (ids is None) is (prefix is None):
            raise UsageError("give either the ids of the messages, or a prefix of their subjects ('' for everything)")
        if ids is not None and (since is not None or until is not None):
            raise UsageError("since and until choose among the messages of a prefix; with ids leave them out")
        self._common: dict[str, Any] = {"dry_run": dry_run}
        if group is None:
            self._common["all_groups"] = True
        else:
            self._common["group"] = check_group_or_member(group)
        self._ids = None if ids is None else _parsed(ids)
        if prefix is not None:
            times = {"since_us": _time_us("since", since), "until_us": _time_us("until", until)}
            if since is not None and until is not None and since >= until:
                raise UsageError(f"since ({since}) is not before until ({until}), so no message lies between them")
            self._common |= {"prefix": check_prefix(prefix), **times}

    def requests(self, store_id: bytes) -> list[dict[str, Any]]:
        """Return the requests for the broker with that store."""
        if self._ids is None:
            return [self._common]
        mine = [bytes.fromhex(str(one)) for one in self._ids if one.store_id == store_id]
        return [{**self._common, "ids": mine[at : at + IDS_AT_ONCE]} for at in range(0, len(mine), IDS_AT_ONCE)]

    def dry(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a request that counts and changes nothing."""
        return {**request, "dry_run": True}

    def unknown(self, store_ids: Sequence[bytes]) -> list[MessageId]:
        """Return the ids that are of none of these stores."""
        return [one for one in self._ids or () if one.store_id not in store_ids]


def _parsed(ids: Iterable[str]) -> list[MessageId]:
    if isinstance(ids, str | bytes):
        raise UsageError(f"ids must be a list of message ids, not {ids!r:.80}")
    listed = list(ids)
    if not listed:
        raise UsageError("ids is empty: give the ids of the messages to resend")
    for one in listed:
        if not isinstance(one, str):
            raise UsageError(f"ids must be texts of 32 hex digits, not {one!r:.80}")
    return [MessageId.parse(one.lower()) for one in dict.fromkeys(listed)]


def _time_us(name: str, time: object) -> int | None:
    """Return a time in microseconds since 1970. Raises UsageError."""
    if time is None:
        return None
    if not isinstance(time, datetime) or time.utcoffset() is None:
        raise UsageError(f"{name} must be a datetime with a time zone, such as datetime(..., tzinfo=UTC), not {time!r}")
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


async def resend_at(
    do: Callable[..., Awaitable[dict[str, Any]]], request: dict[str, Any], told: Callable[[int, int], None]
) -> ResendCount | str:
    """Have one broker resend, until it has ended; return the counts, or why nothing is selected there.

    *do* asks it once (again over a new connection, where one is lost); *told* takes how far it is. Raises TimeoutError
    when the broker does not answer, and what it refuses.
    """
    run = os.urandom(_RUN_BYTES)
    while True:
        found = await do("resend", run=run, **request)
        if nothing := found.get("nothing"):
            return str(nothing)
        told(found["looked"], found["total"])
        if found["done"]:
            return resend_count_of(found)


def resend_count_of(found: dict[str, Any]) -> ResendCount:
    """Return the counts of an answer."""
    return ResendCount(
        found["resent"], groups=found["groups"], redriven=found["redriven"], waiting=found["waiting"],
        in_flight=found["in_flight"], retrying=found["retrying"], gone=found["gone"],
    )  # fmt: skip


def nothing_for(unknown: Sequence[MessageId], stores: int) -> UnknownMessage:
    """Return the error for ids of other stores."""
    one = unknown[0]
    return UnknownMessage(
        f"message {one} is of store {one.store_id.hex()}, which is none of the {stores} brokers of this client; "
        "connect to the broker that stored it"
    )

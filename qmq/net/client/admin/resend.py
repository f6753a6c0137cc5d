"""``client.admin.resend``: the messages that are meant, and the requests that a client repeats until all have ended.

Messages with a key, and copies (which keep the ids of their originals), are looked up first, and named by subject and
sequence. A resend that is repeated would repeat its messages; so one that cannot reach all brokers does nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from qmq.errors import BrokersMissed, InvalidOption, UnknownGroup, UnknownMessage, UsageError
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION
from qmq.intervals import Intervals
from qmq.names import check_group_or_member, check_prefix
from qmq.net.client.admin.listing import Listing
from qmq.net.client.admin.results import ResendCount
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers
from qmq.net.client.find.finder import Finder, microseconds_since_1970, search_terms
from qmq.net.client.find.get import get
from qmq.net.client.find.requests import BrokerSource
from qmq.net.client.find.stored_message import lane_of_stored

#: Ids, or ranges of sequences, of one request.
AT_ONCE: Final = 1_000
_RUN_BYTES: Final = 16

#: Takes how many messages were looked at, and how many there are to look at, each counted once for each group.
OnProgress = Callable[[int, int], None]
#: Asks one broker to carry out an action.
Do = Callable[..., Awaitable[dict[str, Any]]]


class ResendTerms(NamedTuple):
    """The checked arguments of ``Admin.resend``."""

    ids: list[MessageId] | None
    prefix: str | None
    key: str | None
    since: datetime | None
    until: datetime | None
    #: The fields of each request that say who gets the messages.
    target: dict[str, Any]
    dry_run: bool

    @property
    def times(self) -> dict[str, int | None]:
        """The fields of a request that say of which time messages are meant."""
        return {
            "since_us": None if self.since is None else microseconds_since_1970("since", self.since),
            "until_us": None if self.until is None else microseconds_since_1970("until", self.until),
        }


def resend_terms(
    ids: Iterable[str] | None, prefix: str | None, key: str | None, since: datetime | None, until: datetime | None,
    group: str | None, all_groups: bool, dry_run: bool,
) -> ResendTerms:  # fmt: skip
    """Check the arguments. Raises UsageError, with InvalidName and InvalidOption."""
    if (group is None) is not all_groups:
        raise UsageError(
            "give either the group that gets the messages, or all_groups=True for all that follow their subjects"
        )
    if (ids is None) is (prefix is None and key is None):
        raise UsageError("give either the ids of the messages, or a prefix of their subjects ('' for all) or a key")
    if ids is not None and not (since is None and until is None):
        raise UsageError("since and until choose among the messages of a prefix; with ids leave them out")
    target = {"all_groups": True} if group is None else {"group": check_group_or_member(group)}
    found = None if ids is None else _parsed(ids)
    if ids is None:
        prefix = check_prefix(prefix or "")
    terms = ResendTerms(found, prefix, key, since, until, target, bool(dry_run))
    since_us, until_us = terms.times.values()
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError(f"since ({since}) is not before until ({until}), so no message lies between them")
    return terms


def _parsed(ids: Iterable[str]) -> list[MessageId]:
    if isinstance(ids, str | bytes):
        raise UsageError(f"ids must be a list of message ids, not {ids!r:.80}")
    listed = list(ids)
    if not listed:
        raise UsageError("ids is empty: give the ids of the messages to resend")
    for one in listed:
        if not isinstance(one, str):
            raise UsageError(f"ids must be texts of 32 hex digits, not {one!r:.80}")
    return [MessageId.parse(one) for one in dict.fromkeys(one.lower() for one in listed)]


class Resending:
    """One call of ``Admin.resend``."""

    def __init__(
        self, brokers: Brokers, listing: Listing, do_of: Callable[[Link], Do], on_progress: OnProgress | None
    ) -> None:
        self._brokers = brokers
        self._listing = listing
        self._do_of = do_of
        self._on_progress = on_progress

    async def run(self, terms: ResendTerms) -> ResendCount:
        """Resend. Raises as ``Admin.resend`` does."""
        links = await self._brokers.reached_within(self._brokers.options.admin_timeout)
        missed = [str(link.address) for link in self._brokers.links if link not in links]
        stores = [link.store_id for link in links]
        if missed and (terms.ids is None or not all(one.store_id in stores for one in terms.ids)):
            raise self._nothing_done(missed)
        requests = [(link, request) for link in links for request in await self._requests(terms, link, links)]
        if terms.ids is None and not requests:
            raise InvalidOption(f"nothing is selected: no message of that selection has the key {terms.key!r:.80}")
        if len(requests) > 1 and (terms.ids is not None or terms.key is not None) and not terms.dry_run:
            await self._ask([(link, {**request, "dry_run": True}) for link, request in requests], None)
        return await self._ask(requests, self._on_progress)

    def _nothing_done(self, missed: Sequence[str]) -> BrokersMissed:
        return BrokersMissed(
            f"nothing was done; {self._listing.no_answer(missed)}, which may have some of these messages; to resend "
            "those of the other brokers, connect to these alone"
        )

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _requests(self, terms: ResendTerms, link: Link, links: Sequence[Link]) -> list[dict[str, Any]]:
        """Return the requests for a broker."""
        common = {**terms.target, "dry_run": terms.dry_run}
        if terms.ids is None and terms.key is None:
            return [{**common, "prefix": terms.prefix, **terms.times}]
        if terms.ids is None:
            sequences = await self._of_key(terms, link)
        else:
            sequences = await self._of_copies(terms.ids, link, links)
        plain = [
            bytes.fromhex(str(one))
            for one in terms.ids or ()
            if one.store_id == link.store_id and one.partition < DELAY_PARTITION
        ]
        parts = [("ids", plain[at : at + AT_ONCE]) for at in range(0, len(plain), AT_ONCE)]
        parts += [("sequences", sequences[at : at + AT_ONCE]) for at in range(0, len(sequences), AT_ONCE)]
        return [{**common, name: part} for name, part in parts]

    async def _of_key(self, terms: ResendTerms, link: Link) -> list[Any]:
        """Return the messages with the key at a broker: [subject, first sequence, the last one + 1, lane] each."""
        search = search_terms(
            terms.prefix or "", key=terms.key, since=terms.since, until=terms.until, limit=None, stop_after=None
        )
        source = BrokerSource(link, self._brokers.options.admin_timeout)
        found = dict[tuple[str, int], Intervals]()
        finder = Finder(search, lambda: [source])
        async for message in finder:
            if message.sequence is not None:  # a copy of one group has none, and comes to that group anyway
                name = message.subject, lane_of_stored(message)
                found.setdefault(name, Intervals()).add(message.sequence, message.sequence + 1)
        if finder.missed:
            raise self._nothing_done(finder.missed)
        return [[subject, start, end, lane] for (subject, lane), some in found.items() for start, end in some]

    async def _of_copies(self, ids: Sequence[MessageId], link: Link, links: Sequence[Link]) -> list[Any]:
        """Return the copies at a broker that keep one of these ids, as ``_of_key`` does. Raises UnknownMessage."""
        stores, found = [one.store_id for one in links], list[Any]()
        for one in ids:
            if one.store_id in stores and one.partition < DELAY_PARTITION:
                continue
            message = await get(self._brokers, self._listing, str(one))
            if message.sequence is None:
                raise UnknownMessage(f"message {one} is not delivered yet, or only one group has it: nothing was done")
            if message.broker == str(link.address):
                found.append([message.subject, message.sequence, message.sequence + 1, lane_of_stored(message)])
        return found

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _ask(self, requests: list[tuple[Link, dict[str, Any]]], on_progress: OnProgress | None) -> ResendCount:
        """Have brokers resend, all at once."""
        far = [(0, 0)] * len(requests)

        def told(at: int, looked: int, total: int) -> None:
            far[at] = looked, total
            if on_progress is not None:
                on_progress(sum(one for one, _ in far), sum(one for _, one in far))

        asked = [
            _resend_at(self._do_of(link), request, partial(told, at)) for at, (link, request) in enumerate(requests)
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        sums, nothing, errors, missed = ResendCount(), list[str](), list[BaseException](), list[str]()
        for (link, _), answer in zip(requests, answers, strict=True):
            if isinstance(answer, TimeoutError):
                missed.append(str(link.address))
            elif isinstance(answer, BaseException):
                errors.append(answer)
            elif isinstance(answer, str):
                nothing.append(answer)
            else:
                sums = _sum(sums, answer)
        if missed:
            raise BrokersMissed(
                f"{int(sums):,} resent; {self._listing.no_answer(missed)}, which may go on with it: look at the group "
                "before you resend these again"
            )
        errors.sort(key=lambda error: isinstance(error, UnknownGroup))  # a group may be at some brokers only
        is_in_vain = len(errors) + len(nothing) == len(requests)
        if errors and (is_in_vain or not isinstance(errors[0], UnknownGroup)):
            raise errors[0]
        if nothing and is_in_vain:  # rather that nobody follows it than that there is none
            raise InvalidOption(min(nothing, key=lambda text: text.startswith("nothing")))
        return sums


def _sum(one: ResendCount, other: ResendCount) -> ResendCount:
    """Return the counts of both; a group is counted once, although each broker has its messages."""
    return ResendCount(
        int(one) + int(other), groups=max(one.groups, other.groups), redriven=one.redriven + other.redriven,
        waiting=one.waiting + other.waiting, in_flight=one.in_flight + other.in_flight,
        retrying=one.retrying + other.retrying, gone=one.gone + other.gone,
    )  # fmt: skip


async def _resend_at(do: Do, request: dict[str, Any], told: Callable[[int, int], None]) -> ResendCount | str:
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
            return ResendCount(
                found["resent"], groups=found["groups"], redriven=found["redriven"], waiting=found["waiting"],
                in_flight=found["in_flight"], retrying=found["retrying"], gone=found["gone"],
            )  # fmt: skip

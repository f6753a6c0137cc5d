"""``client.admin``: lists and changes of groups, consumers and dead letters, at one broker and at all of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar, Unpack

import msgpack

from qmq.errors import BrokersMissed, InvalidOption, QmqError, UnknownGroup
from qmq.names import check_group_or_member, check_prefix
from qmq.net.client.admin.broker_info import BrokerInfo, broker_info_of
from qmq.net.client.admin.listing import Listing
from qmq.net.client.admin.resend import OnProgress, Resending, resend_terms
from qmq.net.client.admin.results import (
    ConsumerInfo,
    DeadLetter,
    GroupInfo,
    ResendCount,
    SealedLog,
    TokenRights,
    consumer_info_of,
    dead_letter_of,
    group_info_of,
    token_rights_of,
)
from qmq.net.client.admin.statistics import BrokerStats, broker_stats_of, group_stats_of
from qmq.net.client.broker_link import Link
from qmq.net.client.brokers import Brokers
from qmq.net.client.group_settings import ChangedSettings, packed_settings, shown_settings
from qmq.net.client.options import start_of
from qmq.net.protocol.frames import FrameKind

log = logging.getLogger("qmq.client")

T = TypeVar("T")


_PAGE: Final = 500


class AdminOfOne:
    """The admin of the broker of one link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def do(self, action: str, **fields: Any) -> dict[str, Any]:
        """Have the broker do *action*, and return its answer. Raises InvalidName for the group, TimeoutError."""
        if "group" in fields:
            check_group_or_member(fields["group"])
        answer = await self._link.answer(FrameKind.ADMINISTER, {"action": action, **fields})
        found: dict[str, Any] = msgpack.unpackb(answer.payload, strict_map_key=False)
        return found

    async def info(self) -> BrokerInfo:
        """Return the broker's version, settings, disks, connections and problems."""
        return broker_info_of(await self.do("info"))

    async def rights(self) -> TokenRights:
        """Return what the client may do at the broker."""
        return token_rights_of(await self.do("rights"))

    async def stats(self) -> BrokerStats:
        """Return the broker's counts since its start, and the present state of its groups."""
        page = first = await self.do("stats")
        groups = [group_stats_of(page["columns"], row) for row in page["groups"]]
        while page["after"] is not None:
            page = await self.do("stats", after=page["after"])
            groups += [group_stats_of(page["columns"], row) for row in page["groups"]]
        return broker_stats_of(first, groups)

    async def groups(self, name: str | None = None) -> list[GroupInfo]:
        """Return all groups by name, or the one with *name* (for a broadcast, one a member). Raises UnknownGroup."""
        found, after = list[GroupInfo](), ""
        while True:
            fields = {} if name is None else {"group": name}
            page = await self.do("groups", after=after, **fields)
            found += [group_info_of(row) for row in page["rows"]]
            if page["after"] is None:
                return found
            after = page["after"]

    async def consumers(self, group: str) -> list[ConsumerInfo]:
        """The consumers of a group, by name. Raises UnknownGroup."""
        found, after = list[ConsumerInfo](), ""
        while True:
            page = await self.do("consumers", group=group, after=after)
            found += [consumer_info_of(row) for row in page["rows"]]
            if page["after"] is None:
                return found
            after = page["after"]

    async def set_group(self, group: str, *, follows: Sequence[str] | None = None, **settings: Any) -> dict[str, Any]:
        """Change settings of a group, or the names that it follows; return all settings. Raises UnknownGroup,
        InvalidOption, InvalidName.
        """
        fields = {} if follows is None else {"follows": checked_follows(follows)}
        found = await self.do("set_group", group=group, settings=packed_settings(settings), **fields)
        return {"follows": found["follows"], **shown_settings(found["settings"])}

    async def seek(
        self, group: str, to: Literal["first", "new"] | datetime | int, *, clear_retries: bool = False
    ) -> None:
        """Move a group: to the first stored message, behind the last one, to a time or to a sequence.

        Messages in flight are dropped, and late acks of them are refused. Retries stay, unless *clear_retries*.
        Raises UnknownGroup, InvalidOption.
        """
        await self.do("seek_group", group=group, to=start_of(to), clear_retries=clear_retries)

    async def delete_group(self, group: str) -> None:
        """Delete a group with its cursors, retries and dead letters. Raises UnknownGroup."""
        await self.do("delete_group", group=group)

    async def dead_letters(self, group: str, after: int) -> tuple[list[DeadLetter], int | None]:
        """Return some dead letters of a group from *after* (at first 0) on, the oldest first, and the next *after*
        (None: there are no more). Raises UnknownGroup.
        """
        page = await self.do("dead_letters", group=group, after=after, limit=_PAGE)
        return [dead_letter_of(row) for row in page["rows"]], page["after"]

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message; return whether it was in time. Raises InvalidOption."""
        return bool((await self.do("cancel", id=message_id))["cancelled"])

    async def roll(self) -> list[SealedLog]:
        """Roll the segment of each partition. Raises StorageError."""
        return [SealedLog(row["partition"], row["end"]) for row in (await self.do("roll"))["rows"]]

    async def change_dead(
        self, action: Literal["redrive", "delete_dead"], group: str, numbers: Sequence[int] | None
    ) -> int:
        """Redrive or delete dead letters, all or those with these numbers; return their count."""
        fields = {} if numbers is None else {"numbers": list(numbers)}
        return int((await self.do(action, group=group, **fields))["messages"])


def checked_follows(follows: Sequence[str]) -> list[str]:
    """Return *follows* as the broker takes it. Raises InvalidOption, InvalidName."""
    if isinstance(follows, str | bytes) or not isinstance(follows, Sequence) or not follows:
        raise InvalidOption(f"follows must be a list of prefixes and subjects, not {follows!r:.80}")
    return [check_prefix(prefix) for prefix in follows]


_Action = Literal["redrive", "delete_dead"]


class _Answers(NamedTuple):
    """The answers of brokers by address, the errors of those without the group, and the brokers without an answer."""

    answers: dict[str, Any]
    unknown: list[UnknownGroup]
    missed: list[str]


class Admin:
    """Lists and changes groups, consumers and dead letters at all brokers of a client: its attribute ``admin``.

    Each row names its broker. A broker has ``admin_timeout`` seconds for each answer (see ``qmq.connect``). A list of
    several brokers goes on without those that do not answer, and waits half a second for one that has had no connection
    for 5 seconds; ``missed`` names them. BrokersMissed is raised if none
    answers, or if a change may be missing at some; it names these, and the same call again completes the change.
    """

    def __init__(self, brokers: Brokers, listing: Listing) -> None:
        self._brokers = brokers
        self._listing = listing

    @property
    def missed(self) -> tuple[str, ...]:
        """The brokers that the last list (also of ``Client.subjects``) lacks, as they did not answer in time."""
        return self._listing.missed

    async def info(self) -> list[BrokerInfo]:
        """Return version, uptime, settings, disks, connections and problems of each broker. Raises BrokersMissed.

        Example::

            for broker in await client.admin.info():
                for problem in broker.problems:
                    print(broker.broker, problem.level, problem.message)
        """
        found = await self._listed(lambda admin: admin.info())
        return [replace(info, broker=broker) for broker, info in found.items()]

    async def rights(self) -> list[TokenRights]:
        """Return what this client may do at each broker, whatever its token. Raises BrokersMissed.

        Example::

            may_change = all(rights.admin for rights in await client.admin.rights())
        """
        found = await self._listed(lambda admin: admin.rights())
        return [replace(rights, broker=broker) for broker, rights in found.items()]

    async def stats(self) -> list[BrokerStats]:
        """Return the statistics of each broker: counts since its start, durations, and the present state of its groups.

        It costs a broker little, so it may be called every few seconds, also with many groups; the rate of something
        is the difference of two counts. Raises BrokersMissed.

        Example::

            for broker in await client.admin.stats():
                for group in broker.groups:
                    print(group.name, group.ready, group.oldest_unacked, group.acked)
        """
        found = await self._listed(lambda admin: admin.stats())
        return [replace(stats, broker=broker) for broker, stats in found.items()]

    async def groups(self, name: str | None = None) -> list[GroupInfo]:
        """Return all groups by name, or the one with *name* (for a broadcast, one of each member); one row for each
        broker. Raises UnknownGroup, BrokersMissed.
        """
        found = await self._listed(lambda admin: admin.groups(name))
        return [replace(row, broker=broker) for broker, rows in found.items() for row in rows]

    async def consumers(self, group: str) -> list[ConsumerInfo]:
        """Return the consumers of a group; one row for each broker. Raises UnknownGroup, BrokersMissed."""
        found = await self._listed(lambda admin: admin.consumers(group))
        return [replace(row, broker=broker) for broker, rows in found.items() for row in rows]

    async def set_group(
        self, group: str, *, follows: Sequence[str] | None = None, **settings: Unpack[ChangedSettings]
    ) -> dict[str, Any]:
        """Change settings of a group; return all of them. Raises UnknownGroup, InvalidOption, BrokersMissed.

        With *follows* the group follows these prefixes and subjects from now on, and no others. Messages of the others
        that are ready no longer belong to it; those in flight may still be acknowledged, and become dead letters if
        they come back. Present consumers keep those of their prefixes that the group still follows. A prefix that the
        group followed before continues where it was, so no message is handed out twice; a new one begins at the first
        stored message (for a broadcast: behind the last).
        """
        found = await self._changed(lambda admin: admin.set_group(group, follows=follows, **settings))
        return dict(next(iter(found.values())))

    async def seek(
        self, group: str, to: Literal["first", "new"] | datetime | int, *, clear_retries: bool = False
    ) -> None:
        """Move a group: to the first stored message, behind the last one, to a time or to a sequence.

        Messages in flight are dropped, and late acks of them are refused. Retries stay, unless *clear_retries*.
        Raises UnknownGroup, InvalidOption, BrokersMissed.
        """
        await self._changed(lambda admin: admin.seek(group, to, clear_retries=clear_retries))

    async def delete_group(self, group: str) -> None:
        """Delete a group with its cursors, retries and dead letters. Raises UnknownGroup, BrokersMissed."""
        await self._changed(lambda admin: admin.delete_group(group))

    async def dead_letters(self, group: str) -> AsyncIterator[DeadLetter]:
        """Yield the dead letters of a group, broker by broker, the oldest first. Raises UnknownGroup, BrokersMissed."""
        unknown, known = list[UnknownGroup](), 0
        for link in await self._listing.begin():
            after: int | None = 0
            try:
                while after is not None:
                    page = await self._listing.page(link, AdminOfOne(link).dead_letters(group, after))
                    letters, after = page or ([], None)
                    for letter in letters:
                        yield replace(letter, broker=str(link.address))
                known += 1
            except UnknownGroup as error:
                unknown.append(error)
        if unknown and not known:
            raise unknown[0]

    async def redrive(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Hand out dead letters again, as if for the first time: those with these message ids, or *all*. Return their
        count.

        Raises InvalidOption without ids and *all*, UnknownGroup, BrokersMissed.
        """
        return await self._change_dead("redrive", group, ids, all)

    async def delete_dead(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Delete dead letters: those with these message ids, or *all*. Return their count. Raises as ``redrive``."""
        return await self._change_dead("delete_dead", group, ids, all)

    async def _change_dead(self, action: _Action, group: str, ids: Iterable[str] | None, every: bool) -> int:
        if ids is None and not every:
            raise InvalidOption(f"neither ids nor all are given; give ids, or all=True for group {group!r}")
        if ids is None:
            return sum((await self._changed(lambda admin: admin.change_dead(action, group, None))).values())
        if every:
            raise InvalidOption("give either ids or all=True, not both")
        wanted = _lowered(ids)
        letters = [letter async for letter in self.dead_letters(group) if letter.id in wanted]
        absent = wanted - {letter.id for letter in letters}
        if absent and self.missed:
            raise BrokersMissed(
                f"nothing was done; {self._listing.no_answer(self.missed)}, which may have {len(absent)} of these ids; "
                "call it again when all brokers answer"
            )
        if absent:
            raise InvalidOption(f"{len(absent)} of these ids are not dead letters of group {group!r}; list them first")
        changed = 0
        for link in self._brokers.links:
            numbers = [letter.number for letter in letters if letter.broker == str(link.address)]
            if not numbers:
                continue
            try:
                changed += await AdminOfOne(link).change_dead(action, group, numbers)
            except TimeoutError:
                missed = self._listing.no_answer([str(link.address)])
                raise BrokersMissed(
                    f"{changed} done; {missed}, which may have done {len(numbers)} more or not; list the dead letters "
                    "to see"
                ) from None
        return changed

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message at the broker that has it; return whether it was in time.

        Raises InvalidOption, or BrokersMissed if a broker that did not answer may have it.
        """
        result = await self._each(lambda admin: admin.cancel(message_id), self._brokers.links)
        if not any(result.answers.values()) and result.missed:
            raise BrokersMissed(f"{self._listing.no_answer(result.missed)}, which may have the message; call it again")
        return any(result.answers.values())

    async def roll(self) -> list[SealedLog]:
        """Roll the segment of each partition, so that its messages can be archived; return one row for each partition.

        It returns when the segments are on disk. An empty segment is not rolled. Raises StorageError, BrokersMissed.
        """
        found = await self._changed(lambda admin: admin.roll())
        return [replace(row, broker=broker) for broker, rows in found.items() for row in rows]

    async def resend(
        self,
        *,
        ids: Iterable[str] | None = None,
        prefix: str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        group: str | None = None,
        all_groups: bool = False,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> ResendCount:
        """Have stored messages handed out again, to one group or to all that follow their subjects; return how many.

        They are the messages with these *ids*, or those of the subjects that *prefix* takes ("": of all), with this
        *key*, stored at *since* or later and before *until* (aware datetimes); at most 10 million a broker. Consumers
        get them as attempt 1, with ``message.replayed``. Messages that are waiting, in flight or in retry are left
        alone; dead letters among them are dead no more. With *dry_run* it counts and changes nothing. *on_progress* is
        called with the messages looked at so far and in all.

        A broker goes on by itself if this program ends meanwhile. Raises UsageError, UnknownGroup; UnknownMessage for
        an id that is not stored; InvalidOption if nothing is selected, or if the group does not follow it; and
        BrokersMissed. Then nothing is changed, unless BrokersMissed says otherwise.

        Example::

            count = await client.admin.resend(prefix="shop.order.", since=yesterday, group="billing")
            print(count, "resent;", count.waiting, "come anyway")
        """
        terms = resend_terms(ids, prefix, key, since, until, group, all_groups, dry_run)
        self._brokers.ready()
        resending = Resending(self._brokers, self._listing, lambda link: AdminOfOne(link).do, on_progress)
        return await resending.run(terms)

    # --- all brokers -------------------------------------------------------------------------------------------------

    async def _listed(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> dict[str, T]:
        result = await self._each(call, await self._listing.begin())
        missed = [*self.missed, *result.missed]
        if missed and not result.answers and not result.unknown:
            raise BrokersMissed(self._listing.no_answer(missed))
        if result.missed:
            self._listing.lacks(missed)
        if not result.answers:
            raise result.unknown[0]
        return result.answers

    async def _changed(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> dict[str, T]:
        result = await self._each(call, self._brokers.links)
        if result.missed:
            done = f"done at {', '.join(result.answers)}; " if result.answers else ""
            missed = self._listing.no_answer(result.missed)
            raise BrokersMissed(f"{done}{missed}, which may have done it or not; call it again to complete it")
        if not result.answers:
            raise result.unknown[0]
        return result.answers

    async def _each(self, call: Callable[[AdminOfOne], Awaitable[T]], links: Sequence[Link]) -> _Answers:
        """Call these brokers at once. Raises the first refusal except UnknownGroup."""
        self._brokers.ready()
        asked = [call(AdminOfOne(link)) for link in links]
        result = _Answers({}, [], [])
        refusals: list[BaseException] = []
        for link, answer in zip(links, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, TimeoutError):
                result.missed.append(str(link.address))
            elif isinstance(answer, UnknownGroup):
                result.unknown.append(answer)
            elif isinstance(answer, BaseException):
                refusals.append(answer)
            else:
                result.answers[str(link.address)] = answer
        for refusal in refusals:
            if isinstance(refusal, QmqError) and result.answers:
                refusal.add_note(f"done at {', '.join(result.answers)}")
            raise refusal
        return result


def _lowered(ids: Iterable[str]) -> set[str]:
    """Return message ids in lower case, as dead letters have them. Raises InvalidOption."""
    listed = list(ids)
    if isinstance(ids, str) or not all(isinstance(one, str) for one in listed):
        raise InvalidOption(f"ids must be a list of message ids, not {ids!r:.80}")
    return {one.lower() for one in listed}

"""Groups, their consumers and dead letters at one broker, seen and changed; ``everywhere`` does it at all of them.

Lists of all brokers of a client, page by page, and which brokers a list lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar, Unpack

import msgpack

from qmq.errors import BrokersMissed, InvalidOption, QmqError, UnknownGroup
from qmq.names import check_group_or_member, check_prefix
from qmq.net.client.broker_link import Link
from qmq.net.client.cluster import Brokers
from qmq.net.client.group_settings import ChangedSettings, packed_settings, shown_settings
from qmq.net.client.options import start_of
from qmq.net.client.producer.receipts import utc_from_us
from qmq.net.protocol.frames import FrameKind

log = logging.getLogger("qmq.client")

T = TypeVar("T")


class Listing:
    """Of one client."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        #: Which brokers the last list lacks, as they were not reached.
        self.missed: tuple[str, ...] = ()

    async def begin(self) -> list[Link]:
        """Of which brokers a list is now. Raises BrokersMissed when none is reached."""
        found = await self._brokers.reached_within(self._brokers.options.admin_timeout)
        missed = [str(link.address) for link in self._brokers.links if link not in found]
        if not found:
            raise BrokersMissed(self.no_answer(missed))
        self.lacks(missed)
        return found

    async def page(self, link: Link, asked: Coroutine[Any, Any, T]) -> T | None:
        """A page of one of them; None when that one of several does not answer: it is missed then, too. Raises
        BrokersMissed when it is the only one.
        """
        try:
            return await asked
        except TimeoutError:
            if len(self._brokers.links) == 1:
                raise BrokersMissed(self.no_answer([str(link.address)])) from None
            self.lacks([*self.missed, str(link.address)])
            return None

    def no_answer(self, addresses: Sequence[str]) -> str:
        """Say that these brokers did not answer in time."""
        return f"no answer within {self._brokers.options.admin_timeout:g} s from {', '.join(addresses)}"

    def lacks(self, addresses: Sequence[str]) -> None:
        """The list that is made now lacks these, which the log is told."""
        self.missed = tuple(addresses)
        if addresses:
            log.warning("what is listed lacks %s: %s", ", ".join(addresses), self.no_answer(addresses))


_PAGE: Final = 500


class GroupInfo(NamedTuple):
    """A group: which prefixes and subjects it follows, how many consumers are online, and how many of its messages are
    where.

    ``ready``: nobody was given them yet (these at least, where not ``ready_exact``); ``oldest`` of these was stored
    then. ``in_flight``: consumers hold them. ``in_retry``: they wait to be handed out again. ``skipped``: lost
    to the group, as they were dropped before it took them, or may have been handed out before a crash. ``filtered``:
    passed, as they have none of its tags. ``delayed``: to be delivered later.
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


class ConsumerInfo(NamedTuple):
    """A consumer of a group, and how many messages it has in flight, the oldest of them since ``in_flight_since``.

    ``last_pull``: when it was given something last, as far as the broker remembers. ``silent``: seconds since it was
    heard of (its heartbeats, or its process's). ``stalled``: for so many seconds its event loop had not turned then.
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


class DeadLetter(NamedTuple):
    """A message that its group has given up, and why. ``id`` is None when it cannot be read any more."""

    number: int
    id: str | None
    subject: str | None
    sequence: int | None
    attempts: int
    session_expiries: int
    reason: str
    died_at: datetime
    broker: str = ""


class SealedLog(NamedTuple):
    """A partition of a broker's message log: what lies before position ``end`` is in files that nobody writes to."""

    partition: int
    end: int
    broker: str = ""


class AdminOfOne:
    """Of the broker that a link leads to."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def do(self, action: str, **fields: Any) -> dict[str, Any]:
        """Ask for *action*: what came of it. Raises InvalidName of what can't be a group's, TimeoutError."""
        if "group" in fields:
            check_group_or_member(fields["group"])
        answer = await self._link.answer(FrameKind.ADMINISTER, {"action": action, **fields})
        found: dict[str, Any] = msgpack.unpackb(answer.payload, strict_map_key=False)
        return found

    async def groups(self, name: str | None = None) -> list[GroupInfo]:
        """All groups by name, or that one (of a broadcast the group of each member). Raises UnknownGroup."""
        found, after = list[GroupInfo](), ""
        while True:
            fields = {} if name is None else {"group": name}
            page = await self.do("groups", after=after, **fields)
            found += [_group_info(row) for row in page["rows"]]
            if page["after"] is None:
                return found
            after = page["after"]

    async def consumers(self, group: str) -> list[ConsumerInfo]:
        """The consumers of a group, by name. Raises UnknownGroup."""
        found, after = list[ConsumerInfo](), ""
        while True:
            page = await self.do("consumers", group=group, after=after)
            found += [_consumer_info(row) for row in page["rows"]]
            if page["after"] is None:
                return found
            after = page["after"]

    async def set_group(self, group: str, *, follows: Sequence[str] | None = None, **settings: Any) -> dict[str, Any]:
        """Change settings of a group, or what it follows; returns all of them. Raises UnknownGroup, InvalidOption,
        InvalidName.
        """
        fields = {} if follows is None else {"follows": checked_follows(follows)}
        found = await self.do("set_group", group=group, settings=packed_settings(settings), **fields)
        return {"follows": found["follows"], **shown_settings(found["settings"])}

    async def seek(
        self, group: str, to: Literal["first", "last"] | datetime | int, *, clear_retries: bool = False
    ) -> None:
        """Have a group go on at the first message kept, behind the last, at a time or at a sequence.

        What its consumers hold is dropped, and their late acknowledgements are refused. What waits to be handed out
        again stays, unless *clear_retries*. Raises UnknownGroup, InvalidOption.
        """
        await self.do("seek_group", group=group, to=start_of(to), clear_retries=clear_retries)

    async def delete_group(self, group: str) -> None:
        """Forget a group, with all it holds, retries and dead letters. Raises UnknownGroup."""
        await self.do("delete_group", group=group)

    async def dead_letters(self, group: str, after: int) -> tuple[list[DeadLetter], int | None]:
        """Some dead letters of a group, the oldest first, from *after* (at first 0) on, and what to go on with (None:
        no more). Raises UnknownGroup.
        """
        page = await self.do("dead_letters", group=group, after=after, limit=_PAGE)
        return [_dead_letter(row) for row in page["rows"]], page["after"]

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message: True when it was in time. Raises InvalidOption."""
        return bool((await self.do("cancel", id=message_id))["cancelled"])

    async def seal(self) -> list[SealedLog]:
        """Close the files that are being written; by partition. Raises StorageError."""
        return [SealedLog(row["partition"], row["end"]) for row in (await self.do("seal"))["rows"]]

    async def change_dead(
        self, action: Literal["retry_dead", "delete_dead"], group: str, numbers: Sequence[int] | None
    ) -> int:
        """Hand out dead letters again or delete them: all, or those with these numbers; how many."""
        fields = {} if numbers is None else {"numbers": list(numbers)}
        return int((await self.do(action, group=group, **fields))["messages"])


def checked_follows(follows: Sequence[str]) -> list[str]:
    """What a group is to follow, as the broker takes it. Raises InvalidOption and InvalidName."""
    if isinstance(follows, str | bytes) or not isinstance(follows, Sequence) or not follows:
        raise InvalidOption(f"follows must be a list of prefixes and subjects, not {follows!r:.80}")
    return [check_prefix(prefix) for prefix in follows]


def _group_info(row: Mapping[str, Any]) -> GroupInfo:
    return GroupInfo(
        row["group"], row["mode"], row["follows"], row["consumers"], row["ready"], _time(row["oldest_us"]),
        row["in_flight"], row["in_retry"], row["dead"], row.get("skipped", 0), shown_settings(row["settings"]),
        delayed=row["delayed"], ready_exact=row["ready_exact"], filtered=row["filtered"],
    )  # fmt: skip


def _consumer_info(row: Mapping[str, Any]) -> ConsumerInfo:
    return ConsumerInfo(
        row["consumer"], row["epoch"], row["online"], row["in_flight"], _time(row["in_flight_since_us"]),
        _time(row["pulled_us"]), row["silent_us"] / 1e6, row["stalled_us"] / 1e6,
    )  # fmt: skip


def _dead_letter(row: Mapping[str, Any]) -> DeadLetter:
    return DeadLetter(
        row["number"], row["id"], row["subject"], row["sequence"], row["attempts"], row["session_expiries"],
        row["reason"], utc_from_us(row["died_at_us"]),
    )  # fmt: skip


def _time(time_us: int | None) -> datetime | None:
    return None if time_us is None else utc_from_us(time_us)


_Action = Literal["retry_dead", "delete_dead"]


class _Told(NamedTuple):
    """What came of asking every broker: answers by address, who does not know the group, who did not answer in time."""

    answers: dict[str, Any]
    unknown: list[UnknownGroup]
    missed: list[str]


class Admin:
    """Groups, their consumers and dead letters, at every broker of a client. Made by it.

    A row says which broker it is of. A broker gets ``admin_timeout`` seconds for each answer (see ``qmq.connect``). A
    list of several brokers goes on without one that does not answer, which ``missed`` names; where none answers, and
    where a change may not have been made everywhere, BrokersMissed names those that did not, and the same call again
    completes it.
    """

    def __init__(self, brokers: Brokers, listing: Listing) -> None:
        self._brokers = brokers
        self._listing = listing

    @property
    def missed(self) -> tuple[str, ...]:
        """Which brokers the last list lacks (also one of ``Client.subjects``), as they did not answer in time."""
        return self._listing.missed

    async def groups(self, name: str | None = None) -> list[GroupInfo]:
        """All groups by name, or that one (of a broadcast the group of each member); a row a broker. Raises
        UnknownGroup.
        """
        found = await self._listed(lambda admin: admin.groups(name))
        return [row._replace(broker=broker) for broker, rows in found.items() for row in rows]

    async def consumers(self, group: str) -> list[ConsumerInfo]:
        """The consumers of a group; a row a broker. Raises UnknownGroup."""
        found = await self._listed(lambda admin: admin.consumers(group))
        return [row._replace(broker=broker) for broker, rows in found.items() for row in rows]

    async def set_group(
        self, group: str, *, follows: Sequence[str] | None = None, **settings: Unpack[ChangedSettings]
    ) -> dict[str, Any]:
        """Change settings of a group; returns all of them. Raises UnknownGroup, InvalidOption, BrokersMissed.

        With *follows* it follows these prefixes and subjects from now on, and nothing else. What is ready in others is
        not its own any more, what is in flight may still be acknowledged, and what comes back is dead. Consumers that
        are there go on with what of their own prefixes is left. A prefix that the group followed once goes on where it
        was, so nothing is handed out twice; one that is new begins at the first message kept (of a broadcast: behind
        the last).
        """
        found = await self._changed(lambda admin: admin.set_group(group, follows=follows, **settings))
        return dict(next(iter(found.values())))

    async def seek(
        self, group: str, to: Literal["first", "last"] | datetime | int, *, clear_retries: bool = False
    ) -> None:
        """Have a group go on at the first message kept, behind the last, at a time or at a sequence.

        What its consumers hold is dropped, and their late acknowledgements are refused. What waits to be handed out
        again stays, unless *clear_retries*. Raises UnknownGroup, InvalidOption, BrokersMissed.
        """
        await self._changed(lambda admin: admin.seek(group, to, clear_retries=clear_retries))

    async def delete_group(self, group: str) -> None:
        """Forget a group, with all it holds, retries and dead letters. Raises UnknownGroup, BrokersMissed."""
        await self._changed(lambda admin: admin.delete_group(group))

    async def dead_letters(self, group: str) -> AsyncIterator[DeadLetter]:
        """The dead letters of a group, of one broker after another, the oldest first. Raises UnknownGroup."""
        unknown, known = list[UnknownGroup](), 0
        for link in await self._listing.begin():
            after: int | None = 0
            try:
                while after is not None:
                    page = await self._listing.page(link, AdminOfOne(link).dead_letters(group, after))
                    letters, after = page or ([], None)
                    for letter in letters:
                        yield letter._replace(broker=str(link.address))
                known += 1
            except UnknownGroup as error:
                unknown.append(error)
        if unknown and not known:
            raise unknown[0]

    async def retry_dead(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Hand out dead letters again, as if for the first time: those with these message ids, or *all*; how many.

        Raises InvalidOption without either, UnknownGroup, BrokersMissed.
        """
        return await self._change_dead("retry_dead", group, ids, all)

    async def delete_dead(self, group: str, ids: Iterable[str] | None = None, *, all: bool = False) -> int:
        """Delete dead letters for good: those with these message ids, or *all*; how many. Raises as ``retry_dead``."""
        return await self._change_dead("delete_dead", group, ids, all)

    async def _change_dead(self, action: _Action, group: str, ids: Iterable[str] | None, every: bool) -> int:
        if ids is None and not every:
            raise InvalidOption(f"give ids, or all=True for every dead letter of group {group!r}")
        if ids is None:
            return sum((await self._changed(lambda admin: admin.change_dead(action, group, None))).values())
        if every:
            raise InvalidOption("give either ids or all=True, not both")
        wanted = _lowered(ids)
        letters = [letter async for letter in self.dead_letters(group) if letter.id in wanted]
        absent = wanted - {letter.id for letter in letters}
        if absent and self.missed:
            raise BrokersMissed(
                f"done nowhere; {self._listing.no_answer(self.missed)}, which may have {len(absent)} of these"
            )
        if absent:
            raise InvalidOption(f"{len(absent)} of these ids are no dead letters of group {group!r}")
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
                    f"{changed} done; {missed}, which may have done {len(numbers)} more or not: list them to see"
                ) from None
        return changed

    async def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message at whichever broker has it: True when it was in time.

        Raises InvalidOption; BrokersMissed when it may be at one that did not answer.
        """
        told = await self._each(lambda admin: admin.cancel(message_id))
        if not any(told.answers.values()) and told.missed:
            raise BrokersMissed(f"{self._listing.no_answer(told.missed)}, which may have it")
        return any(told.answers.values())

    async def seal(self) -> list[SealedLog]:
        """Close the files that messages are being written to, so that they can be archived; a row a partition.

        Returns when they are on disk. Where nothing was written since the last time nothing is done. Raises
        StorageError, BrokersMissed.
        """
        found = await self._changed(lambda admin: admin.seal())
        return [row._replace(broker=broker) for broker, rows in found.items() for row in rows]

    # --- all of them -------------------------------------------------------------------------------------------------

    async def _listed(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> dict[str, T]:
        told = await self._each(call)
        if told.missed and not told.answers and not told.unknown:
            raise BrokersMissed(self._listing.no_answer(told.missed))
        self._listing.lacks(told.missed)
        if not told.answers:
            raise told.unknown[0]
        return told.answers

    async def _changed(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> dict[str, T]:
        told = await self._each(call)
        if told.missed:
            done = f"done at {', '.join(told.answers)}; " if told.answers else ""
            missed = self._listing.no_answer(told.missed)
            raise BrokersMissed(f"{done}{missed}, which may have done it or not; the same call again completes it")
        if not told.answers:
            raise told.unknown[0]
        return told.answers

    async def _each(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> _Told:
        """Ask all at once. Raises what any of them refuses it with, but that it does not know the group."""
        self._brokers.ready()
        links = self._brokers.links
        asked = [call(AdminOfOne(link)) for link in links]
        told = _Told({}, [], [])
        refusals: list[BaseException] = []
        for link, result in zip(links, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(result, TimeoutError):
                told.missed.append(str(link.address))
            elif isinstance(result, UnknownGroup):
                told.unknown.append(result)
            elif isinstance(result, BaseException):
                refusals.append(result)
            else:
                told.answers[str(link.address)] = result
        for refusal in refusals:
            if isinstance(refusal, QmqError) and told.answers:
                refusal.add_note(f"done at {', '.join(told.answers)}")
            raise refusal
        return told


def _lowered(ids: Iterable[str]) -> set[str]:
    """Message ids as a dead letter has its own. Raises InvalidOption."""
    listed = list(ids)
    if isinstance(ids, str) or not all(isinstance(one, str) for one in listed):
        raise InvalidOption(f"ids must be a list of message ids, not {ids!r:.80}")
    return {one.lower() for one in listed}

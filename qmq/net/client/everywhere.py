"""``client.admin`` of one broker or several: every change goes to all of them, every list is of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar, Unpack

from qmq.errors import BrokersMissed, InvalidOption, QmqError, UnknownGroup
from qmq.net.client.admin import AdminOfOne, ConsumerInfo, DeadLetter, GroupInfo, SealedLog
from qmq.net.client.cluster import Brokers
from qmq.net.client.group_settings import ChangedSettings

_Action = Literal["retry_dead", "delete_dead"]
T = TypeVar("T")


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

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    @property
    def missed(self) -> tuple[str, ...]:
        """Which brokers the last list lacks (also one of ``Client.subjects``), as they did not answer in time."""
        return self._brokers.listing.missed

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
        for link in await self._brokers.listing.begin():
            after: int | None = 0
            try:
                while after is not None:
                    page = await self._brokers.listing.page(link, AdminOfOne(link).dead_letters(group, after))
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
                f"done nowhere; {self._brokers.listing.no_answer(self.missed)}, which may have {len(absent)} of these"
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
                missed = self._brokers.listing.no_answer([str(link.address)])
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
            raise BrokersMissed(f"{self._brokers.listing.no_answer(told.missed)}, which may have it")
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
            raise BrokersMissed(self._brokers.listing.no_answer(told.missed))
        self._brokers.listing.lacks(told.missed)
        if not told.answers:
            raise told.unknown[0]
        return told.answers

    async def _changed(self, call: Callable[[AdminOfOne], Awaitable[T]]) -> dict[str, T]:
        told = await self._each(call)
        if told.missed:
            done = f"done at {', '.join(told.answers)}; " if told.answers else ""
            missed = self._brokers.listing.no_answer(told.missed)
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

"""A search over several stores: asks each for the next step, merges what they find, and says how far it is."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol, Self

from qmq.durations import Duration, seconds_of
from qmq.errors import BadBatch, BrokersMissed, InvalidOption, QmqError
from qmq.format.run import Run
from qmq.net.client.find.cursor import SourceCursor, pack_cursor, unpack_cursor
from qmq.net.client.find.requests import FoundPage
from qmq.net.client.find.stored_message import StoredMessage, stored_message
from qmq.net.client.find.text import TextFilter
from qmq.net.protocol.selection import END_US, Boundary, Selection

#: Messages of one step: of a search that returns all of them, and of one that looks into them here.
_PAGE: Final = 1_000
_TEXT_PAGE: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: After this many seconds a search ends, unless the program says otherwise.
STOP_AFTER: Final = 60.0


class SearchTerms(NamedTuple):
    """The checked arguments of a search."""

    selection: Selection
    text: TextFilter | None
    contains: str | None
    newest: bool
    limit: int | None
    stop_after: float | None
    cursor: dict[bytes, SourceCursor]

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments by which a cursor belongs to the search."""
        return _identity(self.selection, self.contains, self.newest)


def _identity(selection: Selection, contains: str | None, newest: bool) -> dict[str, Any]:
    return {**selection.packed(), "contains": contains, "newest": newest}


def search_terms(
    prefix: str = "",
    *,
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    contains: str | None = None,
    newest: bool = False,
    limit: int | None = 100,
    stop_after: Duration | None = STOP_AFTER,
    cursor: str | None = None,
) -> SearchTerms:
    """Check the arguments of ``Client.find``. Raises UsageError, with InvalidName and InvalidOption."""
    since_us = 0 if since is None else microseconds_since_1970("since", since)
    until_us = END_US if until is None else microseconds_since_1970("until", until)
    selection = Selection(prefix, key, since_us, until_us).check()
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidOption(f"limit must be a whole number from 1 on, or None for no limit, not {limit!r:.80}")
    seconds = None if stop_after is None else seconds_of("stop_after", stop_after)
    text = None if contains is None else TextFilter(contains)
    found = {} if cursor is None else unpack_cursor(cursor, _identity(selection, contains, bool(newest)))
    return SearchTerms(selection, text, contains, bool(newest), limit, seconds, found)


def microseconds_since_1970(name: str, at: datetime) -> int:
    """Return an aware time in microseconds since 1970, 0 for one before. Raises InvalidOption."""
    if not isinstance(at, datetime):
        raise InvalidOption(f"{name} must be an aware datetime, not {at!r:.80}")
    if at.utcoffset() is None:
        raise InvalidOption(f"{name} {at!r} has no time zone; use datetime(..., tzinfo=UTC)")
    since = at - _EPOCH
    return max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


@dataclass(frozen=True, slots=True)
class FindProgress:
    """How far a search is: ``found`` messages were returned, ``looked`` runs of messages were looked at, and about
    ``left`` are left. ``share`` is the part that is done, from 0.0 to 1.0.
    """

    found: int
    looked: int
    left: int

    @property
    def share(self) -> float:
        """The part of the search that is done, about: from 0.0 to 1.0."""
        return self.looked / (self.looked + self.left) if self.left else 1.0


class SearchSource(Protocol):
    """One store that is searched."""

    #: The address of its broker, or the place of its files.
    name: str

    async def store_id(self) -> bytes:
        """Return the id of the store. Raises TimeoutError if it does not answer."""

    async def page(
        self, selection: Selection, newest: bool, after: Boundary | None, upto_us: int | None, max_count: int
    ) -> FoundPage:
        """Return the next messages. Raises QmqError, TimeoutError."""


class _StoreSearch:
    """The search of one store: the messages that were found and not returned, and where it goes on."""

    def __init__(self, source: SearchSource, terms: SearchTerms) -> None:
        self.source = source
        self._terms = terms
        self.store_id: bytes | None = None
        self.waiting: deque[tuple[StoredMessage, Boundary]] = deque()
        self.after: Boundary | None = None
        self.upto_us: int | None = None
        self.is_done = False
        self.is_missed = False
        self.error: QmqError | None = None
        self.looked = self.left = self.unreadable = 0

    @property
    def wants_more(self) -> bool:
        """Whether the next message of the store is not known yet."""
        return not self.waiting and not self.is_done and not self.is_missed and self.error is None

    async def fetch(self, max_count: int) -> None:
        """Ask for the next step."""
        terms = self._terms
        try:
            if self.store_id is None:
                self._begin(await self.source.store_id())
                if self.is_done:
                    return
            page = await self.source.page(terms.selection, terms.newest, self.after, self.upto_us, max_count)
        except TimeoutError:
            self.is_missed = True
            return
        except QmqError as error:
            self.error = error
            return
        self.unreadable += page.unreadable
        for run in page.runs[::-1] if terms.newest else page.runs:
            self._add(run)
        self.after, self.upto_us = page.after, page.upto_us
        self.looked, self.left = self.looked + page.looked, page.left
        self.is_done = page.after is None

    def _begin(self, store_id: bytes) -> None:
        """Go on where a cursor says."""
        self.store_id = store_id
        place = self._terms.cursor.get(store_id)
        if place is not None:
            self.after, self.upto_us = place
            self.is_done = place.after is None

    def _add(self, run: Run) -> None:
        terms = self._terms
        indexes = range(run.count) if terms.text is None else terms.text.matches(run)
        for index in reversed(indexes) if terms.newest else indexes:
            try:
                message = stored_message(run, index, self.source.name)
            except BadBatch:  # its sender packed something else: no consumer is given it either
                self.unreadable += 1
                continue
            ordinal = run.ordinal + index
            self.waiting.append((message, Boundary(run.stored_at_us, ordinal + 1 if terms.newest else ordinal)))

    def may_come_before(self, message: StoredMessage) -> bool:
        """Return whether the store may still have a message that comes before *message*."""
        if not self.wants_more:
            return False
        if self.after is None:
            return True
        edge_us = self.after.stored_at_us
        return edge_us >= message.stored_at_us if self._terms.newest else edge_us <= message.stored_at_us

    def place(self) -> SourceCursor | None:
        """Return where the search goes on; None: at its beginning."""
        if self.upto_us is None:
            return None
        return SourceCursor(self.waiting[0][1] if self.waiting else self.after, self.upto_us)

    @property
    def is_exhausted(self) -> bool:
        """Whether all that it has found was returned, and nothing is left to look at."""
        return self.is_done and not self.waiting


class Finder:
    """The messages of a search, one after another: ``async for message in client.find(...)``.

        finder = client.find("shop.", key="order-4421", newest=True)
        async for message in finder:
            print(message.id, message.stored_at)
        if not finder.is_complete:
            more = client.find("shop.", key="order-4421", newest=True, cursor=finder.cursor)

    The loop may be left at any time: nothing is kept at the brokers. Of a search over several brokers the messages are
    merged by the times at which they were stored.
    """

    def __init__(
        self,
        terms: SearchTerms,
        sources: Callable[[], Sequence[SearchSource]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms = terms
        self._make_sources = sources
        self._clock = clock
        self._searches: list[_StoreSearch] | None = None
        self._ends_at: float | None = None
        self._seen: set[str] = set()  # ids of messages of a sparse search: several groups may have a copy
        self._found = 0
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StoredMessage:
        for message in await self.page(1):
            return message
        raise StopAsyncIteration

    def known(self) -> StoredMessage | None:
        """Return the next message if it was found already, without waiting; None otherwise, and at the end."""
        if self._searches is None or self._found == self._terms.limit:
            return None
        for message in self._take(self._searches, 1):
            self._found += 1
            return message
        return None

    async def page(self, most: int = _PAGE) -> list[StoredMessage]:
        """Return up to *most* of the next messages, as soon as there is one; none at the end of the search.

        Raises BrokersMissed if no broker answers, StorageError if a disk fails, once the others are searched.
        """
        terms = self._terms
        limit = most if terms.limit is None else min(most, terms.limit - self._found)
        if limit < 1 or self._has_ended:
            return []
        searches = self._begin()
        while True:
            found = self._take(searches, limit)
            if found:
                self._found += len(found)
                return found
            wanting = [search for search in searches if search.wants_more]
            if not wanting:
                self._has_ended = True
                self._raise_errors(searches)
                return []
            if self._ends_at is not None and self._clock() >= self._ends_at:
                return []
            count = _TEXT_PAGE if terms.text is not None else _PAGE
            if terms.limit is not None and terms.text is None:
                count = min(count, terms.limit - self._found + 1)  # one more tells whether there is more
            await asyncio.gather(*(search.fetch(count) for search in wanting))

    def _begin(self) -> list[_StoreSearch]:
        if self._searches is None:
            self._searches = [_StoreSearch(source, self._terms) for source in self._make_sources()]
            if self._terms.stop_after is not None:
                self._ends_at = self._clock() + self._terms.stop_after
        return self._searches

    def _take(self, searches: list[_StoreSearch], most: int) -> list[StoredMessage]:
        """Take the messages that are next in the order of the search."""
        found: list[StoredMessage] = []
        while len(found) < most:
            ready = [search for search in searches if search.waiting]
            if not ready:
                break
            first = (max if self._terms.newest else min)(ready, key=lambda search: search.waiting[0][0].stored_at_us)
            message = first.waiting[0][0]
            if any(search.may_come_before(message) for search in searches):
                break
            first.waiting.popleft()
            if self._terms.selection.is_sparse:
                if message.id in self._seen:
                    continue
                self._seen.add(message.id)
            found.append(message)
        return found

    @staticmethod
    def _raise_errors(searches: list[_StoreSearch]) -> None:
        for search in searches:
            if search.error is not None:
                raise search.error
        if all(search.is_missed for search in searches):
            names = ", ".join(search.source.name for search in searches)
            raise BrokersMissed(f"no answer in time from {names}; search again with the cursor")

    # --- how far it is -----------------------------------------------------------------------------------------------

    @property
    def progress(self) -> FindProgress:
        """How far the search is."""
        searches = self._searches or []
        looked, left = sum(search.looked for search in searches), sum(search.left for search in searches)
        return FindProgress(self._found, looked, left)

    @property
    def is_complete(self) -> bool:
        """Whether every message of the selection was returned: the search reached its end, no broker was missed, and
        all could be read.
        """
        return self._is_exhausted and not self.unreadable

    @property
    def _is_exhausted(self) -> bool:
        searches = self._searches
        return searches is not None and all(search.is_exhausted for search in searches)

    @property
    def cursor(self) -> str | None:
        """A text by which another search with the same arguments goes on behind the last message that was returned;
        None when nothing is left to look at. Messages that arrive while one pages with it change no page.
        """
        if self._is_exhausted:
            return None
        places = dict(self._terms.cursor)
        for search in self._searches or []:
            place = search.place()
            if search.store_id is not None and place is not None:
                places[search.store_id] = place
        return pack_cursor(self._terms.identity, places)

    @property
    def missed(self) -> tuple[str, ...]:
        """The brokers that did not answer, whose messages are missing."""
        return tuple(search.source.name for search in self._searches or [] if search.is_missed)

    @property
    def unreadable(self) -> int:
        """The places that could not be read or decoded, so that messages are missing."""
        return sum(search.unreadable for search in self._searches or [])

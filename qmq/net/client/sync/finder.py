"""A search without asyncio."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Self

from qmq.net.client.find.finder import Finder, FindProgress
from qmq.net.client.find.stored_message import StoredMessage


class SyncFinder:
    """The messages of a search: ``for message in client.find(...)``. See ``Finder``."""

    def __init__(self, finder: Finder, run: Callable[[Coroutine[Any, Any, list[StoredMessage]]], Any]) -> None:
        """*run* runs a coroutine in the client's loop, and waits for its result."""
        self._finder = finder
        self._run = run

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StoredMessage:
        message = self._finder.known()
        if message is not None:
            return message
        for found in self._run(self._finder.page(1)):
            return found  # type: ignore[no-any-return]  # a list of messages
        raise StopIteration

    @property
    def progress(self) -> FindProgress:
        """How far the search is."""
        return self._finder.progress

    @property
    def is_complete(self) -> bool:
        """Whether every message of the selection was returned. See ``Finder.is_complete``."""
        return self._finder.is_complete

    @property
    def cursor(self) -> str | None:
        """A text by which another search goes on. See ``Finder.cursor``."""
        return self._finder.cursor

    @property
    def missed(self) -> tuple[str, ...]:
        """The brokers that did not answer, whose messages are missing."""
        return self._finder.missed

    @property
    def unreadable(self) -> int:
        """The places that could not be read. See ``Finder.unreadable``."""
        return self._finder.unreadable
